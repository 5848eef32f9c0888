"""Shape of a local cluster: `parse_flags` makes a `ClusterPlan` of the flags of `baton up`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.config import KV_TRANSPORTS, MEM_FRACTION, SECRETS, EngineConfig, build_config
from baton.config.flags import (
    FlagParser,
    add_flags,
    exit_with_mistakes,
    flag_name,
    flags_table,
    opt,
)
from baton.errors import ConfigError

PROG = "baton up"
PER_NODE = {
    "host",
    "port",
    "health_port",
    "disaggregation_mode",
    "disaggregation_bootstrap_port",
    "transfer_port",
}
"""Engine flags that `up` sets itself, different for each node."""
_OWN = {
    flag_name(
        name
    ): "baton up sets it for each node; say how many of which with --prefill, --decode or "
    "--workers, and give nodes of one role more flags with --prefill-args, --decode-args or "
    "--worker-args"
    for name in sorted(PER_NODE - {"host", "port"})
}
"""Flags of an engine that mean nothing to a whole cluster."""
_ROUTER_OWN = (
    "--host",
    "--port",
    "--health-port",
    "--pd-disaggregation",
    "--prefill",
    "--decode",
    "--worker-urls",
)
"""Flags of the router that follow from those of `up`."""
CONTROL_KEYS_ENV = "BATON_ROUTER_FLAG_CONTROL_PLANE_API_KEYS"
"""Environment variable of the router's --control-plane-api-keys."""
_ROUTER_SECRETS = {
    "--api-key": SECRETS["api_key"],
    "--control-plane-api-keys": CONTROL_KEYS_ENV,
}
"""Flags of the router whose values are secret, and their environment variables."""
SHARED_WITH_ROUTER = ("enable_trace", "otlp_traces_endpoint", "log_format", "allowed_hosts")
"""Engine flags that the router has too, with the same meaning."""

ROLES = ("prefill", "decode", "worker")
MODE = {"prefill": "prefill", "decode": "decode", "worker": "null"}


DRILL_LEASE_SECS = 1
"""--kv-lease-secs with --drill, unless it is given: its slow node is slower than that."""
WORKER_WAIT_FLAG = "--worker-wait-timeout-secs"
DRILL_WAIT_SECS = 120
"""Longest wait of a drill's streams for the node that was killed, to start again on a slow
machine.
"""

ESSENTIALS = (
    "model_path", "prefill", "decode", "workers", "host", "port", "api_key", "policy", "log_dir",
    "router_args",
)  # fmt: skip
"""Fields whose flags --help shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """The cluster's shape; one flag per field."""

    prefill: int | None = opt(None, "prefill nodes (default: 1, or 0 with --workers)")
    decode: int | None = opt(None, "decode nodes (default: 1, or 0 with --workers)")
    workers: int = opt(0, "engines that do both phases, instead of prefill and decode nodes")
    transport: str | None = opt(None, "how KV pages travel (default: auto)", choices=KV_TRANSPORTS)
    policy: str | None = opt(None, "router: how a worker is chosen (default: the router's)")
    prefill_policy: str | None = opt(None, "router: policy for prefill nodes (default: --policy)")
    decode_policy: str | None = opt(None, "router: policy for decode nodes (default: --policy)")
    host: str = opt("127.0.0.1", "address the router listens on; the nodes stay on 127.0.0.1")
    port: int | None = opt(
        None,
        "port of the router; 0 picks a free one (default: 8000, or the next free one)",
        ge=0,
        le=65535,
    )
    smoke: bool = opt(
        False,
        "send real requests through the cluster, print the answers, stop; exit code 0 or 1",
    )
    drill: bool = opt(
        False,
        "show three promises on the cluster: abort requests, stop and kill a decode node, print "
        "the outcome, stop; exit code 0 or 1",
    )
    state_file: str | None = opt(
        None, "write processes and ports to this JSON file, now and after every change"
    )
    log_dir: str | None = opt(
        None,
        "directory for one log file per process (default: a temporary one, removed after a stop "
        "without errors)",
    )
    start_timeout_secs: float | None = opt(
        None,
        "give up when a process is not ready after this long (default: 300; 1800 with --device "
        "cuda or auto, since kernels are compiled at the first start) [s]",
        gt=0,
    )
    hang_timeout_secs: float = opt(
        60.0,
        "end and restart a process that was ready and has not answered its health check for this "
        "long; 0: never [s]",
        ge=0,
    )
    router_args: str = opt(
        "", "more flags for the router, in one string: --router-args='--log-level debug'"
    )
    prefill_args: str = opt("", "more flags for every prefill node")
    decode_args: str = opt("", "more flags for every decode node")
    worker_args: str = opt("", "more flags for every --workers engine")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Processes that will run: checked flags, no process yet."""

    up: UpConfig
    counts: dict[str, int]
    """Nodes per role."""
    engine: dict[str, Any]
    """Engine flags given by the user, by field name."""
    args: dict[str, list[str]]
    """Words of --router-args, --prefill-args and their like, by "router" and role."""
    own: dict[str, dict[str, Any]]
    """Engine flags among them, by role and field name."""

    @property
    def processes(self) -> int:
        """Those that compute."""
        return sum(
            n * self.role_size(role, "dp_size") * self.role_size(role, "tp_size")
            for role, n in self.counts.items()
        )

    @property
    def gpu_share(self) -> dict[str, float]:
        """All engines take the same GPU, or GPUs: they share its memory alike."""
        if self.engine.get("device", "cpu") == "cpu":
            return {}
        return {"mem_fraction_static": round(MEM_FRACTION / sum(self.counts.values()), 3)}

    @property
    def start_timeout_secs(self) -> float:
        if self.up.start_timeout_secs is not None:
            return self.up.start_timeout_secs
        return 300.0 if self.engine.get("device", "cpu") == "cpu" else 1800.0

    def role_size(self, role: str, field: str) -> int:
        """Ranks of each node of a role: `dp_size` or `tp_size`."""
        return int({**self.engine, **self.own[role]}.get(field, 1))


def make_parser() -> FlagParser:
    parser = FlagParser(
        PROG,
        "A whole Baton cluster on this machine; the flags of engines go to every engine.",
        _OWN,
        essentials=ESSENTIALS,
        word_remedy="give the model as --model-path {word}",
    )
    add_flags(parser.add_argument_group("the cluster"), UpConfig)
    add_flags(parser, EngineConfig, skip=PER_NODE)
    return parser


def parse_flags(argv: Sequence[str]) -> ClusterPlan:
    """Flags → plan; prints mistakes and exits with 2. Reads no file but --tenant-config's."""
    up, engine, bad = make_parser().read_config(UpConfig, argv)
    default = 0 if up.workers else 1
    given = {"prefill": up.prefill, "decode": up.decode, "worker": up.workers}
    counts = {role: default if count is None else count for role, count in given.items()}
    if up.transport is not None:
        engine["disaggregation_transfer_backend"] = up.transport
    if up.drill:
        engine.setdefault("kv_lease_secs", DRILL_LEASE_SECS)
    bad += [*_count_mistakes(counts), *_drill_mistakes(up), *_engine_mistakes(engine)]
    plan = ClusterPlan(up, counts, engine, args={}, own={})
    for name in ("router", *ROLES):
        plan.args[name], plan.own[name], mistakes = _read_args(up, name, engine)
        bad += [f"{flag_name(f'{name}_args')}: {text}" for text in mistakes]
    if up.drill and not any(word.startswith(WORKER_WAIT_FLAG) for word in plan.args["router"]):
        plan.args["router"] += [WORKER_WAIT_FLAG, str(DRILL_WAIT_SECS)]
    if bad:
        exit_with_mistakes(PROG, bad)
    return plan


