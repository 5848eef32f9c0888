"""Heads that draft from hidden states: what they draft is what transformers' layers make of the
same tokens, and no answer is another one than without.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton.config import build_config
from baton.errors import ConfigError
from baton.models.checkpoint import check_checkpoint
from baton.runtime.build import load_rank
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import LENGTHS, STEPS, storm
from tests.parity.test_speculation import PROMPTS, SAMPLING, run
from tests.support.engines.draft_model import (
    count_drafts,
    draft_always,
    drafter_of,
    script_head,
)
from tests.support.engines.engine_run import FLAGS, answer, greedy, make_engine
from tests.support.grammars.engines import follow_grammars, make_store
from tests.support.models.checkpoints import make_checkpoint, variant_config
from tests.support.models.draft_heads import (
    DRAFT_VOCAB,
    EAGLE3_LAYERS,
    HeadReference,
    make_eagle3,
    make_mtp,
    make_qwen3_next_mtp,
)
from tests.support.models.quantized_checkpoints import quantize

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)
MTP = {"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 3}


@dataclass(frozen=True)
class Drafting:
    """A model, what its head drafts, and the flags for it."""

    path: Path
    head: HeadReference
    flags: Mapping[str, Any]


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    root = tmp_path_factory.mktemp("eagle3")
    path = make_checkpoint("llama", root / "model", num_hidden_layers=EAGLE3_LAYERS)
    head = make_eagle3(path, root / "head")
    flags = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(root / "head"),
        "speculative_num_steps": 3,
    }
    return Drafting(path, head, flags)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """A model whose MTP layer is always right."""
    path = tmp_path_factory.mktemp("mtp") / "echo"
    return Drafting(path, make_mtp("glm4-moe", path, echoes=True), MTP)


@dataclass(frozen=True)
class DraftedChain:
    """What a head drafted behind some tokens."""

    tokens: list[int]
    missing: frozenset[int]
    """Positions in front of the last one without an entry."""
    drafts: list[int]


def watch_drafts(engine: EngineLoop, page_size: int = 4) -> list[DraftedChain]:
    """The chains that will be drafted."""
    chains: list[DraftedChain] = []
    drafter = drafter_of(engine)
    run_drafts = drafter._run_drafts

    def run_watched(rows: Sequence[DraftRow]) -> list[DraftStep]:
        steps = run_drafts(rows)
        for row in rows:
            (seq,) = [seq for seq in drafter._seqs.values() if seq.slot == row.slot]
            slots = [
                seq.pages[place // page_size] * page_size + place % page_size
                for place in range(row.position)
            ]
            places = {slot: place for place, slot in enumerate(slots)}
            found = [places[slot] for slot in row.entries.tolist()]
            assert found == sorted(found)
            drafts = [
                token
                for step in steps
                for slot, token in zip(step.slots, step.tokens, strict=True)
                if slot == row.slot
            ]
            missing = frozenset(range(row.position)) - frozenset(found)
            chains.append(DraftedChain(list(seq.tokens), missing, drafts))
        return steps

    drafter._run_drafts = run_watched
    return chains


def check_drafts(chains: Sequence[DraftedChain], head: HeadReference) -> None:
    for chain in chains:
        assert chain.drafts == head.draft(chain.tokens, len(chain.drafts), chain.missing)


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 1},
        {"page_size": 4, "chunked_prefill_size": 16},
        {"page_size": 16, "disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_eagle3_drafts_what_its_formula_gives(eagle3: Drafting, flags: dict[str, Any]) -> None:
    prompts = [list(range(40, 110)), [5, 6, 7], [9]]
    engine = draft_always(make_engine(eagle3.path, **flags, **eagle3.flags))
    chains = watch_drafts(engine, flags["page_size"])
    answer(engine, prompts, greedy(12))
    engine.close()
    assert len(chains) > 25
    # The first token has no state in front of it; all others have been computed here.
    assert {chain.missing for chain in chains} == {frozenset({0})}
    check_drafts(chains, eagle3.head)
    assert len({token for chain in chains for token in chain.drafts}) > 10


@pytest.mark.parametrize(
    "variant",
    ["deepseek-v3", "glm4-moe", "glm4-moe-lite", "qwen3-next", "qwen3.5", "qwen3.5-moe"],
)
def test_mtp_layer_drafts_what_its_formula_gives(tmp_path: Path, variant: str) -> None:
    make = make_qwen3_next_mtp if variant.startswith("qwen3") else make_mtp
    head = make(path=tmp_path / variant, variant=variant)
    engine = draft_always(make_engine(tmp_path / variant, **MTP))
    chains = watch_drafts(engine)
    answer(engine, [list(range(40, 110)), [5, 6, 7]], greedy(10))
    engine.close()
    assert len(chains) > 12
    check_drafts(chains, head)
    assert len({token for chain in chains for token in chain.drafts}) > 10


def test_drafts_behind_a_prefix_that_was_found_leave_out_one_entry(eagle3: Drafting) -> None:
    """That of the first token behind it: its state was another request's."""
    shared = list(range(40, 80))
    engine = draft_always(make_engine(eagle3.path, **eagle3.flags))
    answer(engine, [[*shared, 1, 2]], greedy(2))
    chains = watch_drafts(engine)
    answer(engine, [[*shared, 3, 4, 5]], greedy(8))
    engine.close()
    assert {chain.missing for chain in chains} == {frozenset({0, len(shared)})}
    check_drafts(chains, eagle3.head)


