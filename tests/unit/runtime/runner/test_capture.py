"""Parts of recorded decode steps: where their buffers lie, what the backend reads, what is refused. The whole is in
tests/parity/test_decode_graphs.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from baton import config
from baton.errors import ConfigError
from baton.layers.attention.base import GraphInputs
from baton.layers.attention.flashinfer import FlashInferAttention
from baton.layers.attention.paged_indices import (
    PagedRows,
    View,
    decode_rows,
    pad_decode,
    pad_slots,
)
from baton.layers.kv_pool import KvTensors, make_pool
from baton.layers.spec import EVERYTHING
from baton.runtime import build
from baton.runtime.runner.capture import DecodeGraphs, rows_to_record
from baton.runtime.runner.cuda_runner import DeviceRunner
from baton.runtime.runner.token_table import TokenTable
from baton.sched.types.plan import INVALID_TOKEN
from tests.support.devices import fake_flashinfer
from tests.support.devices.late_stream import LateStream
from tests.support.devices.tape import TapeRecorder
from tests.support.kernels.attention_batch import AttentionRow, build_batch
from tests.support.kernels.attention_cases import Case
from tests.support.models import tiny_model
from tests.support.models.whole_model import load_model
from tests.support.probes import RunnerProbe
from tests.unit.runtime.test_device import CUDA, DeviceCheck, FakeStream


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@given(st.integers(1, 40), st.integers(0, 100), st.data())
def test_one_copy_fills_every_buffer(most: int, pages: int, data: st.DataObject) -> None:
    static = GraphInputs(most, pages, torch.device("cpu"))
    fields = (static.token_ids, static.positions, static.entries, *static.slot_mappings)
    (view,) = static.views
    for n in data.draw(st.lists(st.integers(0, most), min_size=1, max_size=3)):
        columns = np.random.default_rng(n).integers(-(2**62), 2**62, (4, n))
        counts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)), np.int32)
        indptr = np.concatenate((np.zeros(1, np.int32), counts.cumsum(dtype=np.int32)))
        if indptr[-1] > pages:
            continue
        rows = PagedRows(
            indptr,
            np.arange(1, indptr[-1] + 1, dtype=np.int32) * 7,
            np.arange(n, dtype=np.int32) + 1,
        )
        static.fill(LateStream(), columns, [rows])
        assert [x[:n].tolist() for x in fields] == columns.tolist()
        assert view.page_indptr[: n + 1].tolist() == indptr.tolist()
        assert view.page_indices[: indptr[-1]].tolist() == rows.kv_indices.tolist()
        assert view.last_page_len[:n].tolist() == rows.last_page_len.tolist()


def test_table_reads_what_was_written_last() -> None:
    table = TokenTable(4, torch.device("cpu"))
    table.write_tokens(torch.tensor([2, 0, table.dummy, table.dummy]), torch.tensor([70, 50, 1, 2]))
    table.write_tokens(torch.tensor([2]), torch.tensor([71]))
    ids = np.array([9, 0, 0, 5])
    ids[1:3] = table.make_references(np.array([2, 0]))
    assert table.resolve_tokens(torch.from_numpy(ids)).tolist() == [9, 71, 50, 5]
    table.write_tokens(torch.tensor([2]), torch.tensor([INVALID_TOKEN]))
    assert table.resolve_tokens(torch.from_numpy(ids)).tolist() == [9, 0, 50, 5], (
        "an id of the vocabulary"
    )


@settings(max_examples=8, deadline=None)
@given(
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]), page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99),
    windows=st.sampled_from([(0, 0), (0, 5), (3, 7)]), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
)  # fmt: skip
def test_recorded_forward_attends_as_the_eager_one(
    heads: tuple[int, int], page_size: int, seed: int, windows: tuple[int, int], lengths: list[int]
) -> None:
    """Grouped queries, windows, pages of any size; every capture size is recorded once and used for any rows."""
    case = Case(
        heads=heads[0],
        kv_heads=heads[1],
        page_size=page_size,
        windows=windows,
        lengths=tuple(lengths),
    )
    rng = np.random.default_rng(seed)
    pages = 2 * sum(-(-n // page_size) for n in lengths)
    data = torch.randn(pages + 1, 2, 2, page_size, heads[1], case.dim).bfloat16()
    data[pages] = torch.nan
    kv = KvTensors(case.kv_spec(), data, dummy_page=pages)
    backend = FlashInferAttention(case.layers(), kv, fake_flashinfer)
    static = GraphInputs(4, pages + 4, torch.device("cpu"), views=len(backend.views))
    q, k, v = (
        torch.zeros(4, h, case.dim, dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1])
    )
    out = torch.zeros(2, 4, heads[0] * case.dim, dtype=torch.bfloat16)

    def layers(size: int) -> None:
        backend.use_capture(size, [slots[:size] for slots in static.slot_mappings])
        for layer in range(2):
            out[layer, :size].copy_(backend.forward(layer, q[:size], k[:size], v[:size]))

    replays: dict[int, Any] = {}
    with torch.inference_mode():
        for size in (4, 2, 1):
            no_rows = PagedRows(*(np.zeros(n, np.int32) for n in (1, 0, 0)))
            views = [no_rows] * len(backend.views)
            load(backend, static, size, views, np.zeros(0, int), kv)
            replays[size] = TapeRecorder().record(lambda size=size: layers(size))  # type: ignore[misc]
        free = rng.permutation(pages).tolist()
        rows = [
            AttentionRow([0], n - 1, [free.pop() for _ in range(-(-n // page_size))])
            for n in lengths
        ]
        for some in (rows, rows[::2], rows[:1], rows):
            batch = build_batch(some, page_size)
            q.copy_(torch.randn(q.shape))
            k.copy_(torch.randn(k.shape))
            v.copy_(torch.randn(v.shape))
            size = next(s for s in (1, 2, 4) if s >= len(some))
            views = decode_rows(
                batch.kv_lens.numpy(),
                batch.page_indptr.numpy(),
                [batch.page_indices.numpy()],
                backend.views,
                page_size,
            )
            load(backend, static, size, views, batch.slot_mapping.numpy(), kv)
            replays[size]()
            n = len(some)
            backend.plan(batch)
            for layer in range(2):
                assert torch.equal(out[layer, :n], backend.forward(layer, q[:n], k[:n], v[:n]))


def load(
    backend: Any,
    static: GraphInputs,
    size: int,
    views: list[PagedRows],
    slots: np.ndarray,
    kv: KvTensors,
) -> None:
    if size not in backend._captured:
        backend.prepare_capture(size, static)
    assert kv.dummy_page is not None
    padded = [pad_decode(rows, size, kv.dummy_page) for rows in views]
    columns = np.zeros((4, size), np.int64)
    columns[3] = pad_slots(slots, size, kv.dummy_page, kv.page_size)
    static.fill(LateStream(), columns, padded)
    backend.plan_replay(size, padded)


def test_large_sizes_of_many_heads_get_a_larger_workspace() -> None:
    """64 heads in groups of 8, 256 rows: 383 blocks of 16 queries. Eager steps take 33 blocks of 128."""
    case = Case(heads=64, kv_heads=8, dim=128, lengths=(1,))
    backend = FlashInferAttention(case.layers(), case.pool("cpu"), fake_flashinfer)
    assert backend._capture_workspace_bytes(256) == 64 * 383 * 16 * 129 * 4 + (1 << 20)
    assert (
        backend._capture_workspace_bytes(256)
        > len(backend._workspace)
        == 64 * 33 * 128 * 129 * 4 + (1 << 20)
    )
    assert backend._capture_workspace_bytes(1) == 64 * 33 * 16 * 129 * 4 + (1 << 20), (
        "two blocks per multiprocessor"
    )
    assert backend._capture_workspace_bytes(8) < len(backend._workspace)
    assert backend.capture_bytes(8) == 2 << 20, (
        "the integers of two windows; the floats are those of eager steps"
    )
    assert backend.capture_bytes(256) == (2 << 20) + backend._capture_workspace_bytes(256)


class RecordedCheck(DeviceCheck):
    views = (View(0, EVERYTHING),)

    def capture_bytes(self, largest: int) -> int:
        return 0

    def prepare_capture(self, size: int, static: GraphInputs) -> None: ...
    def plan_replay(self, size: int, views: Sequence[PagedRows]) -> None:
        (rows,) = views
        assert len(rows) == size

    def use_capture(self, size: int, slot_mappings: Sequence[Tensor]) -> None:
        (slot_mapping,) = slot_mappings
        assert slot_mapping.device.type == "cuda"
        assert len(slot_mapping) == size


class RunsIt:
    def record(self, work: Any) -> Any:
        work()
        return work


def test_recorded_steps_read_nothing_back_and_mix_no_devices(tmp_path: Path) -> None:
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        kv = make_pool(model.spec.kv_spec(4), 8, device=CUDA, dummy_page=True)
        assert (kv.num_pages, kv.dummy_page, len(kv.data)) == (8, 8, 9)
        table = TokenTable(4, CUDA)
        made = DecodeGraphs(model, kv, RecordedCheck(), table, FakeStream(), RunsIt(), 4, 64)
        made._replays[4]()
        table.resolve_tokens = lambda ids: ids[: int(ids[0].item())]  # type: ignore[method-assign]
        with pytest.raises(DataDependentOutputException):
            made._replays[4]()


REFUSED = [
    ({"cuda_graph_max_bs": 8}, "there are no CUDA graphs on --device cpu; leave it out"),
    (
        {"cuda_graph_max_bs": 8, "device": "cuda", "tp_size": 2},
        "steps are not recorded with --tp-size 2; leave it out",
    ),
    (
        {"cuda_graph_max_bs": 8, "device": "cuda", "disable_cuda_graph": True},
        "--disable-cuda-graph is set, too",
    ),
    ({"cuda_graph_max_bs": 0, "device": "cuda"}, "--cuda-graph-max-bs 0: give 1 to 1024"),
    ({"cuda_graph_max_bs": 1025, "device": "auto"}, "--cuda-graph-max-bs 1025: give 1 to 1024"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_flags_that_would_have_no_effect_are_refused(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.build_config(flags)


DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ({}, 256), ({"disaggregation_mode": "prefill"}, 0),
        ({"max_running_requests": 1000}, 256), ({"disable_cuda_graph": True}, 0), ({"tp_size": 2}, 0),
        ({"cuda_graph_max_bs": 16}, 16), ({"cuda_graph_max_bs": 500, "max_running_requests": 100}, 100),
        ({"max_running_requests": 10, **DRAFTS}, 60), ({"max_running_requests": 100, **DRAFTS}, 256),
        ({"max_running_requests": 50, "chunked_prefill_size": 64, **DRAFTS}, 64),
        ({"cuda_graph_max_bs": 16, **DRAFTS}, 16),
    ],
)  # fmt: skip
def test_how_many_rows_are_recorded(flags: dict[str, object], rows: int) -> None:
    assert rows_to_record(config.build_config({"device": "cuda", **flags})) == rows


def test_reason_for_not_recording_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    kv = make_pool(model.spec.kv_spec(4), 8, native=False)
    runner = DeviceRunner(model, kv, DeviceCheck(), 2, stream=LateStream())
    memory: Any = None
    with caplog.at_level(logging.INFO):
        for flags in (
            {"disable_cuda_graph": True},
            {"tp_size": 2},
            {"disaggregation_mode": "prefill"},
            {},
        ):
            asked = config.build_config({"device": "cuda", **flags})
            rows = rows_to_record(asked)
            build._record_graphs(asked, runner, memory, rows, context=64)
    assert "none with --disable-cuda-graph" in caplog.messages[0]
    assert "none with --tp-size 2" in caplog.messages[1]
    assert "none, a prefill node runs no decode steps" in caplog.messages[2]
    assert "the torch attention backend cannot be recorded" in caplog.messages[3]


def test_failure_while_recording_leaves_an_engine_that_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    kv = make_pool(model.spec.kv_spec(4), 8, native=False, dummy_page=True)
    runner = DeviceRunner(model, kv, RecordedCheck(), 2, stream=LateStream())

    class Refuses:
        def __init__(self, device: torch.device) -> None: ...

        def record(self, work: Any) -> Any:
            raise RuntimeError("fast_decode_plan() got an unexpected keyword argument")

    memory: Any = SimpleNamespace(device=torch.device("cpu"), reserved_bytes=lambda: 0)
    monkeypatch.setattr(build, "CudaRecorder", Refuses)
    asked = config.build_config({"device": "cuda"})
    build._record_graphs(asked, runner, memory, rows=4, context=64)
    assert RunnerProbe(runner).graphs is None
    assert (
        "recording failed (fast_decode_plan() got an unexpected keyword argument)"
        in caplog.messages[-1]
    )
