"""`POST /debug/diagnosis`: facts that only this engine knows, for `baton doctor`.

* its host and the limits of its process (host_facts.py);
* proof of its cluster keys: HMACs of the caller's challenge, under keys derived from them that open
  nothing;
* links of its transfer runtimes, with the transport of each;
* how it reaches the prefill nodes that the caller names: the bootstrap server with a signed
  request, as a decode rank asks it, then the transfer port of each rank that has no link yet. A
  decode node connects to any address that a request names as `bootstrap_host`; this route gives no
  further reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from baton.config import KV_REMEDY, EngineConfig, is_loopback
from baton.server import fields
from baton.server.observability.host_facts import HostFacts
from baton.server.request.schema import DiagnosisRequest
from baton.server.text.native import native_extension

PROOF_LABEL = b"baton doctor: equal cluster keys"
PROBE_SECS = 3.0
"""For each request to a bootstrap server and each connection."""
MAX_RANKS = 64
"""Ranks looked at of each prefill node."""


def key_proof(cluster_key: str, challenge: str) -> str:
    """HMAC-SHA256 in hex of the challenge, under a key that serves for nothing but this."""
    derived = hmac.digest(cluster_key.encode(), PROOF_LABEL, hashlib.sha256)
    return hmac.digest(derived, challenge.encode(), hashlib.sha256).hex()


def _mac(cluster_key: str, text: str, body: bytes = b"") -> str:
    return hmac.digest(cluster_key.encode(), text.encode() + body, hashlib.sha256).hex()


def sign_request(cluster_key: str, path: str, at_ms: int) -> str:
    """Header of a GET to a bootstrap server (docs/protocol.md §3)."""
    stamp = f"{at_ms} {secrets.token_hex(8)}"
    return f"{stamp} " + _mac(cluster_key, f"GET\n{path}\n{stamp}\n")


class PrefillProbe:
    """Test of the way from a decode rank to one prefill node."""

    def __init__(
        self, config: EngineConfig, session: aiohttp.ClientSession, links: Mapping[str, str]
    ) -> None:
        """`links`: transport by address of the ranks that this engine is connected to."""
        self._config = config
        self._session = session
        self._links = links

    async def look(self, host: str, port: int) -> dict[str, Any]:
        """`bootstrap`: ok, unreachable, refused, untrusted or empty, with `detail`; `ranks`: one
        object for each.
        """
        if not self._config.is_kv_open and not is_loopback(host):
            detail = f"this node has no cluster key and asks loopback addresses only; {KV_REMEDY}"
            return {
                "host": host,
                "port": port,
                "bootstrap": "untrusted",
                "detail": detail,
                "ranks": [],
            }
        sizes_path = "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1"
        outcome, detail, sizes = await self._ask(host, port, sizes_path)
        count = min(_count(sizes), MAX_RANKS) if outcome == "ok" else 0
        ranks = await asyncio.gather(*(self._rank(host, port, rank) for rank in range(count)))
        return {"host": host, "port": port, "bootstrap": outcome, "detail": detail, "ranks": ranks}

    async def _rank(self, host: str, port: int, rank: int) -> dict[str, Any]:
        path = f"/route?engine_rank=0&target_dp_group={rank}&target_pp_rank=0"
        outcome, detail, route = await self._ask(host, port, path)
        found = {
            "rank": rank,
            "address": None,
            "transfer": outcome,
            "detail": detail,
            "transport": None,
        }
        if outcome != "ok":
            return found
        peer_host = str(route.get("rank_ip", ""))
        peer_port = route.get("rank_port")
        if type(peer_port) is not int or not 0 < peer_port < 65536:
            detail = f"the bootstrap server names no transfer port, but {peer_port!r}"
            return found | {"transfer": "refused", "detail": detail}
        found["address"] = _address(peer_host, peer_port)
        for known in await _numeric(peer_host, peer_port):
            if (transport := self._links.get(known)) is not None:
                return found | {"transfer": "linked", "transport": transport}
        problem = await _connect(peer_host, peer_port)
        return found | {"transfer": "unreachable" if problem else "reachable", "detail": problem}

    async def _ask(self, host: str, port: int, path: str) -> tuple[str, str, dict[str, Any]]:
        """Outcome, its detail and the answer's object."""
        key = self._config.cluster_key
        header = "" if key is None else sign_request(key, path, int(time.time() * 1000))
        url = f"http://{_address(host, port)}{path}"
        auth = native_extension().headers.AUTH
        try:
            async with self._session.get(url, headers={auth: header} if header else {}) as response:
                body = await response.content.read(1 << 16)
                status = response.status
                proof = response.headers.get(auth, "")
        except aiohttp.ClientConnectorError as err:
            return (
                "unreachable",
                f"{_address(host, port)}: {err.os_error.strerror or err.os_error}",
                {},
            )
        except asyncio.TimeoutError:
            return "unreachable", f"{_address(host, port)}: no answer within {PROBE_SECS:g} s", {}
        except (aiohttp.ClientError, OSError) as err:
            return "unreachable", f"{_address(host, port)}: {err}", {}
        if status == 401:
            return "refused", _message(body), {}
        if key is not None:
            expected = _mac(key, f"answer\n{header}\n{status}\n", body)
            if not hmac.compare_digest(expected, proof):
                return "untrusted", "its answer is not signed with this node's cluster key", {}
        if status == 404:
            return "empty", _message(body), {}
        if status != 200:
            return "refused", f"status {status}: {_message(body)}", {}
        try:
            return "ok", "", msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "refused", "its answer is no JSON object: another program listens there", {}


