"""The description of the API against the routes, the errors, and the specification of OpenAPI."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
from aiohttp import web

from baton import errors
from baton.server.http.app import engine_routes
from baton.server.http.openapi import __main__ as generator
from baton.server.http.openapi.document import openapi_document
from baton.server.http.openapi.page import api_table, docs_page
from baton.server.http.routes.route import Server
from baton.server.http.routes.table import GENERATION_PATHS, OPEN_PATHS, ROUTES, routes_of
from baton.server.text.answer_spec import Dialect

ROOT = Path(__file__).parents[4]


def test_files_that_the_router_embeds_are_current() -> None:
    for name, text in generator.embedded_files().items():
        path = ROOT / generator.ROUTER_FOLDER / name
        assert path.read_text(encoding="utf-8") == text, "run: python -m baton.server.http.openapi"


def test_page_of_all_paths_is_current() -> None:
    page = (ROOT / "docs/guide/api.md").read_text(encoding="utf-8")
    assert api_table() in page, "run: python -m baton.server.http.openapi"


def test_application_has_the_described_routes_with_and_without_a_slash() -> None:
    app = web.Application()
    app.add_routes(engine_routes(ROUTES))
    routes = set()
    for route in app.router.routes():
        if route.method != "HEAD":  # aiohttp makes one beside each GET
            assert route.resource is not None
            routes.add((route.method.lower(), route.resource.canonical))
    described = {
        (method, path)
        for path, methods in openapi_document(Server.ENGINE)["paths"].items()
        for method in methods
    }
    slashed = {(method, path + "/") for method, path in described}
    assert routes == described | slashed


def test_lists_of_paths_are_read_from_the_table() -> None:
    assert len(GENERATION_PATHS) == len(Dialect)
    assert {route.dialect for route in ROUTES if route.generates} == set(Dialect)
    assert OPEN_PATHS.isdisjoint(GENERATION_PATHS)
    assert {"/health", "/livez", "/metrics", "/openapi.json"} <= OPEN_PATHS


@pytest.mark.parametrize("server", Server)
def test_operations_name_their_errors_and_references_lead_somewhere(server: Server) -> None:
    document = openapi_document(server)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            assert {"400", "404", "503", "default"} <= set(responses), (method, path)
            if "requestBody" in operation:
                assert {"413", "415", "429"} <= set(responses), (method, path)
    for reference in re.findall(r"'\$ref': '([^']+)'", str(document)):
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["additionalProperties"] is True
    names = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    assert len(names) == len(set(names))


def test_error_schema_takes_the_errors_of_the_engine() -> None:
    schemas = openapi_document(Server.ENGINE)["components"]["schemas"]
    schema = {"$ref": "#/components/schemas/ErrorAnswer", "components": {"schemas": schemas}}
    validator = jsonschema.Draft202012Validator(schema)
    body = errors.BadRequest("n is 0; give 1 to 128", param="n").body()
    assert validator.is_valid(body)
    assert not validator.is_valid({"error": "n is 0"})


def test_router_describes_no_fields_that_only_routers_set() -> None:
    described = {
        server: openapi_document(server)["components"]["schemas"]["ChatCompletionRequest"]
        for server in Server
    }
    router, engine = (described[server]["properties"] for server in (Server.ROUTER, Server.ENGINE))
    assert set(engine) - set(router) == {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "baton_resume",
    }
    assert set(router) < set(engine)
    schemas = openapi_document(Server.ROUTER)["components"]["schemas"]
    # Control paths: the operator's fields.
    assert "bootstrap_port" in schemas["AddWorkerRequest"]["properties"]
    assert "bootstrap_room" in schemas["AbortRequest"]["properties"]


@pytest.mark.parametrize("server", Server)
def test_page_lists_every_operation_and_loads_nothing(server: Server) -> None:
    page = docs_page(openapi_document(server), server)
    for route in routes_of(server):
        assert f"<code>{route.described_path}</code>" in page
    assert re.findall(r"<script|<link|<img|https?://|url\(", page) == []
