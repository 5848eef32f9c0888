"""Every way to draft, with every way to sample, on one node and on two, and with what happens to a
request: tokens, logprobs and ends are those without drafts.

Two settings together break what each alone does not, so the cases hold every pair of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.request import SamplingParams
from tests.parity.test_draft_model import ENDS_EARLY
from tests.parity.test_speculation import PROMPTS, SAMPLING, STEPS, Answer
from tests.support.engines.draft_model import (
    count_drafts,
    draft_always,
    script_drafts,
    script_head,
    with_draft,
)
from tests.support.engines.metamorph import Cluster, suspend_at
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.grammars.engines import follow_grammars, make_store
from tests.support.models.checkpoints import VOCAB, make_checkpoint
from tests.support.models.draft_heads import (
    EAGLE3_LAYERS,
    make_eagle3,
    make_mtp,
    make_qwen3_next_mtp,
)
from tests.support.pairwise import Case, pairwise

CHOICES = "two choices"
SAMPLED: dict[str, SamplingParams] = {
    **SAMPLING,
    CHOICES: SamplingParams(max_new_tokens=STEPS, temperature=0.9, seed=12),
}


class Drafting(NamedTuple):
    kind: str
    right: float | None = None
    """Share of the drafts that are the token that comes; None: as it happens."""


DRAFTERS = {
    "scripted 0": Drafting("scripted", 0.0),
    "scripted 0.7": Drafting("scripted", 0.7),
    "scripted 1": Drafting("scripted", 1.0),
    "ngram": Drafting("ngram"),
    # The model itself, and a head that is always right.
    "draft model": Drafting("draft model"),
    "mtp": Drafting("mtp"),
    "draft model 0.7": Drafting("draft model", 0.7),
    "eagle3": Drafting("eagle3"),
    "eagle3 0.7": Drafting("eagle3", 0.7),
    # Of a model that keeps states.
    "states 0.7": Drafting("states", 0.7),
    "mtp of states 0.7": Drafting("mtp of states", 0.7),
}
AXES: dict[str, Sequence[Any]] = {
    "drafter": list(DRAFTERS),
    "sampling": sorted(SAMPLED),
    "nodes": ["one", "shm", "tcp"],
    "event": ["chunked", "prefix hit", "preempted", "decode node killed"],
    "page": [1, 4, 16],
}  # fmt: skip
SUSPENDED_AT = (2, 7, 12)
"""Turns."""
KNOWN = 2
"""Tokens that the client has of each answer when the decode node dies, at least, or all."""


def is_valid(case: Case) -> bool:
    return case["event"] != "decode node killed" or case["nodes"] != "one"


CASES = pairwise(AXES, is_valid)
QUICK = [
    next(case for case in CASES[place:] if case["drafter"] == drafter)
    for place, drafter in enumerate(AXES["drafter"])
]
"""One case of each drafter."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    want: Answer

    def resumed_behind(self, tokens: Sequence[int]) -> Request:
        """The rest, as the router asks another node for it."""
        done = len(tokens)
        params = replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - done,
            min_new_tokens=max(self.params.min_new_tokens - done, 0),
            resumed=done,
        )
        rest = Answer(self.want.tokens[done:], self.want.logprobs[done:], self.want.finish)
        return Request((*self.prompt, *tokens), params, rest)


class Models:
    """The models that are drafted for, and the answers without drafts."""

    def __init__(self, root: Path) -> None:
        self.llama = make_checkpoint("llama", root / "llama")
        self.deep = make_checkpoint("llama", root / "deep", num_hidden_layers=EAGLE3_LAYERS)
        make_eagle3(self.deep, self.head)
        self.echo = root / "echo"
        make_mtp("glm4-moe", self.echo, echoes=True)
        self.hybrid = root / "hybrid"
        make_qwen3_next_mtp(self.hybrid)
        self.requests = cache(self._compute_requests)

    @property
    def head(self) -> Path:
        return self.deep.parent / "head"

    def drafted_by(self, kind: str) -> tuple[Path, dict[str, Any]]:
        """The model for it, and the flags of the node that drafts."""
        eagle3 = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(self.head),
            "speculative_num_steps": 3,
        }
        mtp = {"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 3}
        return {
            "scripted": (self.llama, {}),
            "ngram": (self.llama, {"speculative_algorithm": "NGRAM"}),
            "draft model": (self.llama, with_draft(self.llama)),
            "eagle3": (self.deep, eagle3),
            "mtp": (self.echo, mtp),
            "states": (self.hybrid, {}),
            "mtp of states": (self.hybrid, mtp),
        }[kind]

    def _compute_requests(self, path: Path, sampling: str) -> list[Request]:
        """One process answers the prompts one by one, without cache and chunks."""
        params = SAMPLED[sampling]
        prompts = [prompt for prompt in PROMPTS for _ in range(1 + (sampling == CHOICES))]
        cluster = Cluster(path, disable_radix_cache=True, chunked_prefill_size=1024)
        follow_grammars(cluster.engines[0], make_store(path))
        requests = []
        for number, prompt in enumerate(prompts):
            own = replace(params, seed=params.seed + number)
            (want,) = ask(cluster, [Request(tuple(prompt), own, Answer([], []))])
            requests.append(Request(tuple(prompt), own, want))
        cluster.close()
        return requests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("drafted"))


