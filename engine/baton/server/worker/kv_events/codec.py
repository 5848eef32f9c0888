"""KV events on the wire: vLLM's msgpack arrays, and the same as JSON objects.

The arrays are those of vLLM's KV event publisher (also SGLang's), which routers read. They are as
long as the longest version of that format: readers of older, shorter ones ignore what follows their
last field.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from baton.cache.kv_events import Cleared, KvEvent, Removed, Stored

FIRST_GROUP = 0
"""The page group that is announced, and the only one that readers count: it keeps all tokens."""
KINDS = {"full": "full_attention", "latent": "mla_attention"}
"""vLLM's words for the kinds that the first page group may have."""


class _Event(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Arrays that begin with the name of the class."""


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    """Always None: this engine has no adapters."""
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For a block that begins a sequence of a namespace: cache_salt and extra_key, each empty if
    absent.
    """
    group_idx: int = FIRST_GROUP
    kv_cache_spec_kind: str | None = None
    """What the group's pages hold, in vLLM's words."""


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int = FIRST_GROUP


class AllBlocksCleared(_Event):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class WireEventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


EXTRAS = ("lora_name", "extra_keys", "kv_cache_spec_kind")
"""Fields that JSON objects leave out when they are null."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WireEventBatch] = msgspec.msgpack.Decoder(WireEventBatch)


def encode(
    events: Iterable[KvEvent], page_size: int, ts: float, dp_rank: int, group_kind: str
) -> bytes:
    """Encode a batch as a message's payload. `ts`: Unix time [s]; `group_kind`: that of the first
    page group.
    """
    kind = KINDS[group_kind]
    return _encoder.encode(
        WireEventBatch(ts, [_to_wire(event, page_size, kind) for event in events], dp_rank)
    )


def _to_wire(event: KvEvent, page_size: int, kind: str) -> WireEvent:
    if isinstance(event, Stored):
        tokens = array("i", event.tokens).tolist()
        stored = BlockStored(
            list(event.hashes),
            event.parent,
            tokens,
            page_size,
            lora_id=None,
            medium=event.medium,
            kv_cache_spec_kind=kind,
        )
        if event.namespace:
            first = tuple(event.namespace.decode().split("\0")) if event.parent is None else None
            stored.extra_keys = [first, *[None] * (len(event.hashes) - 1)]
        return stored
    if isinstance(event, Removed):
        return BlockRemoved(list(event.hashes), event.medium)
    assert isinstance(event, Cleared), event
    return AllBlocksCleared()


def as_objects(payload: bytes) -> tuple[float, list[dict[str, Any]]]:
    """A payload's time and its events as JSON objects with vLLM's field names; absent extras are
    left out.
    """
    batch = _decoder.decode(payload)
    return batch.ts, [_as_object(event) for event in batch.events]


def _as_object(event: WireEvent) -> dict[str, Any]:
    found = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
    return {name: value for name, value in found.items() if value is not None or name not in EXTRAS}
