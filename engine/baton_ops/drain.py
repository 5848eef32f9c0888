"""`baton drain`: take engines out of service, show what they have left, return them.

1. Targets become places: the URL of an engine, the URL of a router's worker (ROUTER/workers/ID), or
   the engines of Kubernetes pods, found with `kubectl get pods`;
2. before a drain every place is asked how many other ready nodes could take its requests: a drain
   that leaves none needs --force, or a yes on a terminal;
3. every place gets the order to drain or, with --undo, to return to service; --status only asks;
4. --wait asks each second what is left, until nothing is or --timeout has passed.

Engines of pods are asked by `kubectl exec`, from inside: they listen on the pod's address only,
network policies let only routers reach them, and the key is in the container's environment. That
takes the rights `get pods`, `list pods` and `create pods/exec`. With --router the router passes the
order on, and reading pods is enough.

Exit codes: 0 done, 1 a target could not be asked or returned to service meanwhile, 2 wrong flags, 3
work is left, 4 refused: no ready node would be left for the requests of a target.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.config.flags import FlagParser, add_flags, exit_with_mistakes, flags_table, opt
from baton.errors import counted
from baton_ops.clients.flags import API_KEY_ENV, make_client
from baton_ops.clients.http_client import NO_HTTP, connection_remedy
from baton_ops.clients.kubectl import Kubectl, KubectlError
from baton_ops.clients.local_keys import known_control_key

PROG = "baton drain"
LOOK_EVERY_SECS = 1.0
ASK_SECS = 30.0
"""For one answer; a router passes the question on with a limit of its own."""
EXEC_SECS = 60.0
"""For one kubectl command."""
MOST_AT_ONCE = 16
"""Places asked at the same time."""
FAILED = 1
LEFT = 3
REFUSED = 4
EXIT_CODES = (
    "exit code: 0 done, 1 a target could not be asked or returned to service meanwhile, 2 wrong "
    "flags, 3 work is left after --timeout, 4 a target is the last ready node of its role and "
    "--force is missing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """Flags of the command."""

    wait: bool = opt(
        False,
        "show the remaining work each second, and end with it: exit code 0, or 3 after --timeout",
    )
    timeout_secs: float = opt(600.0, "longest wait [s]", also=("--timeout",))
    undo: bool = opt(False, "return the targets to service")
    force: bool = opt(
        False, "drain the last ready node of a role too: its requests wait for another one and fail"
    )
    status: bool = opt(False, "show the remaining work, change nothing")
    json: bool = opt(False, "print one JSON object per look instead of text")
    key: str | None = opt(None, "key of engines, or of the router's control plane", env=API_KEY_ENV)
    ca_cert: str | None = opt(
        None, "PEM file of an authority to trust besides the system's, for https addresses"
    )
    router: str | None = opt(
        None, "URL of a router that passes orders for pods on, instead of kubectl exec"
    )
    namespace: str = opt("baton", "namespace of the pods")
    selector: str = opt(
        "app.kubernetes.io/name=baton,app.kubernetes.io/component!=router",
        "labels of the engine pods of a node",
    )
    kubectl: str = opt(
        "kubectl",
        "command that reaches the cluster, with its flags: --kubectl='kubectl --context x'",
    )


class DrainFailed(Exception):
    """A target that cannot be asked, and what to do about it."""


class Gone(DrainFailed):
    """Nothing is at the place any more."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """Last answer of a place."""

    target: str
    state: str
    is_drained: bool = False
    left: dict[str, Any] = field(default_factory=dict)
    is_final: bool = False
    role: str | None = None
    ready_peers: int | None = None
    """Other ready nodes that could take its requests, as a router last reported; None: unknown."""
    drained_by: str | None = None
    """`router`: drained by the asked router alone; other routers still send to it."""
    note: str | None = None
    error: str | None = None
    incarnation: str | None = None
    """Incarnation of the process that reports."""

    def format_line(self) -> str:
        outcome = self.error or _left_text(self.left)
        return f"{self.target}  {self.state}  {outcome}" + (f"  ({self.note})" if self.note else "")


def _left_text(left: dict[str, Any]) -> str:
    if not any(value for name, value in left.items() if name != "oldest_secs"):
        return "nothing left"
    names = ("requests", "streams", "waiting", "running", "transfers", "leases", "rooms")
    states = ("waiting", "running")
    counts = [
        f"{left[name]} {name}" if name in states else counted(left[name], name.removesuffix("s"))
        for name in names
        if left.get(name)
    ]
    oldest = [] if left.get("oldest_secs") is None else [f"oldest {left['oldest_secs']:.0f} s"]
    return ", ".join([*counts, *oldest])


# ---- places --------------------------------------------------------------------------------------


@dataclass(slots=True)
class UrlPlace:
    """An engine, or a router's worker: both have /drain and /undrain below their URL."""

    name: str
    url: str
    key: str | None
    opener: urllib.request.OpenerDirector

    def ask(self, verb: str) -> DrainReport:
        answer = self._send_request(
            "GET" if verb == "status" else "POST", "undrain" if verb == "undrain" else "drain"
        )
        reason = answer.get("reason")
        if "left" not in answer and verb == "drain":  # a router that drains the worker alone
            try:
                answer |= self._send_request("GET", "drain")
            except Gone:
                answer |= {"state": "gone", "is_drained": True, "left": {}}
        state = answer.get("state") or answer.get("status")
        if not isinstance(state, str) or not {"left", "drained_by"} & answer.keys():
            raise DrainFailed(
                f"{self.url} answered without a report; is it an engine or a router of Baton?"
            )
        is_drained = bool(answer.get("is_drained"))
        is_final = bool(answer.get("is_final"))
        left = answer.get("left") or {}
        drained_by = answer.get("drained_by")
        alone = f"drained at this router only: {reason or 'other routers still send to it'}"
        note = alone if drained_by == "router" else None
        return DrainReport(
            self.name,
            state,
            is_drained,
            left,
            is_final,
            role=answer.get("role"),
            ready_peers=answer.get("ready_peers"),
            drained_by=drained_by,
            note=note,
            incarnation=answer.get("incarnation"),
        )

    def _send_request(self, method: str, path: str) -> dict[str, Any]:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        url = f"{self.url.rstrip('/')}/{path}"
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with self.opener.open(request, timeout=ASK_SECS) as answer:
                report = json.load(answer)
        except urllib.error.HTTPError as err:
            raise self._make_refusal(err, method, path) from err
        except urllib.error.URLError as err:
            if isinstance(err.reason, ConnectionRefusedError):
                raise Gone(f"{url}: nothing listens there ({err.reason})") from err
            remedy = connection_remedy(self.url, str(err.reason).lower())
            advice = f"; {remedy}" if remedy else ""
            raise DrainFailed(f"{url} cannot be asked: {err.reason}{advice}") from err
        except (
            OSError,
            ValueError,
        ) as err:  # cut or silent connections, and answers that are no JSON
            raise DrainFailed(f"{url} gave no answer that can be read: {err}") from err
        except http.client.HTTPException as err:
            remedy = connection_remedy(self.url, NO_HTTP)
            raise DrainFailed(f"{url}: {NO_HTTP}; {remedy}") from err
        if not isinstance(report, dict):
            raise DrainFailed(f"{url} answered {report!r}; is it an engine or a router of Baton?")
        return report

    def _make_refusal(self, err: urllib.error.HTTPError, method: str, path: str) -> DrainFailed:
        try:
            message = json.load(err)["error"]["message"]
        except (OSError, ValueError, KeyError, TypeError):
            message = err.reason
        answer = f"{method} {self.url}/{path}: {err.code}, {message}"
        if err.code in (404, 405):
            return Gone(
                f"{answer}; give the URL of an engine with /drain, or ROUTER/workers/ID of a worker"
            )
        remedy = f"; give --key, or {API_KEY_ENV}" if err.code in (401, 403) else ""
        return DrainFailed(answer + remedy)