def _engine_mistakes(engine: dict[str, Any]) -> list[str]:
    """Mistakes that every engine would report, before any of them is started."""
    try:
        build_config(dict(engine))
    except ConfigError as err:
        return err.message.splitlines()
    return []


def _read_args(
    up: UpConfig, name: str, engine: dict[str, Any]
) -> tuple[list[str], dict[str, Any], list[str]]:
    """Words of --router-args, or of a role's flag; the engine flags among them; the mistakes."""
    try:
        words = shlex.split(getattr(up, f"{name}_args"))
    except ValueError as err:  # a quote without its other half
        return [], {}, [f"{err}; it is read as a shell would"]
    if name == "router":
        names = [word.partition("=")[0] for word in words]
        mistakes = [
            f"{flag} is set by baton up; give its own flags"
            for flag in names
            if flag in _ROUTER_OWN
        ]
        secret = {flag: _ROUTER_SECRETS[flag] for flag in names if flag in _ROUTER_SECRETS}
        return words, {}, [*mistakes, *map(_secret_mistake, secret.items())]
    parser = FlagParser(f"{PROG}: {flag_name(f'{name}_args')}", "")
    add_flags(parser, EngineConfig)
    values, mistakes = parser.read(words)
    secret = {flag_name(field): SECRETS[field] for field in values if field in SECRETS}
    mistakes += map(_secret_mistake, secret.items())
    return words, values, [*mistakes, *(_engine_mistakes({**engine, **values}) if values else [])]


def _secret_mistake(secret: tuple[str, str]) -> str:
    """Sentence about a flag whose value would stand in the command line of a process, with its
    variable.
    """
    flag, variable = secret
    return (
        f"{flag} is secret, and all users of this machine see command lines; set {variable} for "
        "baton up instead"
    )


def _drill_mistakes(up: UpConfig) -> Iterator[str]:
    if up.drill and up.workers:
        yield (
            f"--drill with --workers {up.workers}: it stops and kills a decode node; give "
            "--prefill and --decode"
        )
    if up.drill and up.smoke:
        yield "--drill with --smoke: each ends the cluster; give one of the two"


def _count_mistakes(counts: dict[str, int]) -> Iterator[str]:
    prefill, decode, workers = (counts[role] for role in ROLES)
    if min(prefill, decode, workers) < 0:
        yield f"--prefill {prefill} --decode {decode} --workers {workers}: none may be negative"
    elif workers and (prefill or decode):
        yield (
            f"--workers {workers} with --prefill {prefill} --decode {decode}: give workers, or "
            "both of the others"
        )
    elif not workers and not (prefill and decode):
        yield (
            f"--prefill {prefill} --decode {decode}: a request needs one of each; give both, or "
            "--workers"
        )


if __name__ == "__main__":
    print(flags_table(UpConfig))