def prepare_drafts(engine: EngineLoop, drafting: Drafting, requests: Sequence[Request]) -> None:
    """Let the engine draft in every step it can."""
    kind, right = drafting
    script = {request.prompt: request.want.tokens for request in requests}
    if kind in ("scripted", "states"):
        assert right is not None
        seen = {(request.prompt, request.params.seed): request.want.tokens for request in requests}
        speculate(engine, ScriptedDrafter(seen, right, VOCAB), most=4)
    elif kind == "ngram":
        engine.sched.observe = lambda *_: None  # type: ignore[method-assign]
    else:
        draft_always(engine)
        if right is not None:
            script_of = script_drafts if kind == "draft model" else script_head
            script_of(engine, script, right)


def ask(
    cluster: Cluster, requests: Sequence[Request], disturb: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """All together."""
    handles = [cluster.submit(request.prompt, request.params) for request in requests]
    cluster.until(lambda: cluster.finished.issuperset(handles), disturb)
    cluster.resume_all()
    cluster.rest()
    return [answer_to(cluster, handle) for handle in handles]


def answer_to(cluster: Cluster, handle: int) -> Answer:
    """So far."""
    logprobs = [
        # Those of a token that P drew have come as JSON.
        token
        and replace(token, top_ids=tuple(token.top_ids), top_logprobs=tuple(token.top_logprobs))
        for token in cluster.logprobs[handle]
    ]
    return Answer(cluster.got[handle], logprobs, cluster.ends.get(handle))


def check_after_death(
    cluster: Cluster, drafting: Drafting, requests: Sequence[Request], path: Path
) -> int:
    """The decode node dies in the middle of the answers, and another one, whose drafter knows
    nothing of them, goes on. Returns its drafts."""
    handles = [cluster.submit(request.prompt, request.params) for request in requests]

    def have_begun() -> bool:
        return all(h in cluster.finished or len(cluster.got[h]) >= KNOWN for h in handles)

    cluster.until(have_begun)
    begun = [answer_to(cluster, handle) for handle in handles]
    cluster.replace_decode_node()
    rest = [
        request.resumed_behind(answer.tokens)
        for request, answer in zip(requests, begun, strict=True)
        if answer.finish is None
    ]
    engine = follow_grammars(cluster.engines[-1], make_store(path))
    prepare_drafts(engine, drafting, rest)
    assert ask(cluster, rest) == [request.want for request in rest]
    for request, answer in zip(requests, begun, strict=True):
        assert answer.tokens == request.want.tokens[: len(answer.tokens)]
        assert answer.logprobs == request.want.logprobs[: len(answer.tokens)]
        assert answer.finish in (None, request.want.finish)
    return count_drafts(engine)[0] if rest else 1


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_answers_are_those_without_drafts(models: Models, case: Case) -> None:
    drafting = DRAFTERS[case["drafter"]]
    event = case["event"]
    page = case["page"]
    path, drafting_flags = models.drafted_by(drafting.kind)
    requests = models.requests(path, case["sampling"])
    flags: dict[str, Any] = {
        "page_size": page,
        "chunked_prefill_size": max(page, 8) if event == "chunked" else 1024,
    }
    if case["nodes"] == "one":
        cluster = Cluster(path, **flags, **drafting_flags)
    else:
        cluster = Cluster(path, case["nodes"], d_more=drafting_flags, **flags)

    def disturb(turn: int) -> None:
        if event == "preempted":
            for suspended_at in SUSPENDED_AT:
                suspend_at(cluster, suspended_at)(turn)

    try:
        for engine in cluster.engines:
            follow_grammars(engine, make_store(path))
        engine = cluster.engines[-1]
        prepare_drafts(engine, drafting, requests)
        want = [request.want for request in requests]
        if event == "decode node killed":
            drafted = check_after_death(cluster, drafting, requests, path)
        else:
            for _ in range(2 if event == "prefix hit" else 1):
                assert ask(cluster, requests, disturb) == want
            drafted = count_drafts(engine)[0]
        # N-grams need repetition.
        assert drafted > 0 or case["sampling"] in ENDS_EARLY or drafting.kind == "ngram"
    finally:
        cluster.close()
