"""The OpenAPI document of a server, from the table of routes and the structs that read bodies.

Objects may have more members than the document names: clients send what other servers know, and
fields without effect are named in the header `x-ignored-params`.
"""

from __future__ import annotations

import functools
import re
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from baton import errors
from baton.server.http.routes import answers
from baton.server.http.routes.route import EVENT_STREAM, JSON, Access, Route, Server
from baton.server.http.routes.table import routes_of
from baton.server.text.native import native_extension

REF = "#/components/schemas/{name}"
BODY_ERRORS = (
    errors.BadRequest,
    errors.InvalidApiKey,
    errors.ForeignOrigin,
    errors.NotFound,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
    errors.RateLimited,
    errors.EngineError,
    errors.NotReady,
    errors.RequestTimeout,
)
"""An error for each status that a request with a body may be answered with."""
OTHER_ERRORS = (
    errors.BadRequest,
    errors.InvalidApiKey,
    errors.HostNotAllowed,
    errors.NotFound,
    errors.NotReady,
)
"""The same without a body."""
DESCRIPTIONS = {
    "400": "The request is wrong",
    "401": "The key is missing or unknown",
    "403": "The key does not open this path, or a web page may not ask for it",
    "404": "There is no such path, model or request",
    "413": "The body is too large",
    "415": "The body is not plain JSON",
    "429": "There is no place; try again later",
    "500": "This server failed",
    "502": "A worker failed",
    "503": "This server takes no requests at present",
    "504": "The request took too long",
    "default": "Any other error",
}
ROUTER_STATUSES = frozenset({"502"})
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")

_ERROR_PREFIX = {False: "Error", True: "AnthropicError"}
_ERROR_STRUCTS: dict[bool, type[Struct]] = {
    False: answers.ErrorAnswer,
    True: answers.AnthropicErrorAnswer,
}

Json = dict[str, Any]


@functools.cache
def openapi_document(server: Server) -> Json:
    """The OpenAPI 3.1 document of an engine or a router. Equal for equal servers: no version of the
    program, no address."""
    routes = routes_of(server)
    paths: dict[str, Json] = {}
    for route in routes:
        for method in route.methods:
            paths.setdefault(route.described_path, {})[method] = _operation(route, method, server)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Baton {server.value}", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": _schemas(routes, server),
            "responses": _error_responses(),
            "securitySchemes": {
                access.name.lower(): {"type": "http", "scheme": "bearer"}
                for access in (Access.CLIENT, Access.CONTROL)
            },
        },
    }


def _schemas(routes: list[Route], server: Server) -> Json:
    structs: set[type[Struct]] = {answers.ErrorAnswer, answers.AnthropicErrorAnswer}
    for route in routes:
        structs.update(route.body)
        if route.answer is not None:
            structs.add(route.answer)
    by_name = sorted(structs, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(by_name, ref_template=REF)
    for schema in schemas.values():
        schema["additionalProperties"] = True
    if server is Server.ROUTER:
        _leave_out_router_fields(routes, schemas)
    return dict(sorted(schemas.items()))


def _leave_out_router_fields(routes: list[Route], schemas: dict[str, Json]) -> None:
    """Remove the members of clients' bodies that reach no worker. Bodies of control paths keep
    theirs: an operator says where P's bootstrap server is, or which room to abort.
    """
    is_router_field = native_extension().is_router_field
    for route in routes:
        if route.access(Server.ROUTER) is Access.CONTROL:
            continue
        for struct in route.body:
            properties = schemas[struct.__name__]["properties"]
            for name in [name for name in properties if is_router_field(name)]:
                del properties[name]


def _operation(route: Route, method: str, server: Server) -> Json:
    described: Json = {
        "operationId": _operation_id(route, method),
        "summary": route.summary,
        "tags": [route.tag],
        "responses": _responses(route, server),
    }
    access = route.access(server)
    if access is not Access.OPEN:
        # Servers without keys take requests without one.
        described["security"] = [{access.name.lower(): []}, {}]
    parameters = _parameters(route)
    if parameters:
        described["parameters"] = parameters
    if route.body:
        schemas = [_ref(struct) for struct in route.body]
        schema = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
        content: Json = {"schema": schema}
        if route.example is not None:
            content["example"] = route.example
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    return described


def _operation_id(route: Route, method: str) -> str:
    path = route.described_path
    if path.endswith("/"):
        path += "index"
    words = re.findall(r"\w+", path)
    return "_".join([method, *words])


def _parameters(route: Route) -> list[Json]:
    names = _PATH_PARAMETER.findall(route.described_path)
    in_path = [{"name": name, "in": "path", "required": True} for name in names]
    in_query = [{"name": name, "in": "query", "required": False} for name in route.query]
    return [{**place, "schema": {"type": "string"}} for place in in_path + in_query]


def _responses(route: Route, server: Server) -> Json:
    responses: Json = {str(route.status): _good_answer(route)}
    kinds = BODY_ERRORS if route.body else OTHER_ERRORS
    statuses = {str(kind.status) for kind in kinds} | {"default"}
    if server is Server.ROUTER:
        statuses |= ROUTER_STATUSES
    prefix = _ERROR_PREFIX[route.has_anthropic_errors]
    for status in sorted(statuses):
        responses[status] = {"$ref": f"#/components/responses/{prefix}{status}"}
    return responses


def _error_responses() -> Json:
    responses: Json = {}
    for has_anthropic_errors, struct in _ERROR_STRUCTS.items():
        content = {JSON: {"schema": _ref(struct)}}
        for status, description in DESCRIPTIONS.items():
            name = _ERROR_PREFIX[has_anthropic_errors] + status
            responses[name] = {"description": description, "content": content}
    return responses


def _good_answer(route: Route) -> Json:
    if route.status >= HTTPStatus.MULTIPLE_CHOICES:
        return {"description": "A redirect"}
    if route.answer is not None:
        schema = _ref(route.answer)
    elif route.media_type == JSON:
        schema = {}
    else:
        schema = {"type": "string"}
    content: Json = {route.media_type: {"schema": schema}}
    if route.generates:
        # A schema here is one of each event (OpenAPI 3.2), and events differ.
        content[EVENT_STREAM] = {}
    return {"description": "The answer", "content": content}


def _ref(struct: type[Struct]) -> Json:
    return {"$ref": REF.format(name=struct.__name__)}
