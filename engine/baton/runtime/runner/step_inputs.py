"""A step as the device executes it: arrays of integers with every token known, made of a plan or of
bytes.

With tensor parallelism only the first rank plans and samples. Of each plan it makes a `StepInputs`,
in which the tokens that the plan leaves open are filled in, and sends it as bytes; the other ranks
execute them as received. So a step's tokens, admissions' prompts and growth of page tables all
travel in one message.

The message ends with a number over the index arrays that the first rank computes with, chained to
those of all steps before it. A rank whose own arrays give another number (a message lost or
altered, a page table that differs) raises `StepMismatch` before it computes or writes anything:
every rank executes the plan, or the group ends.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cache.host import CopyRun
from baton.cache.int_array import IntArray, pack, unpack
from baton.sched.types.plan import FurtherGrowth, StateCopy

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class StepMismatch(Exception):
    """This rank would have executed something else than the first rank."""


class Growth(NamedTuple):
    """New pages of a slot: they continue its page table at index `base`."""

    slot: int
    base: int
    pages: IntArray


@dataclass(slots=True)
class StepInputs:
    """R rows with T tokens, in the plan's order."""

    number: int
    num_decode: int
    slots: Int64
    """[R]"""
    starts: Int64
    """[R]"""
    lengths: Int64
    """[R]"""
    samples: NDArray[np.bool_]
    """[R]"""
    token_ids: Int64
    """[T]"""
    prompt_rows: Int64
    """Places among the tokens of the rows that predict prompt tokens whose logprobs are missing."""
    growth: list[Growth]
    copies: tuple[CopyRun, ...]
    new_pages: IntArray
    """Pages with new content, which peers must not take for the old (StepPlan); empty where no peer
    reads them.
    """
    further: tuple[FurtherGrowth, ...] = ()
    """Growth of page tables in further page groups."""
    num_drafted_rows: int = 0
    """Rows behind the decode rows that have drafts: a token is drawn behind each of theirs."""
    states: tuple[StateCopy, ...] = ()
    """Copies between states of slots and pages of their sequences."""

    @property
    def num_answering_tokens(self) -> int:
        """Those of the rows that extend an answer, with their drafts: the first ones."""
        drafted = slice(self.num_decode, self.num_decode + self.num_drafted_rows)
        return self.num_decode + int(self.lengths[drafted].sum())

    def count_draws(self) -> Int64:
        """How many tokens are drawn in each row, behind its last ones: int64 [R]."""
        counts = self.samples.astype(np.int64)
        drafted = slice(self.num_decode, self.num_decode + self.num_drafted_rows)
        counts[drafted] = self.lengths[drafted]
        return counts


class StepArrays(NamedTuple):
    """Inputs of a step on the host: the tensors of `ForwardBatch` as arrays, in its order."""

    token_ids: Int64
    positions: Int64
    slot_mapping: Int64
    sample_index: Int64
    qo_indptr: Int32
    kv_lens: Int32
    page_indptr: Int32
    page_indices: Int32
    further: tuple[tuple[Int64, Int32], ...] = ()
    """`slot_mapping` and `page_indices` of tables 1, 2, ... of the pool."""


def separate_drafts(step: StepInputs, arrays: StepArrays, page_size: int) -> StepArrays:
    """The arrays with each token of a row with drafts as a decode row of its own, over the pages
    of its row up to itself.

    It attends as in its row, because all tokens of a step are in KV before a layer attends. It
    reads no K and V behind it: those of a draft may be NaN, and a kernel that takes a row's
    queries together multiplies all of the row's values, by 0 where a query does not see them.

    Cost: O(tokens * pages of their rows) copies; no loop in Python.
    """
    if not step.num_drafted_rows:
        return arrays
    rows = step.num_decode + step.num_drafted_rows
    tokens = step.num_answering_tokens
    positions = arrays.positions[:tokens]
    pages = positions // page_size + 1
    indptr = np.zeros(tokens + 1, np.int32)
    np.cumsum(pages, out=indptr[1:])
    firsts = np.repeat(arrays.page_indptr[:rows], step.lengths[:rows])
    places = np.repeat(firsts - indptr[:-1], pages) + np.arange(indptr[-1])
    first_page_behind = arrays.page_indptr[rows]

    def separate_pages(table: Int32) -> Int32:
        return np.concatenate((table[places], table[first_page_behind:]))

    indptr_behind = arrays.page_indptr[rows + 1 :] - first_page_behind + indptr[-1]
    return arrays._replace(
        qo_indptr=np.concatenate((np.arange(tokens, dtype=np.int32), arrays.qo_indptr[rows:])),
        kv_lens=np.concatenate(((positions + 1).astype(np.int32), arrays.kv_lens[rows:])),
        page_indptr=np.concatenate((indptr, indptr_behind)),
        page_indices=separate_pages(arrays.page_indices),
        further=tuple((slots, separate_pages(table)) for slots, table in arrays.further),
    )


def _unpack_array(kind: Any, packed: bytes) -> Any:
    """An array of the type that its field has: NDArray[X] is ndarray[..., dtype[X]]."""
    if kind is IntArray:
        return unpack(kind, packed)
    return np.frombuffer(packed, get_args(get_args(kind)[1])[0]).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=pack)
_decoder = msgspec.msgpack.Decoder(tuple[StepInputs, int], dec_hook=_unpack_array)


def encode_step(step: StepInputs, check: int) -> bytes:
    return _encoder.encode((step, check))


def decode_step(message: bytes) -> tuple[StepInputs, int]:
    """The step, and the number that `checksum` must give for it."""
    return _decoder.decode(message)


def checksum_step(step: StepInputs, indices: StepArrays | None, before: int) -> int:
    """A number over what a step does, chained to that of the step before.

    `indices`: None when it has no rows.
    """
    value = zlib.crc32(
        step.new_pages.tobytes(), zlib.crc32(f"{step.number}:{step.num_decode}".encode(), before)
    )
    for run in step.copies:
        value = zlib.crc32(
            run.pages.tobytes() + run.slots.tobytes(), zlib.crc32(bytes([run.to_host]), value)
        )
    for copy in step.states:
        facts = f"{copy.kind}:{copy.slot}:{copy.tokens}".encode()
        value = zlib.crc32(copy.pages.tobytes(), zlib.crc32(facts, value))
    if indices is None:
        return value
    parts: tuple[NDArray[Any], ...] = (
        indices.token_ids, indices.positions, indices.qo_indptr, indices.kv_lens,
        indices.page_indices, indices.slot_mapping, indices.sample_index,
        *(part for table in indices.further for part in table),
    )  # fmt: skip
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part).data, value)
    return value
