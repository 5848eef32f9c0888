"""Requests and KV tokens that tenants hold on a rank, compared with their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.config.tenants import TenantRule, TenantRules
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState

NO_LIMITS = TenantRule()
_HOLDING = (SeqState.RUNNING, SeqState.TRANSFER)


@dataclass(slots=True)
class _TenantUse:
    running: int = 0
    kv_tokens: int = 0


class TenantUsage:
    """Requests and KV tokens per tenant at one moment; admissions are added one by one."""

    def __init__(self, limits: TenantLimits, holders: Iterable[Seq]) -> None:
        self._limits = limits
        self._use: dict[str, _TenantUse] = {}
        if limits.are_any:
            for seq in holders:
                self.add(seq)

    def add(self, seq: Seq) -> None:
        limits = self._limits
        use = self._use.setdefault(limits.tenant_of(seq.req), _TenantUse())
        use.running += seq.state in _HOLDING
        if limits.are_any_of_kv:
            use.kv_tokens += limits.expected_tokens(seq)

    def has_room_for(self, seq: Seq) -> bool:
        """True if its tenant is below its limits.

        A tenant that holds nothing always is: a request may be larger than expected.
        """
        limits = self._limits
        tenant = limits.tenant_of(seq.req)
        use = self._use.get(tenant)
        if use is None:
            return True
        rule = limits.rule_of(tenant)
        if rule.max_running is not None and use.running >= rule.max_running:
            limits.note_throttled(seq, "running")
            return False
        if rule.max_kv_tokens is not None:
            kv_tokens = use.kv_tokens + limits.expected_tokens(seq)
            if kv_tokens > rule.max_kv_tokens:
                limits.note_throttled(seq, "kv")
                return False
        return True


class TenantLimits:
    """Limits of all tenants, and how often they kept a request from waiting or running.

    Args:
        rules: None: there is one tenant, without limits.
        answer_tokens: tokens that a request is expected to still generate.
    """

    def __init__(self, rules: TenantRules | None, answer_tokens: Callable[[Seq], int]) -> None:
        self._has_tenants = rules is not None
        self.rules = rules or TenantRules()
        self._answer_tokens = answer_tokens
        all_rules = list(self.rules.all)
        self.are_any_of_kv = any(rule.max_kv_tokens is not None for rule in all_rules)
        self.are_any = self.are_any_of_kv or any(rule.max_running is not None for rule in all_rules)
        self.throttled = dict.fromkeys(("queue", "running", "kv"), 0)
        """Requests by the limit that held them up, each counted once while it waits."""
        self._held_back: set[int] = set()

    def tenant_of(self, req: ValidatedRequest) -> str:
        return req.tenant if self._has_tenants else ""

    def rule_of(self, tenant: str) -> TenantRule:
        """Requests without a tenant, such as the node's own health probes, have no limits."""
        return self.rules.rule_of(tenant) if tenant else NO_LIMITS

    def expected_tokens(self, seq: Seq) -> int:
        """Tokens that a sequence is expected to hold at its end."""
        return len(seq.tokens) + self._answer_tokens(seq)

    def note_throttled(self, seq: Seq, reason: str) -> None:
        if seq.handle not in self._held_back:
            self._held_back.add(seq.handle)
            self.throttled[reason] += 1

    def on_dequeued(self, seq: Seq) -> None:
        """A request waits no longer."""
        self._held_back.discard(seq.handle)
