"""Replays the golden streams of /v1/responses and /v1/messages through the clients' own libraries.

Usage: replay_streams.py openai|anthropic GOLDEN_FILE. Prints what a user of the library sees of each case, as JSON.
Every event and every whole answer must be one of the library's models in pydantic's strict mode. Nothing else is judged
here: the test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Case = dict[str, Any]


def stream_bytes(case: Case) -> bytes:
    return "".join(line + "\n" for line in case["expected"]["stream"]).encode()


def transport_of(case: Case) -> Any:
    """Answers with the case's stream or its whole answer, as the request asks."""
    import httpx2

    def answer(request: httpx2.Request) -> httpx2.Response:
        if json.loads(request.content).get("stream"):
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return httpx2.Response(200, headers=headers, content=stream_bytes(case))
        headers = {"content-type": "application/json"}
        return httpx2.Response(200, headers=headers, content=case["expected"]["whole"])

    return httpx2.MockTransport(answer)


def events_of(case: Case) -> list[str]:
    """The data of each event."""
    lines = case["expected"]["stream"]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return data


def failure_of(err: Exception) -> dict[str, str]:
    return {"error": type(err).__name__, "message": str(err)}


def replay_openai(case: Case) -> dict[str, Any]:
    import httpx2
    import openai
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    event_model: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    kinds = [
        type(event_model.validate_json(data, strict=True)).__name__ for data in events_of(case)
    ]
    client = openai.OpenAI(
        base_url="http://baton.invalid/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.Client(transport=transport_of(case)),
    )
    asked: Any = {"model": "m", "input": "x"}
    seen: dict[str, Any] = {"models": sorted(set(kinds))}
    if case["expected"]["whole"] is not None:
        Response.model_validate_json(case["expected"]["whole"], strict=True)
        whole = client.responses.create(**asked)
        seen["whole"] = [item.model_dump(mode="json", exclude_unset=True) for item in whole.output]
        seen["whole_text"] = whole.output_text
    try:
        with client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
    except (RuntimeError, openai.OpenAIError) as err:
        return seen | failure_of(err)
    seen["streamed"] = [item.to_dict() for item in final.output]
    seen["text"] = final.output_text
    seen["usage"] = None if final.usage is None else final.usage.to_dict()
    return seen


def replay_anthropic(case: Case) -> dict[str, Any]:
    import anthropic
    import httpx2
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    event_model: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = [data for data in events_of(case) if json.loads(data)["type"] not in ("ping", "error")]
    kinds = [type(event_model.validate_json(data, strict=True)).__name__ for data in events]
    client = anthropic.Anthropic(
        base_url="http://baton.invalid",
        api_key="none",
        max_retries=0,
        http_client=httpx2.Client(transport=transport_of(case)),
    )
    asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    seen: dict[str, Any] = {"models": sorted(set(kinds))}
    if case["expected"]["whole"] is not None:
        Message.model_validate_json(case["expected"]["whole"], strict=True)
        whole = client.messages.create(**asked)
        seen["whole"] = [block.to_dict() for block in whole.content]
    try:
        with client.messages.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_message()
    except (RuntimeError, anthropic.AnthropicError) as err:
        return seen | failure_of(err)
    seen["streamed"] = [block.to_dict() for block in final.content]
    seen["stop"] = [final.stop_reason, final.stop_sequence]
    seen["usage"] = final.usage.to_dict()
    return seen


REPLAYS = {"openai": replay_openai, "anthropic": replay_anthropic}


def replay_all(library: str, cases: list[Case]) -> dict[str, Any]:
    """Values that a user of the library sees, by case name."""
    return {case["name"]: REPLAYS[library](case) for case in cases}


if __name__ == "__main__":
    print(json.dumps(replay_all(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
