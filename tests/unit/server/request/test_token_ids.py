"""Token ids that reach a rank are those of the model's embedding, wherever a request has them from.

The tokenizer of these tests has ids beyond the model; in others it has fewer than the model, or leaves ids out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer

from baton.config import build_config
from baton.errors import BadRequest, ConfigError
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.token_ids import SHOWN_TOKENS, ModelVocabulary
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support.models import tiny_model

MODEL_SIZE = 384
PADDED_SIZE = 400
ADDED = "<|new|>"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model.make(tmp_path_factory.mktemp("model"))
    set_vocab_size(path, MODEL_SIZE)
    added = HFTokenizer.from_file(str(path / "tokenizer.json"))
    while added.get_vocab_size() < MODEL_SIZE:
        added.add_tokens([f"<filler{added.get_vocab_size()}>"])
    added.add_special_tokens([ADDED])
    assert added.token_to_id(ADDED) == MODEL_SIZE
    added.save(str(path / "tokenizer.json"))
    return path


def set_vocab_size(path: Path, size: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": size}))


def validator_of(path: Path, **flags: object) -> RequestValidator:
    config = build_config({"model_path": str(path), **flags})
    return RequestValidator(config, model_info.load(config), Tokenizer(path))


@pytest.fixture(scope="module")
def validator(base: Path) -> RequestValidator:
    return validator_of(base)


def chat(v: RequestValidator, **body: Any) -> AcceptedRequest:
    return asyncio.run(v.chat({"messages": CHAT, "stream": True, **body}))


def completion(v: RequestValidator, **body: Any) -> AcceptedRequest:
    return asyncio.run(v.completion({"prompt": "hello", "stream": True, **body}))


def generate(v: RequestValidator, **body: Any) -> AcceptedRequest:
    text = {} if "input_ids" in body else {"text": "hello"}
    return asyncio.run(v.generate({**text, "stream": True, **body}))


def resume(ids: list[int]) -> dict[str, Any]:
    return {"ids": ids, "seed": 1, "created": 1}


Send = Callable[..., AcceptedRequest]
SOURCES: list[tuple[Send, str, Callable[[int], Any]]] = [
    (completion, "prompt", lambda i: [5, i]),
    (completion, "prompt", lambda i: [[5], [6, i]]),
    (generate, "input_ids", lambda i: [5, i]),
    (generate, "input_ids", lambda i: [[5], [i]]),
    (chat, "input_ids", lambda i: [5, i]),
    (completion, "input_ids", lambda i: [5, i]),
    (chat, "stop_token_ids", lambda i: [i]),
    (chat, "stop_token_ids", lambda i: i),
    (generate, "sampling_params", lambda i: {"stop_token_ids": [i]}),
    (chat, "logit_bias", lambda i: {str(i): 1}),
    (generate, "sampling_params", lambda i: {"logit_bias": {str(i): 1}}),
    (chat, "baton_resume", lambda i: resume([5, i])),
    (completion, "baton_resume", lambda i: resume([i])),
]
"""Request form, field, and a value with the given token id."""


@pytest.mark.parametrize(("send", "field", "value"), SOURCES)
@pytest.mark.parametrize("token_id", [MODEL_SIZE, 99_999, 10**11])
def test_id_beyond_model_is_refused_and_named(
    validator: RequestValidator,
    send: Send,
    field: str,
    value: Callable[[int], Any],
    token_id: int,
) -> None:
    with pytest.raises(BadRequest) as caught:
        send(validator, **{field: value(token_id)})
    assert caught.value.code == "invalid_value"
    assert str(token_id) in caught.value.message
    assert f"vocabulary has {MODEL_SIZE} ids" in caught.value.message
    assert str(caught.value.param).split(".")[0] == field


@pytest.mark.parametrize(("send", "field", "value"), SOURCES)
def test_last_id_of_model_is_accepted(
    validator: RequestValidator, send: Send, field: str, value: Callable[[int], Any]
) -> None:
    send(validator, **{field: value(MODEL_SIZE - 1)})


@pytest.mark.parametrize("bad", [-1, True, 1.5, "5", None, [5]])
@pytest.mark.parametrize("field", ["stop_token_ids", "input_ids"])
def test_other_things_than_ids_are_refused(
    validator: RequestValidator, field: str, bad: object
) -> None:
    with pytest.raises(BadRequest, match=field):
        chat(validator, **{field: [5, bad]})


@pytest.mark.parametrize("bias", [-100, 100, -100.0, 99.5])
def test_bias_up_to_100_is_accepted(validator: RequestValidator, bias: float) -> None:
    """OpenAI's reference: "a bias value from -100 to 100"."""
    (item,) = chat(validator, logit_bias={"5": bias}).items
    assert item.params.logit_bias == ((5, bias),)


