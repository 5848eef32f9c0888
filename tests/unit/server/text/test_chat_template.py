"""Chat templates give the same prompt as transformers' apply_chat_template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BadRequest, UnsupportedParameter
from baton.server.fields import decode_exact
from baton.server.text import model_info
from baton.server.text.chat_template import ChatTemplate, encode_chat_fields
from baton.server.text.tokenizer import Tokenizer
from tests.support.goldens.rendering import render
from tests.support.models import tiny_model

# Shapes of the templates of common families, written for this test.
LLAMA3_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|sys|>{{ system }} {{ kwargs_date | default('none') }}<|eot|>
{% for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
<|{{ message['role'] }}|>{{ message['content'] | trim }}<|eot|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
QWEN_LIKE = """{%- set ns = namespace(last=-1) %}
{% for m in messages %}
    {% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{%- for m in messages -%}
  <|im_start|>{{ m.role }}
  {{ m.content }}{% if loop.index0 == ns.last %} [last]{% endif %}<|im_end|>
  {%- if loop.index > 20 %}{% break %}{% endif %}
{% endfor -%}
{{ {'a<b': [1, 'ü'], 'tools': tools} | tojson }}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}
{% endfor %}"""
TEMPLATES = {
    "tiny": tiny_model.TEMPLATE,
    "llama3": LLAMA3_LIKE,
    "qwen": QWEN_LIKE,
    "generation": GENERATION,
}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello world"}],
    [
        {"role": "system", "content": "  be brief  "},
        {"role": "user", "content": "héllo <b>&amp;</b> 😀\n"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two "},
        {"role": "user", "content": "three"},
    ],
    [{"role": "user", "content": "continue"}, {"role": "assistant", "content": "the relay"}],
    [
        {"role": "user", "content": "continue"},
        {"role": "assistant", "content": "ends with spaces  "},
    ],
]


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ChatTemplate, Tokenizer]:
    """transformers' tokenizer, our template, our tokenizer, of one model directory."""
    from transformers import AutoTokenizer

    path = tiny_model.make(
        tmp_path_factory.mktemp(request.param), template=TEMPLATES[request.param]
    )
    facts = model_info.load(_config(path))
    return (
        AutoTokenizer.from_pretrained(path),
        ChatTemplate(facts.chat_template, facts.special_tokens),
        Tokenizer(path),
    )


def _config(path: Path) -> Any:
    from baton.config import build_config

    return build_config({"model_path": str(path)})


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_same_text_and_tokens_as_transformers(
    pair: tuple[Any, ChatTemplate, Tokenizer],
    messages: list[dict[str, Any]],
    generation_prompt: bool,
) -> None:
    theirs, ours, tokenizer = pair
    options = {"enable_thinking": False, "kwargs_date": "today"}
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt, **options
    )
    text = render(ours, messages, add_generation_prompt=generation_prompt, kwargs=options)
    assert text == expected
    ids = theirs.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, return_dict=False, **options
    )
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("messages", CHATS[3:], ids=range(len(CHATS[3:])))
def test_continued_messages_as_transformers(
    pair: tuple[Any, ChatTemplate, Tokenizer], messages: list[dict[str, Any]]
) -> None:
    theirs, ours, _ = pair
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    text = render(ours, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected


NUMBERS = [
    "9007199254740993",
    "18446744073709551616",
    "-0",
    "-0.0",
    "1e3",
    "1E-7",
    "0.1000000000000000055511151231257827",
    "123456789012345678901234567890.5",
    "2.638344616030823e-256",
    "9" * 400,
]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_are_printed_as_transformers_does(tmp_path: Path, number: str) -> None:
    """Numbers of a tool's schema, and of the arguments of a call in the conversation."""
    from transformers import AutoTokenizer

    template = (
        "{{ tools | tojson }}{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    path = tiny_model.make(tmp_path, template=template)
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{{"maximum":{number}}}}}}}'
    message = '{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":%s}}]}'
    arguments = f'{{"x": [{number}]}}'
    tools = json.loads(f"[{tool}]")
    messages = [json.loads(message % arguments)]
    theirs = AutoTokenizer.from_pretrained(path)
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    sent = f'{{"messages":[{message % json.dumps(arguments)}],"tools":[{tool}]}}'
    facts = model_info.load(_config(path))
    ours = ChatTemplate(facts.chat_template, facts.special_tokens)
    assert ours.render_chat(encode_chat_fields(decode_exact(sent))) == expected


def test_plain_text_gets_the_same_special_tokens_as_transformers(
    pair: tuple[Any, ChatTemplate, Tokenizer],
) -> None:
    theirs, _, tokenizer = pair
    assert tokenizer.encode("the baton") == theirs("the baton")["input_ids"]


def test_refusing_template_gives_its_message() -> None:
    with pytest.raises(BadRequest, match="unknown role judge"):
        render(ChatTemplate(LLAMA3_LIKE, {"bos_token": "<s>"}), [{"role": "judge", "content": "x"}])


def test_without_a_template_chat_is_refused_with_advice() -> None:
    with pytest.raises(UnsupportedParameter, match="no chat template; use /v1/completions"):
        render(ChatTemplate(None, {}), [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_broken_or_hostile_templates_are_a_400(source: str) -> None:
    with pytest.raises(BadRequest):
        render(ChatTemplate(source, {}), [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "warning"),
    [
        (None, None),
        ("{{ messages[0].content }}", None),
        ("{{ raise_exception('two messages are needed') }}", None),
        ("a\n{{ messages.swap() }}", r"fails on a plain conversation: unknown method: .*chat:2"),
        ("a\n{% for %}", r"does not compile \(.*chat:2"),
    ],
)
def test_template_that_cannot_be_used_is_reported_with_its_line(
    source: str | None, warning: str | None
) -> None:
    found = ChatTemplate(source, {}).warning
    if warning is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(warning, found)


def test_template_sources_in_order_of_preference(tmp_path: Path) -> None:
    path = tiny_model.make(tmp_path, template=None)
    assert model_info.load(_config(path)).chat_template is None
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert model_info.load(_config(path)).chat_template == "D"
    (path / "chat_template.jinja").write_text("J")
    assert model_info.load(_config(path)).chat_template == "J"
