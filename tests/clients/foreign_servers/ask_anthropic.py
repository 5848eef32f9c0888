"""Asks a router in front of another server through anthropic-python, prints what came back as JSON.

Usage: ask_anthropic.py BASE_URL. Nothing is judged here: the test compares.
"""

import json
import sys
from typing import Any

import anthropic

ASKED: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is a lease?"}],
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}


def error_of(call: Any, **asked: Any) -> Any:
    try:
        call(**asked)
    except anthropic.APIStatusError as err:
        body: Any = err.body
        return [type(err).__name__, err.status_code, body["error"]["message"]]
    return "no error"


def main() -> None:
    with anthropic.Anthropic(
        base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120.0
    ) as client:
        whole = client.messages.create(**ASKED)
        with client.messages.stream(**ASKED) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = {name: ASKED[name] for name in ("model", "messages")}
        said = {
            "whole": [block.text for block in whole.content],
            "streamed": streamed,
            "final": [block.text for block in final.content],
            "ends": [whole.stop_reason, final.stop_reason],
            "usage": [
                [message.usage.input_tokens, message.usage.output_tokens]
                for message in (whole, final)
            ],
            "count": error_of(client.messages.count_tokens, **counted),
            "model": error_of(client.messages.create, **{**ASKED, "model": "other"}),
            "unknown member": error_of(
                client.messages.create, **{**ASKED, "extra_body": {"top_k": 3}}
            ),
        }
    print(json.dumps(said))


main()