@pytest.mark.parametrize("bias", [-100.5, 101, "1", None, True])
def test_other_bias_is_refused(validator: RequestValidator, bias: object) -> None:
    with pytest.raises(BadRequest, match="from -100 to 100"):
        chat(validator, logit_bias={"5": bias})


@pytest.mark.parametrize("key", ["-1", "1.0", "x", "", "²", "0" * 12 + "9" * 30])
def test_other_keys_than_ids_have_no_bias(validator: RequestValidator, key: str) -> None:
    with pytest.raises(BadRequest, match="logit_bias has the key"):
        chat(validator, logit_bias={key: 1})


@pytest.mark.parametrize(
    ("send", "field", "value"),
    [
        (completion, "prompt", f"a{ADDED}b"),
        (completion, "prompt", ["a", ADDED]),
        (generate, "text", ADDED),
        (chat, "messages", [{"role": "user", "content": f"a{ADDED}"}]),
    ],
)
def test_text_with_token_that_model_lacks_is_refused(
    validator: RequestValidator, send: Send, field: str, value: Any
) -> None:
    with pytest.raises(BadRequest) as caught:
        send(validator, **{field: value})
    assert caught.value.param == field
    assert f"{MODEL_SIZE} ({ADDED!r})" in caught.value.message


def test_prediction_is_read_without_tokens_that_model_lacks(base: Path) -> None:
    drafting = validator_of(base, speculative_algorithm="NGRAM")

    def predicted(text: str) -> list[int]:
        prediction = chat(drafting, prediction={"type": "content", "content": text}).prediction
        assert prediction is not None
        return prediction.tolist()

    assert predicted(f"a{ADDED}b") == [*predicted("a"), *predicted("b")]


def test_tokenizing_and_detokenizing_need_no_model(validator: RequestValidator) -> None:
    ids = asyncio.run(validator.tokenize({"prompt": ADDED, "add_special_tokens": False}))
    assert ids == [MODEL_SIZE]
    text = asyncio.run(validator.detokenize({"tokens": ids, "skip_special_tokens": False}))
    assert text == ADDED
    with pytest.raises(BadRequest, match="tokens has the token id"):
        asyncio.run(validator.detokenize({"tokens": [MODEL_SIZE + 1]}))


def test_ids_in_padding_of_embedding_are_accepted(base: Path, tmp_path: Path) -> None:
    path = tiny_model.make(tmp_path / "padded")
    set_vocab_size(path, PADDED_SIZE)
    padded = validator_of(path)
    known = Tokenizer(path).vocab_size
    assert known < PADDED_SIZE
    for token_id in (known, PADDED_SIZE - 1):
        assert list(completion(padded, prompt=[token_id]).items[0].prompt) == [token_id]
        assert chat(padded, logit_bias={str(token_id): 1}).items[0].params.logit_bias
        assert asyncio.run(padded.detokenize({"tokens": [token_id]})) == ""
    assert padded.vocabulary.warning() is None


def test_ids_left_out_by_tokenizer_do_not_hide_larger_ones(tmp_path: Path) -> None:
    path = tiny_model.make(tmp_path / "sparse")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    size = len(vocab)
    last = max(vocab, key=lambda token: vocab[token])
    vocab[last] = size + 50
    file.write_text(json.dumps(tokenizer))
    set_vocab_size(path, size)
    sparse = validator_of(path)
    assert sparse.vocabulary.missing == {size + 50: last}
    with pytest.raises(BadRequest, match=f"token id {size + 50} "):
        completion(sparse, prompt=last.replace("Ġ", " "), add_special_tokens=False)