def test_drafts_behind_pages_that_a_prompt_adopts_leave_out_one_entry_more(
    eagle3: Drafting,
) -> None:
    """Both prompts are computed in parts, in turns, and each goes on behind what the other did."""
    shared = list(range(40, 88))
    flags = {"page_size": 4, "chunked_prefill_size": 32, "long_prefill_token_threshold": 16}
    engine = draft_always(make_engine(eagle3.path, **flags, **eagle3.flags))
    chains = watch_drafts(engine)
    answer(engine, [[*shared, 1, 2], [*shared, 3, 4, 5]], greedy(8))
    engine.close()
    assert any(len(chain.missing) > 2 for chain in chains)
    check_drafts(chains, eagle3.head)


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_answers_are_those_without_drafts(eagle3: Drafting, name: str) -> None:
    params = SAMPLING[name]

    def engine(**flags: Any) -> EngineLoop:
        return follow_grammars(make_engine(eagle3.path, **flags), make_store(eagle3.path))

    plain = engine()
    want = run(plain, params, PROMPTS)
    plain.close()
    answers = {tuple(prompt): each.tokens for prompt, each in zip(PROMPTS, want, strict=True)}
    for right, flags in ((0.0, {"page_size": 1}), (0.7, {"chunked_prefill_size": 16})):
        drafting = draft_always(engine(**flags, **eagle3.flags))
        script_head(drafting, answers, right)
        assert run(drafting, params, PROMPTS) == want
        drafted, drawn = count_drafts(drafting)
        if right or not params.grammar:
            assert drafted > 0
        if right:
            assert drawn > 0
        drafting.close()


