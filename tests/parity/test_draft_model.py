"""With drafts of a second model every answer is what it is without, and a model that drafts for
itself is always right: its K and V are never those of another text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import ConfigError
from baton.models.checkpoint import read_draft_spec
from baton.runtime.build import load_rank
from baton.runtime.engine_loop import EngineLoop
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import LENGTHS, STEPS, storm
from tests.parity.test_speculation import PROMPTS, SAMPLING, run
from tests.support.engines.draft_model import count_drafts, draft_always, with_draft
from tests.support.engines.engine_run import FLAGS as FLAGS_OF_ENGINES
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.grammars.engines import follow_grammars, make_store
from tests.support.models.checkpoints import variant_config
from tests.support.models.truncated import truncate_checkpoint

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)
FLAGS: list[dict[str, Any]] = [
    {"page_size": 1},
    {"page_size": 4, "chunked_prefill_size": 16},
    {"page_size": 16, "disable_overlap_schedule": True},
]
ENDS_EARLY = ("grammar", "greedy grammar", "min_tokens", "stops")
"""Answers that end behind a draft, which does not count as drawn then."""


@pytest.fixture(scope="module")
def half_llama(
    reference: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The first of two layers."""
    target = tmp_path_factory.mktemp("draft") / "half-llama"
    return truncate_checkpoint(reference("llama").path, target, 1)


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_answers_are_those_without_drafts(
    reference: Callable[[str], Reference], half_llama: Path, name: str
) -> None:
    path = reference("llama").path
    params = SAMPLING[name]

    def engine(**flags: Any) -> EngineLoop:
        return follow_grammars(make_engine(path, **flags), make_store(path))

    plain = engine()
    want = run(plain, params, PROMPTS)
    plain.close()
    for draft, flags in zip((path, half_llama, path), FLAGS, strict=True):
        drafting = draft_always(engine(**flags, **with_draft(draft)))
        assert run(drafting, params, PROMPTS) == want
        drafted, drawn = count_drafts(drafting)
        if name not in ENDS_EARLY:
            assert drafted > 30
            agrees = draft == path and params.temperature == 0
            assert (drawn == drafted) is agrees, "a model's most likely token is its own"
        drafting.close()


def test_choices_of_one_prompt(reference: Callable[[str], Reference]) -> None:
    """Sequences that share pages from the first token on."""
    path = reference("llama").path
    params = greedy(20)
    prompts = [list(range(40, 110))] * 4
    plain = make_engine(path)
    want = run(plain, params, prompts)
    plain.close()
    engine = draft_always(make_engine(path, **with_draft(path)))
    for _ in range(2):
        assert run(engine, params, prompts) == want
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 60
    engine.close()


@pytest.mark.parametrize("variant", ["gemma3", "gpt-oss", "deepseek-v2"])
def test_windows_and_latents_of_both_models(
    reference: Callable[[str], Reference], variant: str
) -> None:
    """The draft model keeps the pages behind its windows."""
    ref = reference(variant)
    engine = draft_always(make_engine(ref.path, **with_draft(ref.path)))
    answers = run(engine, greedy(len(ref.greedy[0])), ref.prompts)
    assert [each.tokens for each in answers] == ref.greedy
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 60
    engine.close()


@pytest.mark.parametrize("page_size", [1, 4, 16])
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
def test_no_draft_follows_from_a_page_of_another_text(
    reference: Callable[[str], Reference], page_size: int, flags: dict[str, Any]
) -> None:
    """Pages are evicted, handed to others, copied to the host and back under sequences that are
    sent back and suspended; with K and V of another text a draft would be wrong.
    """
    ref = reference("llama")
    prompts = prompts_of(random.Random(3), LENGTHS)
    engine = draft_always(
        make_engine(ref.path, page_size=page_size, **flags, **with_draft(ref.path))
    )
    want = ref.answers(prompts, STEPS)
    for repeat in range(3):
        disturb = storm(engine, random.Random(repeat))
        assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == want
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 15
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_decode_node_accepts_as_many_drafts_as_a_single_node(
    reference: Callable[[str], Reference], half_llama: Path, transport: str
) -> None:
    """It computes the draft model's part of the prompts that P has computed."""
    ref = reference("llama")
    steps = 24
    # Where the first step of an answer is planned ahead, it has no drafts on the node that computed
    # the prompt.
    flags: dict[str, Any] = {"disable_overlap_schedule": True, **with_draft(half_llama)}
    single = draft_always(make_engine(ref.path, **flags))
    pair = pair_module.Pair(ref.path, transport, d_more=flags)
    try:
        draft_always(pair.d.engine)
        for prompts in (ref.prompts, ref.prompts[::-1]):
            for prompt in prompts:
                (want,) = ref.answers([prompt], steps)
                assert answer(single, [prompt], greedy(steps)) == [want]
                assert pair.answer([prompt], greedy(steps)) == [want]
        drafted, drawn = count_drafts(single)
        assert count_drafts(pair.d.engine) == (drafted, drawn)
        assert 0 < drawn < drafted
        assert pair.answer(ref.prompts, greedy(steps)) == ref.answers(ref.prompts, steps)
    finally:
        pair.close()
        single.close()


def test_its_size_and_pages_are_reported(
    reference: Callable[[str], Reference], half_llama: Path
) -> None:
    flags = {**FLAGS_OF_ENGINES, **with_draft(half_llama), "max_running_requests": 3}
    loaded = load_rank(
        build_config({"model_path": str(reference("llama").path), **flags}),
        str(reference("llama").path),
    )
    info = loaded.info["draft_model"]
    assert isinstance(info, dict)
    assert info["path"] == str(half_llama)
    whole = loaded.kv.page_bytes
    # Half the layers, and a scratch page for each slot.
    assert info["kv_pool_bytes"] == (loaded.kv.num_pages + 3) * whole // 2
    assert info["num_parameters"] < loaded.info["num_parameters"]  # type: ignore[operator]


def test_a_long_prompt_is_caught_up_with_in_parts(reference: Callable[[str], Reference]) -> None:
    """Meanwhile the other answer goes on, with drafts."""
    ref = reference("llama")
    prompts = [[5, 6, 7], [i % 250 for i in range(400)]]
    engine = draft_always(make_engine(ref.path, **with_draft(ref.path)))
    assert answer(engine, prompts, greedy(60)) == ref.answers(prompts, 60)
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 60
    engine.close()


def test_a_model_with_states_is_refused(tmp_path: Path) -> None:
    """Its drafter has pages for it, and no states."""
    variant_config("qwen3-next").save_pretrained(tmp_path)
    config = build_config({"load_format": "dummy", **with_draft(tmp_path)})
    with pytest.raises(ConfigError, match="and a draft model has pages alone"):
        read_draft_spec(config, tmp_path, None, on_cpu=True)
