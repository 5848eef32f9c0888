"""Runs under another environment's Python: `transformers serve` without some of its paths.

Usage: serve_transformers.py MODEL PORT [PATH …]. The paths that follow answer 404, as on a server that lacks them.
"""

import sys
from typing import Any

from transformers.cli import serve
from transformers.cli.serving import server

build_server = server.build_server


def main(model: str, port: int, lacking: list[str]) -> None:
    def build_without(*args: Any, **options: Any) -> Any:
        app = build_server(*args, **options)
        kept = [route for route in app.router.routes if route.path not in lacking]
        app.router.routes[:] = kept
        return app

    server.build_server = build_without
    serve.Serve(force_model=model, host="127.0.0.1", port=port, device="cpu")


main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
