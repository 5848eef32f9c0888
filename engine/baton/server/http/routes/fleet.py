"""Paths that only routers have."""

from __future__ import annotations

from baton.server.http.routes.bodies import AddWorkerRequest, AnyRequest
from baton.server.http.routes.route import (
    BYTES,
    EVENT_STREAM,
    HTML,
    PLAIN_TEXT,
    Access,
    Route,
)

PROBES = [
    Route(
        path="/liveness",
        methods=("get",),
        summary="The process runs",
        tag="health",
        router_access=Access.OPEN,
    ),
    Route(
        path="/readiness",
        methods=("get",),
        summary="Ready for requests",
        tag="health",
        router_access=Access.OPEN,
    ),
]

FLEET = [
    Route(
        path="/",
        methods=("get",),
        summary="Names of the paths, or the web page for browsers",
        tag="fleet",
        router_access=Access.OPEN,
    ),
    Route(
        path="/workers",
        methods=("get",),
        summary="Workers with their state",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
    Route(
        path="/workers",
        methods=("post",),
        summary="Register a worker",
        tag="fleet",
        body=(AddWorkerRequest,),
        router_access=Access.CONTROL,
    ),
    Route(
        path="/workers/{id}",
        methods=("get",),
        summary="One worker",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
    Route(
        path="/workers/{id}",
        methods=("delete",),
        summary="Forget a worker",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
    Route(
        path="/workers/{id}/drain",
        methods=("get",),
        summary="Requests that are left at a worker",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
    Route(
        path="/workers/{id}/drain",
        methods=("post",),
        summary="Send a worker no new requests",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
    Route(
        path="/workers/{id}/undrain",
        methods=("post",),
        summary="Send a worker requests again",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
    *(
        Route(
            path=path,
            methods=(method,),
            summary=summary,
            tag="fleet",
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
    Route(
        path="/engine_metrics",
        methods=("get",),
        summary="Metrics of all workers and of the router in one exposition",
        tag="fleet",
        media_type=PLAIN_TEXT,
        router_access=Access.CONTROL,
    ),
    Route(
        path="/v1/requests/{id}",
        methods=("get",),
        summary="Timeline of a request, running or ended",
        tag="fleet",
        router_access=Access.CONTROL,
    ),
]

WEB_PAGE = [
    Route(
        path="/ui",
        methods=("get",),
        summary="The web page",
        tag="web page",
        media_type=HTML,
        status=308,
        router_access=Access.OPEN,
    ),
    Route(
        path="/ui/",
        methods=("get",),
        summary="The web page",
        tag="web page",
        media_type=HTML,
        router_access=Access.OPEN,
    ),
    Route(
        path="/ui/{file}",
        methods=("get",),
        summary="Files of the web page",
        tag="web page",
        media_type=BYTES,
        router_access=Access.OPEN,
    ),
    Route(
        path="/ui/feed",
        methods=("get",),
        summary="State of the fleet, as events",
        tag="web page",
        media_type=EVENT_STREAM,
        router_access=Access.CONTROL,
    ),
]

PASSED_ON = [
    Route(
        path=path,
        methods=("post",),
        summary="Passed on to a worker of SGLang or vLLM; Baton's engines answer 404",
        tag="passed on",
        body=(AnyRequest,),
    )
    for path in (
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
    )
]
