"""Answers of a model whose logits are random: masks, matchers and the sampler without anything that computes.

Each constraint of `random_constraints` passes its check as in a front, and is compiled as in a rank. Rows have moods:
letters that they like, so that answers do not all look alike.
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import signal
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.errors import BadRequest, UnsupportedParameter
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import sample_tokens
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN, AdmittedSeq
from baton.sched.types.request import FinishReason, SamplingParams
from baton.server.request.grammar.checks.process import SlowCheck
from baton.server.request.grammar.checks.queue import LARGE_LANE, TOO_SLOW
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import (
    GrammarCheck,
    RequestGrammar,
    make_request_grammar,
)
from tests.support.grammars.engines import bytes_of_alphabet
from tests.support.grammars.random_constraints import RandomConstraint, random_constraint
from tests.support.models.checkpoints import BOS, EOS, write_tokenizer

PIECES = (
    '{"', '":', '": ', '", "', '","', '"}', "},", "}]", "[[", "]]", "[]", "{}", "null", "true", ", ", "\n  ", "  ",
    "ab", "score", '"score"', '{"a', "12", ".5", "\\u00", '\\"', "€", "日本", "<a>", "</a", "yes", "label-",
)  # fmt: skip
"""Tokens that span the parts of JSON, and characters of several bytes."""
FIRST_PIECE = 258
VOCAB_SIZE = FIRST_PIECE + len(PIECES) + 4
"""The last ids have no text."""
COMPILE_SECS = 60.0


MARKERS = MarkerTokens(
    lambda: {"<a>": FIRST_PIECE + PIECES.index("<a>"), "<|bos|>": BOS, "<|eos|>": EOS}
)
"""Tokens that llguidance takes for special ones."""
UNJUDGED = re.compile(r"[0-9][eE]|[0-9]{15}|\\u")
"""A number that a double may not hold, and escapes, in which llguidance recognizes no name of a property."""
LONGEST_DERIVED = 120
"""Characters of a text whose derivation by a grammar is looked for."""


@dataclass
class WalkedAnswer:
    """An answer that has ended."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def text(self) -> str:
        """The answer without its end token, whole characters."""
        return b"".join(TOKEN_BYTES[token] for token in self.tokens if token != EOS).decode()


def _token_bytes() -> dict[int, bytes]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = bytes_of_alphabet()
    single = {token: bytes([byte_of[char]]) for token, char in enumerate(alphabet)}
    pieces = {FIRST_PIECE + i: piece.encode() for i, piece in enumerate(PIECES)}
    return single | pieces


TOKEN_BYTES = _token_bytes()


def make_piece_store(folder: Path) -> GrammarStore:
    """Grammars for a vocabulary of bytes and pieces."""
    write_tokenizer(folder)
    added = [(FIRST_PIECE + i, piece, False) for i, piece in enumerate(PIECES)]
    source = TokenizerSource((folder / "tokenizer.json").read_text(), added, [EOS])
    trie = build_trie(source, VOCAB_SIZE)
    return GrammarStore(trie, MaskFiller(trie.vocab_size, VOCAB_SIZE, 1))


@dataclass
class WalkReport:
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, other: WalkReport) -> None:
        self.outcomes += other.outcomes
        self.problems += other.problems


def walk_constraints(
    store: GrammarStore, seeds: Iterable[int], *, answers: int, longest: int
) -> WalkReport:
    """Answer the constraints of these seeds; each is refused, or each of its answers ends well."""
    report = WalkReport()
    accepted = []
    for seed in seeds:
        rng = random.Random(seed)
        constraint = random_constraint(rng)
        grammar = _check(constraint, rng, report)
        if grammar is not None:
            accepted.append((seed, constraint, grammar))
    texts = [grammar.text for _, _, grammar in accepted]
    rng = random.Random(repr(seeds))
    walked = walk_grammars(store, texts, rng, answers=answers, longest=longest)
    for (seed, constraint, grammar), some in zip(accepted, walked, strict=True):
        for answer in some:
            problem = _judge(constraint, grammar, answer, report)
            if problem is not None:
                body = repr(constraint.body)[:1000]
                report.problems.append(f"seed {seed}: {problem}: {answer.tokens[-40:]} {body}")
                break
    return report