def test_end_tokens_that_model_lacks_are_dropped(base: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(base, tmp_path / "ends"))
    config = {"eos_token_id": [1, MODEL_SIZE, 10**30]}
    (path / "generation_config.json").write_text(json.dumps(config))
    token_config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(token_config | {"eos_token": ADDED}))
    assert validator_of(path).eos_token_ids == (1,)


def test_warning_names_tokens_that_model_lacks(base: Path) -> None:
    warning = validator_of(base).vocabulary.warning()
    assert warning is not None
    assert f"{ADDED!r} ({MODEL_SIZE})" in warning
    many = ModelVocabulary(100, Tokenizer(base)).warning()
    assert many is not None
    assert many.count("(") == SHOWN_TOKENS
    assert f"and {MODEL_SIZE + 1 - 100 - SHOWN_TOKENS} more" in many


@pytest.mark.parametrize("size", [None, 0, -1, 1e9, "", [], {}, True])
def test_size_of_vocabulary_is_checked_at_start(base: Path, tmp_path: Path, size: object) -> None:
    path = Path(shutil.copytree(base, tmp_path / "sizes"))
    set_vocab_size(path, size)
    with pytest.raises(ConfigError, match=r"vocab_size = .* a positive integer up to"):
        validator_of(path)


def test_simulated_engine_takes_every_id(base: Path) -> None:
    config = build_config({"model_path": str(base), "simulate": "reference"})
    vocabulary = ModelVocabulary(model_info.load(config).vocab_size, Tokenizer.four_byte())
    assert vocabulary.warning() is None
    vocabulary.check_ids([2**31 - 1], "prompt")


# ---- defaults from generation_config.json --------------------------------------------------------------------------


def with_defaults(base: Path, tmp_path: Path, **values: object) -> Path:
    path = Path(shutil.copytree(base, tmp_path / "defaults"))
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("top_p", 0.0, "is 0, must be above 0"),
        ("top_p", 1.5, "must be at most 1"),
        ("top_p", "0.7", "must be a number"),
        ("top_p", True, "must be a number"),
        ("min_p", 2.0, "must be at most 1"),
        ("min_p", -1, "must be at least 0"),
        ("temperature", -1, "must be at least 0"),
        ("temperature", 1e39, "must be at most"),
        ("temperature", [], "must be a number"),
        ("top_k", -2, "must be at least -1"),
        ("top_k", 2.5, "must be an integer"),
        ("top_k", {}, "must be an integer"),
        ("repetition_penalty", 0, "must be above 0"),
        ("repetition_penalty", "", "must be a number"),
    ],
)
def test_default_that_no_request_may_state_ends_start(
    base: Path, tmp_path: Path, field: str, value: object, problem: str
) -> None:
    path = with_defaults(base, tmp_path, **{field: value})
    with pytest.raises(ConfigError) as caught:
        validator_of(path)
    assert "generation_config.json: " + field in caught.value.message
    assert problem in caught.value.message
    with pytest.raises(BadRequest, match=field):
        chat(validator_of(base), **{field: value})


def test_all_mistakes_of_defaults_are_reported(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        validator_of(with_defaults(base, tmp_path, top_p=0, min_p=2))
    assert len(caught.value.message.splitlines()) == 2


def test_defaults_are_used_unless_request_states_its_own(base: Path, tmp_path: Path) -> None:
    path = with_defaults(
        base, tmp_path, temperature=0, top_k=50.0, top_p=None, min_p=0.25, repetition_penalty=1.25
    )
    v = validator_of(path)
    params = chat(v).items[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 50, 1.0)
    assert (params.min_p, params.repetition_penalty) == (0.25, 1.25)
    own = chat(v, temperature=0.5, min_p=0).items[0].params
    assert (own.temperature, own.min_p) == (0.5, 0.0)
    nested = generate(v).items[0].params
    assert (nested.temperature, nested.min_p) == (1.0, 0.0)


@pytest.mark.parametrize("value", [0, -1, None])
def test_neutral_top_k_is_no_limit(base: Path, tmp_path: Path, value: int | None) -> None:
    assert chat(validator_of(with_defaults(base, tmp_path, top_k=value))).items[0].params.top_k == 0
