"""Every path of engines and router: methods, bodies, answers, and the key it needs.

A test of each server compares this table with the routes that it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta, Struct

from baton.server.http.openapi import answers
from baton.server.request import schema

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
HTML = "text/html"
PLAIN_TEXT = "text/plain"
BYTES = "application/octet-stream"
JSON_LINES = "application/x-ndjson"


class Server(Enum):
    ENGINE = "engine"
    ROUTER = "router"


class Access(Enum):
    """Key that a request needs where the server has keys."""

    OPEN = "none"
    CLIENT = "API key"
    CONTROL = "control key"


class ResponsesRequest(Struct, kw_only=True):
    """Beside these all fields of chat requests that /v1/responses documents."""

    input: Any
    model: schema.Text = None
    instructions: str | None = None
    max_output_tokens: schema.Natural = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    prompt_cache_key: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    messages: list[Any]
    model: schema.Text = None
    system: Any = None
    tools: list[Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    tool_choice: Any = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class AddWorkerRequest(Struct, kw_only=True):
    url: str
    bootstrap_port: int | None = None
    topology: str | None = None


class AnyRequest(Struct, kw_only=True):
    """The body is the worker's to define."""


Body = tuple[type[Struct], ...]
ENGINE = frozenset({Server.ENGINE})
ROUTER = frozenset({Server.ROUTER})
BOTH = ENGINE | ROUTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path."""

    method: str
    path: str
    summary: str
    tag: str
    servers: frozenset[Server] = BOTH
    body: Body = ()
    """Structs that read the body; empty: none is read."""
    example: dict[str, Any] | None = None
    """A body that any model answers."""
    answer: type[Struct] | None = None
    """`None`: an object without a documented form, or no JSON."""
    media_type: str = JSON
    streams: bool = False
    """True if `"stream": true` in the body asks for events."""
    status: int = 200
    query: tuple[str, ...] = ()
    engine_access: Access = Access.CLIENT
    router_access: Access = Access.CLIENT
    has_anthropic_errors: bool = False

    def access(self, server: Server) -> Access:
        return self.engine_access if server is Server.ENGINE else self.router_access


def _all_paths(paths: tuple[str, ...], **same: Any) -> list[Operation]:
    return [Operation(path=path, **same) for path in paths]


MESSAGES_EXAMPLE = [{"role": "user", "content": "What is Baton?"}]
CHAT_BODY = (schema.ChatCompletionRequest, schema.SamplingFields)
COMPLETION_BODY = (schema.CompletionRequest, schema.SamplingFields)

GENERATION = [
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation (OpenAI's chat completions)",
        tag="generation",
        body=CHAT_BODY,
        example={"messages": MESSAGES_EXAMPLE, "max_tokens": 16},
        answer=answers.ChatCompletion,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a text (OpenAI's completions)",
        tag="generation",
        body=COMPLETION_BODY,
        example={"prompt": "Baton is", "max_tokens": 16},
        answer=answers.TextCompletion,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer items (OpenAI's responses); nothing is stored",
        tag="generation",
        body=(ResponsesRequest,),
        example={"input": "What is Baton?", "max_output_tokens": 16},
        answer=answers.ResponseObject,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/messages",
        summary="Answer a conversation (Anthropic's messages)",
        tag="generation",
        body=(MessagesRequest,),
        example={"messages": MESSAGES_EXAMPLE, "max_tokens": 16},
        answer=answers.MessageAnswer,
        streams=True,
        has_anthropic_errors=True,
    ),
    *(
        Operation(
            method=method,
            path="/generate",
            summary="Continue a text or token ids (SGLang's native API)",
            tag="generation",
            body=(schema.GenerateRequest,),
            example={"text": "Baton is", "sampling_params": {"max_new_tokens": 16}},
            streams=True,
        )
        for method in ("post", "put")
    ),
    *(
        Operation(
            method=method,
            path="/v1/responses" + path,
            summary="Refused: no responses are stored",
            tag="generation",
            status=400,
        )
        for method, path in (
            ("get", "/{id}"),
            ("delete", "/{id}"),
            ("get", "/{id}/input_items"),
            ("post", "/{id}/cancel"),
            ("post", "/compact"),
        )
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count the tokens that a messages request would have",
        tag="tokens",
        body=(CountTokensRequest,),
        example={"messages": MESSAGES_EXAMPLE},
        answer=answers.TokenCount,
        has_anthropic_errors=True,
    ),
]

TOKENS = [
    *_all_paths(
        ("/tokenize", "/v1/tokenize"),
        method="post",
        summary="Token ids of a text or a conversation",
        tag="tokens",
        body=(schema.TokenizeRequest,),
        example={"prompt": "Baton is"},
        answer=answers.TokenizeAnswer,
    ),
    *_all_paths(
        ("/detokenize", "/v1/detokenize"),
        method="post",
        summary="Text of token ids",
        tag="tokens",
        body=(schema.DetokenizeRequest,),
        example={"tokens": [1, 2, 3]},
        answer=answers.DetokenizeAnswer,
    ),
]

DESCRIPTION = [
    Operation(
        method="get",
        path="/v1/models",
        summary="Models that are served",
        tag="description",
        answer=answers.ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{id}",
        summary="One model",
        tag="description",
        answer=answers.Model,
    ),
    *_all_paths(
        ("/get_model_info", "/model_info"),
        method="get",
        summary="Paths, type and context length of the model",
        tag="description",
    ),
    *_all_paths(
        ("/get_server_info", "/server_info"),
        method="get",
        summary="Configuration, capacity and state of an engine",
        tag="description",
    ),
    Operation(
        method="get",
        path="/version",
        summary="Version of this server",
        tag="description",
        answer=answers.VersionAnswer,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/openapi.json",
        summary="This description",
        tag="description",
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/docs",
        summary="This description as a page",
        tag="description",
        media_type=HTML,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
]

HEALTH = [
    *_all_paths(
        ("/health", "/ping", "/readyz"),
        method="get",
        summary="Engine: ready for requests. Router: /health and /ping say that it runs, /readyz "
        "that it has workers",
        tag="health",
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/livez",
        summary="The process runs",
        tag="health",
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/liveness",
        summary="The process runs",
        tag="health",
        servers=ROUTER,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/readiness",
        summary="Ready for requests",
        tag="health",
        servers=ROUTER,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/health_generate",
        summary="Generate a token on every rank",
        tag="health",
        router_access=Access.CONTROL,
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="Metrics in Prometheus' text format",
        tag="health",
        media_type=PLAIN_TEXT,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
]

CONTROL = [
    *(
        Operation(
            method=method,
            path="/flush_cache",
            summary="Drop all cached prefixes that no request uses",
            tag="control",
            router_access=Access.CONTROL,
        )
        for method in ("get", "post")
    ),
    Operation(
        method="post",
        path="/abort_request",
        summary="Abort a request by its id, its room, or all",
        tag="control",
        body=(schema.AbortRequest,),
        router_access=Access.CONTROL,
    ),
    *(
        Operation(
            method="post",
            path="/v1/requests/{id}/" + verb,
            summary=summary,
            tag="control",
            router_access=Access.CONTROL,
        )
        for verb, summary in (
            ("suspend", "Take a running request out of the batch; it keeps its pages"),
            ("resume", "Put a suspended request back into the batch"),
        )
    ),
    Operation(
        method="get",
        path="/drain",
        summary="Requests that are left while the engine drains",
        tag="control",
        servers=ENGINE,
    ),
    Operation(
        method="post",
        path="/drain",
        summary="Refuse new requests and finish the others",
        tag="control",
        servers=ENGINE,
    ),
    Operation(
        method="post",
        path="/undrain",
        summary="Take requests again",
        tag="control",
        servers=ENGINE,
    ),
]

ENGINE_STATE = [
    *_all_paths(
        ("/v1/loads", "/get_load"),
        method="get",
        summary="Queues and pages of each rank",
        tag="state",
        servers=ENGINE,
    ),
    Operation(
        method="get",
        path="/v1/kv_events",
        summary="Blocks that the prefix cache stores and evicts, one JSON object a line",
        tag="state",
        servers=ENGINE,
        media_type=JSON_LINES,
        query=("dp_rank", "epoch", "from_seq", "follow"),
    ),
    Operation(
        method="get",
        path="/v1/scheduler/steps",
        summary="The last decisions of the scheduler",
        tag="state",
        servers=ENGINE,
        query=("n",),
    ),
    Operation(
        method="get",
        path="/debug/ledger",
        summary="Pages and leases by owner",
        tag="state",
        servers=ENGINE,
    ),
    Operation(
        method="get",
        path="/debug/rooms",
        summary="Timelines of live KV transfers",
        tag="state",
        servers=ENGINE,
        query=("room",),
    ),
    Operation(
        method="post",
        path="/debug/diagnosis",
        summary="Facts for baton doctor",
        tag="state",
        servers=ENGINE,
        body=(schema.DiagnosisRequest,),
    ),
]

FLEET = [
    Operation(
        method="get",
        path="/",
        summary="Names of the paths, or the web page for browsers",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/workers",
        summary="Workers with their state",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
    Operation(
        method="post",
        path="/workers",
        summary="Register a worker",
        tag="fleet",
        servers=ROUTER,
        body=(AddWorkerRequest,),
        router_access=Access.CONTROL,
    ),
    Operation(
        method="get",
        path="/workers/{id}",
        summary="One worker",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
    Operation(
        method="delete",
        path="/workers/{id}",
        summary="Forget a worker",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
    Operation(
        method="get",
        path="/workers/{id}/drain",
        summary="Requests that are left at a worker",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
    Operation(
        method="post",
        path="/workers/{id}/drain",
        summary="Send a worker no new requests",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
    Operation(
        method="post",
        path="/workers/{id}/undrain",
        summary="Send a worker requests again",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
    *(
        Operation(
            method=method,
            path=path,
            summary=summary,
            tag="fleet",
            servers=ROUTER,
            router_access=Access.CONTROL,
            query=query,
        )
        for method, path, summary, query in (
            ("post", "/add_worker", "Register a worker (SGLang's router)", ("url",)),
            ("post", "/remove_worker", "Forget a worker (SGLang's router)", ("url",)),
            ("get", "/list_workers", "URLs of the workers (SGLang's router)", ()),
            ("get", "/get_loads", "Requests in flight by worker", ()),
            ("post", "/start_profile", "Start the profiler of every worker that has one", ()),
            ("post", "/stop_profile", "Stop the profiler of every worker that has one", ()),
        )
    ),
    Operation(
        method="get",
        path="/engine_metrics",
        summary="Metrics of all workers and of the router in one exposition",
        tag="fleet",
        servers=ROUTER,
        media_type=PLAIN_TEXT,
        router_access=Access.CONTROL,
    ),
    Operation(
        method="get",
        path="/v1/requests/{id}",
        summary="Timeline of a request, running or ended",
        tag="fleet",
        servers=ROUTER,
        router_access=Access.CONTROL,
    ),
]

WEB_PAGE = [
    Operation(
        method="get",
        path="/ui",
        summary="The web page",
        tag="web page",
        servers=ROUTER,
        media_type=HTML,
        status=308,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/ui/",
        summary="The web page",
        tag="web page",
        servers=ROUTER,
        media_type=HTML,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/ui/{file}",
        summary="Files of the web page",
        tag="web page",
        servers=ROUTER,
        media_type=BYTES,
        router_access=Access.OPEN,
    ),
    Operation(
        method="get",
        path="/ui/feed",
        summary="State of the fleet, as events",
        tag="web page",
        servers=ROUTER,
        media_type=EVENT_STREAM,
        router_access=Access.CONTROL,
    ),
]

PASSED_ON = _all_paths(
    (
        "/v1/embeddings",
        "/encode",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/v1/classify",
        "/classify",
        "/pooling",
        "/parse_function_call",
        "/separate_reasoning",
        "/v1/audio/transcriptions",
    ),
    method="post",
    summary="Passed on to a worker of SGLang or vLLM; Baton's engines answer 404",
    tag="passed on",
    servers=ROUTER,
    body=(AnyRequest,),
)

OPERATIONS = (
    *GENERATION,
    *TOKENS,
    *DESCRIPTION,
    *HEALTH,
    *CONTROL,
    *ENGINE_STATE,
    *FLEET,
    *WEB_PAGE,
    *PASSED_ON,
)


def operations_of(server: Server) -> list[Operation]:
    return [operation for operation in OPERATIONS if server in operation.servers]
