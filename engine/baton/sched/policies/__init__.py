"""Order of the waiting queue: a policy turns every waiting sequence into a number, smallest first.

Priority, when enabled, comes before the policy's number; ties end with (arrival, handle), so every
order is total and the same inputs give the same order. Retracted sequences keep their arrival,
hence their place.

| policy | smallest first | good for | bad for |
|---|---|---|---|
| fcfs | arrival | fairness | short requests behind long ones |
| lpm | - cached tokens | hit rate of a single engine | cold prompts, unless `lpm_aging_tokens_per_s` |
| dfs-weight | place in a walk of the radix tree, heaviest first | sharing among queued requests | cold prompts |
| lof | - max_new_tokens | keeping a decode batch full at the end of a job | all requests of a prefill node |
| random | a hash of (step, request) | comparison | p99 |
| short-first | estimated tokens - aging | mean TTFT with bimodal lengths | long requests, bounded by aging |
| srpt-aging | tokens left to prefill - aging, per chunk | mean TTFT of prefill nodes | long prompts, bounded |
| edf | first-token deadline, hopeless ones last | most requests inside their deadline | requests without a deadline |
| hrrn | - (waited work / own work) | a compromise without a parameter | every request a little |

A policy also states the inputs of its numbers beside the sequences (`cache_key`): while they are
equal, nothing is computed or sorted again, and when they have changed, a long queue is sorted again
over several steps (waiting_queue.py).

Sources: SGLang 0.5.7's semantics for fcfs, lpm, dfs-weight, lof and random, without its 128-request
cliff; Schrage's SRPT with aging 0.05 as it did best on recorded traces (docs/scheduling/orders.md).
"""  # noqa: W505 - a table does not wrap

from __future__ import annotations

from collections.abc import Callable

from baton.sched.policies.base import Policy, PolicyContext, PolicyParams
from baton.sched.policies.dfs_weight import DfsWeight
from baton.sched.policies.edf import EdfPolicy
from baton.sched.policies.fcfs import FcfsPolicy
from baton.sched.policies.hrrn import HrrnPolicy
from baton.sched.policies.lof import LofPolicy
from baton.sched.policies.lpm import LpmPolicy
from baton.sched.policies.random import RandomPolicy
from baton.sched.policies.short_first import ShortFirst
from baton.sched.policies.srpt_aging import SrptAging

_ALL: tuple[type[Policy], ...] = (
    FcfsPolicy,
    LpmPolicy,
    DfsWeight,
    LofPolicy,
    RandomPolicy,
    ShortFirst,
    SrptAging,
    EdfPolicy,
    HrrnPolicy,
)
POLICIES: dict[str, Callable[[PolicyParams], Policy]] = {policy.name: policy for policy in _ALL}

__all__ = ["POLICIES", "Policy", "PolicyContext", "PolicyParams", "ShortFirst"]