@pytest.mark.parametrize(
    "flags",
    [
        {"max_total_tokens": 192, "schedule_conservativeness": 0.05},
        {"max_total_tokens": 192, "schedule_conservativeness": 0.05, "host_kv_gib": 0.002,
         "preemption_mode": "offload"},
        {"disable_radix_cache": True},
    ],
    ids=["small", "host", "no-cache"],
)  # fmt: skip
def test_no_draft_reads_an_entry_of_another_text(eagle3: Drafting, flags: dict[str, Any]) -> None:
    """Pages are evicted, handed to others, copied to the host and back under sequences that are
    sent back and suspended.
    """
    prompts = prompts_of(random.Random(3), LENGTHS)
    reference = Reference(eagle3.path)
    want = reference.answers(prompts, STEPS)
    engine = draft_always(make_engine(eagle3.path, **flags, **eagle3.flags))
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    chains = watch_drafts(engine)
    # Behind the watch, so that rejected drafts leave entries behind.
    script_head(engine, answers, 0.6)
    disturb = storm(engine, random.Random(0))
    assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == want
    drafted, drawn = count_drafts(engine)
    assert 0 < drawn < drafted
    check_drafts(chains, eagle3.head)
    has_prefixes = any(len(chain.missing) > 1 for chain in chains)
    assert has_prefixes or "disable_radix_cache" in flags
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_decode_node_drafts_from_the_tokens_that_it_computed(
    eagle3: Drafting, transport: str
) -> None:
    reference = Reference(eagle3.path)
    steps = 16
    pair = pair_module.Pair(eagle3.path, transport, d_more=dict(eagle3.flags))
    try:
        engine = draft_always(pair.d.engine)
        chains = watch_drafts(engine)
        for prompts in (reference.prompts, reference.prompts[::-1]):
            for prompt in prompts:
                (want,) = reference.answers([prompt], steps)
                assert pair.answer([prompt], greedy(steps)) == [want]
        assert len(chains) > 40
        check_drafts(chains, eagle3.head)
        # Of a prompt that P computed there is no entry, nor of the token behind it.
        (first, *_) = [chain for chain in chains if chain.tokens[:33] == reference.prompts[0]]
        assert first.missing == frozenset(range(34))
        assert pair.answer(reference.prompts, greedy(steps)) == reference.answers(
            reference.prompts, steps
        )
    finally:
        pair.close()


@pytest.mark.parametrize("transport", ["", "shm", "tcp"])
def test_drafts_of_a_head_that_is_right_are_accepted(echo: Drafting, transport: str) -> None:
    reference = Reference(echo.path)
    want = reference.answers(reference.prompts, 20)
    if transport:
        pair = pair_module.Pair(echo.path, transport, d_more=dict(echo.flags))
        engine = draft_always(pair.d.engine)
        assert pair.answer(reference.prompts, greedy(20)) == want
    else:
        engine = draft_always(make_engine(echo.path, **echo.flags))
        assert answer(engine, reference.prompts, greedy(20)) == want
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 20
    if transport:
        pair.close()
    else:
        engine.close()


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_head_of_a_model_with_states(tmp_path: Path, transport: str) -> None:
    """Right drafts and wrong ones, on D behind the state that P sent, and interrupted."""
    path = tmp_path / "m"
    make_qwen3_next_mtp(path)
    reference = Reference(path)
    prompts = prompts_of(random.Random(8), [1, 16, 63, 64, 90])
    want = reference.answers(prompts, 40)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    if transport:
        pair = pair_module.Pair(path, transport, d_more=dict(MTP))
        engine = draft_always(pair.d.engine)
        script_head(engine, answers, 0.7)
        for _ in range(2):
            assert pair.answer(prompts, greedy(40)) == want
        pair.close()
    else:
        engine = draft_always(make_engine(path, **MTP, state_snapshot_tokens=16))
        script_head(engine, answers, 0.7)
        disturb = storm(engine, random.Random(0))
        assert answer(engine, prompts, greedy(40), disturb=disturb) == want
        engine.close()
    drafted, drawn = count_drafts(engine)
    assert 50 < drawn < drafted


