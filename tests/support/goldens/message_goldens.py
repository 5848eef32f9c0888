"""Golden file of message normalization: what a client sends, what the template is given, and the prompt.

`python -m tests.support.goldens.message_goldens` writes `tests/contract/golden/messages/cases.json`; a Python test
holds the engine to it (tests/unit/server/text/test_messages.py), a Rust test the text layer
(engine/text/src/template/messages.rs).

Capabilities and normalized messages are written here by hand. The prompt is what transformers' renderer makes
of the normalized messages. The templates are written for these tests, one for each way in which the templates of
real families read messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[3] / "tests/contract/golden/messages/cases.json"
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class MessageCase:
    messages: Any
    normalized: Messages | None = None
    """None: as `messages`."""
    refused: str | None = None
    """Field that the error names, for messages that are refused."""
    continues: bool = False
    """With continue_final_message."""


@dataclass(frozen=True)
class TemplateFamily:
    template: str
    cases: list[MessageCase]
    caps: dict[str, Any] = field(default_factory=dict)
    """Differences from `PLAIN_CAPS`."""


PLAIN_CAPS = {
    "system": "text",
    "developer": "text",
    "user": "text",
    "assistant": "text",
    "tool": "text",
    "arguments": "object",
    "empty_content": "text",
    "inline_system": True,
    "renders_tools": False,
}


def message(role: str, content: Any, **members: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **members}


def user(content: Any = "Hi") -> dict[str, Any]:
    return message("user", content)


def call(arguments: Any, *, name: str = "look", call_id: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calling(*calls: dict[str, Any], content: Any = "") -> dict[str, Any]:
    return message("assistant", content, tool_calls=list(calls))


def answer(content: Any = "rain", **members: Any) -> dict[str, Any]:
    return message("tool", content, tool_call_id="call00001", **members)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


CITY = {"city": "Köln <&'>", "days": 1.0}
CITY_JSON = '{"city": "Köln <&\'>", "days": 1.0}'
ODD = {
    "whole": 1e17,
    "small": 1e-5,
    "large": 2**63 + 1,
    "yes": True,
    "none": None,
    "list": [1, 1.5, "a'b", "\n", None, {"k": False}],
    "text": 'say "hi"\n',
}
FULL_CALL = [user(), calling(call(CITY)), answer(name="look")]
SENT_CALL = [user(), calling(call(CITY_JSON), content=None), answer()]

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content + '' }}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BOTH = """\
{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}
{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}
{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"""
PARTS = """\
{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}
{% endfor %}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}
{% endfor %}"""
ITEMS = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}|{{ v | string }}|{{ v | tojson }}
{% endfor %}</function>{% endfor %}{% endfor %}"""
CONCATENATING = """\
{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls and m.content is none %}<assistant>
{% for c in m.tool_calls %}{{ '<call>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}
{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}
{% endif %}{% endfor %}"""
PRINTING = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}{% endfor %}
{% endfor %}"""
THINKING = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{% set content = m.content %}{% if '</think>' in m.content %}
{% set content = m.content.split('</think>')[-1] %}{% endif %}
{% if reasoning %}<think>{{ reasoning }}</think>{% endif %}{{ content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }} {% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}
{{ c.function.arguments | tojson }}{% endif %}</tool_call>{% endfor %}
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}"""
STRICT = """\
{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}
{{ raise_exception('the system message must be the first') }}{% endif %}[SYSTEM]{{ m.content + '' }}[/SYSTEM]
{% elif m.role == 'user' %}[INST]{{ m.content + '' }}[/INST]
{% elif m.role == 'assistant' %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}
{{ raise_exception('ids have 9 characters') }}{% endif %}[CALL]{{ c.id }} {{ c.function | tojson }}{% endfor %}
{{ m.content + '' }}{{ eos_token }}
{% elif m.role == 'tool' %}[RESULT]{{ m.name + '' }} {{ m.content | tojson }}[/RESULT]
{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"""
TWO_ROLES = """\
{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}
{% elif m.role == 'assistant' %}Assistant: {{ m.content }}
{% endif %}{% endfor %}"""
PARTS_STRICT = """\
{% if messages[0].role == 'system' %}{{ messages[0].content[0]['text'] }}
{% set messages = messages[1:] %}{% endif %}
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('alternate') }}{% endif %}
<{{ m.role }}>{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}{% endfor %}"""

