"""Pools on a device, over every transport they have: transformers' tokens, and nothing left behind when one breaks.

The device is a stand-in (tests/support/devices/stand_in.py); all else is the product's. What only a GPU shows is in
tests/gpu.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from baton.disagg.calls import (
    FinishCall,
    GrantCall,
    GroupGrant,
    GroupPages,
    OfferCall,
    OpenCall,
    PublishCall,
)
from baton.disagg.events import NodeEvent, RoomFailed, RoomReleased
from baton.disagg.native_node import NativeTransferNode
from baton.layers.cuda.device_pages import DevicePages
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.support.devices.fake_nccl import FakeNccl
from tests.support.devices.stand_in import StandIn
from tests.support.engines.engine_run import greedy
from tests.support.processes.cluster import eventually

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)
STEPS = 12
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 130]
SLOW = {"fault": {"rules": [{"on": "PAGE", "do": {"delay_ms": 3}, "repeat": True}]}}
WAITS = {"comm_open_ms": 5000, "comm_op_ms": 2000, "comm_abort_ms": 2500}


class Rig:
    """A pair whose pools are on stand-ins."""

    def __init__(
        self,
        path: Any,
        transports: list[str],
        *,
        p_only: bool = False,
        late: bool = False,
        **more: Any,
    ) -> None:
        self.p_gpu, self.d_gpu = StandIn(late=late), StandIn(late=late)
        settings = {**WAITS, "transports": transports}
        p = {"stand_in": self.p_gpu, "settings": {**settings, **more.pop("p_settings", {})}}
        d = {
            "stand_in": None if p_only else self.d_gpu,
            "settings": {**settings, **more.pop("d_settings", {})},
        }
        self.pair = pair_module.Pair(path, transports[0], p, d, **more)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.pair.close()
        for gpu in (self.p_gpu, self.d_gpu):
            assert gpu.open_blocks == 0
        deadline = time.monotonic() + 10
        while self.p_gpu.pinned or self.d_gpu.pinned:
            assert time.monotonic() < deadline, "slabs stay pinned"
            self.pair.p.native.generation(
                0
            )  # any call through the native boundary drops released Python objects

    def bytes(self, via: str) -> float:
        return float(self.pair.pulled()[f'kv_pull_bytes_total{{transport="{via}"}}'])

    @property
    def fallbacks(self) -> float:
        return float(self.pair.pulled()["kv_transport_fallbacks_total"])


def heard(node: NativeTransferNode) -> NodeEvent:
    """The next event of a node whose engine does not run."""
    while not (events := node.poll(1)):
        ready, _, _ = select.select([node.event_fd], [], [], 20)
        assert ready, node.rooms_json()
    return events[0]


def work(
    reference: Reference, lengths: list[int] = LENGTHS
) -> tuple[list[list[int]], list[list[int]]]:
    prompts = prompts_of(random.Random(5), lengths)
    return prompts, reference.answers(prompts, STEPS)


@pytest.mark.parametrize(
    ("via", "variant"),
    [
        ("cuda_ipc", "llama"),
        ("gloo", "llama"),
        ("tcp", "llama"),
        ("cuda_ipc", "gemma3"),
        ("gloo", "gpt-oss"),
        ("cuda_ipc", "qwen3-next"),
    ],
)
def test_relay_equals_transformers(
    reference: Callable[[str], Reference], via: str, variant: str
) -> None:
    ref = reference(variant)
    prompts, want = work(ref)
    with Rig(ref.path, [via]) as rig:
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        before = rig.bytes(via)
        assert before > 0
        assert rig.pair.answer(prompts[::-1], greedy(STEPS)) == want[::-1], (
            "second round: prefixes are in both caches"
        )
        assert rig.bytes(via) - before < before
        assert rig.fallbacks == 0
        assert rig.d_gpu.opened == (via == "cuda_ipc")


def test_nccl_sends_from_device_slabs(reference: Callable[[str], Reference]) -> None:
    ref = reference("llama")
    prompts, want = work(ref)
    lib = FakeNccl()
    make_slabs = DevicePages.slabs

    def slabs(pages: DevicePages, count: int, nbytes: int) -> Any:
        made = make_slabs(pages, count, nbytes)
        lib.slabs += made.tensors
        return made

    with (
        lib.used(),
        mock.patch.object(DevicePages, "slabs", slabs),
        Rig(ref.path, ["nccl", "tcp"]) as rig,
    ):
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        assert rig.bytes("nccl") == lib.sent > 0
        assert rig.fallbacks == 0
        assert not {"gathering pages", "scattering pages"} & {*rig.p_gpu.runs, *rig.d_gpu.runs}, (
            "no host memory"
        )


@pytest.mark.parametrize(
    "flags", [{"page_size": 1, "chunked_prefill_size": 5}, {"disable_overlap_schedule": True}]
)
def test_cuda_ipc_under_engine_settings(
    reference: Callable[[str], Reference], flags: dict[str, Any]
) -> None:
    ref = reference("llama")
    prompts, want = work(ref)
    with Rig(ref.path, ["cuda_ipc"], **flags) as rig:
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        assert rig.pair.answer(prompts, greedy(STEPS)) == want


def test_pages_are_announced_when_their_step_has_ended(
    reference: Callable[[str], Reference],
) -> None:
    """Steps are launched ahead of their results, also those of a prompt's first chunks, which have none."""
    ref = reference("llama")
    prompts, want = work(ref)
    with Rig(ref.path, ["cuda_ipc"], late=True, chunked_prefill_size=12) as rig:
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        assert rig.pair.answer(prompts[::-1], greedy(STEPS)) == want[::-1]
        assert rig.p_gpu.announced > 0


