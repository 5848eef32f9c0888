"""ROUTES: every path of engines and routers, in the order in which they are described.

The application, the OpenAPI document, the page of /docs, the table of docs/guide/api.md and the
lists of paths below are made of it. The router has its routes in `router/src/server/api/mod.rs`; a
test compares them with its document.
"""

from __future__ import annotations

from typing import Any

from baton.server.http.anthropic_errors import MESSAGES_PATH
from baton.server.http.routes import admin, answers, bodies, docs, fleet, generation, health, kv
from baton.server.http.routes.route import HTML, JSON_LINES, PLAIN_TEXT, Access, Route, Server
from baton.server.request import schema
from baton.server.text.answer_spec import Dialect

MESSAGES_EXAMPLE = [{"role": "user", "content": "What is Baton?"}]


def _routes(*paths: str, **same: Any) -> list[Route]:
    """The same route under several paths."""
    return [Route(path=path, **same) for path in paths]


GENERATION = [
    Route(
        path="/v1/chat/completions",
        methods=("post",),
        summary="Answer a conversation (OpenAI's chat completions)",
        tag="generation",
        handler=generation.answer_in(Dialect.CHAT),
        dialect=Dialect.CHAT,
        body=(schema.ChatCompletionRequest, schema.SamplingFields),
        example={"messages": MESSAGES_EXAMPLE, "max_tokens": 16},
        answer=answers.ChatCompletion,
        generates=True,
    ),
    Route(
        path="/v1/completions",
        methods=("post",),
        summary="Continue a text (OpenAI's completions)",
        tag="generation",
        handler=generation.answer_in(Dialect.COMPLETIONS),
        dialect=Dialect.COMPLETIONS,
        body=(schema.CompletionRequest, schema.SamplingFields),
        example={"prompt": "Baton is", "max_tokens": 16},
        answer=answers.TextCompletion,
        generates=True,
    ),
    Route(
        path="/v1/responses",
        methods=("post",),
        summary="Answer items (OpenAI's responses); nothing is stored",
        tag="generation",
        handler=generation.answer_in(Dialect.RESPONSES),
        dialect=Dialect.RESPONSES,
        body=(bodies.ResponsesRequest,),
        example={"input": "What is Baton?", "max_output_tokens": 16},
        answer=answers.ResponseObject,
        generates=True,
    ),
    Route(
        path=MESSAGES_PATH,
        methods=("post",),
        summary="Answer a conversation (Anthropic's messages)",
        tag="generation",
        handler=generation.answer_in(Dialect.MESSAGES),
        dialect=Dialect.MESSAGES,
        body=(bodies.MessagesRequest,),
        example={"messages": MESSAGES_EXAMPLE, "max_tokens": 16},
        answer=answers.MessageAnswer,
        generates=True,
    ),
    Route(
        path="/generate",
        methods=("post", "put"),
        summary="Continue a text or token ids (SGLang's native API)",
        tag="generation",
        handler=generation.answer_in(Dialect.GENERATE),
        dialect=Dialect.GENERATE,
        body=(schema.GenerateRequest,),
        example={"text": "Baton is", "sampling_params": {"max_new_tokens": 16}},
        generates=True,
    ),
    *(
        Route(
            path="/v1/responses" + path,
            methods=methods,
            summary="Refused: no responses are stored",
            tag="generation",
            handler=generation.refuse_stored_response,
            dialect=Dialect.RESPONSES,
            status=400,
        )
        for path, methods in (
            ("/{id}", ("get", "delete")),
            ("/{id}/input_items", ("get",)),
            ("/{id}/cancel", ("post",)),
            ("/compact", ("post",)),
        )
    ),
    Route(
        path=MESSAGES_PATH + "/count_tokens",
        methods=("post",),
        summary="Count the tokens that a messages request would have",
        tag="tokens",
        handler=generation.count_tokens,
        dialect=Dialect.MESSAGES,
        body=(bodies.CountTokensRequest,),
        example={"messages": MESSAGES_EXAMPLE},
        answer=answers.TokenCount,
    ),
]

TOKENS = [
    *_routes(
        "/tokenize",
        "/v1/tokenize",
        methods=("post",),
        summary="Token ids of a text or a conversation",
        tag="tokens",
        handler=generation.tokenize,
        body=(schema.TokenizeRequest,),
        example={"prompt": "Baton is"},
        answer=answers.TokenizeAnswer,
    ),
    *_routes(
        "/detokenize",
        "/v1/detokenize",
        methods=("post",),
        summary="Text of token ids",
        tag="tokens",
        handler=generation.detokenize,
        body=(schema.DetokenizeRequest,),
        example={"tokens": [1, 2, 3]},
        answer=answers.DetokenizeAnswer,
    ),
]