DUMPED_NULLS = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
"""Members that openai-python writes for an assistant's answer that is sent back."""
MALFORMED: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("Hi", "messages"),
    (["Hi"], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": None, "content": "x"}], "messages[0].role"),
    ([user(), {"role": "user"}], "messages[1].content"),
    ([user(None)], "messages[0].content"),
    ([user(7)], "messages[0].content"),
    ([user([7])], "messages[0].content"),
    ([user([{"type": "text", "text": None}])], "messages[0].content"),
    ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content"),
    ([message("tool", "rain")], "messages[0].tool_call_id"),
    ([message("tool", "rain", tool_call_id=None)], "messages[0].tool_call_id"),
    ([message("assistant", None, tool_calls="x")], "messages[0].tool_calls"),
    ([message("assistant", None, tool_calls=["x"])], "messages[0].tool_calls"),
    ([message("user", "x", tool_calls=[None])], "messages[0].tool_calls"),
]

FAMILIES = {
    "chatml": TemplateFamily(
        CHATML,
        [
            MessageCase([user()]),
            MessageCase([user(parts("one", "two"))], [user("one\ntwo")]),
            MessageCase([user([{"text": "one", "annotations": None}])], [user("one")]),
            MessageCase([user([])], [user("")]),
            MessageCase([user(), message("assistant", None)], [user(), message("assistant", "")]),
            MessageCase([user(), {"role": "assistant"}], [user(), message("assistant", "")]),
            MessageCase(
                [user(), {**message("assistant", "Yes"), **DUMPED_NULLS}],
                [user(), message("assistant", "Yes")],
            ),
            MessageCase(
                [user(), message("assistant", "Yes", tool_calls=[])],
                [user(), message("assistant", "Yes")],
            ),
            MessageCase([{"name": None, **user()}], [user()]),
            MessageCase(SENT_CALL, FULL_CALL),
            MessageCase([user(), calling(call(ODD))]),
            # Arguments: an object, absent, empty, null, malformed, or no object.
            *(
                MessageCase([user(), calling(call(arguments))], [user(), calling(call({}))])
                for arguments in (
                    None,
                    "",
                    " \n",
                    "null",
                    " null ",
                    "{}",
                    '{"city": "Köl',
                    '{"a": 1} x',
                    '{"a": NaN}',
                    '"text"',
                    "[1]",
                    [1],
                    7,
                    '{"a":' * 101 + "1" + "}" * 101,
                    '{"a":' * 200 + "1" + "}" * 200,
                )
            ),
            MessageCase(
                [user(), calling({"id": "a", "function": {"name": "look"}, "type": None})],
                [user(), calling({"id": "a", "function": {"name": "look", "arguments": {}}})],
            ),
            MessageCase(
                [user(), calling(call('{"b": 1, "a": {"z": 1, "y": 2}, "b": 3}'))],
                [user(), calling(call({"b": 3, "a": {"z": 1, "y": 2}}))],
            ),
            MessageCase(
                [user(), calling(call('{"a":' * 100 + "1" + "}" * 100))],
                [user(), calling(call(json.loads('{"a":' * 100 + "1" + "}" * 100)))],
            ),
            MessageCase(
                [
                    user(),
                    message("assistant", None, function_call={"name": "look", "arguments": "{}"}),
                    message("function", "rain", name="look"),
                ],
                [
                    user(),
                    message(
                        "assistant",
                        "",
                        tool_calls=[
                            {"type": "function", "function": {"name": "look", "arguments": {}}}
                        ],
                    ),
                    message("tool", "rain", name="look"),
                ],
            ),
            MessageCase(
                [user(), calling(call("{}")), answer(parts("one", "two"), name="own")],
                [user(), calling(call({})), answer("one\ntwo", name="own")],
            ),
            *(MessageCase(messages, refused=param) for messages, param in MALFORMED),
        ],
    ),
    "both": TemplateFamily(
        BOTH,
        [
            MessageCase([user()]),
            MessageCase([user(parts("one", "two"))]),
            MessageCase([user([{"text": "one"}])], [user([{"text": "one", "type": "text"}])]),
            MessageCase([message("system", parts("a", "b")), user("c")]),
            MessageCase([user(), message("assistant", parts("a", "b "))], continues=True),
            MessageCase([user([])], [user("")]),
            MessageCase(
                [user(), calling(call('{"a": 1}'), content=None), answer(parts("x", "y"))],
                [user(), calling(call({"a": 1})), answer(parts("x", "y"), name="look")],
            ),
        ],
        dict.fromkeys(("system", "developer", "user", "assistant", "tool"), "both"),
    ),
    "parts": TemplateFamily(
        PARTS,
        [
            MessageCase([user()], [user(parts("Hi"))]),
            MessageCase([user([])], [user(parts(""))]),
            MessageCase(
                [user(), message("assistant", "Well, ")],
                [user(parts("Hi")), message("assistant", parts("Well, "))],
                continues=True,
            ),
            MessageCase([user(parts("one", "two"))]),
            MessageCase(
                [user(""), {"role": "assistant"}],
                [user(parts("")), message("assistant", parts(""))],
            ),
            MessageCase(
                [user(), calling(call('{"a": 1}'), content=None), answer()],
                [
                    user(parts("Hi")),
                    calling(call({"a": 1}), content=parts("")),
                    answer(parts("rain"), name="look"),
                ],
            ),
        ],
        dict.fromkeys(("system", "developer", "user", "assistant", "tool"), "parts"),
    ),
    "items": TemplateFamily(
        ITEMS,
        [
            MessageCase(SENT_CALL, FULL_CALL),
            MessageCase([user(), calling(call(""))], [user(), calling(call({}))]),
            MessageCase([user(), calling(call(json.dumps(ODD)))], [user(), calling(call(ODD))]),
        ],
    ),
    "concatenating": TemplateFamily(
        CONCATENATING,
        [
            MessageCase(
                [user(), calling(call('{"b": 1}'), content=None), answer()],
                [user(), calling(call('{"b": 1}'), content=None), answer(name="look")],
            ),
            *(
                MessageCase(
                    [user(), calling(call(given), content=content)],
                    [user(), calling(call(text), content=None)],
                )
                for content, given, text in (
                    ("", CITY, CITY_JSON),
                    ([], ODD, json.dumps(ODD, ensure_ascii=False)),
                    (None, "", "{}"),
                    (None, "null", "{}"),
                    (None, None, "{}"),
                    (None, '{"cut', '{"cut'),
                    (None, [1], "[1]"),
                )
            ),
            MessageCase([user(), message("assistant", None)], [user(), message("assistant", "")]),
        ],
        {"arguments": "json_text", "empty_content": "null"},
    ),
    "printing": TemplateFamily(
        PRINTING,
        [
            MessageCase(
                [user(), calling(call(CITY)), answer()],
                [user(), calling(call(CITY_JSON)), answer(name="look")],
            )
        ],
        {"arguments": "json_text"},
    ),
    "thinking": TemplateFamily(
        THINKING,
        [
            MessageCase(SENT_CALL, FULL_CALL),
            MessageCase(
                [user(), message("assistant", "Yes", reasoning="hm")],
                [
                    user(),
                    message(
                        "assistant", "Yes", reasoning="hm", reasoning_content="hm", thinking="hm"
                    ),
                ],
            ),
            MessageCase(
                [user(), message("assistant", "Yes", reasoning=None, thinking="hm")],
                [
                    user(),
                    message(
                        "assistant", "Yes", thinking="hm", reasoning_content="hm", reasoning="hm"
                    ),
                ],
            ),
        ],
    ),
    "strict": TemplateFamily(
        STRICT,
        [
            MessageCase(SENT_CALL, FULL_CALL),
            MessageCase(
                [user("a"), message("system", "x"), user("b")],
                [message("system", "x"), user("a"), user("b")],
            ),
            MessageCase(
                [
                    message("system", "x"),
                    user("a"),
                    message("developer", parts("y", "z")),
                    user("b"),
                    message("system", "w"),
                ],
                [message("system", "x\n\ny\nz\n\nw"), user("a"), user("b")],
            ),
        ],
        {"developer": "refused", "inline_system": False},
    ),
    "two_roles": TemplateFamily(
        TWO_ROLES,
        [
            MessageCase([user(), message("assistant", "Yes"), user()]),
            MessageCase([message("system", " "), user()]),
            MessageCase([message("system", "Be brief."), user()], refused="messages[0].content"),
            MessageCase([message("developer", "Be brief."), user()], refused="messages[0].content"),
            MessageCase([user(), calling(call("{}")), answer()], refused="messages[2].content"),
        ],
        {"system": "dropped", "developer": "dropped", "tool": "dropped"},
    ),
    "parts_strict": TemplateFamily(
        PARTS_STRICT,
        [
            MessageCase(
                [message("developer", "Be brief."), user(" a ")],
                [message("system", parts("Be brief.")), user(parts(" a "))],
            ),
            MessageCase(
                [user("a"), message("assistant", parts("x", "y "))],
                continues=True,
                normalized=[user(parts("a")), message("assistant", parts("x", "y "))],
            ),
            MessageCase(
                [user("a"), message("system", parts("x", "y")), message("system", "z")],
                [message("system", parts("x\ny\n\nz")), user(parts("a"))],
            ),
        ],
        {
            "system": "one_part",
            "developer": "refused",
            "user": "parts",
            "assistant": "parts",
            "tool": "refused",
            "inline_system": False,
        },
    ),
}


