"""Plans the next step. Deterministic: no torch, no sockets, no clock.

| module | holds |
|---|---|
| `scheduler` | `Scheduler`: requests in, results in, plans and events out |
| `planner` | `Planner`: the rows of one step |
| `recording` | every input of a scheduler as a line; replay |
| `types/` | request, sequence, priority, plan, events, request timelines |
| `queue/` | waiting queue, admission, deadlines |
| `policies/` | queue orders, one file each |
| `fairness/` | shares of classes and tenants |
| `setup/` | limits of a scheduler, and their values from `EngineConfig` |
| `memory/` | pages of sequences, demand, preemption |
| `metrics/` | statistics, step log |
| `state/` | tables of sequences and the moves between them; load reports of them |
"""
