"""Checks of prefill and decode nodes together: keys, fingerprints, the way from D to P, transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.cli.doctor.check import CheckResult, fail, ok, problems_or_ok, skip, warn
from baton.cli.doctor.fleet import EngineView, FleetView
from baton.server.observability.host_facts import HostFacts
from baton.server.worker.transfer_setup import ON_DEVICE, TRANSPORTS

SHOWN = 4
"""Addresses named in one sentence."""


def named(labels: list[str]) -> str:
    more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return ", ".join(labels[:SHOWN]) + more


# ---- cluster key -----------------------------------------------------------------------------------------------


def check_cluster_keys(view: FleetView) -> list[CheckResult]:
    """Compare proofs for one challenge; keys themselves are never shown.

    An engine signs with its first key and accepts both: they differ while keys are changed node by node.
    """
    name = "pair.cluster_key"
    engines = [e for e in view.diagnosed if e.role in ("prefill", "decode")]
    if len(engines) < 2:
        return [skip(name, f"{len(engines)} prefill and decode nodes of Baton answer")]
    groups: dict[str, list[EngineView]] = {}
    for engine in engines:
        groups.setdefault(next(iter(_proofs(engine)), ""), []).append(engine)
    without = groups.pop("", [])
    if not groups:
        return [ok(name, f"none of {len(without)} engines has a cluster key: KV stays on one host, or is open")]
    largest = max(groups.values(), key=len)
    others = [engine for group in groups.values() if group is not largest for engine in group]
    refused = [engine.label for engine in others if not all(_accept_each_other(engine, one) for one in largest)]
    remedy = "give all engines the same --cluster-key (BATON_CLUSTER_KEY, or its Secret) and restart them"
    problems = []
    if refused:
        sentence = f"{named(refused)}: the cluster key differs from that of {named([e.label for e in largest])}"
        problems.append(fail(name, sentence, remedy))
    elif others:
        sentence = f"{named([e.label for e in others])} signs with another cluster key, which all others accept"
        problems.append(warn(name, sentence, "finish the change of keys (docs/operations.md, Change the cluster key)"))
    if without:
        sentence = f"{named([e.label for e in without])}: no cluster key, the other engines have one"
        problems.append(fail(name, sentence, remedy))
    return problems_or_ok(name, problems, f"{len(largest)} engines have the same cluster key")


def _proofs(engine: EngineView) -> list[str]:
    """Proof of the key that it signs with, then of the one that it accepts besides."""
    return [str(proof) for proof in engine.diagnosis.get("cluster_key_proofs") or []]


def _accept_each_other(one: EngineView, other: EngineView) -> bool:
    return _proofs(one)[0] in _proofs(other) and _proofs(other)[0] in _proofs(one)


# ---- fingerprints ----------------------------------------------------------------------------------------------


def differences(prefill: EngineView, decode: EngineView) -> list[str]:
    """Fields of the fingerprint that both tell and that differ, with both values."""
    ours, theirs = (_fingerprint(engine) for engine in (prefill, decode))
    return [f"{name} {ours[name]} / {theirs[name]}" for name in ours if name in theirs and ours[name] != theirs[name]]


def _fingerprint(engine: EngineView) -> dict[str, str]:
    found = engine.info.get("fingerprint") or engine.worker.get("fingerprint") or {}
    return {name: str(value) for name, value in found.items()}


REMEDIES = {
    "model": "start both with the same --model-path",
    "tokenizer": "start both with the same tokenizer files",
    "chat_template": "start both with the same --chat-template",
    "page_size": "start both with the same --page-size",
    "dtype": "start both with the same --dtype",
    "kv_layout": "start both with the same --tp-size and checkpoint",
}


def check_fingerprints(view: FleetView) -> list[CheckResult]:
    name, prefill, decode = "pair.fingerprint", view.of_role("prefill"), view.of_role("decode")
    if not prefill or not decode:
        return [skip(name, "there are no prefill and decode nodes to pair")]
    misfits = {(p.url, d.url): found for p in prefill for d in decode if (found := differences(p, d))}
    problems = []
    for engine, others in [(p, decode) for p in prefill] + [(d, prefill) for d in decode]:
        keys = [(engine.url, o.url) if engine.role == "prefill" else (o.url, engine.url) for o in others]
        if all(key in misfits for key in keys):
            text = "; ".join(misfits[keys[0]])
            field = text.split(" ", 1)[0]
            sentence = (
                f"{engine.label} pairs with none of {len(others)} {others[0].role} nodes: {text} (prefill / decode)"
            )
            problems.append(fail(name, sentence, REMEDIES.get(field, "start both with the same checkpoint and flags")))
    if misfits and not problems:
        (p, d), found = next(iter(misfits.items()))
        sentence = (
            f"{len(misfits)} of {len(prefill) * len(decode)} pairs do not fit, e.g. {p} and {d}: {'; '.join(found)}"
        )
        problems.append(
            warn(name, sentence, "expected while a new version is rolled out; else as for nodes that never pair")
        )
    count = len(prefill) * len(decode)
    return problems_or_ok(name, problems, f"{count} {'pair fits' if count == 1 else 'pairs fit'} together")


# ---- reachability ----------------------------------------------------------------------------------------------

BOOTSTRAP_REMEDIES = {
    "unreachable": "open the bootstrap port from D to P; without a cluster key P listens on 127.0.0.1 only",
    "refused": "give both engines the same --cluster-key, and synchronize their clocks",
    "untrusted": "give both engines the same --cluster-key",
    "empty": "the prefill node's ranks have not registered: its log says why; a moment after its start this is normal",
}


TRANSFER_REMEDY = (
    "open the transfer ports from decode to prefill nodes (--transfer-port fixes them), and check --kv-host and "
    "--kv-advertise-host of the prefill node"
)


def check_reachability(view: FleetView) -> list[CheckResult]:
    """From where the decode node is, as the decode node reports it."""
    name, prefill, decode = "pair.reachable", view.of_role("prefill"), view.of_role("decode")
    by_address = {p.bootstrap: p for p in prefill if p.bootstrap}
    if not by_address or not decode:
        return [skip(name, "there are no prefill and decode nodes to connect")]
    troubles: dict[tuple[str, str, str], list[str]] = {}
    seen = 0
    for engine in decode:
        for look in engine.diagnosis.get("prefill", []):
            seen += 1
            target = by_address[(look["host"], look["port"])]
            for kind, detail in _troubles(look):
                troubles.setdefault((target.label, kind, detail), []).append(engine.label)
    problems = [
        fail(
            name,
            f"{named(labels)} cannot fetch KV from {target}: {kind}: {detail}",
            BOOTSTRAP_REMEDIES.get(kind.removeprefix("bootstrap "), TRANSFER_REMEDY),
        )
        for (target, kind, detail), labels in troubles.items()
    ]
    unseen = [engine.label for engine in decode if engine.info and not engine.diagnosis]
    closed = [p.label for address, p in by_address.items() if address in view.closed_from_here]
    if unseen and closed:
        sentence = f"{named(unseen)}: the way to prefill nodes is unknown; from this host {named(closed)} is closed"
        problems.append(warn(name, sentence, "open the bootstrap port, or run baton doctor beside the decode nodes"))
    if unseen and not problems:
        sentence = f"{named(unseen)}: the way to prefill nodes is unknown; from this host it is open"
        return [ok(name, sentence)]
    return problems_or_ok(name, problems, f"bootstrap and transfer ports are open from D to P ({seen} looked at)")


def _troubles(look: dict[str, Any]) -> list[tuple[str, str]]:
    if look["bootstrap"] != "ok":
        return [(f"bootstrap {look['bootstrap']}", look["detail"])]
    return [
        (f"transfer port of rank {rank['rank']} {rank['transfer']}", rank["detail"])
        for rank in look["ranks"]
        if rank["transfer"] not in ("linked", "reachable")
    ]


# ---- transports ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransportChoice:
    best: str | None
    """The best transport that works for the pair, as far as their hosts tell."""
    refused: tuple[str, ...]
    """Why each better one does not."""


def choose_transport(prefill: EngineView, decode: EngineView) -> TransportChoice | None:
    """Work out what the transfer runtimes should choose; None when a node has not reported its host."""
    ours, theirs = prefill.facts, decode.facts
    if ours is None or theirs is None:
        return None
    on_device = {engine.info.get("device", "cpu") != "cpu" for engine in (prefill, decode)}
    table = ON_DEVICE if on_device == {True} else TRANSPORTS
    allowed = [_allowed(engine, on_device=engine.info.get("device", "cpu") != "cpu") for engine in (prefill, decode)]
    both = [transport for transport in allowed[1] if transport in allowed[0]]
    refused = []
    for transport in table["auto"]:
        if transport in both:
            continue
        blames = next(e for e, can in zip((prefill, decode), allowed, strict=True) if transport not in can)
        backend = blames.info.get("disaggregation_transfer_backend")
        refused.append(f"{transport}: --disaggregation-transfer-backend {backend} of {blames.label}")
    for transport in both:
        problem = _same_host_problem(ours, theirs) if transport in ("shm", "cuda_ipc") else ""
        if not problem:
            return TransportChoice(transport, tuple(refused))
        refused.append(f"{transport}: {problem}")
    return TransportChoice(None, tuple(refused))


def _allowed(engine: EngineView, *, on_device: bool) -> list[str]:
    backend = str(engine.info.get("disaggregation_transfer_backend", "auto"))
    return (ON_DEVICE if on_device else TRANSPORTS).get(backend, [])


def _same_host_problem(ours: HostFacts, theirs: HostFacts) -> str:
    if not ours.boot_id or ours.boot_id != theirs.boot_id:
        return f"they run on different hosts ({ours.hostname}, {theirs.hostname})"
    if ours.network_namespace != theirs.network_namespace:
        return "they run in different network namespaces of one host"
    if ours.uid != theirs.uid:
        return f"they run as different users ({ours.uid}, {theirs.uid})"
    return ""


def check_transports(view: FleetView) -> list[CheckResult]:
    """Name the transport of each pair, and why it is not a better one."""
    name = "pair.transport"
    prefill = {engine.bootstrap: engine for engine in view.of_role("prefill") if engine.bootstrap}
    problems, notes = [], []
    for engine in view.of_role("decode"):
        for look in engine.diagnosis.get("prefill", []):
            p = prefill[(look["host"], look["port"])]
            choice = choose_transport(p, engine)
            if choice is None or differences(p, engine) or look["bootstrap"] != "ok":
                continue  # other checks name what is wrong
            pair = f"{p.url} -> {engine.url}"
            why = f" ({'; '.join(choice.refused)})" if choice.refused else ""
            used = sorted({rank["transport"] for rank in look["ranks"] if rank["transport"]})
            if choice.best is None and not used:
                remedy = "give both --disaggregation-transfer-backend auto, or one that both can use"
                problems.append(fail(name, f"{pair}: no transport serves this pair{why}", remedy))
            elif not used:
                notes.append(f"{pair}: {choice.best} expected, not connected yet{why}")
            elif choice.best is not None and used != [choice.best]:
                sentence = f"{pair}: KV travels by {', '.join(used)}, {choice.best} should work{why}"
                remedy = "the decode node's log says why it changed; baton_kv_transport_fallbacks_total counts it"
                problems.append(warn(name, sentence, remedy))
            else:
                notes.append(f"{pair}: {', '.join(used)}{why}")
    if not problems and not notes:
        return [skip(name, "no pair of Baton engines reports its transport")]
    return [*problems, *(ok(name, sentence) for sentence in notes[:SHOWN])] + (
        [ok(name, f"and {len(notes) - SHOWN} more pairs like these")] if len(notes) > SHOWN else []
    )


PAIR_CHECKS: tuple[Callable[[FleetView], list[CheckResult]], ...] = (
    check_cluster_keys,
    check_fingerprints,
    check_reachability,
    check_transports,
)


def check_pairs(view: FleetView) -> list[CheckResult]:
    return [result for check in PAIR_CHECKS for result in check(view)] if view.engines else []
