"""Checkpoints with one value of one file replaced: a start serves as transformers would, or ends in a sentence.

Every value of every JSON file is replaced by null, -1, 0, 1e9, "", [] and {}, one at a time. In one process: the checks
of a start, the front's validation of a chat and a completion, and the engine's steps. An exception other than a
ConfigError at the start, or an EngineError of one request, is a failure. Engines are shared by variants that compute
the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import ConfigError, EngineError
from baton.models import checkpoint
from baton.models.spec_reader import read_spec
from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support import effort
from tests.support.engines.engine_run import FLAGS, make_engine
from tests.support.models.checkpoints import reference_greedy, reference_model
from tests.support.models.replaced_values import (
    FILES,
    ReplacedCheckpoint,
    Replacement,
    make_full_checkpoint,
    replacements,
)

TEXT = "Hello<|eos|> you"
PROMPT = [40, 41, 42, 43, 44, 45]
TOKENS = 4
COMPARED_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
"""Files that decide the tokens of a prompt given as ids."""
EXEMPT = {
    (("use_cache",), '""'): "a falsy value that is not false makes generate() drop context",
    (("use_cache",), "[]"): "the same",
    (("use_cache",), "{}"): "the same",
    (("use_cache",), "0"): "the same",
    (("rms_norm_eps",), "1000000000.0"): "all logits are equal but for rounding",
    (("rms_norm_eps",), "1000000000"): "the same",
    (("attn_logit_softcapping",), "1000000000.0"): "our tanh is exact to 3e-7 of the cap",
}
"""Fields and values with which transformers' answer says nothing, and why."""
EXEMPT_OF_LONGROPE = {
    (("max_position_embeddings",), "1000000000"): "the served context chooses the long factors",
}
FEW = 100
"""Variants of a file that are all tried in the fast suite."""
COMPARED = 12
"""Variants of each that the fast suite compares with transformers."""
_handles = itertools.count(10**9)


class Starter:
    """Starts engines in this process, and keeps those of which further variants compute the same."""

    def __init__(self) -> None:
        self._engines: dict[object, EngineLoop] = {}

    def start(self, path: Path) -> tuple[RequestValidator, Tokenizer, EngineLoop]:
        """Check and load as the launcher and a rank do. Raises ConfigError."""
        config = build_config({"model_path": str(path), **FLAGS})
        checkpoint.check_checkpoint(config, path)
        facts = model_info.load(config)
        tokenizer = Tokenizer(facts.tokenizer_path)
        validator = RequestValidator(config, facts, tokenizer)
        return validator, tokenizer, self._engine(path)

    def _engine(self, path: Path) -> EngineLoop:
        spec = read_spec(path, "float32")
        computed = dataclasses.replace(spec, model_hash="", eos_token_ids=(), bos_token_id=None)
        index = (path / "model.safetensors.index.json").read_text()
        key = (computed, index)
        if key not in self._engines:
            self._engines[key] = make_engine(path)
        return self._engines[key]


def serve(engine: EngineLoop, accepted: AcceptedRequest) -> list[int]:
    """Tokens of an accepted request. Raises EngineError when the engine refuses it or ends it with an error."""
    (item,) = accepted.items
    handle = next(_handles)
    engine.submit(ValidatedRequest(handle, "r", array("i", item.prompt), item.params))
    tokens: list[int] = []
    finish = None
    while finish is None:
        outputs, busy = engine.step(0.0)
        assert busy or outputs, "the engine stopped with a request open"
        for out in outputs:
            assert out.handle == handle
            tokens += out.tokens
            finish = out.finish
            if finish is FinishReason.ERROR:
                raise EngineError(str(out.error))
    return tokens


def send_requests(validator: RequestValidator, tokenizer: Tokenizer, engine: EngineLoop) -> None:
    """A completion and a chat, with the checkpoint's own sampling defaults and end tokens."""
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (validator.completion, {"prompt": TEXT}),
        (validator.chat, {"messages": [{"role": "user", "content": TEXT}]}),
    ]
    for accept, body in bodies:
        try:
            accepted = asyncio.run(accept({**body, "max_tokens": TOKENS, "seed": 1}))
            tokenizer.decode(serve(engine, accepted))
        except EngineError as err:
            if err.status >= 500:
                raise


