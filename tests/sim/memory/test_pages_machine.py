"""Hypothesis drives the scheduler's pages: every call in every order, on a pool of a few pages, shrunk when it fails.

WatchedScheduler counts holders, locks, slots and private pages again after each call; the pretend device knows which
tokens each page was computed from. The tree alone has its own machine in tests/unit/cache/test_radix.py.
"""

from __future__ import annotations

import dataclasses
import random
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.cache.group_pages import NO_PAGE, GroupRule
from baton.cache.radix import RadixNode as TreeNode
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason
from tests.support.probes import RadixCacheProbe, SchedulerProbe
from tests.support.sched.sched_sim import Node, chain, reference, request
from tests.support.sched.watched import WatchedScheduler

PAGES = 9
GROUPS: list[tuple[GroupRule, ...]] = [
    (),
    (),
    (GroupRule("window", 3, 2),),
    (GroupRule("window", 6, 1), GroupRule("chunk", 4, 1)),
]


class PagesMachine(RuleBasedStateMachine):
    @initialize(
        page=st.sampled_from([1, 2, 4]),
        depth=st.sampled_from([1, 2]),
        slots=st.integers(1, 3),
        chunk=st.integers(1, 4),
        mode=st.sampled_from(["recompute", "cache", "offload", "auto"]),
        host=st.sampled_from([0, 3, 20]),
        estimate=st.sampled_from([0.05, 1.0]),
        groups=st.sampled_from(GROUPS),
        damage=st.sampled_from([0.0, 0.0, 0.1]),
    )
    def start(
        self,
        page: int,
        depth: int,
        slots: int,
        chunk: int,
        mode: str,
        host: int,
        estimate: float,
        groups: tuple[GroupRule, ...],
        damage: float,
    ) -> None:
        self.pages = PAGES * (1 + sum(rule.width for rule in groups))
        limits = Limits(
            self.pages, page, slots, 100, page * chunk, schedule_conservativeness=estimate,
            preemption_mode=mode, host_pages=host * (self.pages // PAGES), page_groups=groups,
            priority=PriorityRule(enabled=True, preemption_threshold=0),
            preemption_min_remaining_tokens=0,
        )  # fmt: skip
        self.node = Node(limits, depth)
        damage_rng = random.Random(0)
        if damage:
            self.node.device.damage = lambda: damage_rng.random() < damage
        self.sched = self.node.sched = WatchedScheduler(limits)
        self.want: dict[int, list[int]] = {}
        self.gone: set[int] = set()

    # Pages of two kinds, so that prompts share, split and repeat; a tail makes the last page partial.
    @rule(
        kinds=st.lists(st.booleans(), max_size=4),
        tail=st.integers(0, 3),
        answer=st.integers(1, 9),
        more=st.booleans(),
    )
    def add(self, kinds: list[bool], tail: int, answer: int, more: bool) -> None:
        page, handle = self.node.limits.page_size, len(self.want)
        prompt = [
            token for kind in kinds for token in ([1] * page if kind else [1] * (page - 1) + [2])
        ]
        prompt = (prompt + [3] * tail or [3])[: self.node.limits.capacity_tokens - 1]
        req = dataclasses.replace(
            request(handle, prompt, answer, ignore_eos=True), priority=int(more)
        )
        self.sched.add(req)
        self.want[handle] = reference(
            req.prompt, min(answer, self.node.limits.capacity_tokens - len(prompt)), True
        )

    @rule(turns=st.integers(1, 4))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.node.step()

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.integers(0, len(self.want) - 1))
        self.node.absorb()
        if handle not in self.node.finished:
            self.gone.add(handle)
        self.sched.abort(handle)

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        before = self.sched.ledger()
        memory = SchedulerProbe(self.sched).memory
        freed = memory.cache.evict(pages)
        assert min(pages, before.cached) <= freed < pages + memory.pages_per_block
        assert self.sched.ledger().cached == before.cached - freed

    @rule()
    def flush(self) -> None:
        self.sched.flush_cache()
        assert self.sched.ledger().cached == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "sched"):
            self.sched.ledger()
            SchedulerProbe(self.sched).check_holders()

    @invariant()
    def every_cached_page_holds_what_its_tokens_compute(self) -> None:
        """Pages that a step in flight is still to write are left out."""
        if not hasattr(self, "sched"):
            return
        unwritten = self._pages_of_flight()
        copied = (run for plan in self.node.flight for run in plan.copies if not run.to_host)
        unwritten.update(page for run in copied for page in run.pages)
        cache = SchedulerProbe(self.sched).memory.cache
        stack: list[tuple[TreeNode, int]] = [
            (root, 1) for root in RadixCacheProbe(cache).roots.values()
        ]
        while stack:
            node, state = stack.pop()
            if node.parent is not None:
                tokens = array("i", node.key)
                for i, token in enumerate(tokens):
                    page, offset = divmod(i, self.node.limits.page_size)
                    state = chain(state, token)
                    held = [node.pages[page]]
                    for group, pages in zip(cache.groups, node.further, strict=True):
                        held += pages[page * group.width : (page + 1) * group.width]
                    for cached in set(held) - unwritten - {NO_PAGE}:
                        assert self.node.device.memory[cached][offset] == state
            stack.extend((child, state) for child in node.children.values())

    def _pages_of_flight(self) -> set[int]:
        """Pages that the steps in flight are going to write, also those of requests that have ended meanwhile."""
        size = self.node.limits.page_size
        tables = [list(slot.table) for slot in self.node.device.slots]
        further = [[list(table) for table in slot.further] for slot in self.node.device.slots]
        rules = self.node.limits.page_groups
        pages: set[int] = set()
        for plan in self.node.flight:
            for admitted in plan.admitted:
                further[admitted.slot] = [[] for _ in rules]
            for growth in plan.further:
                table = further[growth.slot][growth.group][: growth.base]
                table += [NO_PAGE] * (growth.base - len(table))
                further[growth.slot][growth.group] = table + list(growth.pages)
            for row in plan.rows:
                table = tables[row.slot] = tables[row.slot][: row.page_base] + list(row.pages)
                first = row.start // size
                end = (row.start + row.n - 1) // size + 1
                pages.update(table[first:end])
                for each, blocks in zip(rules, further[row.slot], strict=True):
                    pages.update(blocks[first * each.width : end * each.width])
        return pages

    def teardown(self) -> None:
        if not hasattr(self, "sched"):
            return
        self.node.run()
        for handle, tokens in self.want.items():
            got = self.node.outputs.get(handle, [])
            if handle in self.gone:
                assert got == tokens[: len(got)]
            else:
                assert got == tokens
                assert self.node.finished[handle] is FinishReason.LENGTH
        self.sched.ledger().check_idle(self.pages)
        self.sched.flush_cache()
        assert self.sched.ledger().free == self.pages


PagesMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestPages = PagesMachine.TestCase