@dataclass(slots=True)
class PodPlace:
    """An engine in a container, asked by `baton drain` inside of it."""

    name: str
    pod: str
    container: str
    url: str
    kubectl: Kubectl
    knows_force: bool = False
    """True if `baton drain` in the container has --force: its reports name the role."""

    def ask(self, verb: str) -> DrainReport:
        force = ["--force"] if self.knows_force else []  # this command has decided that
        flag = {"drain": force, "undrain": ["--undo"], "status": ["--status"]}[verb]
        command = [
            "exec",
            self.pod,
            "-c",
            self.container,
            "--",
            "baton",
            "drain",
            "--json",
            *flag,
            self.url,
        ]
        out = self.kubectl.run(*command, exits=(0, FAILED))
        try:
            target = json.loads(out.splitlines()[-1])["targets"][0]
            fields = {f.name for f in dataclasses.fields(DrainReport)}
            values = {name: value for name, value in target.items() if name in fields}
            report = DrainReport(**{**values, "target": self.name})
        except (ValueError, KeyError, IndexError, TypeError) as err:
            raise DrainFailed(
                f"{self.name}: baton drain in its container printed {out[-200:]!r}"
            ) from err
        if report.error is not None:
            raise (Gone if report.state == "gone" else DrainFailed)(report.error)
        self.knows_force = report.role is not None
        return report


Place = UrlPlace | PodPlace
"""Where an engine can be asked. `ask` takes drain, undrain or status, and raises DrainFailed."""


