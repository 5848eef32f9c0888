"""With drafts, right or wrong, every answer is what it is without: tokens, logprobs and ends."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from baton.models.decoder import Decoder
from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.plan import TokenLogprobs
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest
from tests.parity.conftest import Reference
from tests.support.engines.engine_run import greedy, make_engine
from tests.support.engines.scripted_drafter import Answers, ScriptedDrafter, speculate
from tests.support.grammars.engines import REGEX, follow_grammars, make_store
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import EOS, VOCAB

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)
STEPS = 24
PROMPTS = [[5, 6, 7, 8], list(range(40, 110)), [9], [5, 6, 7, 8, 9, 10, 11]]

SAMPLING: dict[str, SamplingParams] = {
    "greedy": greedy(STEPS),
    "seeded": SamplingParams(max_new_tokens=STEPS, temperature=0.9, seed=3),
    "top_p": SamplingParams(max_new_tokens=STEPS, temperature=1.2, top_p=0.8, top_k=50, seed=4),
    "penalties": SamplingParams(
        max_new_tokens=STEPS, temperature=0.9, seed=5, frequency_penalty=0.9,
        presence_penalty=0.5, repetition_penalty=1.3,
    ),
    "logprobs": SamplingParams(max_new_tokens=STEPS, temperature=0.9, seed=6, logprobs=3),
    "restricted": SamplingParams(
        max_new_tokens=STEPS, seed=7, allowed_tokens=pack_ids(range(60, 66)),
        bad_words=((60,), (61, 62), (62, 61, 63)),
    ),
    "bias": SamplingParams(max_new_tokens=STEPS, temperature=0.0, logit_bias=((70, 4.0), (71, 2.0))),
    "min_tokens": SamplingParams(
        max_new_tokens=STEPS, temperature=1.5, seed=8, min_new_tokens=9, stop_token_ids=tuple(range(3, 200))
    ),
    "stops": SamplingParams(
        max_new_tokens=STEPS, temperature=1.5, seed=9, stop_token_ids=tuple(range(3, 60))
    ),
    "grammar": SamplingParams(
        max_new_tokens=60, temperature=1.0, seed=10, grammar=REGEX, stop_token_ids=(EOS,)
    ),
    "greedy grammar": SamplingParams(
        max_new_tokens=60, temperature=0.0, grammar=REGEX, stop_token_ids=(EOS,)
    ),
}  # fmt: skip


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    finish: FinishReason | None = None


def run(
    engine: EngineLoop, params: SamplingParams, prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    """Answers to all prompts together; the seed of each is another one."""
    for i, prompt in enumerate(prompts):
        own = replace(params, seed=params.seed + i)
        engine.submit(
            ValidatedRequest(i, f"r{i}", array("i", prompt), own, arrival=time.monotonic())
        )
    answers = [Answer([], []) for _ in prompts]
    while any(answer.finish is None for answer in answers):
        outputs, busy = engine.step(time.monotonic())
        for out in outputs:
            assert out.finish is not FinishReason.ERROR, out.error
            answers[out.handle].tokens += out.tokens
            answers[out.handle].logprobs += [out.logprobs] * len(out.tokens)
            answers[out.handle].finish = out.finish
        assert busy or engine.grammars.count
    while engine.step(time.monotonic())[1]:
        pass
    engine.gauges()
    assert engine.not_accepting_reason is None
    return answers


def seen(answers: Sequence[Answer], params: SamplingParams, prompts: Any = PROMPTS) -> Answers:
    return {
        (tuple(prompt), params.seed + i): answer.tokens
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    }


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_answers_are_those_without_drafts(reference: Callable[[str], Reference], name: str) -> None:
    path = reference("llama").path
    params = SAMPLING[name]

    def engine(**flags: object) -> EngineLoop:
        return follow_grammars(make_engine(path, **flags), make_store(path))

    plain = engine()
    want = run(plain, params, PROMPTS)
    plain.close()
    for right, flags in (
        (0.0, {"page_size": 1}),
        (0.7, {"chunked_prefill_size": 16, "page_size": 16}),
        (1.0, {"disable_overlap_schedule": True}),
    ):
        drafting = speculate(
            engine(**flags), ScriptedDrafter(seen(want, params), right, VOCAB), most=4
        )
        assert run(drafting, params, PROMPTS) == want, f"{right} of the drafts are right"
        counters = drafting.sched.stats.counters()
        # A grammar refuses wrong drafts before they are computed.
        if right or not params.grammar:
            assert counters["spec_decode_num_draft_tokens_total"] > 0
        if right == 1:
            assert counters["spec_decode_num_accepted_tokens_total"] > 0
        drafting.close()


@pytest.mark.parametrize("variant", ["gemma3", "gpt-oss"])
def test_models_with_windows_and_sinks(reference: Callable[[str], Reference], variant: str) -> None:
    ref = reference(variant)
    params = greedy(len(ref.greedy[0]))
    engine = make_engine(ref.path, page_size=4)
    drafter = ScriptedDrafter(
        {(tuple(p), i): g for i, (p, g) in enumerate(zip(ref.prompts, ref.greedy, strict=True))},
        0.8, VOCAB,
    )  # fmt: skip
    answers = run(speculate(engine, drafter), params, ref.prompts)
    assert [answer.tokens for answer in answers] == ref.greedy
    assert engine.sched.stats.counters()["spec_decode_num_accepted_tokens_total"] > 0
    engine.close()


def test_a_pool_that_is_too_small(reference: Callable[[str], Reference]) -> None:
    """Sequences are sent back while they draft."""
    ref = reference("llama")
    params = greedy(len(ref.greedy[0]))
    engine = make_engine(
        ref.path, page_size=4, max_total_tokens=160, schedule_conservativeness=0.05
    )
    seen_before = {
        (tuple(p), i): g for i, (p, g) in enumerate(zip(ref.prompts, ref.greedy, strict=True))
    }
    drafter = ScriptedDrafter(seen_before, 0.8, VOCAB)
    answers = run(speculate(engine, drafter), params, ref.prompts)
    assert [answer.tokens for answer in answers] == ref.greedy
    assert engine.sched.report.counters()["retractions_total"] > 0
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_decode_node_drafts_from_the_first_token_of_p_on(
    reference: Callable[[str], Reference], transport: str
) -> None:
    ref = reference("llama")
    pair = pair_module.Pair(ref.path, transport)
    try:
        answers = {(tuple(p), 0): g for p, g in zip(ref.prompts, ref.greedy, strict=True)}
        speculate(pair.d.engine, ScriptedDrafter(answers, 0.8, VOCAB))
        params = greedy(len(ref.greedy[0]))
        assert pair.answer(ref.prompts, params) == ref.greedy
        assert pair.answer(ref.prompts[::-1], params) == ref.greedy[::-1], (
            "pages that hold accepted tokens are found again"
        )
        counters = pair.d.engine.sched.stats.counters()
        assert counters["spec_decode_num_accepted_tokens_total"] > 0
    finally:
        pair.close()


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_repeated_text_is_drafted(reference: Callable[[str], Reference], variant: str) -> None:
    """The drafter of --speculative-algorithm, on answers that run in circles and on the same ones again."""
    ref = reference(variant)
    params = greedy(len(ref.greedy[0]))
    engine = make_engine(ref.path, page_size=4, speculative_algorithm="NGRAM")
    engine.sched.observe = lambda *_: None  # type: ignore[method-assign]
    for _ in range(3):
        answers = run(engine, params, ref.prompts)
        assert [answer.tokens for answer in answers] == ref.greedy
    counters = engine.sched.stats.counters()
    assert counters["spec_decode_num_accepted_tokens_total"] > 50
    engine.close()


@pytest.mark.parametrize("variant", ["llama", "deepseek-v2"])
def test_numbers_that_are_none_end_no_answer_in_rejected_places(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Wrong drafts are a token whose states are NaN."""
    path = reference(variant).path
    params = SAMPLING["seeded"]
    plain = make_engine(path)
    want = run(plain, params, PROMPTS)
    plain.close()
    used = {token for prompt in PROMPTS for token in prompt}
    used |= {token for each in want for token in each.tokens}
    poison_embeddings(monkeypatch, poison := min(set(range(VOCAB)) - used))
    engine = make_engine(path)
    drafter = ScriptedDrafter(seen(want, params), 0.5, VOCAB, wrong=poison)
    assert run(speculate(engine, drafter), params, PROMPTS) == want
    counters = engine.sched.stats.counters()
    drafted, drawn = (
        counters[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")
    )
    assert 0 < drawn < drafted
    engine.close()


def poison_embeddings(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Let the states of a token be NaN."""
    embed = Decoder._embed_tokens

    def embed_poisoned(self: Decoder, ids: torch.Tensor) -> torch.Tensor:
        return embed(self, ids).masked_fill((ids == token)[:, None], torch.nan)

    monkeypatch.setattr(Decoder, "_embed_tokens", embed_poisoned)
