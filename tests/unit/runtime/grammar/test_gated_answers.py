"""Answers of a model with random weights that reason, and follow a grammar behind it."""

from __future__ import annotations

import json
import random
import re
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.runtime.grammar.store import GrammarStore
from baton.sched.types.plan import AdmittedSeq
from baton.sched.types.reasoning import ReasoningGate, ReasoningMarker, ReasoningPhase
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
from tests.support.grammars.reasoning import (
    BEGIN,
    CALL,
    END,
    FORCED_END,
    LONG_END,
    LONG_NEWLINES,
    make_gate,
    make_thinking_checkpoint,
    token_of,
    tokens_of,
)
from tests.support.models.checkpoints import EOS

PROMPT = [1, 2, 3, 4, 5]
LONG = 300
TOWARDS_MARKERS = ((END, 4.0), (BEGIN, 4.0), (EOS, 8.0), (CALL, 4.0))
"""Makes markers, and ends that are forbidden, likely in answers that are random."""
STARTS = (ReasoningPhase.UNDECIDED, ReasoningPhase.INSIDE, ReasoningPhase.BEHIND)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinking_checkpoint(tmp_path_factory.mktemp("thinking") / "llama")


@pytest.fixture
def store(checkpoint: Path) -> GrammarStore:
    return make_store(checkpoint)


def sampled(
    seed: int, gate: ReasoningGate | None, grammar: str = "", **more: Any
) -> SamplingParams:
    bias = {"logit_bias": TOWARDS_MARKERS, "max_new_tokens": LONG, "temperature": 1.0, **more}
    return SamplingParams(seed=seed, grammar=grammar, reasoning=gate, **bias)


def divide_answer(answer: GrammarAnswer, start: ReasoningPhase) -> tuple[list[int], list[int]]:
    """Tokens of the reasoning with its end marker, and those of the answer behind it."""
    tokens = answer.tokens
    reasons = start is ReasoningPhase.INSIDE or (
        start is ReasoningPhase.UNDECIDED and tokens[:1] == [BEGIN]
    )
    count = tokens.index(END) + 1 if reasons else 0
    behind = tokens[count:]
    if reasons or start is ReasoningPhase.BEHIND:
        while behind[:1] == tokens_of("\n"):
            behind = behind[1:]
    return tokens[:count], behind


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_answers_behind_reasoning_are_valid(checkpoint: Path, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(30)]
    starts = [rng.choice(STARTS) for _ in schemas]
    store = make_store(checkpoint, threads=2)
    engine = follow_grammars(make_engine(checkpoint, max_total_tokens=16384), store)
    params = [
        sampled(
            i,
            make_gate(start, budget=rng.choice((0, 3, 40))),
            schema_text(schema),
            temperature=rng.choice((0.0, 0.7, 1.5)),
            top_k=rng.choice((0, 5)),
        )
        for i, (schema, start) in enumerate(zip(schemas, starts, strict=True))
    ]
    answers = run_to_end(engine, [request(PROMPT, each) for each in params])
    lengths = set()
    for schema, start, answer in zip(schemas, starts, answers, strict=True):
        assert answer.finish is FinishReason.STOP, (schema, answer.error, answer.tokens)
        reasoning, behind = divide_answer(answer, start)
        assert not {EOS, CALL} & {*reasoning}
        jsonschema.validate(json.loads(text_of(behind)), schema)
        lengths.add(len(reasoning))
    assert 0 in lengths
    assert len(lengths) > 3
    engine.close()


@pytest.mark.parametrize(
    ("start", "grammar"),
    [
        (ReasoningPhase.INSIDE, ""),
        (ReasoningPhase.INSIDE, REGEX),
        (ReasoningPhase.UNDECIDED, ""),
        (ReasoningPhase.UNDECIDED, REGEX),
        (ReasoningPhase.BEHIND, ""),
    ],
)
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_reasoning_ends_at_its_limit(
    checkpoint: Path, store: GrammarStore, start: ReasoningPhase, grammar: str, budget: int
) -> None:
    """The model writes begin markers wherever they are allowed, and never an end marker."""
    engine = follow_grammars(make_engine(checkpoint), store)
    bias = ((BEGIN, 50.0), (END, -50.0), (CALL, -50.0), (EOS, -50.0))
    params = sampled(
        1, make_gate(start, budget=budget), grammar, max_new_tokens=LONG, logit_bias=bias
    )
    (answer,) = run_to_end(engine, [request(PROMPT, params)])
    begins = [] if start is ReasoningPhase.INSIDE else [BEGIN]
    reasoning = [*begins, *[BEGIN] * budget, *FORCED_END]
    assert answer.tokens[: len(reasoning)] == reasoning
    behind = answer.tokens[len(reasoning) :]
    assert behind[0] != BEGIN
    if grammar:
        assert PATTERN.fullmatch(text_of(behind).lstrip("\n"))
        assert answer.finish is FinishReason.STOP
    else:
        assert answer.finish is FinishReason.LENGTH
        assert END not in behind
    engine.close()


