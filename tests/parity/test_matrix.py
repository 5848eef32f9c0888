"""Each family in each form of its weights and cache, with what happens to a request on one node, on
two, or on ranks.

Two settings together break what each alone does not, so the cases hold every pair of values. A new
family is in them once it has a variant in VARIANTS; `tests.parity.family_tables` makes a table of
docs/models.md of them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.layers.kv_spec import FP8
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_tensor_parallel import FAMILIES as DIVIDED
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.executor_ranks import ExecutorProcesses
from tests.support.engines.metamorph import Cluster, suspend_at
from tests.support.models.checkpoints import (
    VARIANTS,
    WITH_STATES,
    reference_greedy,
    reference_model,
)
from tests.support.models.quantized_checkpoints import FORMATS, quantize
from tests.support.pairwise import Case, pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20
LENGTHS = [5, 70, 200]
"""The last prompt has 140 tokens, since prompts of a call share at most 40."""
KILLED_AT = 4
"""Tokens that each answer has when its decode node dies."""
SUSPENDED_AT = (3, 9, 15)
"""Turns."""

FORM_FLAGS: dict[str, dict[str, object]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "FP8 cache": {"kv_cache_dtype": FP8},
    "int8 made at load": {"quantization": "int8"},
    "int4 made at load": {"quantization": "int4"},
    **{name: {} for name in FORMATS},
}
SURROUNDINGS = {
    "nodes": ["one", "shm", "tcp"],
    "event": ["chunked", "prefix hit", "preempted", "decode node killed", "2 ranks"],
    "page": [1, 16, 64],
}


def representatives() -> list[str]:
    """A variant of each family: the last one that is divided among ranks, else the last one."""
    divided = {name for name, _ in DIVIDED}
    chosen: dict[str, str] = {}
    for name, (family, _) in VARIANTS.items():
        if name in divided or chosen.get(family) not in divided:
            chosen[family] = name
    return list(chosen.values())


def is_valid(case: Case) -> bool:
    """Ranks are compared in one node; sums over ranks round otherwise than one process does in
    bfloat16. There is no FP8 cache of latents, and none beside states."""
    _, config = VARIANTS[case["variant"]]
    has_no_codes = "kv_lora_rank" in config or case["variant"] in WITH_STATES
    if case["form"] == "FP8 cache" and has_no_codes:
        return False
    if case["event"] == "2 ranks":
        return case["nodes"] == "one" and case["form"] != "bfloat16"
    return case["event"] != "decode node killed" or case["nodes"] != "one"


def choose_cases() -> list[Case]:
    """Each family in each form once, in the surroundings with most pairs that no earlier case has,
    and of several the rarest."""
    surroundings = [
        dict(zip(SURROUNDINGS, values, strict=True))
        for values in itertools.product(*SURROUNDINGS.values())
    ]
    counts = Counter[object]()
    chosen = []
    forms = deque(FORM_FLAGS)
    for variant in representatives():
        # Another one comes first each time, because first cases have more to choose from.
        forms.rotate()
        for form in forms:
            cases = [{"variant": variant, "form": form, **each} for each in surroundings]
            best = min(
                (case for case in cases if is_valid(case)),
                key=lambda case: sum(
                    counts[pair] - 100 * (pair not in counts) for pair in pairs(case)
                ),
                default=None,
            )
            if best is None:
                continue
            counts.update(pairs(best))
            chosen.append(best)
    return chosen


CASES = choose_cases()


def test_cases_hold_every_pair() -> None:
    axes = {"variant": representatives(), "form": list(FORM_FLAGS), **SURROUNDINGS}
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    wanted = {pair for case in every if is_valid(case) for pair in pairs(case)}
    assert {pair for case in CASES for pair in pairs(case)} == wanted


class Prepared(NamedTuple):
    """A checkpoint in a form, and the answers to the prompts."""

    path: Path
    flags: dict[str, object]
    prompts: list[list[int]]
    want: list[list[int]]


@pytest.fixture(scope="module")
def executors() -> Iterator[ExecutorProcesses]:
    made = ExecutorProcesses(1)
    yield made
    made.close()


def prepare(ref: Reference, form: str, folder: Path) -> Prepared:
    """The judge is transformers in float32, on dequantized weights; for a form that rounds
    otherwise one process that answers the prompts one by one, without cache and chunks."""
    prompts = prompts_of(random.Random(7), LENGTHS)
    flags = FORM_FLAGS[form]
    if flags:
        plain = {"disable_radix_cache": True, "chunked_prefill_size": 1024}
        engine = make_engine(ref.path, **plain, **flags)
        want = [answer(engine, [prompt], greedy(STEPS))[0] for prompt in prompts]
        engine.close()
        return Prepared(ref.path, flags, prompts, want)
    path = ref.path
    model = ref.model
    if form in FORMATS:
        path, plain_twin = quantize(ref.path, form, folder)
        model = reference_model(plain_twin)
    return Prepared(path, flags, prompts, [reference_greedy(model, p, STEPS) for p in prompts])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_tokens_are_those_of_the_judge(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, tmp_path: Path, case: Case
) -> None:
    made = prepare(reference(case["variant"]), case["form"], tmp_path)
    page = case["page"]
    is_chunked = case["event"] == "chunked"
    flags = made.flags | {
        "page_size": page,
        "chunked_prefill_size": max(page, 8) if is_chunked else 1024,
        "max_total_tokens": 4096,
    }
    if case["event"] == "2 ranks":
        with executors.engine(made.path, 2, **flags) as engine:
            assert answer(engine, made.prompts, greedy(STEPS)) == made.want
        assert executors.endings == ["stopped"]
    elif case["event"] == "decode node killed":
        assert answer_after_death(case["nodes"], made, flags) == made.want
    else:
        cluster = Cluster(made.path, case["nodes"], **flags)
        try:
            check_cluster(cluster, made, case)
        finally:
            cluster.close()


def check_cluster(cluster: Cluster, made: Prepared, case: Case) -> None:
    def disturb(turn: int) -> None:
        if case["event"] == "preempted":
            for suspended_at in SUSPENDED_AT:
                suspend_at(cluster, suspended_at)(turn)

    def ask() -> list[int]:
        handles = [cluster.submit(prompt, greedy(STEPS)) for prompt in made.prompts]
        cluster.until(lambda: cluster.finished.issuperset(handles), disturb)
        cluster.rest()
        assert [cluster.got[handle] for handle in handles] == made.want
        return handles

    ask()
    if case["event"] == "preempted":
        assert cluster.suspended > 0
    if case["event"] == "prefix hit":
        found = [cluster.cached[handle] for handle in ask()]
        page = case["page"]
        assert found == [(len(prompt) - 1) // page * page for prompt in made.prompts]


def answer_after_death(transport: str, made: Prepared, flags: dict[str, object]) -> list[list[int]]:
    """A decode node dies in the middle of all answers; another one resumes what clients have, as
    the router asks it to."""
    pair_module: Any = pytest.importorskip(
        "tests.support.engines.pair",
        reason="needs the native module: make setup",
        exc_type=ImportError,
    )
    pair = pair_module.Pair(made.path, transport, **flags)
    try:
        rooms = pair.submit(made.prompts, greedy(STEPS))
        pair.until(lambda: all(len(pair.d.got.get(room, ())) >= KILLED_AT for room in rooms))
        begun: Sequence[list[int]] = [pair.d.got[room] for room in rooms]
        assert all(len(tokens) < STEPS for tokens in begun)
        pair.d.close()
        pair.d = pair_module.Half(made.path, "decode", transport, **flags)
        return [
            tokens + pair.answer([prompt + tokens], greedy(STEPS - len(tokens)))[0]
            for prompt, tokens in zip(made.prompts, begun, strict=True)
        ]
    finally:
        pair.close()
