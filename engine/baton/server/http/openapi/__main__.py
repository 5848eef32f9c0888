"""`python -m baton.server.http.openapi`: write the files that the router embeds, print the table of
the guide.
"""

from __future__ import annotations

import json
from pathlib import Path

from baton.server.http.openapi.document import openapi_document
from baton.server.http.openapi.page import api_table, docs_page
from baton.server.http.routes.route import Server

ROUTER_FOLDER = "router/src/server/api/openapi"


def embedded_files() -> dict[str, str]:
    """The router's files by name."""
    document = openapi_document(Server.ROUTER)
    return {
        "openapi.json": json.dumps(document, indent=1) + "\n",
        "docs.html": docs_page(document, Server.ROUTER),
    }


if __name__ == "__main__":
    repository = Path(__file__).parents[5]
    for name, text in embedded_files().items():
        (repository / ROUTER_FOLDER / name).write_text(text, encoding="utf-8")
    print(api_table())
