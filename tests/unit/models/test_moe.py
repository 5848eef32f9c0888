"""Mixtures of experts: routers against transformers', stored forms, the sum of experts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.shard import Shard
from baton.layers.spec import ExpertShapes
from baton.models.blocks.moe import MoeBlock
from baton.models.blocks.router import route
from baton.models.families import FAMILIES
from baton.models.load import load_weights
from baton.models.spec.model import share_of, weight_bytes
from baton.models.spec.moe import ExpertNames, MoeSpec, RouterSpec, Scoring
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import held_tensors, load_model

TOKENS = 10_000
HIDDEN = 16
EXPERTS = 16


def planted_rows(generator: torch.Generator) -> Tensor:
    """Rows of hidden states, of which each fiftieth is zero, so that all of its scores tie."""
    rows = torch.randn(TOKENS, HIDDEN, generator=generator)
    rows[::50] = 0.0
    return rows


def router_of(name: str, fields: dict[str, Any]) -> Any:
    """transformers' router of a family."""
    import transformers
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.llama4.modeling_llama4 import Llama4Router
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    made = {
        "Qwen3Moe": Qwen3MoeTopKRouter,
        "Mixtral": MixtralTopKRouter,
        "Glm4Moe": Glm4MoeTopkRouter,
        "DeepseekV2": DeepseekV2TopkRouter,
        "DeepseekV3": DeepseekV3TopkRouter,
        "Glm4MoeLite": Glm4MoeLiteTopkRouter,
        "GptOss": GptOssTopKRouter,
        "Phimoe": PhimoeTopKRouter,
        "Llama4Text": Llama4Router,
    }
    config = getattr(transformers, f"{name}Config")(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=4, **fields
    )
    return made[name](config).eval()


def spec_of(name: str, fields: dict[str, Any]) -> RouterSpec:
    """Our description of a router, by its family."""
    from baton.models.config_file import ModelConfig

    values = {"num_hidden_layers": 1, "intermediate_size": 8, "first_k_dense_replace": 0, **fields}
    architecture = f"{name.removesuffix('Text')}ForCausalLM"
    mlp = FAMILIES[architecture].read_mlp(ModelConfig(Path("config.json"), values), 0)
    assert isinstance(mlp, MoeSpec)
    return mlp.router