@pytest.mark.parametrize("via", ["gloo", "tcp"])
def test_prefill_node_on_a_device_serves_one_in_host_memory(
    reference: Callable[[str], Reference], via: str
) -> None:
    ref = reference("llama")
    prompts, want = work(ref)
    with Rig(ref.path, [via], p_only=True) as rig:
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        assert rig.bytes(via) > 0


def test_copy_that_fails_goes_on_by_the_next_transport(
    reference: Callable[[str], Reference],
) -> None:
    ref = reference("llama")
    prompts, want = work(ref)
    broken = {"fault": {"rules": [{"on": "PAGE", "do": "break"}]}}
    with Rig(ref.path, ["cuda_ipc", "gloo", "tcp"], d_settings=broken) as rig:
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        assert rig.bytes("gloo") > 0
        assert rig.fallbacks == 1


def test_page_given_away_under_the_copy_fails_its_room_only(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """A new owner of a leased page, which the scheduler never makes: between the copy and the second look."""
    ref = reference("llama")
    held = {"fault": {"rules": [{"on": "COPIED", "do": {"hold": str(tmp_path / "copied")}}]}}
    with Rig(ref.path, ["cuda_ipc"], d_settings=held) as rig:
        p, d = rig.pair.p.node, rig.pair.d.node
        pages = b"".join(page.to_bytes(4, "little") for page in range(4))
        p.call(OfferCall(5, 0, b"h", 20_000))
        d.call(OpenCall(5, 0, "127.0.0.1", rig.pair.bootstrap.port, 0, b"h", 20_000))
        d.call(GrantCall(5, (GroupGrant(0, 0, pages),)))
        p.call(PublishCall(5, 0, 0, pages))
        p.call(FinishCall(5, (GroupPages(0, 0, 4, 1),), b""))
        eventually("a copy is made", (tmp_path / "copied.reached").exists)
        rig.pair.p.native.begin_write(pages[:4])
        (tmp_path / "copied.go").touch()
        failed = heard(d)
        assert isinstance(failed, RoomFailed)
        assert (failed.room, failed.code, failed.is_retryable) == (5, "STALE_PAGE", True)
        assert heard(p) == RoomReleased(5, "STALE_PAGE")
        prompts, want = work(ref, [9, 70])
        assert rig.pair.answer(prompts, greedy(STEPS)) == want


def test_cancelled_requests_leave_no_page_behind(reference: Callable[[str], Reference]) -> None:
    ref = reference("llama")
    rng = random.Random(3)
    with Rig(ref.path, ["cuda_ipc"], d_settings=SLOW) as rig:
        for secs in (0.0, 0.02, 0.05, 0.1, 0.2):
            rooms = rig.pair.submit(prompts_of(rng, [100, 130, 70]), greedy(STEPS))
            cancel_at = time.monotonic() + secs
            rig.pair.until(lambda at=cancel_at: time.monotonic() >= at)  # type: ignore[misc]
            for half in (rig.pair.p, rig.pair.d):
                for room in rooms:
                    half.engine.sched.abort(room)
            rig.pair.until(
                lambda: rig.pair.p.engine.sched.is_idle and rig.pair.d.engine.sched.is_idle
            )
            for half in (rig.pair.p, rig.pair.d):
                half.engine.gauges()  # checks the ledger: every page is free or cached
                assert half.engine.not_accepting_reason is None
        prompts, want = work(ref, [9, 70])
        assert rig.pair.answer(prompts, greedy(STEPS)) == want


def test_deadline_ends_a_room_whose_copies_do_not(reference: Callable[[str], Reference]) -> None:
    """D's device takes 0.6 s for a copy, its room has 0.3 s: the room ends by its deadline, behind that copy."""
    ref = reference("llama")
    with Rig(ref.path, ["cuda_ipc"]) as rig:
        rig.d_gpu.slow_secs = 0.6
        p, d = rig.pair.p.node, rig.pair.d.node
        pages = b"".join(page.to_bytes(4, "little") for page in range(4))
        p.call(OfferCall(5, 0, b"h", 20_000))
        d.call(OpenCall(5, 0, "127.0.0.1", rig.pair.bootstrap.port, 0, b"h", 300))
        d.call(GrantCall(5, (GroupGrant(0, 0, pages),)))
        p.call(PublishCall(5, 0, 0, pages))
        p.call(FinishCall(5, (GroupPages(0, 0, 4, 1),), b""))
        failed = heard(d)
        assert isinstance(failed, RoomFailed)
        assert (failed.room, failed.code) == (5, "DEADLINE")
        runs = list(rig.d_gpu.runs)
        assert runs == ["copying a peer's pages"], "the end came behind what was under way"
        assert heard(p) == RoomReleased(5, "DEADLINE")
        assert rig.d_gpu.runs == runs