def places_of(config: DrainConfig, targets: Iterable[str]) -> list[Place]:
    """Raises DrainFailed for pods that cannot be found."""
    kubectl = Kubectl(config.kubectl, config.namespace, EXEC_SECS)
    opener = make_client(PROG, config.ca_cert).opener
    places: dict[str, Place] = {}
    for target in targets:
        kind, _, name = target.partition("/")
        if kind == "pod":
            pods = kubectl.items("pod", name)
        elif kind == "node":
            pods = kubectl.items(
                "pods", "-l", config.selector, "--field-selector", f"spec.nodeName={name}"
            )
        else:
            key = config.key or known_control_key(target)
            places[target] = UrlPlace(target, target.rstrip("/"), key, opener)
            continue
        engines = [place for pod in pods for place in _find_engines(pod, config, kubectl, opener)]
        if not engines:
            raise DrainFailed(
                f"{target}: no running pod of {len(pods)} has an engine (a container port named "
                "http…)"
            )
        places |= {place.name: place for place in engines}
    return list(places.values())


def _find_engines(
    pod: dict[str, Any],
    config: DrainConfig,
    kubectl: Kubectl,
    opener: urllib.request.OpenerDirector,
) -> Iterator[Place]:
    """Engines of a pod: containers with a port whose name begins with http.

    A pod that ends has none.
    """
    meta = pod["metadata"]
    status = pod.get("status", {})
    address = status.get("podIP")
    if "deletionTimestamp" in meta or status.get("phase") != "Running" or not address:
        return
    host = f"[{address}]" if ":" in address else address
    ports = [
        (container["name"], port["containerPort"])
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
        if port.get("name", "").startswith("http")
    ]
    for container, port in ports:
        name = f"pod/{meta['name']}" + (f"/{container}" if len(ports) > 1 else "")
        url = f"http://{host}:{port}"
        if config.router is None:
            yield PodPlace(name, meta["name"], container, url, kubectl)
        else:
            worker = f"{config.router.rstrip('/')}/workers/{urllib.parse.quote(url, safe='')}"
            key = config.key or known_control_key(config.router)
            yield UrlPlace(name, worker, key, opener)


# ---- the command ---------------------------------------------------------------------------------


def make_parser() -> FlagParser:
    parser = FlagParser(
        PROG, "Take engines out of service without breaking a stream, or return them (--undo)."
    )
    parser.usage = f"{PROG} TARGET… [flags]"
    parser.epilog = EXIT_CODES
    forms = (
        "URL of an engine, ROUTER/workers/ID, pod/NAME, or node/NAME: all engine pods of a "
        "Kubernetes node"
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=forms)
    add_flags(parser, DrainConfig)
    return parser


def parse_flags(argv: Sequence[str]) -> tuple[DrainConfig, list[str]]:
    """Flags and targets; prints mistakes and exits with 2."""
    config, others, bad = make_parser().read_config(DrainConfig, argv)
    targets = others["targets"]
    if not targets:
        bad.append("no target; give the URL of an engine, ROUTER/workers/ID, pod/NAME or node/NAME")
    for target in targets:
        if not target.startswith(("http://", "https://", "pod/", "node/")):
            bad.append(f"{target}: give http://HOST:PORT, ROUTER/workers/ID, pod/NAME or node/NAME")
    if config.force and (config.undo or config.status):
        bad.append("--force goes with neither --undo nor --status; leave one out")
    if config.undo and (config.status or config.wait):
        bad.append("--undo goes with neither --wait nor --status; leave one out")
    if config.timeout_secs < 0:
        bad.append(f"--timeout {config.timeout_secs:g}: give seconds from 0")
    if bad:
        exit_with_mistakes(PROG, bad)
    return config, targets


def find_last_nodes(reports: Iterable[DrainReport]) -> list[str]:
    """Sentences about targets whose drain leaves no ready node for their requests."""
    by_role: dict[str, list[DrainReport]] = {}
    for report in reports:
        is_in_service = report.error is None and report.state == "ready"
        if is_in_service and report.role is not None and report.ready_peers is not None:
            by_role.setdefault(report.role, []).append(report)
    sentences = []
    for role, targets in by_role.items():
        # Each counts the others, targets among them.
        left = min(report.ready_peers or 0 for report in targets) + 1 - len(targets)
        if left > 0:
            continue
        names = ", ".join(report.target for report in targets)
        kind = "" if role == "regular" else f"{role} "
        is_one = len(targets) == 1
        which = f"is the last ready {kind}node" if is_one else f"are the last ready {kind}nodes"
        sentences.append(
            f"{names} {which}: without another one requests wait and then fail with 503"
        )
    return sentences