def _check(
    constraint: RandomConstraint, rng: random.Random, report: WalkReport
) -> RequestGrammar | None:
    """The grammar as a front makes it; None: it is refused."""
    check = GrammarCheck(dict(constraint.body))
    whitespace = rng.choice(("bounded", "any", "none"))
    try:
        with limited_cpu_time(LARGE_LANE.cpu_secs):
            grammar = make_request_grammar(check, whitespace, MARKERS)
    except (BadRequest, UnsupportedParameter):
        report.outcomes["refused"] += 1
        return None
    except SlowCheck:
        report.outcomes["refused"] += 1
        report.outcomes["too slow"] += 1
        return None
    report.outcomes["accepted"] += 1
    return grammar


@contextlib.contextmanager
def limited_cpu_time(secs: float) -> Iterator[None]:
    """Raise SlowCheck where the body takes more CPU time of this process; for its main thread."""

    def stop(signum: int, frame: object) -> None:
        raise SlowCheck(TOO_SLOW)

    former = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, former)


def can_judge(constraint: RandomConstraint, text: str) -> bool:
    is_long = constraint.is_costly_to_judge and len(text) > LONGEST_DERIVED
    return not is_long and UNJUDGED.search(text) is None


def _judge(
    constraint: RandomConstraint,
    grammar: RequestGrammar,
    answer: WalkedAnswer,
    report: WalkReport,
) -> str | None:
    """What is wrong with an answer."""
    assert answer.finish is not None
    report.outcomes[answer.finish.name.lower()] += 1
    if answer.finish is FinishReason.ERROR:
        return "grammar_failed"
    if answer.finish is not FinishReason.STOP or grammar.ignored:
        return None
    text = answer.text()
    if not can_judge(constraint, text):
        return None
    report.outcomes["judged"] += 1
    return None if constraint.judge(text) else f"{text!r} is outside the constraint"


def walk_grammars(
    store: GrammarStore,
    texts: Sequence[str],
    rng: random.Random,
    *,
    answers: int,
    longest: int,
) -> list[list[WalkedAnswer]]:
    """By grammar, answers that random logits give."""
    for handle, text in enumerate(texts):
        if not store.request(handle, text):
            _wait_compiled(store, text)
    walked = [[WalkedAnswer() for _ in range(answers)] for _ in texts]
    rows = []
    open_answers = []
    for handle, text in enumerate(texts):
        for answer in walked[handle]:
            params = _random_params(rng, text)
            admitted = AdmittedSeq(handle, 0, params, 1, array("i", [0]))
            rows.append(SampleRow(params, 1, [0], store.start_sequence(admitted)))
            open_answers.append(answer)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    strengths = torch.tensor([[rng.choice((0.0, 1.0, 3.0))] for _ in rows])
    moods = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * strengths
    while rows:
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) + moods
        result = sample_tokens(logits, rows, store.filler)
        goes_on = []
        for i, token in enumerate(result.tokens):
            answer = open_answers[i]
            if token == GRAMMAR_FAILED_TOKEN:
                answer.finish = FinishReason.ERROR
                continue
            answer.tokens.append(token)
            rows[i].append(token)
            if i in result.completed:
                answer.finish = FinishReason.STOP
            elif len(answer.tokens) == longest:
                answer.finish = FinishReason.LENGTH
            else:
                goes_on.append(i)
        rows = [rows[i] for i in goes_on]
        open_answers = [open_answers[i] for i in goes_on]
        moods = moods[goes_on]
    store.release_ended(lambda handle: False)
    return walked


def _random_params(rng: random.Random, text: str) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=1,
        temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
        top_p=rng.choice((1.0, 0.8)),
        top_k=rng.choice((0, 5)),
        seed=rng.getrandbits(32),
        grammar=text,
    )


def _wait_compiled(store: GrammarStore, text: str) -> None:
    outcomes = store.take_outcomes()
    while not outcomes:
        assert select.select([store.event_fd], [], [], COMPILE_SECS)[0], "a grammar is not compiled"
        outcomes = store.take_outcomes()
    for outcome in outcomes:
        assert outcome.error is None, (outcome.error, text[:2000])