def _count(sizes: Mapping[str, Any]) -> int:
    """Ranks with a KV pool of their own; SGLang's bootstrap server uses the other name."""
    found = sizes.get("prefill_dp_size", sizes.get("dp_size"))
    return found if type(found) is int else 1


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _message(body: bytes) -> str:
    """Sentence of an error object of ours. Other texts are not repeated: the caller may name any
    server.
    """
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return "its answer is no error object: another program listens there"


async def _numeric(host: str, port: int) -> list[str]:
    """Addresses of a peer as the transfer runtime names them; none when the name does not
    resolve.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [_address(str(address[0]), port) for *_, address in found]


async def _connect(host: str, port: int) -> str:
    """Why no peer answers on a transfer port; empty: one does, P sends the first message."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_SECS)
    except asyncio.TimeoutError:
        return f"no connection to {_address(host, port)} within {PROBE_SECS:g} s"
    except OSError as err:
        return f"{_address(host, port)}: {err.strerror or err}"
    try:
        head = await asyncio.wait_for(reader.read(4), PROBE_SECS)
        return "" if head else f"{_address(host, port)} closed the connection at once"
    except (asyncio.TimeoutError, OSError) as err:
        return f"{_address(host, port)} sent nothing within {PROBE_SECS:g} s {err}".rstrip()
    finally:
        writer.close()


def links_of(books: list[dict[str, Any]]) -> dict[str, str]:
    """Transport by address of the peers in the ranks' ledgers; of D these are the ranks of prefill
    nodes.
    """
    found: dict[str, str] = {}
    for rank in books:
        for peer in rank.get("transfer", {}).get("detail", {}).get("peers", []):
            found[str(peer["addr"])] = str(peer["transport"])
    return found


async def diagnose(
    config: EngineConfig, body: Mapping[str, Any], books: list[dict[str, Any]]
) -> dict[str, Any]:
    """Answer of the route. `books`: what the ranks say to the control operation `ledger`."""
    targets = fields.read(DiagnosisRequest, body)
    links = links_of(books)
    keys = [key for key in (config.cluster_key, config.second_cluster_key) if key is not None]
    proofs = (
        [] if targets.challenge is None else [key_proof(key, targets.challenge) for key in keys]
    )
    timeout = aiohttp.ClientTimeout(total=PROBE_SECS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        probe = PrefillProbe(config, session, links)
        looks = await asyncio.gather(
            *(probe.look(node.host, node.port) for node in targets.prefill or ())
        )
    return {
        "host": HostFacts(),
        "has_cluster_key": config.cluster_key is not None,
        "cluster_key_proofs": proofs,
        "has_api_key": config.api_key is not None,
        "kv_listen_host": config.kv_listen_host,
        "links": links,
        "prefill": looks,
    }
