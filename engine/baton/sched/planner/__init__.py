"""Chooses the rows of the next forward pass: one token for every decoding sequence, then prompt
chunks.

| module | holds |
|---|---|
| `planner` | `Planner`: the order of the steps below; `PlanOutcome` |
| `transfers` | D: pages for prompts on their way from P |
| `preemption` | running requests suspended for a more important one |
| `decode` | rows of decoding sequences, retraction |
| `prefill` | admission from the waiting queue, prompt chunks |
| `prompt_budget` | tokens and time of a step's prompts, size of a chunk |
| `admission` | pages a request needs, and whether the step can compute it |
| `reservation` | pages kept for a request that did not fit |
| `draft` | the plan in the making |
"""

from baton.sched.planner.planner import Planner, PlanOutcome

__all__ = ["PlanOutcome", "Planner"]
