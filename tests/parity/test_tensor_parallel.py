"""--tp-size: several processes answer what one does, and what transformers does; a step that differs is noticed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.runtime.build import LoadedModel
from baton.runtime.runner import step_inputs
from baton.sched.types.request import SamplingParams
from tests.parity.conftest import Reference
from tests.support.engines.draft_model import count_drafts, draft_always, with_draft
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.executor_ranks import ExecutorProcesses
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.models import tiny_model
from tests.support.models.checkpoints import VOCAB
from tests.support.probes import RunnerProbe

pytestmark = pytest.mark.timeout(
    300
)  # three executor ranks import torch at once, perhaps on a machine with two cores

STEPS = 16
LENGTHS = [1, 5, 17, 33, 64, 70]
SMALL_POOL = {"max_total_tokens": 120, "schedule_conservativeness": 0.05}


@pytest.fixture(scope="module")
def executors() -> Iterator[ExecutorProcesses]:
    made = ExecutorProcesses(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    return [shared[: n // 2] + [rng.randrange(VOCAB) for _ in range(n - n // 2)] for n in LENGTHS]


class Logits:
    """Results of the first rank's model, step by step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def watch(self, loaded: LoadedModel) -> None:
        model = RunnerProbe(loaded.runner).model
        compute_logits = model.compute_logits

        def watched(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden)
            self.steps.append(logits.clone())
            return logits

        model.compute_logits = watched


DIVIDED_ANOTHER_WAY = [
    ("llama", 2),
    ("llama-tied-bias", 4),
    ("qwen3", 2),
    ("phi3", 2),
    ("olmo2", 4),
    ("mixtral", 2),
    ("qwen2-moe", 2),
    ("glm4-moe", 4),
    ("gemma3", 4),
    ("deepseek-v3", 4),
    ("qwen3-next", 2),
    ("qwen3.5-moe", 2),
]
"""One family of each way to divide tensors. Four ranks hold each of two KV heads twice, or the only one four times;
Phi stores projections as one matrix; OLMo norms all heads of all ranks as one row; of Qwen2-MoE and GLM, some experts
are shared by all tokens; Gemma 3 has two page groups; every rank has all latents of DeepSeek;
Qwen3-Next has states, and gates behind queries."""
DIVIDED_AS_ANOTHER = [
    ("llama-tied-bias", 2),
    ("qwen2", 2),
    ("qwen3", 4),
    ("mistral-window", 4),
    ("seed-oss", 4),
    ("olmo3", 2),
    ("granite", 2),
    ("smollm3", 2),
    ("gemma2", 2),
    ("phi3-longrope", 2),
    ("phimoe", 2),
    ("qwen3-moe-mixed", 2),
    ("deepseek-v2-lite", 2),
    ("glm4-moe-lite", 2),
    ("gpt-oss", 2),
    ("llama4", 2),
    ("kimi-linear", 2),
]
FAMILIES = [*DIVIDED_ANOTHER_WAY, *DIVIDED_AS_ANOTHER]


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        *DIVIDED_ANOTHER_WAY,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in DIVIDED_AS_ANOTHER),
    ],
)
def test_tokens_and_logits_equal_transformers(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, variant: str, size: int
) -> None:
    ref = reference(variant)
    seen = Logits()
    prompt = ref.prompts[2]
    answers = ref.greedy
    with executors.engine(ref.path, size, touch=seen.watch) as engine:
        assert answer(engine, ref.prompts, greedy(64)) == answers
        seen.steps.clear()
        assert answer(engine, [prompt], greedy(STEPS)) == [answers[2][:STEPS]]
    assert executors.endings == ["stopped"] * (size - 1)
    known = prompt + answers[2][:STEPS]
    with torch.inference_mode():
        want = ref.model(torch.tensor([known])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen.steps)[:STEPS], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("qwen3-moe-mixed", 2),
        ("llama4", 2),
        pytest.param("glm4-moe", 4, marks=pytest.mark.slow),
        pytest.param("gpt-oss", 2, marks=pytest.mark.slow),
    ],
)
def test_whole_experts_on_ranks_give_the_same_tokens(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, variant: str, size: int
) -> None:
    ref = reference(variant)
    answers = ref.greedy
    with executors.engine(ref.path, size, ep_size=size) as engine:
        assert answer(engine, ref.prompts, greedy(64)) == answers
    assert executors.endings == ["stopped"] * (size - 1)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, {"page_size": 1, "chunked_prefill_size": 7}),
        (2, {"disable_overlap_schedule": True, "attention_backend": "torch"}),
        # The same pool with a host tier is below.
        pytest.param(2, SMALL_POOL, marks=pytest.mark.slow),
        (
            2,
            {
                "max_total_tokens": 120,
                "schedule_conservativeness": 0.05,
                "host_kv_gib": 0.01,
                "chunked_prefill_size": 8,
            },
        ),
        pytest.param(
            4, {"chunked_prefill_size": 12, "max_running_requests": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_chunks_hits_overlap_retraction_and_host_pages_change_nothing(
    reference: Callable[[str], Reference],
    executors: ExecutorProcesses,
    prompts: list[list[int]],
    size: int,
    flags: dict[str, object],
) -> None:
    ref = reference("llama")
    want = ref.answers(prompts, STEPS)
    with executors.engine(ref.path, size, **flags) as engine:
        assert answer(engine, prompts, greedy(STEPS)) == want
        assert answer(engine, prompts[::-1], greedy(STEPS), stagger=2) == want[::-1], (
            "second round, with prefix hits"
        )
        assert sum(engine.sched.hit_tokens.values()) > 0
        if "max_total_tokens" in flags:
            assert engine.sched.report.counters()["retractions_total"] > 0, (
                "the pool was meant to be too small"
            )
        if "host_kv_gib" in flags:
            assert engine.counters['kv_host_copies_total{direction="in"}'] > 0
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bfloat16_is_as_close_as_in_one_process(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, size: int
) -> None:
    """Partial sums are rounded before they meet: within what one process is allowed (test_families)."""
    ref = reference("qwen3")
    seen = Logits()
    with executors.engine(ref.path, size, touch=seen.watch, dtype="bfloat16") as engine:
        for prompt, want in zip(ref.prompts, ref.logits, strict=True):
            seen.steps.clear()
            answer(engine, [prompt], greedy(1))
            assert (seen.steps[0][0] - want[-1]).abs().max() < 0.05 * want.abs().max()


def test_row_has_the_same_bits_alone_and_in_a_batch(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, prompts: list[list[int]]
) -> None:
    """Four addends: their order must not depend on where a row stands."""
    seen = Logits()
    with executors.engine(
        reference("llama").path, 4, touch=seen.watch, chunked_prefill_size=1024
    ) as engine:
        answer(engine, prompts, greedy(1))
        together = torch.cat(seen.steps)
        for prompt, row in zip(prompts, together, strict=True):
            engine.sched.flush_cache()
            seen.steps.clear()
            answer(engine, [prompt], greedy(1))
            assert torch.equal(torch.cat(seen.steps)[0], row)


def test_sampled_tokens_are_those_of_one_process(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, prompts: list[list[int]]
) -> None:
    params = SamplingParams(
        max_new_tokens=STEPS, temperature=0.9, top_p=0.9, seed=11, frequency_penalty=0.4
    )
    path = reference("llama").path
    alone = make_engine(path)
    want = answer(alone, prompts, params)
    alone.close()
    with executors.engine(path, 2) as engine:
        assert answer(engine, prompts, params, stagger=1) == want


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_weights_are_the_same_model_however_divided(
    executors: ExecutorProcesses, tmp_path: Path, size: int
) -> None:
    """Also: a vocabulary that no number of ranks divides."""
    path = tiny_model.make(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 331}))
    flags = {"load_format": "dummy", "random_seed": 5}
    prompts = [[7, 330, 12], list(range(40))]
    alone = make_engine(path, **flags)
    want = answer(alone, prompts, greedy(STEPS))
    alone.close()
    assert len(set(want[0])) > 1
    with executors.engine(path, size, **flags) as engine:
        assert answer(engine, prompts, greedy(STEPS)) == want


