"""The page of /docs: one HTML file without scripts and without anything from another server.

The table of docs/guide/api.md is made of the same routes.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from baton.server.http.routes.route import Route, Server
from baton.server.http.routes.table import ROUTES, routes_of

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; }
summary code { font-weight: 600; }
.method { display: inline-block; width: 4.5rem; text-transform: uppercase; opacity: .7; }
.help { opacity: .8; }
table { border-collapse: collapse; margin: .4rem 0 1rem 4.5rem; }
pre { margin: .4rem 0 .4rem 4.5rem; white-space: pre-wrap; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; overflow-wrap: anywhere; }
"""


def docs_page(document: dict[str, Any], server: Server) -> str:
    """The page of an OpenAPI document: each operation with its fields."""
    routes = routes_of(server)
    tags = list(dict.fromkeys(route.tag for route in routes))
    title = escape(document["info"]["title"])
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width">',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        '<p class="help">Also as <a href="openapi.json">openapi.json</a>. A path may end in one '
        "slash; HEAD is accepted where GET is.</p>",
    ]
    for tag in tags:
        parts.append(f"<h2>{escape(tag.capitalize())}</h2>")
        same_tag = [route for route in routes if route.tag == tag]
        parts.extend(
            _operation(route, method, server, document)
            for route in same_tag
            for method in route.methods
        )
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _operation(route: Route, method: str, server: Server, document: dict[str, Any]) -> str:
    key = route.access(server).value
    schemas = document["components"]["schemas"]
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type_of(schema))}</td></tr>"
        for struct in route.body
        for name, schema in schemas[struct.__name__]["properties"].items()
    ]
    fields = f"<table>{''.join(rows)}</table>" if rows else ""
    if route.example is not None:
        example = escape(json.dumps(route.example), quote=False)
        fields = f"<pre>{example}</pre>{fields}"
    return (
        f'<details><summary><span class="method">{method}</span>'
        f"<code>{escape(route.described_path)}</code> {escape(route.summary)}</summary>"
        f'<p class="help">Key: {escape(key)}.</p>{fields}</details>'
    )


def _type_of(schema: dict[str, Any]) -> str:
    """The type of a field in words, as "integer, 0 to 20"."""
    options = schema.get("anyOf", [schema])
    return " or ".join(_words_of(option) for option in options if option.get("type") != "null")


def _words_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = str(schema.get("type", "any"))
    least = schema.get("minimum")
    most = schema.get("maximum")
    if least is not None and most is not None:
        return f"{kind}, {least} to {most}"
    return kind


def api_table() -> str:
    """The table of docs/guide/api.md: every path with its methods, servers and keys."""
    rows = ["| path | methods | | key on engines | key on the router |", "|---|---|---|---|---|"]
    by_path: dict[str, list[Route]] = {}
    for route in ROUTES:
        by_path.setdefault(route.described_path, []).append(route)
    for path, routes in by_path.items():
        methods = ", ".join(method.upper() for route in routes for method in route.methods)
        summary = "; ".join(dict.fromkeys(route.summary for route in routes))
        keys = [_key_of(routes[0], server) for server in Server]
        rows.append(" | ".join([f"| `{path}`", methods, summary, *keys]) + " |")
    return "\n".join(rows)


def _key_of(route: Route, server: Server) -> str:
    """The key in words; a dash where the server does not have the path."""
    return route.access(server).value if server in route.servers else "-"
