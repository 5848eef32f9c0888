"""Answers of a model with random weights that follow grammars: each is what its grammar describes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.runtime.grammar.store import GrammarStore
from baton.sched.types.request import FinishReason, SamplingParams
from tests.support.engines.engine_run import make_engine
from tests.support.grammars.engines import (
    PATTERN,
    REGEX,
    GrammarAnswer,
    follow_grammars,
    make_store,
    request,
    run_to_end,
    schema_text,
    text_of,
)
from tests.support.grammars.random_schemas import random_schema
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import EOS, VOCAB

PROMPT = [1, 2, 3, 4, 5]
LONG = 300


def sampled(seed: int, grammar: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=LONG, temperature=1.0, seed=seed, grammar=grammar, **more)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_every_answer_to_random_schemas_is_valid(checkpoint: Path, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(50)]
    store = make_store(checkpoint, threads=2)
    engine = follow_grammars(make_engine(checkpoint, max_total_tokens=16384), store)
    params = [
        replace(
            sampled(i, schema_text(schema)),
            temperature=rng.choice((0.0, 0.7, 1.5)),
            top_p=rng.choice((1.0, 0.8)),
            top_k=rng.choice((0, 5)),
        )
        for i, schema in enumerate(schemas)
    ]
    answers = run_to_end(engine, [request(PROMPT, each) for each in params])
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish is FinishReason.STOP, (schema, answer.error, answer.tokens)
        jsonschema.validate(json.loads(text_of(answer.tokens)), schema)
    engine.close()


def test_preempted_answers_are_equal(checkpoint: Path, store: GrammarStore) -> None:
    """A pool that is too small: sequences lose their slot, and their matchers are made again from
    their tokens.
    """
    requests = [sampled(seed, REGEX) for seed in range(8)]
    results = []
    for flags in ({}, {"max_total_tokens": 80, "schedule_conservativeness": 0.05}):
        engine = follow_grammars(make_engine(checkpoint, **flags), store)
        answers = run_to_end(engine, [request(PROMPT, params) for params in requests])
        assert all(PATTERN.fullmatch(text_of(answer.tokens)) for answer in answers)
        results.append([answer.tokens for answer in answers])
        if flags:
            assert engine.sched.report.counters()["retractions_total"] > 0
        engine.close()
    assert results[0] == results[1]


def test_suspended_answer_goes_on_where_it_was(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    plain = run_to_end(engine, [request(PROMPT, sampled(3, REGEX))])

    def suspend_and_resume(handles: list[int]) -> None:
        engine.sched.suspend(handles)
        engine.sched.resume(handles)

    disturbed = run_to_end(engine, [request(PROMPT, sampled(3, REGEX))], suspend_and_resume)
    assert disturbed == plain
    engine.close()


def test_resumed_answer_is_the_rest_of_the_whole_one(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    (whole,) = run_to_end(engine, [request(PROMPT, sampled(4, REGEX))])
    for done in range(1, len(whole.tokens)):
        params = replace(sampled(4, REGEX), max_new_tokens=LONG - done, resumed=done)
        (rest,) = run_to_end(engine, [request(PROMPT + whole.tokens[:done], params)])
        assert whole.tokens[:done] + rest.tokens == whole.tokens
    engine.close()


def test_resumed_tokens_outside_the_grammar_are_refused(
    checkpoint: Path, store: GrammarStore
) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    bad = [200, 201]
    params = replace(sampled(4, REGEX), resumed=len(bad))
    (answer,) = run_to_end(engine, [request(PROMPT + bad, params)])
    assert answer.error is not None
    assert answer.error[0] == "invalid_value"
    assert "baton_resume.ids" in answer.error[1]
    engine.close()


@pytest.mark.parametrize("flags", [{}, {"disable_overlap_schedule": True}])
def test_complete_answer_ends_at_once(
    checkpoint: Path, store: GrammarStore, flags: dict[str, Any]
) -> None:
    """Without an end token, also where the client ignores it or wants more tokens."""
    engine = follow_grammars(make_engine(checkpoint, **flags), store)
    grammar = 'start: "yes" | "nope"'
    variants: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"min_new_tokens": 50}]
    for more in variants:
        (answer,) = run_to_end(engine, [request(PROMPT, sampled(1, grammar, **more))])
        assert answer.finish is FinishReason.STOP
        assert text_of(answer.tokens) in ("yes", "nope")
        assert EOS not in answer.tokens
    engine.close()


def test_open_ended_grammar_may_end_with_the_end_token(
    checkpoint: Path, store: GrammarStore
) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    bias = ((EOS, 100.0),)
    for more in ({}, {"ignore_eos": True}):
        params = sampled(1, "start: /ab+/", logit_bias=bias, **more)
        (answer,) = run_to_end(engine, [request(PROMPT, params)])
        assert (answer.finish, text_of(answer.tokens[:-1])) == (FinishReason.STOP, "ab")
        assert answer.tokens[-1] == EOS
    engine.close()


def test_limit_ends_an_answer_in_its_middle(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    params = replace(sampled(1, 'start: "abcdef"'), max_new_tokens=3)
    (answer,) = run_to_end(engine, [request(PROMPT, params)])
    assert (answer.finish, text_of(answer.tokens)) == (FinishReason.LENGTH, "abc")
    engine.close()


def test_free_rows_beside_constrained_ones_are_as_alone(
    checkpoint: Path, store: GrammarStore
) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    free = [SamplingParams(max_new_tokens=40, temperature=t, seed=5) for t in (0.0, 1.0)]
    penalized = replace(free[1], repetition_penalty=1.3, logprobs=2)
    alone = [run_to_end(engine, [request(PROMPT, params)])[0] for params in (*free, penalized)]
    together = run_to_end(
        engine,
        [request(PROMPT, params) for params in (*free, penalized)]
        + [request(PROMPT, sampled(seed, REGEX)) for seed in range(4)],
    )
    assert together[:3] == alone
    engine.close()


def test_penalties_and_bias_act_within_the_grammar(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    grammar = "start: /[ab]{12}/"
    letter_a = byte_token("a")
    biased = sampled(1, grammar, logit_bias=((letter_a, 100.0),))
    (answer,) = run_to_end(engine, [request(PROMPT, biased)])
    assert text_of(answer.tokens) == "a" * 12
    forbidden = sampled(1, grammar, logit_bias=((letter_a, -100.0),))
    (answer,) = run_to_end(engine, [request(PROMPT, forbidden)])
    assert text_of(answer.tokens) == "b" * 12
    engine.close()


def test_allowed_tokens_and_bad_words_act_within_the_grammar(
    checkpoint: Path, store: GrammarStore
) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    letter_a, letter_b = (byte_token(letter) for letter in "ab")

    def ask(grammar: str, **more: Any) -> GrammarAnswer:
        return run_to_end(engine, [request(PROMPT, sampled(1, grammar, **more))])[0]

    grammar = "start: /[ab]{12}/"
    assert text_of(ask(grammar, allowed_tokens=pack_ids([letter_a])).tokens) == "a" * 12
    assert text_of(ask(grammar, bad_words=((letter_a,),)).tokens) == "b" * 12
    words = ((letter_a, letter_a), (letter_b, letter_b))
    assert text_of(ask(grammar, bad_words=words).tokens) in ("ab" * 6, "ba" * 6)
    failed = ask("start: /a{3}b/", allowed_tokens=pack_ids([letter_a, EOS]))
    assert (failed.finish, text_of(failed.tokens)) == (FinishReason.ERROR, "aaa")
    assert failed.error is not None
    assert failed.error[0] == "grammar_failed"
    before = engine.counters["grammar_failures_total"]
    complete = ask('start: "aa"', allowed_tokens=pack_ids([letter_a]))
    assert (complete.finish, text_of(complete.tokens)) == (FinishReason.STOP, "aa")
    endless = replace(
        sampled(1, "start: /a+/"), allowed_tokens=pack_ids([letter_a]), max_new_tokens=20
    )
    (answer,) = run_to_end(engine, [request(PROMPT, endless)])
    assert (answer.finish, len(answer.tokens)) == (FinishReason.LENGTH, 20), "the end is not listed"
    assert engine.counters["grammar_failures_total"] == before
    engine.close()


def byte_token(letter: str) -> int:
    (token,) = [token for token in range(256) if text_of_one(token) == letter]
    return token


def text_of_one(token: int) -> str:
    try:
        return text_of([token])
    except UnicodeDecodeError:
        return ""


def test_grammar_that_the_model_cannot_write_fails(checkpoint: Path) -> None:
    """The tokenizer has a token that the model lacks: behind the first letter nothing is allowed."""
    store = make_store(checkpoint, trie_size=VOCAB + 40)
    engine = follow_grammars(make_engine(checkpoint), store)
    beyond = f'start: "a" <[{VOCAB + 2}]>'
    params = [sampled(1, beyond), sampled(1, REGEX)]
    failed, other = run_to_end(engine, [request(PROMPT, each) for each in params])
    assert failed.finish is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error[0] == "grammar_failed"
    assert "after 1 token" in failed.error[1]
    assert other.finish is FinishReason.STOP
    assert engine.counters["grammar_failures_total"] >= 1
    engine.close()


def test_grammars_that_cannot_be_compiled_are_refused(
    checkpoint: Path, store: GrammarStore
) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    for text in ("start: missing", "start: /(/", "start: <nosuchtoken>", "{"):
        (answer,) = run_to_end(engine, [request(PROMPT, sampled(1, text))])
        assert answer.error is not None
        assert answer.error[0] == "invalid_value"
        assert "cannot be compiled" in answer.error[1]
        assert len(answer.error[1]) < 400
    engine.close()
