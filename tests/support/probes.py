"""Read access of tests to the parts of a few classes that have no public view.

A test asserts on a part through the probe of its class, so that a renamed attribute changes one
line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.cache.group_pages import GroupPages
    from baton.cache.radix import RadixCache
    from baton.sched.memory.kv_manager import KvManager
    from baton.sched.scheduler import Scheduler
    from baton.sched.state.tables import SchedulerState
    from baton.sched.types.sequence import Seq


class SchedulerProbe:
    """Tables and memory of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def state(self) -> SchedulerState:
        """All tables, for moves between them."""
        return self._scheduler._state

    @property
    def memory(self) -> KvManager:
        return self.state.memory

    @property
    def seqs(self) -> dict[int, Seq]:
        """Live sequences by handle."""
        return self.state.seqs

    @property
    def running(self) -> dict[int, Seq]:
        return self.state.running

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed since the start."""
        return self.state.computed_tokens

    @property
    def reservation(self) -> Any:
        """Sequence for which the planner keeps pages free."""
        return self._scheduler._planner.reservation.current

    def check_holders(self) -> None:
        """Raise where two owners hold a page."""
        self._scheduler._check_holders()


class RadixCacheProbe:
    """Nodes and eviction queue of a radix cache."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache

    @property
    def roots(self) -> Mapping[bytes, Any]:
        """Root of each namespace."""
        return self._cache._roots

    @property
    def eviction_queue(self) -> list[Any]:
        return self._cache._heap

    def edges(self) -> Iterable[tuple[bytes, Any]]:
        """Nodes below the roots, each with its namespace."""
        return [
            (namespace, node)
            for namespace, root in self._cache._roots.items()
            for node in root.children.values()
        ]

    def watch_walks(self, on_walk: Callable[[], None]) -> None:
        """Call `on_walk` at each comparison of tokens with the tree."""
        walk = self._cache._walk_edges

        def watched(tokens: bytes, namespace: bytes, limit: int) -> object:
            on_walk()
            return walk(tokens, namespace, limit)

        self._cache._walk_edges = watched  # type: ignore[method-assign, assignment]


class GroupPagesProbe:
    """Blocks of a further page group in a tree."""

    def __init__(self, group: GroupPages) -> None:
        self._group = group

    @property
    def passed(self) -> list[int]:
        """Blocks to be evicted before all others, in this order."""
        return list(self._group._passed)

    @property
    def locks(self) -> dict[int, int]:
        return self._group._locks


class RunnerProbe:
    """Model, KV pool, attention and CUDA graphs of a model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def model(self) -> Any:
        return self._runner._model

    @property
    def kv_pool(self) -> Any:
        return self._runner._kv

    @property
    def attention(self) -> Any:
        return self._runner._attn

    @property
    def slot_states(self) -> Any:
        """States of all slots: uint8 [slots, bytes]."""
        return self._runner._states.buffers.data

    @property
    def graphs(self) -> Any:
        """Recorded decode steps; None without CUDA graphs."""
        return self._runner._graphs

    def watch_eager_steps(self, on_step: Callable[[Any], None]) -> None:
        """Call `on_step` with each step that is uploaded, because no graph replays it."""
        upload = self._runner._upload_step

        def watched(step: Any, *more: Any) -> Any:
            on_step(step)
            return upload(step, *more)

        self._runner._upload_step = watched

    def begin_step(self, plan: Any) -> Any:
        return self._runner._begin_step(plan)

    def make_batch(self, step: Any, indices: Any) -> Any:
        states = self._runner._begin_states(step)
        return self._runner._make_batch(step, indices, states)


class DecoderProbe:
    """Tables of a decoder."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    @property
    def rope(self) -> Any:
        """Cosines and sines of the positions."""
        (rope,) = self._decoder._tables.values()
        return rope

    def join_rope_tables(self) -> None:
        """Keep cosines and sines as halves of one table, as on a GPU."""
        import torch  # tests of schedulers use probes without it

        rope = self.rope
        rope.cos, rope.sin = torch.cat((rope.cos, rope.sin), 1).chunk(2, 1)