ROUTERS = [
    ("Qwen3Moe", {"num_experts": EXPERTS, "num_experts_per_tok": 4}),
    ("Qwen3Moe", {"num_experts": EXPERTS, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    ("Mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    ("Glm4Moe", {"n_routed_experts": EXPERTS, "num_experts_per_tok": 4}),
    (
        "Glm4Moe",
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    ("Glm4Moe", {"n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "norm_topk_prob": False}),
    (
        "DeepseekV2",
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "topk_method": "greedy",
            "routed_scaling_factor": 2.5,
        },
    ),
    (
        "DeepseekV2",
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
        },
    ),
    (
        "DeepseekV2",
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "n_group": 8, "topk_group": 1,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0,
        },
    ),
    (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 0,
        },
    ),
    ("Glm4MoeLite", {"n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "mlp_layer_types": ["sparse"]}),
    ("GptOss", {"num_local_experts": EXPERTS, "num_experts_per_tok": 4}),
    ("Phimoe", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    (
        "Phimoe",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    ),
    ("Llama4Text", {"num_local_experts": EXPERTS, "num_experts_per_tok": 1}),
]  # fmt: skip


def compute_theirs(router: Any, name: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts of transformers' router."""
    with torch.no_grad():
        answer = router(rows)
    if name != "Llama4Text":
        logits, weights, experts = answer
        return logits, weights, experts
    # A score for each expert, 0 for all but the chosen one.
    scores, logits = answer
    weights, experts = scores.max(dim=-1, keepdim=True)
    return logits, weights, experts


def weight_of_each_expert(experts: Tensor, weights: Tensor) -> Tensor:
    """[tokens, EXPERTS]: the weights of the chosen experts, 0 for all others."""
    dense = torch.zeros(len(experts), EXPERTS, dtype=torch.float64)
    return dense.scatter(1, experts.long(), weights.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "fields"), ROUTERS)
def test_choices_and_weights_are_those_of_transformers(
    name: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    theirs = router_of(name, fields)
    spec = spec_of(name, fields)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        theirs.weight.normal_(generator=generator)
        if spec.has_bias:
            # Large enough to change most choices, and never the weights.
            theirs.e_score_correction_bias.normal_(0, 0.5, generator=generator)
        if name == "GptOss":
            theirs.bias.normal_(0, 2.0, generator=generator)
            theirs.bias.data = theirs.bias.data.to(dtype)
    theirs.weight.data = theirs.weight.data.to(dtype)
    rows = planted_rows(generator).to(dtype)
    logits, want_weights, want_experts = compute_theirs(theirs, name, rows)
    bias = theirs.e_score_correction_bias if spec.has_bias else None
    experts, weights = route(logits, spec, bias)
    assert torch.equal(weights, weights.to(want_weights.dtype).to(weights.dtype))
    scores = logits.float().sigmoid() if spec.scoring == "sigmoid" else logits.float()
    ranking = scores if bias is None else scores + bias
    untied = ranking.sort(dim=-1).values.diff(dim=-1).ne(0).all(dim=-1)
    assert untied.sum() > TOKENS * (0.9 if dtype == torch.float32 else 0.1)
    # transformers leaves the order of equal scores to torch.topk: rows without ties are compared whole.
    # Which experts weigh nothing is left open, too: those of dropped groups tie at 0.
    got = weight_of_each_expert(experts, weights)[untied]
    wanted = weight_of_each_expert(want_experts, want_weights)[untied]
    is_close = torch.isclose(got, wanted, rtol=1e-6, atol=1e-12)
    # An exponential that differs in its last bit may round to the next number of bfloat16.
    spacing = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(got, wanted, rtol=spacing, atol=1e-12)
    assert is_close.sum() >= is_close.numel() - 5


def test_bias_of_a_router_changes_most_choices() -> None:
    """The test above says nothing of a bias that is too small to count."""
    name, fields = ROUTERS[3]
    spec = spec_of(name, fields)
    generator = torch.Generator().manual_seed(1)
    logits = planted_rows(generator)
    bias = torch.empty(EXPERTS).normal_(0, 0.5, generator=generator)
    changed = route(logits, spec, bias).experts != route(logits, spec).experts
    assert changed.any(-1).float().mean() > 0.5


TIED = [
    RouterSpec(5, 2, normalizes=True),
    RouterSpec(5, 2, scoring="softmax_of_chosen"),
    RouterSpec(5, 2, scoring="sigmoid_of_chosen"),
    RouterSpec(5, 2, scoring="sigmoid"),
    RouterSpec(5, 2, scoring="sparsemixer", jitter=0.01),
]


@pytest.mark.parametrize("spec", TIED, ids=lambda spec: spec.scoring)
def test_lowest_number_wins_among_equal_scores_of_each_kind(spec: RouterSpec) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5, [3.0, 1.0, 3.0, 1.0, 3.0]])
    assert route(logits, spec).experts.tolist() == [[1, 2], [0, 1], [0, 2]]


def test_sparsemixer_weighs_each_choice_among_those_near_it() -> None:
    # 2 * 0.1 of the best one: 9 is near 10, and 4.5 is far from both; then 4.5 is far from 9.
    spec = RouterSpec(4, 2, scoring="sparsemixer", jitter=0.1)
    experts, weights = route(torch.tensor([[4.5, 10.0, 9.0, -3.0]]), spec)
    first = math.exp(10.0) / (math.exp(10.0) + math.exp(9.0))
    assert experts.tolist() == [[1, 2]]
    assert weights.tolist() == [pytest.approx([first, 1.0])]


def test_other_groups_weigh_nothing_where_the_best_score_ranks_them() -> None:
    # By their best, group 1 wins; by the sum of two, group 0 would.
    logits = torch.tensor([[2.0, 2.0, 2.5, -9.0]])
    spec = RouterSpec(4, 3, num_groups=2, kept_groups=1, group_rank="best")
    experts, weights = route(logits, spec)
    assert experts.tolist() == [[2, 3, 0]]
    assert weights[0, 2] == 0.0
    by_sum = route(logits, replace(spec, group_rank="two_best", experts_per_token=2))
    assert by_sum.experts.tolist() == [[0, 1]]


def test_bias_and_groups_decide_the_choice_and_not_the_weights() -> None:
    spec = RouterSpec(
        6, 2, scoring="sigmoid", normalizes=True, rounds_weights=False, has_bias=True,
        num_groups=3, kept_groups=1, scaling_factor=2.0,
    )  # fmt: skip
    logits = torch.tensor([[5.0, -5.0, 1.0, 1.0, 0.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    experts, weights = route(logits, spec, bias)
    # Sums of the groups' two best: 0.993 + 0.007, 0.731 + 0.731, 1.5 + 1.5.
    assert experts.tolist() == [[4, 5]]
    assert torch.allclose(weights, torch.tensor([[1.0, 1.0]]))


def make_block(dtype: torch.dtype, experts_per_token: int = 3) -> MoeBlock:
    spec = MoeSpec(RouterSpec(EXPERTS, experts_per_token, normalizes=True), inner_size=24)
    generator = torch.Generator().manual_seed(2)
    tensors = {"router": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    for expert in range(EXPERTS):
        tensors[f"experts.{expert}.gate_up"] = torch.randn(48, HIDDEN, generator=generator)
        tensors[f"experts.{expert}.down"] = torch.randn(HIDDEN, 24, generator=generator)
    return MoeBlock.make(spec, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def naive_sum(block: MoeBlock, x: Tensor) -> Tensor:
    """Token by token, in float64."""
    wide = x.double()
    router, gate_up, down = (
        [matrix.double() for matrix in matrices]  # type: ignore[union-attr]
        for matrices in ([block.router], block.gate_up, block.down)
    )
    rows = []
    for row in wide:
        scores = (router[0] @ row).softmax(0)
        chosen = sorted(range(EXPERTS), key=lambda e: -scores[e])[
            : block.spec.router.experts_per_token
        ]
        total = sum(scores[e] for e in chosen)
        result = torch.zeros_like(row)
        for expert in chosen:
            gate, up = (gate_up[expert] @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            result += scores[expert] / total * (down[expert] @ inner)
        rows.append(result)
    return torch.stack(rows)


@pytest.mark.parametrize("experts_per_token", [1, 3, EXPERTS])
def test_result_is_the_weighted_sum_of_the_chosen_experts(experts_per_token: int) -> None:
    block = make_block(torch.float32, experts_per_token)
    x = torch.randn(37, HIDDEN, generator=torch.Generator().manual_seed(3))
    want = naive_sum(block, x)
    torch.testing.assert_close(block.forward(x).double(), want, rtol=1e-4, atol=1e-4)
    block.pack()
    torch.testing.assert_close(block.forward(x).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_weights_of_experts_have_the_same_bits_in_any_company(scoring: Scoring) -> None:
    """The number of experts fills no vector register: torch.sigmoid rounds by the place in a tensor."""
    pytest.importorskip("baton._native", reason="the native module is not built")
    spec = RouterSpec(10, 3, scoring=scoring, normalizes=True)
    logits = torch.randn(333, 10, generator=torch.Generator().manual_seed(0))
    whole = route(logits, spec).weights
    for size in (1, 3, 7, 100):
        parts = [route(part, spec).weights for part in logits.split(size)]
        assert torch.equal(torch.cat(parts), whole), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_give_a_row_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    pytest.importorskip("baton._native", reason="the native module is not built")
    block = make_block(dtype)
    block.pack()
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = block.forward(x)
    for size in (1, 2, 3, 7, 33):
        parts = [block.forward(part) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), whole), size
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    assert torch.equal(block.forward(x[order]), whole[order])


def joined(path: Path, names: ExpertNames) -> None:
    """Rewrite a checkpoint so that the experts of a layer are one tensor, as transformers 5 holds them."""
    tensors = load_file(path / "model.safetensors")
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name in list(tensors):
        before, mark, after = name.partition("experts.")
        if mark and after[0].isdigit():
            number, module, _ = after.split(".")
            experts.setdefault(before, {}).setdefault(int(number), {})[module] = tensors.pop(name)
    gate, up, down = (name.rsplit(".", 1)[1] for name in (names.gate, names.up, names.down))
    for before, by_number in experts.items():
        ordered = [by_number[number] for number in range(len(by_number))]
        gate_up = [torch.cat((each[gate], each[up])) for each in ordered]
        tensors[f"{before}experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{before}experts.down_proj"] = torch.stack([each[down] for each in ordered])
    assert experts
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)])
def test_experts_in_one_tensor_are_the_same_model(
    tmp_path: Path, variant: str, shard: Shard
) -> None:
    path = make_checkpoint(variant, tmp_path / "m")
    spec = read_spec(path)
    one_by_one = held_tensors(load_weights(spec, path, shard=shard))
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    joined(path, mlp.names)
    together = held_tensors(load_weights(spec, path, shard=shard))
    assert len(one_by_one) == len(together) > 20
    assert all(torch.equal(one, other) for one, other in zip(one_by_one, together, strict=True))


@pytest.mark.parametrize("is_joined", [False, True])
def test_ranks_have_whole_experts_with_ep_size(tmp_path: Path, *, is_joined: bool) -> None:
    path = make_checkpoint("qwen3-moe", tmp_path / "m")
    spec = read_spec(path)
    whole = load_weights(spec, path).weights.layers[1].mlp
    assert isinstance(whole, MoeBlock)
    if is_joined:
        assert isinstance(spec.layers[0].mlp, MoeSpec)
        joined(path, spec.layers[0].mlp.names)
    held: list[Tensor] = []
    for rank in range(4):
        decoder = load_weights(spec, path, shard=Shard(rank, 4, divides_experts=True))
        assert weight_bytes(spec, Shard(rank, 4, divides_experts=True)) < weight_bytes(spec)
        part = decoder.weights.layers[1].mlp
        assert isinstance(part, MoeBlock)
        assert list(part.spec.held_experts) == [2 * rank, 2 * rank + 1]
        held += part.gate_up
    assert all(torch.equal(a, b) for a, b in zip(held, whole.gate_up, strict=True))


@pytest.mark.parametrize("variant", ["gpt-oss", "qwen3-moe"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_each_rank_has_its_part_of_every_expert(
    tmp_path: Path, variant: str, load_format: str
) -> None:
    path = make_checkpoint(variant, tmp_path / "m")
    spec = read_spec(path, load_format=load_format)
    ranks = []
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        mlp = load_weights(spec, path, load_format, shard=shard).weights.layers[1].mlp
        assert isinstance(mlp, MoeBlock)
        ranks.append(mlp)
    whole, *parts = ranks
    for expert in range(8):
        halves = [held_tensors(part.gate_up)[expert].chunk(2) for part in parts]
        gate, up = (torch.cat(half) for half in zip(*halves, strict=True))
        assert torch.equal(torch.cat((gate, up)), held_tensors(whole.gate_up)[expert])
        columns = [held_tensors(part.down)[expert] for part in parts]
        assert torch.equal(torch.cat(columns, dim=1), held_tensors(whole.down)[expert])
    assert [len(rank.down_bias) for rank in ranks] == (
        [8, 8, 0] if variant == "gpt-oss" else [0] * 3
    )


def test_models_that_cannot_be_divided_by_experts_are_refused(tmp_path: Path) -> None:
    few = edited(make_checkpoint("mixtral", tmp_path / "a"), num_local_experts=2)
    spec = read_spec(few, load_format="dummy")
    with pytest.raises(ConfigError, match=r"--tp-size 4: .* 2 experts, fewer than ranks"):
        share_of(spec, Shard(0, 4, divides_experts=True))
    path = make_checkpoint("llama", tmp_path / "b")
    with pytest.raises(ConfigError, match="--ep-size 2: the model has no experts"):
        share_of(read_spec(path), Shard(0, 2, divides_experts=True))


def edited(path: Path, **changes: Any) -> Path:
    """The checkpoint with other fields in config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def test_missing_expert_and_foreign_shapes_are_named(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3-moe", tmp_path / "m")
    whole = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"missing tensor {name}"):
        load_model(path)
    save_file(whole | {name: whole[name][:-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} is \[31, 64\], config.json implies \[32, 64\]"):
        load_model(path)
    save_file(whole, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected tensor model\.layers\.0\.mlp\.experts\.7"):
        load_model(edited(path, num_local_experts=7))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "up to 8"]),
        ({"num_experts": 7}, ["num_local_experts", "8", "num_experts says 7"]),
        ({"num_experts": 10**9}, ["num_experts", "1000000000", "up to 10000"]),
        ({"num_experts": "many"}, ["num_experts", "many", "positive integer"]),
        ({"mlp_only_layers": 1}, ["mlp_only_layers", "1", "list of layer numbers"]),
        ({"norm_topk_prob": "yes"}, ["norm_topk_prob", "yes", "true or false"]),
    ],
)
def test_fields_that_make_no_mixture_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    path = edited(make_checkpoint("qwen3-moe", tmp_path / "m"), **changes)
    with pytest.raises(ConfigError) as err:
        read_spec(path)
    for word in words:
        assert word in err.value.message


def test_groups_that_do_not_divide_the_experts_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("glm4-moe", tmp_path / "m")
    with pytest.raises(ConfigError, match=r"n_group = 3 .*groups of at least 2 of the 8 experts"):
        read_spec(edited(path, n_group=3))


def test_gpu_takes_the_sizes_of_the_mixture(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3-moe", tmp_path / "m")
    spec = share_of(read_spec(path, on_cpu=False), Shard(0, 2))
    assert spec.kernel_shapes.experts == (ExpertShapes(inner_size=16, experts_per_token=2),)


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("gpt-oss", {"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ("gpt-oss", {"swiglu_limit": 0}, ["swiglu_limit = 0", "positive number"]),
        (
            "gpt-oss",
            {"layer_types": ["chunked_attention"] * 3},
            ["layer_types", "sliding_attention"],
        ),
        ("llama4", {"attention_chunk_size": None}, ["attention_chunk_size", "need a size"]),
        (
            "llama4",
            {"layer_types": ["sliding_attention"] * 4},
            ["layer_types", "chunked_attention"],
        ),
        ("llama4", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "each of 4 layers"]),
        ("llama4", {"moe_layers": [True]}, ["moe_layers", "list of layer numbers"]),
        (
            "llama4",
            {"attn_temperature_tuning": "yes"},
            ["attn_temperature_tuning", "true or false"],
        ),
    ],
)
def test_fields_of_gpt_oss_and_llama_4_that_mean_nothing_are_refused(
    tmp_path: Path, variant: str, changes: dict[str, Any], words: list[str]
) -> None:
    path = edited(make_checkpoint(variant, tmp_path / "m"), **changes)
    with pytest.raises(ConfigError) as err:
        read_spec(path)
    for word in words:
        assert word in err.value.message


def test_layers_that_draft_tokens_are_left_in_the_file(tmp_path: Path) -> None:
    path = make_checkpoint("glm4-moe", tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors")
    prompt = list(range(20))
    with torch.inference_mode():
        want = reference_model(path)(torch.tensor([prompt])).logits[0]
    logits = ModelLoop(load_model(path), "torch", page_size=4).prompt_logits(prompt, 7)
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


def test_parameters_are_those_of_the_published_model(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, as its model card says."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path, load_format="dummy")
    assert spec.num_parameters == pytest.approx(30.53e9, rel=1e-3)
    assert spec.kv_spec(16).token_bytes == 48 * 2 * 4 * 128 * 2
