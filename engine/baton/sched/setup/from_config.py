"""From flags to the scheduler's budgets: the one place, for the server and for the simulator."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, TypeVar

from baton.cache.group_pages import GroupRule
from baton.config import EngineConfig, kv_events, tenants
from baton.config.classes import ClassRules, parse_classes
from baton.sched.fairness.fair_queue import FairnessRules
from baton.sched.policies.base import PolicyParams
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule

Made = TypeVar("Made", Limits, PolicyParams, FairnessRules)


def resolve_policy(config: EngineConfig) -> str:
    """The queue order that --schedule-policy stands for on this node."""
    if config.schedule_policy != "auto":
        return config.schedule_policy
    return "srpt-aging" if config.disaggregation_mode == "prefill" else "fcfs"


HOST_LINK_BYTES_PER_S = 10e9
"""Between device and host, until it has been measured: half of PCIe 4.0 x16, or one core's memcpy.
"""


ASSUMED_PAGE_BYTES = 2_000_000
"""16 tokens of an 8 B model with grouped queries; where pages have no size in bytes (tests,
simulation).
"""


def _from_flags(cls: type[Made], config: EngineConfig, **values: Any) -> Made:
    """Make a class of the flags that have the names of its fields, and of `values`."""
    flags = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(EngineConfig, f.name)}
    return cls(**(flags | values))


def limits(
    config: EngineConfig,
    num_pages: int,
    host_pages: int = 0,
    page_bytes: int = ASSUMED_PAGE_BYTES,
    page_groups: tuple[GroupRule, ...] = (),
) -> Limits:
    """The budgets of one rank whose KV pool has `num_pages` on the device and `host_pages` behind
    them.
    """
    c = config
    events = kv_events.parse_events_config(c.kv_events_config)
    output_weight: float | None = None
    if c.short_first_output_weight != "auto":
        output_weight = float(c.short_first_output_weight)
    return _from_flags(
        Limits,
        c,
        num_pages=num_pages,
        page_groups=page_groups,
        is_chunked=c.chunked_prefill_size > 0,
        role=c.disaggregation_mode,
        policy=resolve_policy(c),
        policy_params=_from_flags(
            PolicyParams,
            c,
            short_first_output_weight=output_weight,
            default_deadline_secs=c.default_deadline_ms / 1000,
            demote_hopeless=c.deadline_miss_action != "keep",
        ),
        priority=PriorityRule(
            enabled=c.enable_priority_scheduling,
            low_values_first=c.schedule_low_priority_values_first,
            aging_rate=c.priority_aging_rate,
            aging_max=math.inf if c.priority_aging_max is None else c.priority_aging_max,
            default=c.default_priority,
            preemption_threshold=c.priority_scheduling_preemption_threshold,
        ),
        host_pages=host_pages,
        host_pages_per_s=HOST_LINK_BYTES_PER_S / page_bytes,
        starvation_secs=c.starvation_threshold_ms / 1000,
        aborts_missed_deadlines=c.deadline_miss_action == "abort",
        radix_cache=not c.disable_radix_cache,
        kv_event_batches=events.buffer_steps if events.enable_kv_cache_events else 0,
        max_decode_gap_secs=c.max_decode_gap_ms / 1000,
        step_target_secs=c.step_target_ms / 1000,
        fairness=fairness(c),
    )


def fairness(config: EngineConfig) -> FairnessRules:
    """Classes and tenants. Reads --tenant-config; raises ConfigError for what is wrong in it."""
    c = config
    low_first = c.schedule_low_priority_values_first
    classes = ClassRules(low_values_first=low_first)
    if c.priority_classes:
        parsed, _ = parse_classes(c.priority_classes, low_values_first=low_first)
        classes = parsed or classes
    return _from_flags(
        FairnessRules,
        c,
        classes=classes,
        charge_decode=not c.disable_class_charge_decode,
        tenants=None
        if c.tenant_config is None
        else tenants.load_rules(c.tenant_config, classes.names),
    )
