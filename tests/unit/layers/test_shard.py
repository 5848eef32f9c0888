"""Dividing a model: every weight is somewhere exactly once, what cannot be divided is said, files are read in part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from baton.layers.shard import WHOLE, Shard
from baton.layers.spec import AttentionSpec
from baton.models.load import load_weights
from baton.models.quantized.readers import files
from baton.models.spec.model import ModelSpec, plan_weights, share_of
from baton.models.spec.tensors import Part
from baton.models.spec_reader import read_spec
from tests.unit.models.test_load import checkpoint

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 35, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip


@given(st.integers(1, 200), st.integers(1, 64))
def test_shares_cover_everything_once_and_evenly(n: int, size: int) -> None:
    shares = [Shard(rank, size).slice_of(n) for rank in range(size)]
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(n))
    lengths = {share.stop - share.start for share in shares}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("size", "heads"),
    [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])],
)
def test_query_heads_are_with_the_kv_head_they_read(size: int, heads: list[list[int]]) -> None:
    for rank, want in enumerate(heads):
        shard = Shard(rank, size)
        kv, q = shard.kv_heads(2), shard.slice_of(8)
        assert list(range(kv.start, kv.stop)) == want
        assert {head // 4 for head in range(q.start, q.stop)} == set(want), (
            "groups of four query heads"
        )


def cells(part: Part) -> list[tuple[int, ...]]:
    """Every element that is taken of a checkpoint tensor."""
    index: list[tuple[int, ...]] = [()]
    for cut in part.share:
        index = [(*head, i) for head in index for i in range(cut.start, cut.stop)]
    return index


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_weight_is_on_one_rank_and_kv_heads_on_their_readers(
    tmp_path: Path, size: int
) -> None:
    spec = read_spec(checkpoint(tmp_path, **SHAPE))
    held: dict[str, Counter[tuple[int, ...]]] = {}
    for rank in range(size):
        for _, param in plan_weights(spec, Shard(rank, size)):
            for part in param.parts:
                held.setdefault(part.source, Counter()).update(cells(part))
    for _, param in plan_weights(spec):
        for part in param.parts:
            times = set(held[part.source].values())
            assert len(held[part.source]) == len(cells(part)), (
                f"{part.source}: some weights are nowhere"
            )
            is_whole = param.is_norm
            is_kv = "k_proj" in part.source or "v_proj" in part.source
            assert times == {size if is_whole else max(1, size // 2) if is_kv else 1}, part.source


@pytest.mark.parametrize("rank", [0, 1])
def test_shares_are_slices_of_the_file(tmp_path: Path, rank: int) -> None:
    kept: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, edit=kept.update, **SHAPE)
    weights = load_weights(read_spec(path), path, shard=Shard(rank, 2)).weights
    half = slice(rank * 8, rank * 8 + 8)
    one = slice(rank * 4, rank * 4 + 4)
    mlp = slice(rank * 12, rank * 12 + 12)
    layer, p = weights.layers[1], "model.layers.1."
    q, k, v = (kept[f"{p}self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(layer.attention.qkv, torch.cat([q[half], k[one], v[one]]))
    assert torch.equal(layer.attention.o, kept[f"{p}self_attn.o_proj.weight"][:, half])
    assert torch.equal(
        layer.mlp.gate_up, torch.cat([kept[f"{p}mlp.{x}_proj.weight"][mlp] for x in ("gate", "up")])
    )
    assert torch.equal(layer.mlp.down, kept[f"{p}mlp.down_proj.weight"][:, mlp])
    assert (layer.attention.o_bias is None, layer.mlp.down_bias is None) == (
        rank == 1,
        rank == 1,
    ), "a bias is added once"
    vocab = slice(0, 17) if rank == 0 else slice(17, 35)
    assert torch.equal(weights.embed, kept["model.embed_tokens.weight"][vocab])
    assert torch.equal(weights.lm_head, kept["lm_head.weight"][vocab])


def test_rank_reads_its_shares_and_no_whole_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, **SHAPE)
    whole: list[str] = []
    real = files.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = real(*args, **kwargs)

        def __enter__(self) -> Watched:
            self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self._file.__exit__(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            whole.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(files, "safe_open", Watched)
    load_weights(read_spec(path), path, shard=Shard(1, 2))
    assert whole
    assert all("norm" in name for name in whole)


def test_bias_of_a_rank_without_it_is_not_unexpected_but_a_strange_one_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **SHAPE)
    load_weights(read_spec(path), path, shard=Shard(1, 2))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.scale"] = torch.ones(2)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"unexpected tensor model\.layers\.0\.mlp\.gate_proj\.scale"
    ):
        load_weights(read_spec(path), path, shard=Shard(1, 2))


def spec_of(path: Path, **changes: Any) -> ModelSpec:
    return read_spec(checkpoint(path, **{**SHAPE, **changes}))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        (
            {},
            3,
            "--tp-size 3: the model's num_attention_heads = 4 is no multiple of it; this model takes 1, 2, 4",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4},
            4,
            "--tp-size 4: the model's num_key_value_heads = 6 is neither a multiple nor a divisor of it; "
            "this model takes 1, 2, 3, 6, 12",
        ),
        (
            {"intermediate_size": 22},
            4,
            "--tp-size 4: the model's intermediate_size = 22 is no multiple of it; this model takes 1, 2",
        ),
        (
            {"vocab_size": 3},
            4,
            "--tp-size 4: the model's vocab_size = 3 is smaller; this model takes 1, 2",
        ),
    ],
)
def test_indivisible_shapes_are_refused_with_the_possible_sizes(
    tmp_path: Path, changes: dict[str, Any], size: int, message: str
) -> None:
    spec = spec_of(tmp_path, **changes)
    with pytest.raises(ConfigError) as err:
        share_of(spec, Shard(0, size))
    assert err.value.message == message


def test_share_has_its_heads_and_its_part_of_the_kv_pool(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert share_of(spec, WHOLE) == spec
    two = share_of(spec, Shard(1, 2))
    four = share_of(spec, Shard(3, 4))
    assert two.attention == (AttentionSpec(2, 1, 4, first_kv_head=1),) * 2
    assert [layer.mlp.inner_size for layer in two.layers] == [12, 12]
    assert two.vocab_size == 35
    assert four.attention == (AttentionSpec(1, 1, 4, first_kv_head=1),) * 2
    whole, half, quarter = (share.kv_spec(16).full_group for share in (spec, two, four))
    assert whole.page_bytes == 2 * half.page_bytes
    assert (whole.heads, half.heads) == (((0, 2),), ((1, 2),))
    assert quarter == half, "replicated beyond two"
