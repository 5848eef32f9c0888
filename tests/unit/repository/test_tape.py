"""The stand-in for CUDA graphs is strict: what a graph could not know, a replay does not either."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices.tape import TapeRecorder


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_replay_computes_with_what_fixed_memory_holds_then():
    x, y = torch.arange(4.0), torch.zeros(2)
    replay = TapeRecorder().record(lambda: y.copy_((x.view(2, 2) * 2).sum(-1)))
    x.copy_(torch.ones(4))
    y.zero_()
    replay()
    assert y.tolist() == [4.0, 4.0]


def test_values_python_chose_while_recording_stay():
    x, y, python = torch.ones(3), torch.zeros(3), {"factor": 2.0}
    replay = TapeRecorder().record(lambda: y.copy_(x * python["factor"]))
    python["factor"] = 5.0
    replay()
    assert y.tolist() == [2.0] * 3


def test_work_done_before_the_recording_is_not_done_again():
    """A tensor kept from outside has its old value; one that an earlier piece of work made for itself is garbage."""
    x, y, kept = torch.ones(3), torch.zeros(3), []
    first = TapeRecorder().record(lambda: kept.append(x + 1))
    second = TapeRecorder().record(lambda: y.copy_(kept[-1]))
    x.fill_(7.0)
    second()
    assert y.tolist() == [2.0] * 3
    first()
    second()
    assert y.tolist() == [8.0] * 3


def test_memory_that_the_work_did_not_write_is_garbage():
    y = torch.zeros(3)

    def work():
        part = torch.empty(3)
        part[:2] = 1.0
        y.copy_(part)

    TapeRecorder().record(work)()
    assert y[:2].tolist() == [1.0, 1.0]
    assert y[2].isnan()


@pytest.mark.parametrize("work", [
    lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
])  # fmt: skip
def test_operations_a_recording_stream_cannot_do_are_refused(work):
    with pytest.raises(AssertionError, match=r"cannot be recorded|a mask"):
        TapeRecorder().record(lambda: work(torch.ones(3)))
