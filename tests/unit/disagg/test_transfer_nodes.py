"""The Python face of kv_transfer: memory, calls, event tuples and errors as the engine sees them."""

from __future__ import annotations

import gc
import inspect
import json
import select
import time
from array import array
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

from baton.disagg.calls import (
    FinishCall,
    GrantCall,
    GroupGrant,
    GroupPages,
    OfferCall,
    OpenCall,
    PublishCall,
    TransferCall,
)
from baton.disagg.events import (
    RELEASED_AFTER_PULL,
    NodeEvent,
    RoomAborted,
    RoomCommitted,
    RoomFailed,
    RoomReleased,
    read_event,
)
from baton.disagg.native_node import NativeTransferNode
from baton.layers.kv_spec import KVSpec, describe_heads
from baton.server.observability.metrics import RANK

native = pytest.importorskip(
    "baton._native", reason="needs the native module: make setup", exc_type=ImportError
)

PAGE = 4096
GROUP = describe_heads([0], [0], PAGE // 8, dtype="float32", page_tokens=1)
TIMEOUT_SECS = 20.0


def ids(*pages: int) -> bytes:
    return array("i", pages).tobytes()


def start(pool: Any, role: str, **more: object) -> Any:
    config = {
        "role": role, "host": "127.0.0.1", "port": 0, "transports": ["shm", "tcp"],
        "layout": KVSpec((GROUP,)).layout("m"),
    }  # fmt: skip
    return native.TransferNode(pool, json.dumps({**config, **more}))


def next_event(node: Any) -> NodeEvent:
    deadline = time.monotonic() + TIMEOUT_SECS
    while not (events := node.poll(1)):
        ready, _, _ = select.select([node.event_fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, (node.rooms_json(), node.stats_json())
    return read_event(events[0])


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    server = native.BootstrapServer("127.0.0.1", 0, None)
    pools = native.KvPool(8, PAGE), native.KvPool(8, PAGE)
    p, d = start(pools[0], "prefill"), start(pools[1], "decode")
    p.register("127.0.0.1", server.port, 5000)
    yield server, *pools, p, d
    d.close()
    p.close()
    server.stop()


def test_pool_is_one_writable_buffer_that_outlives_its_python_object() -> None:
    pool = native.KvPool(4, PAGE)
    bytes_of = np.frombuffer(pool.buffer(), dtype=np.uint8)
    assert (pool.nbytes, pool.num_pages, pool.page_bytes) == (4 * PAGE, 4, PAGE)
    assert bytes_of.flags.writeable
    assert bytes_of.ctypes.data == pool.data_ptr
    bytes_of[3 * PAGE] = 7
    again = np.frombuffer(pool.buffer(), dtype=np.uint8)
    del pool, bytes_of
    gc.collect()
    assert (again.nbytes, again[3 * PAGE]) == (4 * PAGE, 7)


def test_generations_follow_ownership() -> None:
    pool = native.KvPool(4, PAGE)
    pool.begin_write(ids(1, 2))
    assert [pool.generation(i) for i in range(4)] == [0, 1, 1, 0]
    pool.seal(ids(2))
    assert [pool.generation(i) for i in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("pages", [ids(4), ids(-1), b"abc"])
def test_page_ids_outside_the_pool_are_value_errors(pages: bytes) -> None:
    pool = native.KvPool(4, PAGE)
    for call in (pool.begin_write, pool.seal):
        with pytest.raises(ValueError, match=r"page|bytes"):
            call(pages)


def test_prompt_is_transferred_and_both_sides_are_notified(
    pair: tuple[Any, Any, Any, Any, Any],
) -> None:
    server, src, dst, p, d = pair
    d.open(7, 0, "127.0.0.1", server.port, 0, b"hash", 10_000)
    p.offer(7, 0, b"hash", 10_000)
    src.begin_write(ids(5, 3))
    pages = np.frombuffer(src.buffer(), dtype=np.uint8).reshape(8, PAGE)
    pages[5], pages[3] = 11, 22
    p.publish(7, 0, 0, ids(5, 3))
    p.finish(7, (GroupPages(0, 0, 2, 9),), b"payload")
    d.grant(7, (GroupGrant(0, 0, ids(0, 1)),))
    committed = next_event(d)
    assert isinstance(committed, RoomCommitted)
    assert committed == RoomCommitted(7, b"payload", (GroupPages(0, 0, 2, 9),), committed.pulled)
    assert committed.pulled.bytes == 2 * PAGE
    got = np.frombuffer(dst.buffer(), dtype=np.uint8).reshape(8, PAGE)
    assert (got[0] == 11).all()
    assert (got[1] == 22).all()
    assert not got[2:].any()
    assert next_event(p) == RoomReleased(7, RELEASED_AFTER_PULL)
    assert {entry["state"] for entry in json.loads(d.rooms_json(7))["timeline"]} >= {
        "RESOLVING",
        "PULLING",
        "COMMITTED",
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prompt_of_two_groups_arrives_with_the_last_pages_of_the_second(transport: str) -> None:
    """D holds the first page of the first group, and needs the last two of the second."""
    window = {**GROUP.to_wire(), "id": 1, "kind": "window", "layers": [[1, 2]], "retain": "last 3"}
    layout = {"groups": [GROUP.to_wire(), window], "model_hash": "m"}
    server = native.BootstrapServer("127.0.0.1", 0, None)
    src, dst = native.KvPool(16, PAGE), native.KvPool(16, PAGE)
    p_native = start(src, "prefill", transports=[transport], layout=layout)
    d_native = start(dst, "decode", transports=[transport], layout=layout)
    p, d = NativeTransferNode(p_native), NativeTransferNode(d_native)
    p.register("127.0.0.1", server.port, 5000)
    try:
        pages = np.frombuffer(src.buffer(), dtype=np.uint8).reshape(16, PAGE)
        src.begin_write(ids(*range(16)))
        pages[:] = np.arange(16, dtype=np.uint8)[:, None]
        d.call(OpenCall(7, 0, "127.0.0.1", server.port, 0, b"hash", 10_000))
        full = GroupGrant(0, 1, ids(10, 11))
        d.call(GrantCall(7, (full, GroupGrant(1, 8, ids(13, 12)))))
        p.call(OfferCall(7, 0, b"hash", 10_000))
        p.call(PublishCall(7, 1, 7, ids(4, 5)))
        p.call(PublishCall(7, 0, 0, ids(1, 2, 3)))
        p.call(PublishCall(7, 1, 9, ids(6)))
        groups = (GroupPages(0, 0, 3, 1), GroupPages(1, 7, 10, 1))
        p.call(FinishCall(7, groups, b"payload"))
        committed = next_event(d_native)
        assert isinstance(committed, RoomCommitted)
        assert committed.groups == groups
        assert (committed.pulled.transport, committed.pulled.pages) == (transport, 4)
        got = np.frombuffer(dst.buffer(), dtype=np.uint8).reshape(16, PAGE)
        assert (got == got[:, :1]).all()
        assert got[:, 0].tolist() == [0] * 10 + [2, 3, 6, 5, 0, 0]
        assert next_event(p_native) == RoomReleased(7, RELEASED_AFTER_PULL)
    finally:
        d.close()
        p.close()
        server.stop()


def test_ends_other_than_success(pair: tuple[Any, Any, Any, Any, Any]) -> None:
    server, _, _, p, d = pair
    p.offer(1, 0, b"hash", 10_000)
    d.open(1, 0, "127.0.0.1", server.port, 0, b"other", 10_000)
    failed = next_event(d)
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.code, failed.is_retryable) == (1, "PROMPT_MISMATCH", False)
    assert "tokenizers" in failed.message
    d.open(2, 0, "127.0.0.1", server.port, 0, b"hash", 10_000)
    d.abort(2, "CLIENT_GONE")
    assert next_event(d) == RoomAborted(2)
    p.abort(1, "CLIENT_GONE")
    assert next_event(p) == RoomReleased(1, "CLIENT_GONE")


def test_misuse_is_a_value_error_and_a_live_room_has_its_own(
    pair: tuple[Any, Any, Any, Any, Any],
) -> None:
    _, _, _, p, d = pair
    p.offer(1, 0, b"", 10_000)
    with pytest.raises(native.DuplicateRoom, match="room 1 is live"):
        p.offer(1, 0, b"", 10_000)
    assert issubclass(native.DuplicateRoom, ValueError)
    with pytest.raises(ValueError, match="reason code"):
        d.abort(1, "whatever")
    with pytest.raises(ValueError, match="page 8"):
        d.grant(1, (GroupGrant(0, 0, ids(8)),))
    other = (GroupGrant(3, 0, ids(0)),)
    for call in (lambda: d.grant(1, other), lambda: p.publish(1, 3, 0, ids(0))):
        with pytest.raises(ValueError, match=r"page group 3, but there are \[0\]"):
            call()
    with pytest.raises(ValueError, match=r"page group 0 of \[0\] is missing"):
        d.grant(1, ())
    with pytest.raises(ValueError, match="color"):
        start(native.KvPool(1, PAGE), "decode", color=1)
    with pytest.raises(OSError, match="registering"):
        p.register("127.0.0.1", 1, 50)


def test_every_number_has_a_documented_metric(pair: tuple[Any, Any, Any, Any, Any]) -> None:
    *_, d = pair
    stats = json.loads(d.stats_json())
    assert stats["healthy"] is True
    known = {spec.name: spec for spec in RANK}
    for kind, suffix in (("gauge", ""), ("counter", "_total")):
        for series in stats[f"{kind}s"]:
            name, _, labels = series.partition("{")
            spec = known[name.removesuffix(suffix)]
            assert spec.kind == kind, series
            assert (
                tuple(part.split("=")[0] for part in labels.rstrip("}").split(",") if part)
                == spec.labels
            ), series


@pytest.mark.parametrize("kind", get_args(TransferCall))
def test_fields_of_a_call_are_the_arguments_of_its_native_method(kind: type[Any]) -> None:
    method = getattr(native.TransferNode, kind.__struct_config__.tag)
    _, *arguments = inspect.signature(method).parameters
    assert list(kind.__struct_fields__) == arguments
