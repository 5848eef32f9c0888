"""Page groups by logical coordinates: ranges, sizes, and a hash that every coordinate enters."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cache.group_pages import GroupRule
from baton.layers.kv_spec import (
    FP8,
    GroupDescriptor,
    KvScales,
    KVSpec,
    describe_attention,
    describe_heads,
    to_ranges,
)
from baton.layers.shard import Shard
from baton.layers.spec import AttentionSpec, DeltaSpec, LatentSpec, LayerAttention

GROUP = describe_heads(range(3), range(2), 8, dtype="bfloat16", page_tokens=4)
MAX_ROUTE_BODY_BYTES = 16 << 10
"""Of PUT /route (docs/protocol.md §3)."""


def with_other(name: str) -> GroupDescriptor:
    others = {
        "id": 1,
        "kind": "window",
        "layers": ((0, 2), (3, 4)),
        "heads": ((2, 4),),
        "dims": "layer,kv=2,slot,head,head_dim=4+4",
        "dtype": "float16",
        "page_tokens": 8,
        "page_bytes": 1,
        "retain": "last 64",
        "scales": (KvScales(),) * 3,
        "tokens_at": "N",
    }
    return replace(GROUP, **{name: others[name]})


def test_page_size_follows_from_the_coordinates() -> None:
    assert GROUP.shape == (3, 2, 4, 2, 8)
    assert GROUP.page_bytes == 3 * 2 * 4 * 2 * 8 * 2
    spec = KVSpec((GROUP,))
    assert (spec.page_bytes, spec.token_bytes) == (GROUP.page_bytes, GROUP.page_bytes // 4)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_their_numbers(numbers: set[int]) -> None:
    ranges = to_ranges(sorted(numbers))
    assert [n for first, end in ranges for n in range(first, end)] == sorted(numbers)
    assert all(left[1] < right[0] for left, right in pairwise(ranges))


def test_numbers_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="number 1 comes after 2"):
        to_ranges([2, 1])


@pytest.mark.parametrize("name", [f.name for f in fields(GroupDescriptor) if f.name != "shape"])
def test_every_coordinate_enters_the_hash(name: str) -> None:
    assert KVSpec((with_other(name),)).groups_hash != KVSpec((GROUP,)).groups_hash


def test_padding_of_heads_is_part_of_the_dims() -> None:
    padded = describe_heads(range(3), range(2), 4, dtype="bfloat16", page_tokens=4, head_padding=4)
    assert padded.dims == "layer,kv=2,slot,head,head_dim=4+4"
    assert (padded.shape, padded.page_bytes) == (GROUP.shape, GROUP.page_bytes)
    assert KVSpec((padded,)).groups_hash != KVSpec((GROUP,)).groups_hash


SCALES = (KvScales(0.5, 2.0), KvScales(), KvScales(1.0, 0.125))


def describe_codes(scales: tuple[KvScales, ...] = SCALES) -> KVSpec:
    group = describe_heads(range(3), range(2), 8, dtype=FP8, page_tokens=4, scales=scales)
    return KVSpec((group,), "bfloat16")


def test_pages_of_codes_have_a_byte_per_number_and_state_both_types() -> None:
    spec = describe_codes()
    assert spec.page_bytes == GROUP.page_bytes // 2
    assert (spec.page_dtype, spec.compute_dtype) == (FP8, "bfloat16")
    layout = json.loads(json.dumps(spec.layout("m")))
    assert (layout["dtype"], layout["groups"][0]["dtype"]) == ("bfloat16", FP8)
    assert KVSpec((GROUP,)).layout("m")["dtype"] == "bfloat16"


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("name", ["key", "value"])
def test_each_scale_of_each_layer_enters_the_hash(layer: int, name: str) -> None:
    other = list(SCALES)
    other[layer] = replace(other[layer], **{name: 0.25})
    assert describe_codes(tuple(other)).groups_hash != describe_codes().groups_hash
    assert describe_codes(tuple(SCALES)).groups_hash == describe_codes().groups_hash


@pytest.mark.parametrize(("dtype", "scales"), [(FP8, ()), (FP8, SCALES[:2]), ("bfloat16", SCALES)])
def test_scales_that_do_not_fit_type_or_layers_are_refused(
    dtype: str, scales: tuple[KvScales, ...]
) -> None:
    with pytest.raises(ValueError, match=f"{len(scales)} scales for 3 layers of {dtype}"):
        describe_heads(range(3), range(2), 8, dtype=dtype, page_tokens=4, scales=scales)


def test_rank_names_its_heads_by_their_numbers_in_the_model() -> None:
    layers = [AttentionSpec(4, 2, 8, first_kv_head=6, window=window) for window in (0, 16)]
    group = describe_attention(layers, "float32", 16)
    assert (group.layers, group.heads) == (((0, 2),), ((6, 8),))
    assert Shard(3, 4).kv_heads(8) == slice(6, 8)


LATENTS = LatentSpec(num_heads=4, latent_dim=32, key_dim=8, scale=0.2)


def test_latents_have_one_row_per_token_and_layer_whatever_share_of_heads_a_rank_has() -> None:
    group = describe_attention([LATENTS] * 3, "bfloat16", 16)
    assert group.shape == (3, 16, 40)
    assert group.page_bytes == 3 * 16 * 40 * 2
    assert (group.kind, group.heads) == ("latent", ((0, 1),))
    assert group.dims == "layer,slot,latent|key=32|8,pairs=interleaved"
    assert describe_attention([replace(LATENTS, num_heads=1)] * 3, "bfloat16", 16) == group


def test_order_of_rotated_pairs_enters_the_hash_of_latents() -> None:
    """Products of a query and a key do not depend on it, but the bytes of a page do."""
    halves = replace(LATENTS, is_interleaved=False)
    groups = [describe_attention([latents], "float32", 16) for latents in (LATENTS, halves)]
    assert groups[0].page_bytes == groups[1].page_bytes
    assert len({KVSpec((group,)).groups_hash for group in groups}) == 2


@pytest.mark.parametrize(
    "layers",
    [
        [AttentionSpec(4, 2, 8), AttentionSpec(4, 1, 8)],
        [LATENTS, replace(LATENTS, latent_dim=16)],
        [LATENTS, AttentionSpec(4, 1, 40)],
        [AttentionSpec(4, 1, 40), LATENTS],
    ],
)
def test_layers_that_keep_other_tokens_are_refused(layers: list[LayerAttention]) -> None:
    with pytest.raises(ValueError, match="layer 1 has"):
        describe_attention(layers, "float32", 16)


def divided(windows: list[int]) -> KVSpec:
    layers = [AttentionSpec(4, 2, 8, window=window) for window in windows]
    return KVSpec((describe_attention(layers, "float32", 16),)).divide(layers)


def test_layers_with_windows_get_groups_of_pages_as_large_as_those_that_see_all() -> None:
    spec = divided([64, 64, 0, 64, 32, 0, 64, 64])
    full, small, large = spec.groups
    assert (full.kind, full.layers, full.retain, full.width) == ("full", ((2, 3), (5, 6)), "all", 1)
    assert (small.kind, small.layers, small.retain, small.width) == (
        "window",
        ((4, 5),),
        "last 32",
        1,
    )
    assert (large.layers, large.retain, large.width) == (((0, 2), (3, 4), (6, 8)), "last 64", 3)
    assert [group.id for group in spec.groups] == [0, 1, 2]
    assert {group.shape for group in spec.groups} == {(2, 2, 16, 2, 8)}
    assert {group.page_bytes for group in spec.groups} == {2 * 2 * 16 * 2 * 8 * 4}
    assert spec.rules == (GroupRule("window", 32, 1), GroupRule("window", 64, 3))
    # Tables: 0 of group 0, 1 of the small window, 2 to 4 of the large one.
    assert spec.layer_places == [(2, 0), (2, 1), (0, 0), (3, 0), (1, 0), (0, 1), (3, 1), (4, 0)]
    assert spec.token_bytes == 2 * 2 * 2 * 8 * 4


def test_layers_with_chunks_get_a_group_of_their_own() -> None:
    layers = [AttentionSpec(4, 2, 8, chunk=chunk) for chunk in (32, 32, 32, 0)]
    full, chunked = KVSpec((describe_attention(layers, "float32", 16),)).divide(layers).groups
    assert (full.layers, full.retain) == (((3, 4),), "all")
    assert (chunked.kind, chunked.layers, chunked.retain) == ("chunk", ((0, 3),), "chunk 32")
    assert chunked.rule == GroupRule("chunk", 32, 3)


@pytest.mark.parametrize("windows", [[0, 0, 0], [8, 8, 8]])
def test_layers_that_see_alike_stay_one_group(windows: list[int]) -> None:
    spec = divided(windows)
    assert len(spec.groups) == 1
    assert spec.rules == ()
    assert spec.layer_places == [(0, 0), (0, 1), (0, 2)]


def test_layers_keep_their_scales_and_type_in_a_divided_pool() -> None:
    layers = [AttentionSpec(4, 2, 8, window=window) for window in (64, 0, 64, 0)]
    scales = tuple(KvScales(key=number) for number in (0.5, 1.5, 2.5, 3.5))
    whole = KVSpec((describe_attention(layers, FP8, 16, scales),), "float32")
    spec = whole.divide(layers)
    assert [[scale.key for scale in group.scales] for group in spec.groups] == [
        [1.5, 3.5],
        [0.5, 2.5],
    ]
    assert spec.layer_scales == whole.layer_scales == scales
    assert (spec.compute_dtype, spec.page_dtype) == ("float32", FP8)


def test_divided_pool_has_another_hash() -> None:
    assert divided([8, 0]).groups_hash != divided([16, 0]).groups_hash
    assert json.loads(json.dumps(divided([8, 0]).layout("m")))["groups"][1]["retain"] == "last 8"


DELTA = DeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, first_value_head=4)


def test_states_are_a_group_of_the_layout_behind_those_of_tokens() -> None:
    spec = divided([8, 0]).with_states({1: DELTA, 2: DELTA, 4: DELTA}, 64)
    *_, group = spec.layout("m")["groups"]  # type: ignore[misc]
    assert group == {
        "id": 2,
        "kind": "state",
        "layers": ((1, 3), (4, 5)),
        "heads": ((4, 8),),
        "dims": "layer,conv|matrix=tap*channel|head*key*value,tap=3,channel=q|k|v:16|16|24,key=8,"
        "value=6,matrix_dtype=float32",
        "dtype": spec.compute_dtype,
        "page_tokens": 0,
        "page_bytes": spec.page_bytes,
        "retain": "latest",
        "scales": "none",
        "tokens_at": "N",
    }
    assert [rule.kind for rule in spec.rules] == ["window", "state"]
    pages = spec.rules[-1].width
    assert (pages - 1) * spec.page_bytes < 3 * DELTA.state_bytes(spec.compute_dtype)
    assert 3 * DELTA.state_bytes(spec.compute_dtype) <= pages * spec.page_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [("value_heads", 2), ("key_dim", 4), ("value_dim", 3), ("taps", 3), ("first_value_head", 0)],
)
def test_every_size_of_a_state_enters_the_hash(name: str, value: int) -> None:
    spec = KVSpec((GROUP,))
    other = replace(DELTA, **{name: value})
    hashes = {
        spec.groups_hash,
        spec.with_states({0: DELTA}, 8).groups_hash,
        spec.with_states({1: DELTA}, 8).groups_hash,
        spec.with_states({0: other}, 8).groups_hash,
    }
    assert len(hashes) == 4
    with pytest.raises(ValueError, match="different sizes"):
        spec.with_states({0: DELTA, 1: other}, 8)


def test_layout_of_many_scattered_layers_fits_a_route_body() -> None:
    group = describe_heads(range(0, 512, 2), range(0, 64, 2), 8, dtype="bfloat16", page_tokens=16)
    layout = KVSpec((group,)).layout("f" * 64)
    assert json.loads(json.dumps(layout))["groups"][0]["heads"][1] == [2, 3]
    assert len(json.dumps(layout)) < MAX_ROUTE_BODY_BYTES / 2