def family_cases(family: TemplateFamily) -> dict[str, Any]:
    return {
        "template": family.template,
        "caps": PLAIN_CAPS | family.caps,
        "cases": [case_record(family.template, case) for case in family.cases],
    }


def case_record(template: str, case: MessageCase) -> dict[str, Any]:
    if case.refused is not None:
        return {"messages": case.messages, "refused": case.refused}
    normalized = case.messages if case.normalized is None else case.normalized
    text = rendered_by_transformers(template, normalized, case.continues)
    record = {"messages": case.messages, "normalized": normalized, "text": text}
    return record | {"continues": True} if case.continues else record


def rendered_by_transformers(template: str, messages: Messages, continues: bool) -> str:
    """The prompt. Below apply_chat_template, which would take away the null that some templates ask for."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        eos_token="</s>",
    )
    return str(texts[0])


def all_cases() -> dict[str, Any]:
    return {name: family_cases(family) for name, family in FAMILIES.items()}


def as_lines(families: dict[str, Any]) -> str:
    """JSON with a line for each case, so that differences can be read."""
    blocks = []
    for name, family in families.items():
        head = json.dumps({key: family[key] for key in ("template", "caps")}, ensure_ascii=False)
        lines = [json.dumps(case, ensure_ascii=False) for case in family["cases"]]
        cases = ",\n".join(lines)
        blocks.append(f'{json.dumps(name)}: {head[:-1]}, "cases": [\n{cases}\n]}}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(as_lines(all_cases()))


if __name__ == "__main__":
    main()