def test_size_and_pages_of_a_head_are_reported(eagle3: Drafting) -> None:
    values = {"model_path": str(eagle3.path), **FLAGS, **eagle3.flags, "max_running_requests": 3}
    loaded = load_rank(build_config(values), str(eagle3.path))
    info = loaded.info["draft_model"]
    assert isinstance(info, dict)
    assert info["path"] == eagle3.flags["speculative_draft_model_path"]
    assert info["architecture"] == "LlamaForCausalLMEagle3"
    # A layer of the head takes what one of the model does; three drafts have slots of their own.
    layer_bytes = loaded.kv.page_bytes // EAGLE3_LAYERS
    assert info["kv_pool_bytes"] == loaded.kv.num_pages * layer_bytes + 3 * 3 * layer_bytes // 4


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def drop_tensor(path: Path, name: str) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def lead_out_of_vocabulary(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][-1] = 400
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: edit_config(path, hidden_size=32), r"hidden_size = 32 .* the model's .* 64"),
        (lambda path: edit_config(path, vocab_size=321), "vocab_size = 321 .* has 320 token ids"),
        (
            lambda path: edit_config(path, num_hidden_layers=2),
            "num_hidden_layers = 2 .* supported: 1",
        ),
        (
            lambda path: edit_config(path, architectures=["LlamaForCausalLMEagle"]),
            "supported: Llama",
        ),
        (lambda path: edit_config(path, norm_before_residual=True), "norm_before_residual = true"),
        (
            lambda path: edit_config(
                path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 9]}
            ),
            r"eagle_aux_hidden_state_layer_ids = \[1, 9\] .* layers of the model from 0 to 6",
        ),
        (lambda path: edit_config(path, draft_vocab_size=199), r"lm_head.weight"),
        (lambda path: drop_tensor(path, "midlayer.hidden_norm.weight"), "midlayer.hidden_norm"),
        (lambda path: drop_tensor(path, "fc.weight"), "fc.weight"),
        (lambda path: drop_tensor(path, "d2t"), rf"drafts {DRAFT_VOCAB} of 320 tokens, and d2t"),
        (lead_out_of_vocabulary, r"d2t leads to tokens \d+ to 599, and the model has 320"),
    ],
)
def test_damaged_head_is_refused(
    eagle3: Drafting, tmp_path: Path, change: Callable[[Path], None], sentence: str
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    for file in Path(str(eagle3.flags["speculative_draft_model_path"])).iterdir():
        (head / file.name).write_bytes(file.read_bytes())
    flags = {**eagle3.flags, "speculative_draft_model_path": str(head)}
    # Whatever the device turns out to be, files are checked before ranks start.
    config = build_config({"model_path": str(eagle3.path), "device": "auto", **flags})
    check_checkpoint(config, eagle3.path)
    change(head)
    with pytest.raises(ConfigError, match=sentence):
        check_checkpoint(config, eagle3.path)


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        ("llama", "names no layers that draft"),
        ("deepseek-v3", "names no layers that draft"),
        ("kimi-linear", "names no layers that draft"),
    ],
)
def test_model_without_a_usable_layer_is_refused(
    tmp_path: Path, variant: str, sentence: str
) -> None:
    variant_config(variant, num_nextn_predict_layers=0).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=[f"{type_name(variant)}ForCausalLM"])
    config = build_config({"load_format": "dummy", "model_path": str(tmp_path), **MTP})
    with pytest.raises(ConfigError, match=sentence):
        check_checkpoint(config, tmp_path)


def type_name(variant: str) -> str:
    return {"llama": "Llama", "deepseek-v3": "DeepseekV3", "kimi-linear": "KimiLinear"}[variant]


def test_checkpoint_without_its_mtp_layer_is_refused(tmp_path: Path) -> None:
    """Qwen3-Next's config.json names no such layer, and quantized copies often leave it out."""
    path = make_checkpoint("qwen3-next", tmp_path / "m")
    config = build_config({"model_path": str(path), **MTP})
    with pytest.raises(
        ConfigError, match=r"hold no layer that drafts \(mtp.fc.weight\); use NGRAM"
    ):
        check_checkpoint(config, path)


def test_missing_tensors_of_an_mtp_layer_are_named(echo: Drafting, tmp_path: Path) -> None:
    for file in echo.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    drop_tensor(tmp_path, "model.layers.2.eh_proj.weight")
    config = build_config({"model_path": str(tmp_path), **MTP})
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.eh_proj"):
        check_checkpoint(config, tmp_path)


def test_quantized_checkpoint_may_leave_the_join_plain_without_listing_it(
    echo: Drafting, tmp_path: Path
) -> None:
    """As DeepSeek V3's does."""
    path, _ = quantize(echo.path, "fp8-block", tmp_path)
    file = path / "model.safetensors"
    name = "model.layers.2.eh_proj.weight"
    tensors = load_file(file)
    del tensors[f"{name}_scale_inv"]
    plain = load_file(echo.path / "model.safetensors")[name]
    save_file(tensors | {name: plain}, file, metadata={"format": "pt"})
    check_checkpoint(build_config({"model_path": str(path), **MTP}), path)