def test_limit_does_not_hurt_a_shorter_reasoning(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    answers = [
        run_to_end(engine, [request(PROMPT, sampled(7, make_gate(start, budget=budget), REGEX))])
        for start in STARTS
        for budget in (None, 200)
    ]
    assert answers[::2] == answers[1::2]
    reasoning, _ = divide_answer(answers[2][0], ReasoningPhase.INSIDE)
    assert 1 < len(reasoning) < 200
    engine.close()


def variants() -> list[SamplingParams]:
    return [
        sampled(seed, make_gate(start, budget=budget), grammar, temperature=temperature)
        for seed, (start, budget, grammar, temperature) in enumerate(
            (
                (ReasoningPhase.INSIDE, None, REGEX, 1.0),
                (ReasoningPhase.INSIDE, 20, REGEX, 0.0),
                (ReasoningPhase.UNDECIDED, 4, REGEX, 1.0),
                (ReasoningPhase.UNDECIDED, 9, REGEX, 0.0),
                (ReasoningPhase.BEHIND, None, REGEX, 1.0),
                (ReasoningPhase.INSIDE, 6, "", 1.0),
            )
        )
    ]


def test_preempted_answers_are_equal(checkpoint: Path, store: GrammarStore) -> None:
    """A pool that is too small: sequences lose their slot, also within their reasoning."""
    results = []
    for flags in ({}, {"max_total_tokens": 80, "schedule_conservativeness": 0.05}):
        engine = follow_grammars(make_engine(checkpoint, **flags), store)
        params = [
            replace(each, logit_bias=((BEGIN, 4.0), (EOS, 8.0)), max_new_tokens=60, seed=seed)
            for seed in range(3)
            for each in variants()
        ]
        answers = run_to_end(engine, [request(PROMPT, each) for each in params])
        results.append([answer.tokens for answer in answers])
        if flags:
            assert engine.sched.report.counters()["retractions_total"] > 0
        engine.close()
    assert results[0] == results[1]


def test_suspended_answer_goes_on_where_it_was(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)

    def suspend_and_resume(handles: list[int]) -> None:
        engine.sched.suspend(handles)
        engine.sched.resume(handles)

    for params in variants():
        params = replace(params, max_new_tokens=60)
        plain = run_to_end(engine, [request(PROMPT, params)])
        assert run_to_end(engine, [request(PROMPT, params)], suspend_and_resume) == plain
    engine.close()


def test_resumed_answer_is_the_rest_of_the_whole_one(checkpoint: Path, store: GrammarStore) -> None:
    engine = follow_grammars(make_engine(checkpoint), store)
    for params in variants():
        params = replace(params, max_new_tokens=40)
        (whole,) = run_to_end(engine, [request(PROMPT, params)])
        for done in range(1, len(whole.tokens)):
            more = replace(params, max_new_tokens=40 - done, resumed=done)
            (rest,) = run_to_end(engine, [request(PROMPT + whole.tokens[:done], more)])
            assert rest.error is None
            assert whole.tokens[:done] + rest.tokens == whole.tokens
    engine.close()


def test_resumed_tokens_outside_the_grammar_are_refused(
    checkpoint: Path, store: GrammarStore
) -> None:
    """They are counted from the answer's beginning, with its reasoning."""
    engine = follow_grammars(make_engine(checkpoint), store)
    bad = [200, 201, END, *tokens_of("\nab-x")]
    params = sampled(4, make_gate(ReasoningPhase.INSIDE), REGEX, resumed=len(bad))
    (answer,) = run_to_end(engine, [request(PROMPT + bad, params)])
    assert answer.error is not None
    assert answer.error[0] == "invalid_value"
    assert "baton_resume.ids: the answer's grammar refuses token 8" in answer.error[1]
    engine.close()


def test_call_that_the_grammar_begins_with_ends_the_reasoning(
    checkpoint: Path, store: GrammarStore
) -> None:
    """Also within a line. It is forbidden where the grammar has no calls, and where calls are not
    read.
    """
    engine = follow_grammars(make_engine(checkpoint), store)
    grammar = f'start: <[{CALL}]> "ok"'
    bias = ((CALL, 60.0), (token_of("\n"), 50.0), (END, -50.0))
    unread = make_gate(ReasoningPhase.INSIDE, budget=9, is_ended_by_calls=False)
    called, free, ignored = [
        run_to_end(engine, [request(PROMPT, params)])[0]
        for params in (
            sampled(1, make_gate(ReasoningPhase.INSIDE, has_text=True), grammar, logit_bias=bias),
            sampled(1, make_gate(ReasoningPhase.INSIDE, budget=9), REGEX, logit_bias=bias),
            sampled(1, unread, grammar, logit_bias=bias),
        )
    ]
    assert called.tokens == [CALL, *tokens_of("ok")]
    assert CALL not in free.tokens
    assert CALL not in ignored.tokens[: 9 + len(FORCED_END)]
    assert ignored.tokens[-3:] == [CALL, *tokens_of("ok")]
    engine.close()


def test_markers_that_are_text_are_found_in_any_tokens(
    checkpoint: Path, store: GrammarStore
) -> None:
    """The tokenizer has one token per character: while it is undecided, the marker goes on or the
    grammar does.
    """
    engine = follow_grammars(make_engine(checkpoint), store)
    begin = "ab:"
    end = "So:"
    gate = ReasoningGate(
        start=ReasoningPhase.UNDECIDED,
        begins=(ReasoningMarker(tuple(tokens_of(begin)), begin),),
        ends=(ReasoningMarker(tuple(tokens_of(end)), end),),
        budget=3,
        forced_end=tuple(tokens_of("\nSo:\n")),
        lead_newlines=2,
    )
    texts = set()
    for seed in range(40):
        bias = ((token_of(":"), 40.0),) if seed % 2 else ()
        params = sampled(seed, gate, "start: /[ab]{4}/", temperature=4.0, logit_bias=bias)
        (answer,) = run_to_end(engine, [request(PROMPT, params)])
        assert answer.finish is FinishReason.STOP
        skipped = len(begin) + 3 if answer.tokens[:3] == tokens_of(begin) else 0
        text = text_of(answer.tokens[skipped:])
        texts.add((bool(bias), text[:2]))
        assert re.fullmatch(r"\nSo:\n{1,2}[ab]{4}" if skipped else "[ab]{4}", text)
    assert (False, "ab") in texts
    assert {text for is_likely, text in texts if is_likely} > {"\nS"}
    assert (True, "ab") not in texts
    engine.close()


def test_token_with_the_end_of_a_marker_and_more_is_forbidden(store: GrammarStore) -> None:
    """The grammar could not read the rest of it; newlines belong to neither side."""
    gate = ReasoningGate(
        start=ReasoningPhase.INSIDE, ends=(ReasoningMarker(tuple(tokens_of("So:")), "So:"),)
    )
    store.request(7, REGEX)
    while not store.take_outcomes():
        time.sleep(0.001)
    params = SamplingParams(grammar=REGEX, reasoning=gate)
    constraint = store.start_sequence(AdmittedSeq(7, 0, params, 3, array("i", [1, 2, 3])))
    assert constraint is not None
    for text, is_within_marker in (("x", False), ("S", True), ("o", False), ("S", True)):
        constraint.advance(token_of(text))
        assert not constraint.has_mask
        assert (LONG_END in constraint.banned_ids) is is_within_marker
        assert LONG_NEWLINES not in constraint.banned_ids
    constraint.advance(LONG_NEWLINES)
    assert constraint.has_mask


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answer_reasons_only_if_that_is_its_likeliest_beginning(
    checkpoint: Path, store: GrammarStore, temperature: float
) -> None:
    """The grammar forbids what the model likes best: of the rest it would take a begin marker."""
    engine = follow_grammars(make_engine(checkpoint), store)
    gate = make_gate(ReasoningPhase.UNDECIDED, budget=0)
    begin = (BEGIN, 80.0)
    begins = []
    for bias in ((begin,), (begin, (token_of("!"), 90.0))):
        params = sampled(1, gate, REGEX, logit_bias=bias, temperature=temperature)
        (answer,) = run_to_end(engine, [request(PROMPT, params)])
        assert answer.finish is FinishReason.STOP
        begins.append(answer.tokens[0] == BEGIN)
    assert begins == [True, False]
    engine.close()
