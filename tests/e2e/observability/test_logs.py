"""Log lines of a whole cluster under `baton up --log-format json`: each is one object, in UTC."""

from __future__ import annotations

import datetime
import json

from tests.support.processes.cluster import Cluster, eventually


def test_every_line_of_router_and_engines_is_json_in_utc() -> None:
    flags = ("--simulate", "reference", "--log-format", "json", "--transport", "tcp")
    started = datetime.datetime.now(datetime.timezone.utc)
    with Cluster.up(*flags, env={"TZ": "Asia/Tokyo"}) as cluster:
        cluster.generate_ids(list(range(1000, 1100)), max_tokens=4)

        def events(name: str) -> list[dict[str, object]]:
            text = (cluster.folder / "logs" / f"{name}.log").read_text()
            return [json.loads(line) for line in text.splitlines()]

        def request_line() -> dict[str, object] | None:
            found = [event for event in events("decode-0") if event["message"] == "request"]
            return found[0] if found else None

        request = eventually("the decode node's line of the request", request_line)
        assert (request["outcome"], request["completion_tokens"]) == ("ok", 4)
        assert isinstance(request["ttft_ms"], float)
        cluster.interrupt()
        everything = {name: events(name) for name in ("router", "prefill-0", "decode-0")}
    ended = datetime.datetime.now(datetime.timezone.utc)
    for name, lines in everything.items():
        for event in lines:
            at = datetime.datetime.fromisoformat(str(event["timestamp"]).replace("Z", "+00:00"))
            assert started <= at <= ended, (name, event)
    for name in ("prefill-0", "decode-0"):
        of_rank = {str(event["target"]) for event in everything[name] if "process" in event}
        assert any(target.startswith("kv_transfer") for target in of_rank), of_rank
        assert any(event["message"] == "READY" for event in everything[name])