def test_executor_rank_with_a_different_step_ends_the_group(
    reference: Callable[[str], Reference],
    executors: ExecutorProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The executor rank refuses a message that differs in one page, before it computes; all ranks end."""
    encode = step_inputs.encode_step
    sent = []

    def altered(step: step_inputs.StepInputs, check: int) -> bytes:
        sent.append(step)
        if len(sent) == 4:
            step.slots = step.slots + 1
        return encode(step, check)

    monkeypatch.setattr("baton.runtime.runner.model_runner.encode_step", altered)
    with (
        pytest.raises(
            RuntimeError,
            match=r"step \d+ failed on the device: PeerLost: tensor-parallel rank 0 of 2 lost",
        ),
        executors.engine(reference("llama").path, 2) as engine,
    ):
        answer(engine, [[1, 2, 3]], greedy(STEPS))
    assert len(sent) >= 4
    assert executors.endings[0].startswith(
        f"StepMismatch: step {sent[3].number}: what this tensor-parallel rank would"
    )


@pytest.mark.parametrize("variant", ["llama", "qwen3-next"])
def test_ranks_compute_rows_with_drafts(
    reference: Callable[[str], Reference], executors: ExecutorProcesses, variant: str
) -> None:
    """Other ranks learn by the next step's rows how many drafts were drawn."""
    ref = reference(variant)
    answers = {(tuple(p), 0): g for p, g in zip(ref.prompts, ref.greedy, strict=True)}
    with executors.engine(ref.path, 2) as engine:
        speculate(engine, ScriptedDrafter(answers, 0.8, VOCAB))
        assert answer(engine, ref.prompts, greedy(len(ref.greedy[0]))) == ref.greedy
        assert engine.sched.stats.counters()["spec_decode_num_accepted_tokens_total"] > 0
    assert executors.endings == ["stopped"]


def test_the_first_of_two_ranks_has_the_draft_model(
    reference: Callable[[str], Reference], executors: ExecutorProcesses
) -> None:
    ref = reference("llama")
    with executors.engine(ref.path, 2, **with_draft(ref.path)) as engine:
        draft_always(engine)
        assert answer(engine, ref.prompts, greedy(32)) == ref.answers(ref.prompts, 32)
        drafted, drawn = count_drafts(engine)
        assert drafted > 30
        assert drawn / drafted > 0.9
    assert executors.endings == ["stopped"]
