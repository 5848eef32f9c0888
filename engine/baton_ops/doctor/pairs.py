"""Checks of prefill and decode nodes together: keys, fingerprints, reachability, transports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.server.observability.host_facts import HostFacts
from baton.server.worker.transfer_setup import ON_DEVICE, TRANSPORTS
from baton_ops.doctor.check import Check, CheckResult, add_check, fail, ok, run_checks, skip, warn
from baton_ops.doctor.fleet import EngineView, FleetView

PAIR_CHECKS: list[Check[FleetView]] = []
SHOWN = 4
"""Addresses named in one sentence."""


def join_labels(labels: list[str]) -> str:
    others = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return ", ".join(labels[:SHOWN]) + others


# ---- cluster key ---------------------------------------------------------------------------------


@add_check(PAIR_CHECKS, "pair.cluster_key")
def check_cluster_keys(view: FleetView) -> Iterator[CheckResult]:
    """Compare proofs for one challenge; keys themselves are never shown.

    An engine signs with its first key and accepts both: they differ while keys are changed node by
    node.
    """
    engines = [e for e in view.diagnosed if e.role in ("prefill", "decode")]
    if len(engines) < 2:
        yield skip(f"{len(engines)} prefill and decode nodes of Baton answer")
        return
    groups: dict[str, list[EngineView]] = {}
    for engine in engines:
        groups.setdefault(next(iter(_find_proofs(engine)), ""), []).append(engine)
    without = groups.pop("", [])
    if not groups:
        yield ok(
            f"none of {len(without)} engines has a cluster key: KV stays on one host, or is open"
        )
        return
    largest = max(groups.values(), key=len)
    others = [engine for group in groups.values() if group is not largest for engine in group]
    refused = [
        engine.label
        for engine in others
        if not all(_accept_each_other(engine, one) for one in largest)
    ]
    remedy = (
        "give all engines the same --cluster-key (BATON_CLUSTER_KEY, or its Secret) and "
        "restart them"
    )
    if refused:
        largest_text = join_labels([e.label for e in largest])
        sentence = f"{join_labels(refused)}: the cluster key differs from that of {largest_text}"
        yield fail(sentence, remedy)
    elif others:
        sentence = (
            f"{join_labels([e.label for e in others])} signs with another cluster key, "
            "which all others accept"
        )
        yield warn(sentence, "finish the change of keys (docs/guide/security.md)")
    if without:
        yield fail(
            f"{join_labels([e.label for e in without])}: no cluster key, the other engines have "
            "one",
            remedy,
        )
    yield ok(f"{len(largest)} engines have the same cluster key")


def _find_proofs(engine: EngineView) -> list[str]:
    """Proof of the key that it signs with, then of the one that it accepts besides."""
    return [str(proof) for proof in engine.diagnosis.get("cluster_key_proofs") or []]


def _accept_each_other(one: EngineView, other: EngineView) -> bool:
    return _find_proofs(one)[0] in _find_proofs(other) and _find_proofs(other)[0] in _find_proofs(
        one
    )


# ---- fingerprints --------------------------------------------------------------------------------


def find_differences(prefill: EngineView, decode: EngineView) -> list[str]:
    """Fields of the fingerprint that both tell and that differ, with both values."""
    ours, theirs = (_read_fingerprint(engine) for engine in (prefill, decode))
    return [
        f"{name} {ours[name]} / {theirs[name]}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]


def _read_fingerprint(engine: EngineView) -> dict[str, str]:
    fingerprint = engine.info.get("fingerprint") or engine.worker.get("fingerprint") or {}
    return {name: str(value) for name, value in fingerprint.items()}


REMEDIES = {
    "model": "start both with the same --model-path and --model-impl",
    "tokenizer": "start both with the same tokenizer files",
    "chat_template": "start both with the same --chat-template",
    "page_size": "start both with the same --page-size",
    "dtype": "start both with the same --dtype and --kv-cache-dtype",
    "kv_layout": "start both with the same --tp-size and checkpoint",
}


@add_check(PAIR_CHECKS, "pair.fingerprint")
def check_fingerprints(view: FleetView) -> Iterator[CheckResult]:
    prefill = view.of_role("prefill")
    decode = view.of_role("decode")
    if not prefill or not decode:
        yield skip("there are no prefill and decode nodes to pair")
        return
    pairs = {(p.url, d.url): find_differences(p, d) for p in prefill for d in decode}
    fitting = {url for urls, differences in pairs.items() if not differences for url in urls}
    alone = [engine for engine in [*prefill, *decode] if engine.url not in fitting]
    for engine in alone:
        others = decode if engine.role == "prefill" else prefill
        text = "; ".join(
            next(differences for urls, differences in pairs.items() if engine.url in urls)
        )
        sentence = (
            f"{engine.label} pairs with none of {len(others)} {others[0].role} nodes: "
            f"{text} (prefill / decode)"
        )
        field = text.split(" ", 1)[0]
        yield fail(sentence, REMEDIES.get(field, "start both with the same checkpoint and flags"))
    misfits = [
        f"{p} and {d}: {'; '.join(differences)}"
        for (p, d), differences in pairs.items()
        if differences
    ]
    if misfits and not alone:
        sentence = f"{len(misfits)} of {len(pairs)} pairs do not fit, e.g. {misfits[0]}"
        yield warn(
            sentence,
            "expected while a new version is rolled out; else as for nodes that never pair",
        )
    yield ok(f"{len(pairs)} {'pair fits' if len(pairs) == 1 else 'pairs fit'} together")


# ---- reachability --------------------------------------------------------------------------------

BOOTSTRAP_REMEDIES = {
    "unreachable": "open the bootstrap port from D to P; without a cluster key P listens on "
    "127.0.0.1 only",
    "refused": "give both engines the same --cluster-key, and synchronize their clocks",
    "untrusted": "give both engines the same --cluster-key",
    "empty": "the prefill node's ranks have not registered: its log says why; a moment after its "
    "start this is normal",
}


TRANSFER_REMEDY = (
    "open the transfer ports from decode to prefill nodes (--transfer-port fixes them), and check "
    "--kv-host and --kv-advertise-host of the prefill node"
)


@add_check(PAIR_CHECKS, "pair.reachable")
def check_reachability(view: FleetView) -> Iterator[CheckResult]:
    """From where the decode node is, as the decode node reports it."""
    decode = view.of_role("decode")
    by_address = {p.bootstrap: p for p in view.of_role("prefill") if p.bootstrap}
    if not by_address or not decode:
        yield skip("there are no prefill and decode nodes to connect")
        return
    troubles: dict[tuple[str, str, str, str], list[str]] = {}
    seen = 0
    for engine in decode:
        for look in engine.diagnosis.get("prefill", []):
            seen += 1
            target = by_address[(look["host"], look["port"])]
            for kind, detail in _find_troubles(look):
                remedy = _reach_remedy(target, kind)
                trouble = (target.label, kind, detail, remedy)
                troubles.setdefault(trouble, []).append(engine.label)
    for (label, kind, detail, remedy), labels in troubles.items():
        yield fail(f"{join_labels(labels)} cannot fetch KV from {label}: {kind}: {detail}", remedy)
    unseen = [engine.label for engine in decode if engine.info and not engine.diagnosis]
    closed = [p.label for address, p in by_address.items() if address in view.closed_from_here]
    if unseen and closed:
        closed_text = join_labels(closed)
        sentence = (
            f"{join_labels(unseen)}: the way to prefill nodes is unknown; from this host "
            f"{closed_text} is closed"
        )
        yield warn(sentence, "open the bootstrap port, or run baton doctor beside the decode nodes")
    if unseen:
        yield ok(
            f"{join_labels(unseen)}: the way to prefill nodes is unknown; from this host it is open"
        )
    yield ok(f"bootstrap and transfer ports are open from D to P ({seen} looked at)")


def _reach_remedy(prefill: EngineView, kind: str) -> str:
    """Advice for a prefill node that a decode node does not reach, by the kind of trouble."""
    given = prefill.worker.get("bootstrap_port")
    own_port = prefill.info.get("disaggregation_bootstrap_port")
    if kind.startswith("bootstrap ") and own_port is not None and given != own_port:
        return (
            f"the router was given bootstrap port {given}, the node's is {own_port}: give the "
            f"router --prefill {prefill.url} {own_port}, or no port, which it then asks the node "
            "for"
        )
    return BOOTSTRAP_REMEDIES.get(kind.removeprefix("bootstrap "), TRANSFER_REMEDY)


def _find_troubles(look: dict[str, Any]) -> list[tuple[str, str]]:
    if look["bootstrap"] != "ok":
        return [(f"bootstrap {look['bootstrap']}", look["detail"])]
    return [
        (f"transfer port of rank {rank['rank']} {rank['transfer']}", rank["detail"])
        for rank in look["ranks"]
        if rank["transfer"] not in ("linked", "reachable")
    ]


# ---- transports ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransportChoice:
    best: str | None
    """The best transport that works for the pair, as far as their hosts tell."""
    refused: tuple[str, ...]
    """Why each better one does not."""


def choose_transport(prefill: EngineView, decode: EngineView) -> TransportChoice | None:
    """Work out what the transfer runtimes should choose.

    Returns None when a node has not reported its host.
    """
    if not prefill.diagnosis or not decode.diagnosis:
        return None
    # A simulated device has its pages in host memory.
    tables = [
        ON_DEVICE if str(e.info.get("device")).startswith("cuda") else TRANSPORTS
        for e in (prefill, decode)
    ]
    backends = [
        str(e.info.get("disaggregation_transfer_backend", "auto")) for e in (prefill, decode)
    ]
    ours, theirs = (table.get(backend, []) for table, backend in zip(tables, backends, strict=True))
    refused = []
    for transport in (tables[0] if tables[0] is tables[1] else TRANSPORTS)["auto"]:
        if transport not in ours or transport not in theirs:
            blamed = decode if transport in ours else prefill
            backend = blamed.info.get("disaggregation_transfer_backend")
            refused.append(
                f"{transport}: --disaggregation-transfer-backend {backend} of {blamed.label}"
            )
    for transport in theirs:
        if transport in ours:
            is_local = transport in ("shm", "cuda_ipc")
            problem = _same_host_problem(prefill.facts, decode.facts) if is_local else ""
            if not problem:
                return TransportChoice(transport, tuple(refused))
            refused.append(f"{transport}: {problem}")
    return TransportChoice(None, tuple(refused))


def _same_host_problem(ours: HostFacts, theirs: HostFacts) -> str:
    if not ours.boot_id or ours.boot_id != theirs.boot_id:
        return f"they run on different hosts ({ours.hostname}, {theirs.hostname})"
    if ours.network_namespace != theirs.network_namespace:
        return "they run in different network namespaces of one host"
    if ours.uid != theirs.uid:
        return f"they run as different users ({ours.uid}, {theirs.uid})"
    return ""


@add_check(PAIR_CHECKS, "pair.transport", shows_all=True)
def check_transports(view: FleetView) -> Iterator[CheckResult]:
    """Name the transport of each pair, and why it is not a better one."""
    prefill = {engine.bootstrap: engine for engine in view.of_role("prefill") if engine.bootstrap}
    judged = 0
    notes = []
    for engine in view.of_role("decode"):
        for look in engine.diagnosis.get("prefill", []):
            p = prefill[(look["host"], look["port"])]
            choice = choose_transport(p, engine)
            if choice is None or find_differences(p, engine) or look["bootstrap"] != "ok":
                continue  # other checks name what is wrong
            judged += 1
            pair = f"{p.url} -> {engine.url}"
            refusals = f" ({'; '.join(choice.refused)})" if choice.refused else ""
            used = sorted({rank["transport"] for rank in look["ranks"] if rank["transport"]})
            if choice.best is None and not used:
                remedy = (
                    "give both --disaggregation-transfer-backend auto, or one that both can use"
                )
                yield fail(f"{pair}: no transport serves this pair{refusals}", remedy)
            elif not used:
                notes.append(f"{pair}: {choice.best} expected, not connected yet{refusals}")
            elif choice.best is not None and used != [choice.best]:
                sentence = (
                    f"{pair}: KV travels by {', '.join(used)}, {choice.best} should work{refusals}"
                )
                remedy = (
                    "the decode node's log says why it changed; "
                    "baton_kv_transport_fallbacks_total counts it"
                )
                yield warn(sentence, remedy)
            else:
                notes.append(f"{pair}: {', '.join(used)}{refusals}")
    yield from (ok(note) for note in notes[:SHOWN])
    if len(notes) > SHOWN:
        yield ok(f"and {len(notes) - SHOWN} more pairs like these")
    if not judged:
        yield skip("no pair of Baton engines reports its transport")


def check_pairs(view: FleetView) -> list[CheckResult]:
    return run_checks(PAIR_CHECKS, view) if view.engines else []