def answer_greedily(validator: RequestValidator, engine: EngineLoop) -> list[int]:
    """Answer to PROMPT with the checkpoint's defaults, of which a repetition penalty counts for greedy tokens, too."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return serve(engine, asyncio.run(validator.completion(body)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_full_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def starter() -> Starter:
    return Starter()


def test_unchanged_checkpoint_serves(source: Path, starter: Starter) -> None:
    validator, tokenizer, engine = starter.start(source)
    send_requests(validator, tokenizer, engine)
    expected = reference_greedy(reference_model(source), PROMPT, TOKENS)
    assert answer_greedily(validator, engine) == expected


@pytest.mark.parametrize("file", FILES)
def test_replaced_value_serves_or_ends_start_in_a_sentence(
    file: str, source: Path, starter: Starter, tmp_path: Path
) -> None:
    variants = ReplacedCheckpoint(source, tmp_path / "variant")
    served = 0
    failures: list[str] = []
    every = list(replacements(source, file))
    # Of the seven values for each place, two or three in turn.
    for replacement in every if effort.EVERY else every[:: 3 if len(every) > FEW else 1]:
        path = variants.apply(replacement)
        try:
            send_requests(*starter.start(path))
            served += 1
        except ConfigError as err:
            if len(err.message) < 20:
                failures.append(f"{replacement}: {err.message!r} is no sentence")
        except BaseException as err:
            if isinstance(err, KeyboardInterrupt):
                raise
            failures.append(f"{replacement}: {type(err).__name__}: {err!s:.200}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)
    assert served


def compare(
    chosen: Sequence[Replacement], source: Path, starter: Starter, variant: Path
) -> list[str]:
    """Variants that Baton serves with other tokens than transformers."""
    variants = ReplacedCheckpoint(source, variant)
    different = []
    for replacement in chosen:
        if (replacement.place[-1:], json.dumps(replacement.value)) in EXEMPT:
            continue
        path = variants.apply(replacement)
        try:
            validator, _, engine = starter.start(path)
        except ConfigError:
            continue
        try:
            expected = reference_greedy(reference_model(path), PROMPT, TOKENS)
        except Exception:  # noqa: BLE001 - transformers does not load or run the variant: nothing to compare
            continue
        got = answer_greedily(validator, engine)
        if got != expected:
            different.append(f"{replacement}: {got}, transformers {expected}")
    return different


@pytest.mark.parametrize("file", COMPARED_FILES)
def test_sampled_variants_give_tokens_of_transformers(
    file: str, source: Path, starter: Starter, tmp_path: Path
) -> None:
    every = list(replacements(source, file))
    chosen = random.Random(file).sample(every, COMPARED)
    assert compare(chosen, source, starter, tmp_path / "variant") == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # some hundred starts of both
@pytest.mark.parametrize("file", COMPARED_FILES)
@pytest.mark.parametrize(
    "variant",
    [
        "llama-rope3",
        "llama-yarn",
        "mistral-window",
        "qwen2-window",
        "qwen3",
        "olmo2",
        "olmo3",
        "granite",
        "smollm3-window",
        "gemma2",
        "gemma3",
        "phi3-longrope",
        "phimoe",
    ],
)
def test_all_variants_give_tokens_of_transformers(
    file: str, variant: str, starter: Starter, tmp_path: Path
) -> None:
    source = make_full_checkpoint(tmp_path / "source", variant)
    chosen = list(replacements(source, file))
    if variant == "phi3-longrope":
        exempt = EXEMPT_OF_LONGROPE
        chosen = [x for x in chosen if (x.place[-1:], json.dumps(x.value)) not in exempt]
    assert compare(chosen, source, starter, tmp_path / "variant") == []