DESCRIPTION = [
    Route(
        path="/v1/models",
        methods=("get",),
        summary="Models that are served",
        tag="description",
        handler=docs.list_models,
        answer=answers.ModelList,
    ),
    Route(
        path="/v1/models/{id:.+}",
        methods=("get",),
        summary="One model",
        tag="description",
        handler=docs.show_model,
        answer=answers.Model,
    ),
    *_routes(
        "/get_model_info",
        "/model_info",
        methods=("get",),
        summary="Paths, type and context length of the model",
        tag="description",
        handler=docs.show_model_info,
    ),
    *_routes(
        "/get_server_info",
        "/server_info",
        methods=("get",),
        summary="Configuration, capacity and state of an engine",
        tag="description",
        handler=docs.show_server_info,
    ),
    Route(
        path="/version",
        methods=("get",),
        summary="Version of this server",
        tag="description",
        handler=docs.show_version,
        answer=answers.VersionAnswer,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Route(
        path="/openapi.json",
        methods=("get",),
        summary="This description",
        tag="description",
        handler=docs.show_document,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Route(
        path="/docs",
        methods=("get",),
        summary="This description as a page",
        tag="description",
        handler=docs.show_page,
        media_type=HTML,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
]

PROBES = [
    *_routes(
        "/health",
        "/ping",
        "/readyz",
        methods=("get",),
        summary="Engine: ready for requests. Router: /health and /ping say that it runs, /readyz "
        "that it has workers",
        tag="health",
        handler=health.show_readiness,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
    Route(
        path="/livez",
        methods=("get",),
        summary="The process runs",
        tag="health",
        handler=health.show_liveness,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
]
"""Paths that --health-port serves too."""

HEALTH = [
    *PROBES,
    *fleet.PROBES,
    Route(
        path="/health_generate",
        methods=("get",),
        summary="Generate a token on every rank",
        tag="health",
        handler=health.generate_token,
        router_access=Access.CONTROL,
    ),
    Route(
        path="/metrics",
        methods=("get",),
        summary="Metrics in Prometheus' text format",
        tag="health",
        handler=health.show_metrics,
        media_type=PLAIN_TEXT,
        engine_access=Access.OPEN,
        router_access=Access.OPEN,
    ),
]

CONTROL = [
    Route(
        path="/flush_cache",
        methods=("get", "post"),
        summary="Drop all cached prefixes that no request uses",
        tag="control",
        handler=kv.flush_cache,
        router_access=Access.CONTROL,
    ),
    Route(
        path="/abort_request",
        methods=("post",),
        summary="Abort a request by its id, its room, or all",
        tag="control",
        handler=admin.abort_requests,
        body=(schema.AbortRequest,),
        router_access=Access.CONTROL,
    ),
    Route(
        path="/v1/requests/{id:.+}/suspend",
        methods=("post",),
        summary="Take a running request out of the batch; it keeps its pages",
        tag="control",
        handler=admin.suspend_request,
        router_access=Access.CONTROL,
    ),
    Route(
        path="/v1/requests/{id:.+}/resume",
        methods=("post",),
        summary="Put a suspended request back into the batch",
        tag="control",
        handler=admin.resume_request,
        router_access=Access.CONTROL,
    ),
    Route(
        path="/drain",
        methods=("get",),
        summary="Requests that are left while the engine drains",
        tag="control",
        handler=admin.show_drain,
        on_router=False,
    ),
    Route(
        path="/drain",
        methods=("post",),
        summary="Refuse new requests and finish the others",
        tag="control",
        handler=admin.begin_drain,
        on_router=False,
    ),
    Route(
        path="/undrain",
        methods=("post",),
        summary="Take requests again",
        tag="control",
        handler=admin.end_drain,
        on_router=False,
    ),
]

ENGINE_STATE = [
    Route(
        path="/v1/loads",
        methods=("get",),
        summary="Queues and pages of each rank",
        tag="state",
        handler=kv.show_loads,
        on_router=False,
    ),
    Route(
        path="/get_load",
        methods=("get",),
        summary="Queues and pages of each rank",
        tag="state",
        handler=kv.show_sglang_load,
        on_router=False,
    ),
    Route(
        path="/v1/kv_events",
        methods=("get",),
        summary="Blocks that the prefix cache stores and evicts, one JSON object a line",
        tag="state",
        handler=kv.stream_events,
        on_router=False,
        media_type=JSON_LINES,
        query=("dp_rank", "epoch", "from_seq", "follow"),
    ),
    Route(
        path="/v1/scheduler/steps",
        methods=("get",),
        summary="The last decisions of the scheduler",
        tag="state",
        handler=admin.show_steps,
        on_router=False,
        query=("n",),
    ),
    Route(
        path="/debug/ledger",
        methods=("get",),
        summary="Pages and leases by owner",
        tag="state",
        handler=kv.show_ledger,
        on_router=False,
    ),
    Route(
        path="/debug/rooms",
        methods=("get",),
        summary="Timelines of live KV transfers",
        tag="state",
        handler=kv.show_rooms,
        on_router=False,
        query=("room",),
    ),
    Route(
        path="/debug/diagnosis",
        methods=("post",),
        summary="Facts for baton doctor",
        tag="state",
        handler=admin.diagnose,
        on_router=False,
        body=(schema.DiagnosisRequest,),
    ),
]

ROUTES = (
    *GENERATION,
    *TOKENS,
    *DESCRIPTION,
    *HEALTH,
    *CONTROL,
    *ENGINE_STATE,
    *fleet.FLEET,
    *fleet.WEB_PAGE,
    *fleet.PASSED_ON,
)


def routes_of(server: Server) -> list[Route]:
    return [route for route in ROUTES if server in route.servers]


OPEN_PATHS = frozenset(
    route.path for route in routes_of(Server.ENGINE) if route.access(Server.ENGINE) is Access.OPEN
)
"""Paths that an engine answers without a key."""
GENERATION_PATHS = frozenset(route.path for route in ROUTES if route.generates)