def may_drain(config: DrainConfig, places: Sequence[Place]) -> bool:
    """Ask how many nodes would be left.

    Returns True if enough are, with --force, or after a yes on a terminal.

    Pods are asked with --force, too: their place learns whether the command inside knows that flag.
    """
    if config.undo or config.status:
        return True
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        reports = list(pool.map(lambda place: _ask_place("status", place, None), places))
    warnings = [] if config.force else find_last_nodes(reports)
    for warning in warnings:
        print(f"{PROG}: {warning}", file=sys.stderr)
    if not warnings:
        return True
    if sys.stdin.isatty() and sys.stderr.isatty():
        print("Drain all the same? [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    print(
        f"{PROG}: nothing was drained; start another node first, or give --force", file=sys.stderr
    )
    return False


def run_drain(config: DrainConfig, places: Sequence[Place]) -> int:
    """Returns the exit code."""
    deadline = time.monotonic() + config.timeout_secs
    verb = "undrain" if config.undo else "status" if config.status else "drain"
    reports = _ask_all(config, places, verb, [None] * len(places))
    while config.wait and not any(_is_lost(config, r) for r in reports):
        if all(r.is_drained for r in reports):
            return _print_end(config, 0, f"safe to stop: {', '.join(r.target for r in reports)}")
        if (pause := min(LOOK_EVERY_SECS, deadline - time.monotonic())) <= 0:
            remaining = "; ".join(
                f"{r.target}: {_left_text(r.left)}" for r in reports if not r.is_drained
            )
            return _print_end(
                config, LEFT, f"not drained after {config.timeout_secs:g} s: {remaining}"
            )
        time.sleep(pause)
        reports = _ask_all(config, places, "status", reports)
    lost = [r for r in reports if _is_lost(config, r)]
    for report in lost:
        reason = (
            report.error
            or f"is {report.state}, and takes requests: it was returned to service meanwhile"
        )
        print(f"{PROG}: {report.target}: {reason}", file=sys.stderr)
    return FAILED if lost else 0


def _is_lost(config: DrainConfig, report: DrainReport) -> bool:
    """True for a target that could not be asked, or that is waited for and does not drain."""
    is_back = config.wait and report.state in ("ready", "accepted") and not report.is_drained
    return report.error is not None or is_back


def _ask_all(
    config: DrainConfig, places: Sequence[Place], verb: str, before: Sequence[DrainReport | None]
) -> list[DrainReport]:
    """Ask the places that are not drained yet; show the last reports of all, and return them."""
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        reports = list(pool.map(partial(_ask_place, verb), places, before))
    if config.json:
        is_drained = all(r.is_drained for r in reports)
        rows = [dataclasses.asdict(r) for r in reports]
        print(json.dumps({"targets": rows, "is_drained": is_drained}), flush=True)
    else:
        for report in reports:
            if report.error is None:
                print(report.format_line(), flush=True)
    return reports


def _ask_place(verb: str, place: Place, before: DrainReport | None) -> DrainReport:
    """`before`: its last report, which stays once it is drained."""
    if before is not None and before.is_drained:
        return before
    try:
        report = place.ask(verb)
        if before is not None and _is_other_process(before, report):
            raise Gone(
                f"the process that was asked has ended, and another one answers at {place.name}"
            )
    except Gone as err:
        # A process that got SIGTERM has ended, or a router has removed the worker that it drained
        # alone.
        has_ended = before is not None and (before.is_final or before.drained_by == "router")
        report = DrainReport(place.name, "gone", has_ended, error=None if has_ended else str(err))
    except (DrainFailed, KubectlError) as err:
        report = DrainReport(place.name, "unknown", error=str(err))
    if (
        before is not None and before.is_final and report.state == "unhealthy"
    ):  # seen through a router
        report = dataclasses.replace(report, state="gone", is_drained=True)
    if before is not None and report.note is None:
        report = dataclasses.replace(report, note=before.note)
    return report


def _is_other_process(before: DrainReport, report: DrainReport) -> bool:
    """True if the address belongs to another process by now: what it has left is its own."""
    is_known = before.incarnation is not None and report.incarnation is not None
    return is_known and before.incarnation != report.incarnation


def _print_end(config: DrainConfig, code: int, text: str) -> int:
    if not config.json:
        print(text, flush=True)
    elif code:
        print(f"{PROG}: {text}", file=sys.stderr)
    return code


def main(argv: Sequence[str]) -> int:
    config, targets = parse_flags(argv)
    try:
        places = places_of(config, targets)
    except (DrainFailed, KubectlError) as err:
        print(f"{PROG}: {err}", file=sys.stderr)
        return FAILED
    try:
        return run_drain(config, places) if may_drain(config, places) else REFUSED
    except KeyboardInterrupt:
        print(
            f"{PROG}: interrupted; the targets stay as they are, --undo returns them to service",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    print(flags_table(DrainConfig))
