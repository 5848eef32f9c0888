"""Messages reach templates as transformers' users write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import BadRequest
from baton.server.text.chat_template import ChatTemplate
from tests.support.goldens import message_goldens
from tests.support.goldens.rendering import normalize, render

FAMILIES = sorted(message_goldens.FAMILIES)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(message_goldens.PATH.read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_prompts_are_transformers(golden: dict[str, Any], name: str) -> None:
    family = message_goldens.family_cases(message_goldens.FAMILIES[name])
    assert family == golden[name], "run python -m tests.support.goldens.message_goldens"


@pytest.mark.parametrize("name", FAMILIES)
def test_probed_capabilities_are_the_templates(golden: dict[str, Any], name: str) -> None:
    expected = golden[name]["caps"].items()
    canonical = " ".join(f"{name}={str(value).lower()}" for name, value in expected)
    assert template_of(golden[name]).caps == canonical


@pytest.mark.parametrize("name", FAMILIES)
def test_normalized_messages_and_prompts_are_golden(golden: dict[str, Any], name: str) -> None:
    template = template_of(golden[name])
    for case in golden[name]["cases"]:
        sent = json.dumps(case["messages"])
        if "refused" in case:
            with pytest.raises(BadRequest) as caught:
                normalize(template, case["messages"])
            assert caught.value.param == case["refused"], sent
            continue
        normalized = normalize(template, case["messages"])
        # As text: the order of members reaches some templates.
        assert json.dumps(normalized) == json.dumps(case["normalized"]), sent
        continues = case.get("continues", False)
        text = render(
            template,
            case["messages"],
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        assert text == case["text"], sent


def template_of(family: dict[str, Any]) -> ChatTemplate:
    return ChatTemplate(family["template"], {"eos_token": "</s>"})


def test_dropped_content_is_refused_with_the_remedy(golden: dict[str, Any]) -> None:
    template = template_of(golden["two_roles"])
    with pytest.raises(
        BadRequest, match=r"drops the content of system messages; .*--chat-template"
    ):
        normalize(template, [{"role": "system", "content": "Be brief."}])
