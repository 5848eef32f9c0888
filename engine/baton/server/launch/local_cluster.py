"""`baton up`: a whole cluster on this machine, as child processes: nodes first, then the router, then a line to paste.

 1. flags → `UpConfig` (the cluster's shape) + engine flags (handed to every engine) + free ports;
 2. all nodes start at once; each prints READY with the address it got; the router starts when all are ready;
 3. the state file tells other programs who runs where; what dies is restarted on the same port, with back-off;
 4. Ctrl-C, SIGTERM, or the end of --smoke: router first, then nodes; nothing is left behind.

A node that cannot start the first time (a bad flag, no such model) ends `up`; only what has been ready is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from baton.config import KV_TRANSPORTS, MEM_FRACTION, SECRETS, EngineConfig, build, uses_four_bytes
from baton.config.flags import FlagParser, add_flags, flag_name, markdown, opt, refuse
from baton.errors import ConfigError
from baton.models import checkpoint
from baton.server.launch.process_group import cancel, describe_exit, first_of
from baton.server.launch.supervisor import ChildFailed, ChildProcess, RestartBackoff
from baton.server.text import model_info

PROG = "baton up"
PER_NODE = {"host", "port", "disaggregation_mode", "disaggregation_bootstrap_port", "transfer_port"}
"""Engine flags that `up` sets itself, different for each node."""
_OWN = {
    flag_name(
        name
    ): "baton up sets it for each node; say how many of which with --prefill, --decode or --workers, and "
    "give nodes of one role more flags with --prefill-args, --decode-args or --worker-args"
    for name in sorted(PER_NODE - {"host", "port"})
}
"""Flags of an engine that mean nothing to a whole cluster."""
ROUTER_GRACE_SECS = 5.0
"""Running requests get this long to end by themselves."""
ROUTER_STOP_SECS = ROUTER_GRACE_SECS + 5.0
"""The router is killed after this: it waits half a second before the grace, and up to two after it for last events."""
NODE_GRACE_SECS = 10.0
PORTS_TRIED = 100
PORT_TAKEN = "is in use already"
"""Part of the router's message when it cannot bind its port."""
ROUTER_PORT_TRIES = 5
PROBE_PAUSE_SECS = 0.05
PROGRESS_SECS = 3.0
"""Between two lines about a node that loads its model; small ones are ready sooner."""
_ROUTER_OWN = ("--host", "--port", "--pd-disaggregation", "--prefill", "--decode", "--worker-urls")
"""Flags of the router that follow from those of `up`."""

SHARED_WITH_ROUTER = ("enable_trace", "otlp_traces_endpoint", "log_format")
"""Engine flags that the router has too, with the same meaning."""

ROLES = ("prefill", "decode", "worker")
MODE = {"prefill": "prefill", "decode": "decode", "worker": "null"}


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
        None, "port of the router; 0 picks a free one (default: 8000, or the next free one)"
    )
    smoke: bool = opt(
        False,
        "send real requests through the cluster, print what came back, stop; exit code 0 or 1",
    )
    state_file: str | None = opt(
        None, "write who runs where to this JSON file, now and after every change"
    )
    log_dir: str | None = opt(
        None,
        "directory for one log file per process (default: a temporary one, removed after a stop without errors)",
    )
    start_timeout_secs: float | None = opt(
        None,
        "give up when a process is not ready after this long (default: 300; 1800 with --device cuda or auto, since "
        "kernels are compiled at the first start) [s]",
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
            n * self.size(role, "dp_size") * self.size(role, "tp_size")
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

    def size(self, role: str, field: str) -> int:
        """Ranks of each node of a role: `dp_size` or `tp_size`."""
        return int({**self.engine, **self.own[role]}.get(field, 1))


def parse(argv: Sequence[str]) -> ClusterPlan:
    """Flags → plan; prints mistakes and exits with 2. Reads no file but --tenant-config's."""
    parser = FlagParser(
        PROG,
        "A whole Baton cluster on this machine; the flags of engines go to every engine.",
        _OWN,
    )
    add_flags(parser.add_argument_group("the cluster"), UpConfig)
    add_flags(parser, EngineConfig, skip=PER_NODE)
    up, engine, bad = parser.read_config(UpConfig, argv)
    default = 0 if up.workers else 1
    given = {"prefill": up.prefill, "decode": up.decode, "worker": up.workers}
    counts = {role: default if count is None else count for role, count in given.items()}
    if up.transport is not None:
        engine["disaggregation_transfer_backend"] = up.transport
    bad += [*_count_mistakes(counts), *_engine_mistakes(engine)]
    plan = ClusterPlan(up, counts, engine, args={}, own={})
    for name in ("router", *ROLES):
        plan.args[name], plan.own[name], mistakes = _read_args(up, name, engine)
        bad += [f"{flag_name(f'{name}_args')}: {text}" for text in mistakes]
    if bad:
        refuse(PROG, bad)
    return plan


def _engine_mistakes(engine: dict[str, Any]) -> list[str]:
    """Mistakes that every engine would report, before any of them is started."""
    try:
        build(dict(engine))
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
        return (
            words,
            {},
            [
                f"{flag} is set by baton up; give its own flags"
                for flag in names
                if flag in _ROUTER_OWN
            ],
        )
    parser = FlagParser(f"{PROG}: {flag_name(f'{name}_args')}", "")
    add_flags(parser, EngineConfig)
    values, mistakes = parser.read(words)
    return words, values, [*mistakes, *(_engine_mistakes({**engine, **values}) if values else [])]


def _count_mistakes(counts: dict[str, int]) -> Iterator[str]:
    prefill, decode, workers = (counts[role] for role in ROLES)
    if min(prefill, decode, workers) < 0:
        yield f"--prefill {prefill} --decode {decode} --workers {workers}: none may be negative"
    elif workers and (prefill or decode):
        yield f"--workers {workers} with --prefill {prefill} --decode {decode}: give workers, or both of the others"
    elif not workers and not (prefill and decode):
        yield f"--prefill {prefill} --decode {decode}: a request needs one of each; give both, or --workers"


@dataclass
class ClusterNode:
    """Engine of the cluster. Port 0 until it has reported the one it got; from then on it keeps it."""

    role: str
    name: str
    plan: ClusterPlan
    port: int = 0
    bootstrap_port: int = 0
    child: ChildProcess = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def argv(self) -> list[str]:
        own = {"host": "127.0.0.1", "port": self.port, "disaggregation_mode": MODE[self.role]}
        if self.role == "prefill":
            own["disaggregation_bootstrap_port"] = self.bootstrap_port
        threads = (
            {}
            if "simulate" in self.plan.engine
            else {"cpu_threads": max(1, _cores() // self.plan.processes)}
        )
        shared = {name: value for name, value in self.plan.engine.items() if name not in SECRETS}
        flags = _words({**own, **threads, **self.plan.gpu_share, **shared})
        return [sys.executable, "-m", "baton.cli", "engine", *flags, *self.plan.args[self.role]]


class LocalCluster:
    """The running processes. `start` once, then `watch`; `stop` always."""

    def __init__(self, plan: ClusterPlan, log_dir: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self._say = say
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # Through the environment: command lines are public on a machine.
        env.update({SECRETS[name]: value for name, value in plan.engine.items() if name in SECRETS})
        key = SECRETS["cluster_key"]
        env[key] = env.get(key) or secrets.token_hex(
            32
        )  # a new one per start: other programs cannot take part
        self.nodes = [
            ClusterNode(role, f"{role} {i}", plan)
            for role in ROLES
            for i in range(plan.counts[role])
        ]
        for node in self.nodes:
            node.child = ChildProcess(
                node.name, node.argv, log_dir / f"{node.name.replace(' ', '-')}.log", env
            )
        self.router = ChildProcess("router", self._router_argv, log_dir / "router.log", env)
        self.host = plan.up.host
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    async def start(self) -> None:
        """Nodes at once, then the router. Raises ChildFailed, with the end of a log, when one is not ready in time."""
        self.port, note = choose_port(self.host, self.plan.up.port)
        if note:
            self._say(note)
        progress = asyncio.ensure_future(self._tell_progress())
        try:
            starts = [self._guarded(node.child, self._start_node(node)) for node in self.nodes]
            await first_of(
                *starts, return_when=asyncio.FIRST_EXCEPTION
            )  # the first failure, else the end of all
        finally:
            await cancel(progress)
        ends = [self._guarded(node.child, _fail_at_end(node.child)) for node in self.nodes]
        # The router would wait for a node that is gone.
        await first_of(self._guarded(self.router, self._start_router_first()), *ends)
        self.write_state()

    async def watch(self) -> None:
        """Restart what dies, until cancelled."""
        await asyncio.gather(
            *(self._keep_alive(node.child, partial(self._start_node, node)) for node in self.nodes),
            # A restarted router is well when it answers: it may be waiting for a node that is down too.
            self._keep_alive(self.router, partial(self._start_router, "/livez")),
        )

    async def stop(self) -> None:
        """Router first, so that no request finds half a cluster; then all nodes at once. Cancel `watch` before."""
        await self._end(self.router, ROUTER_STOP_SECS)
        await asyncio.gather(*(self._end(node.child, NODE_GRACE_SECS) for node in self.nodes))
        if self.plan.up.state_file:
            Path(self.plan.up.state_file).unlink(missing_ok=True)

    async def _end(self, child: ChildProcess, grace_secs: float) -> None:
        if not await child.stop(grace_secs):
            self._say(
                f"{child.name} did not end within {grace_secs:g} s and was killed; its log: {child.log_path}"
            )

    def kill(self) -> None:
        for child in (self.router, *(node.child for node in self.nodes)):
            child.kill()

    def write_state(self) -> None:
        """Atomically: a reader sees the old file or the new one."""
        if not self.plan.up.state_file:
            return
        path = Path(self.plan.up.state_file)
        state = {
            "router": {"pid": self.router.pid, "url": self.url},
            "nodes": [
                {
                    "role": node.role,
                    "pid": node.child.pid,
                    "url": node.url,
                    "bootstrap_port": node.bootstrap_port or None,
                    "restarts": node.child.restarts,
                }
                for node in self.nodes
            ],
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(path)

    async def _start_node(self, node: ClusterNode) -> None:
        await node.child.start()
        ready = await node.child.until_ready(self.plan.start_timeout_secs)
        node.port = int(ready["url"].rpartition(":")[2])
        node.bootstrap_port = int(ready.get("bootstrap_port") or 0)
        self._say(f"{node.name:<10} {node.url}")

    async def _tell_progress(self) -> None:
        """Print the newest log line of each node that is not ready, whenever it changes; until canceled."""
        shown: dict[str, str] = {}
        while True:
            await asyncio.sleep(PROGRESS_SECS)
            for node in self.nodes:
                text = (
                    node.child.last_progress()
                    if node.child.ready_at is None and node.child.pid
                    else ""
                )
                if text and shown.get(node.name) != text:
                    self._say(f"{node.name:<10} {text}")
                    shown[node.name] = text

    async def _start_router_first(self) -> None:
        """Start the router; on another free port if the one chosen before the nodes started is taken by now."""
        for tries_left in reversed(range(ROUTER_PORT_TRIES)):
            try:
                return await self._start_router("/readyz")
            except ChildFailed:
                if (
                    self.plan.up.port
                    or not tries_left
                    or PORT_TAKEN not in self.router.last_errors()
                ):
                    raise
            self.port, _ = choose_port(self.host, self.plan.up.port)

    async def _start_router(self, path: str) -> None:
        await self.router.start()
        await self.router.until_ready(self.plan.start_timeout_secs, _answers(f"{self.url}{path}"))
        self._say(f"router     {self.url}")

    async def _guarded(self, child: ChildProcess, starting: Coroutine[Any, Any, None]) -> None:
        """A failure to start, with the end of the log."""
        try:
            await starting
        except ChildFailed as err:
            log_end = _indented(child.last_errors())
            raise ChildFailed(f"{err}; {child.log_path} says:\n{log_end}", err.exit_code) from err

    def _router_argv(self) -> list[str]:
        argv = [
            sys.executable,
            "-m",
            "baton.cli",
            "router",
            "--host",
            self.host,
            "--port",
            str(self.port),
        ]
        # A laptop's cluster comes and goes: probe it every second, and do not linger when it has to stop.
        argv += ["--health-check-interval-secs", "1", "--shutdown-delay-ms", "0"]
        argv += ["--shutdown-grace-period-secs", str(int(ROUTER_GRACE_SECS))]
        workers = [node.url for node in self.nodes if node.role == "worker"]
        argv += ["--worker-urls", *workers] if workers else ["--pd-disaggregation"]
        for node in self.nodes:
            if node.role == "prefill":
                argv += ["--prefill", node.url, str(node.bootstrap_port)]
            elif node.role == "decode":
                argv += ["--decode", node.url]
        if any(
            count and self.plan.size(role, "dp_size") > 1
            for role, count in self.plan.counts.items()
        ):
            argv += ["--dp-aware"]
        return argv + _tokenizer_flags(self.plan.engine) + _router_flags(self.plan)

    async def _keep_alive(
        self, child: ChildProcess, start: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        backoff = RestartBackoff()
        while True:
            code = await child.wait()
            pause = backoff.pause(
                0.0 if child.ready_at is None else time.monotonic() - child.ready_at
            )
            self._say(
                f"{child.name} {describe_exit(code)}; restarting it in {pause:g} s. {child.log_path} says:"
            )
            self._say(_indented(child.last_errors()))
            await asyncio.sleep(pause)
            child.restarts += 1
            try:
                await start()
            except ChildFailed as err:
                self._say(str(err))
                child.kill()
            self.write_state()


async def _fail_at_end(child: ChildProcess) -> None:
    raise ChildFailed(f"{child.name} {describe_exit(await child.wait())} just after it was ready")


async def _answers(url: str) -> None:
    """Return once GET `url` says 200; the caller bounds the wait."""
    timeout = aiohttp.ClientTimeout(total=2)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            with contextlib.suppress(
                aiohttp.ClientError, asyncio.TimeoutError
            ):  # not listening yet
                async with session.get(url, raise_for_status=True):
                    return
            await asyncio.sleep(PROBE_PAUSE_SECS)


def choose_port(host: str, wanted: int | None) -> tuple[int, str | None]:
    """The router's port and a sentence if it is not the expected one. Raises ChildFailed if `wanted` is taken."""
    if wanted is not None:
        if (port := _bindable(host, wanted)) is not None:
            return port, None
        raise ChildFailed(
            f"port {wanted} on {host} is taken; give another --port, or none to take the next free one"
        )
    for candidate in range(8000, 8000 + PORTS_TRIED):
        if _bindable(host, candidate) is not None:
            return (
                candidate,
                None if candidate == 8000 else f"port 8000 is taken, the router uses {candidate}",
            )
    raise ChildFailed(
        f"ports 8000 to {8000 + PORTS_TRIED - 1} on {host} are all taken; give --port"
    )


def _bindable(host: str, port: int) -> int | None:
    """`port` (or, for 0, a free one) if it can be bound now, else None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def _words(flags: Mapping[str, object]) -> list[str]:
    """Command line of flags by their field names; the value of a switch is True."""
    named = ((flag_name(name), value) for name, value in flags.items())
    return [
        word for flag, value in named for word in ([flag] if value is True else [flag, str(value)])
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (empty)"


def greeting(
    url: str, model: str, *, api_key: str | None = None, key_in_environment: bool = False
) -> str:
    """Lines to paste for a first answer. A key that comes from BATON_API_KEY stays there."""
    header, setup, key = "", "", '"none"'
    if api_key is not None and key_in_environment:
        header, setup, key = (
            ' -H "authorization: Bearer $BATON_API_KEY"',
            "import os\n",
            'os.environ["BATON_API_KEY"]',
        )
    elif api_key is not None:
        header, key = " -H " + shlex.quote(f"authorization: Bearer {api_key}"), repr(api_key)
    return f"""
Baton is up at {url}    Ctrl-C stops it.
In a browser: {url}/ui/

curl -s {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
  -d '{{"model":"{model}","temperature":0,"messages":[{{"role":"user","content":"What is Baton?"}}]}}'

{setup}from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(
    model="{model}", temperature=0, messages=[{{"role": "user", "content": "What is Baton?"}}])
print(answer.choices[0].message.content)
"""


async def _serve(cluster: LocalCluster, api_key: str | None) -> int:
    from baton.server.launch.smoke_test import run_smoke, served_model

    await cluster.start()
    model = await served_model(cluster.url, api_key)
    if not cluster.plan.up.smoke:
        is_in_environment = os.environ.get(SECRETS["api_key"]) == api_key
        print(
            greeting(cluster.url, model, api_key=api_key, key_in_environment=is_in_environment),
            flush=True,
        )
        await cluster.watch()
        return 0
    watch = asyncio.ensure_future(cluster.watch())
    try:
        return 0 if await run_smoke(cluster.url, model, api_key) else 1
    finally:
        await cancel(watch)


async def _run(plan: ClusterPlan, log_dir: Path) -> int:
    """Returns the exit code. Removes no logs."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(
            text if text.startswith(" ") else f"{time.monotonic() - started:6.1f} s  {text}",
            flush=True,
        )

    shape = " + ".join(f"{n} {role}" for role, n in plan.counts.items() if n)
    print(f"starting router + {shape}; logs in {log_dir}", flush=True)
    cluster = LocalCluster(plan, log_dir, say)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            cluster.kill()  # asked twice: do not wait
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.ensure_future(
        _serve(cluster, plan.engine.get("api_key") or os.environ.get("BATON_API_KEY"))
    )
    try:
        await first_of(serving, stop.wait())
        if stop.is_set():
            print("stopping; once more to kill", flush=True)
            return 0
        return serving.result()
    except ChildFailed as err:
        print(f"{PROG}: {err}", file=sys.stderr, flush=True)
        return 2 if err.exit_code == 2 else 1
    finally:
        await cluster.stop()
        say("stopped")


def _tokenizer_flags(engine: dict[str, Any]) -> list[str]:
    """The router tokenizes as the engines do, once for both nodes of a pair. Not what --simulate makes of text."""
    config = build(dict(engine))
    if uses_four_bytes(config):
        return []
    flags = ["--model-path", str(model_info.resolve(config.model_path)), "--forward-input-ids"]
    if config.tokenizer_path:
        flags += [
            "--tokenizer-path",
            str(model_info.model_directory("--tokenizer-path", config.tokenizer_path)),
        ]
    if config.chat_template:
        flags += ["--chat-template", str(Path(config.chat_template).expanduser())]
    return flags


def _router_flags(plan: ClusterPlan) -> list[str]:
    """User's flags for the router, and for router and nodes together."""
    shared = {name: plan.engine.get(name) for name in SHARED_WITH_ROUTER}
    own = {name: getattr(plan.up, name) for name in ("policy", "prefill_policy", "decode_policy")}
    return (
        _words({name: value for name, value in (shared | own).items() if value})
        + plan.args["router"]
    )


def check_router_flags(plan: ClusterPlan) -> str | None:
    """The router's complaint about its flags, which is better heard before a node has loaded a model."""
    if any(word == "--api-key" or word.startswith("--api-key=") for word in plan.args["router"]):
        return "--router-args: give --api-key to baton up itself, which gives it to the router and the nodes"
    argv = [sys.executable, "-m", "baton.cli", "router", *_router_flags(plan), "--print-flags"]
    asked = subprocess.run(
        argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return asked.stderr.strip() if asked.returncode == 2 else None


def check_place(plan: ClusterPlan) -> str | None:
    """Faults of the address, the files and the model that the flags name."""
    up = plan.up
    try:
        socket.create_server(
            (up.host, 0), family=socket.AF_INET6 if ":" in up.host else socket.AF_INET
        ).close()
    except OSError as err:
        why = (err.strerror or str(err)).partition(" (while")[0]
        return f"--host {up.host} cannot be bound ({why}); give an address of this machine"
    for name, path in (
        ("--log-dir", up.log_dir),
        ("--state-file", up.state_file and Path(up.state_file).parent),
    ):
        try:
            if path and name == "--log-dir":
                Path(path).mkdir(parents=True, exist_ok=True)
            if path:
                tempfile.TemporaryFile(dir=path).close()
        except OSError as err:
            return f"{name}: {path} cannot be written to ({err.strerror}); give another directory"
    try:
        config = build(dict(plan.engine))
        facts = model_info.load(config)
        if config.simulate is None:
            checkpoint.check(config, facts.path, sum(plan.counts.values()))
    except ConfigError as err:
        return err.message
    return None


def main(argv: Sequence[str]) -> int:
    plan = parse(argv)
    if complaint := check_router_flags(plan):
        print(complaint, file=sys.stderr)
        return 2
    if complaint := check_place(plan):
        refuse(PROG, [complaint])
    log_dir = Path(plan.up.log_dir or tempfile.mkdtemp(prefix="baton-up-"))
    code = asyncio.run(_run(plan, log_dir))
    if (
        code == 0 and not plan.up.log_dir
    ):  # else the logs are of interest; --log-dir keeps them always
        shutil.rmtree(log_dir, ignore_errors=True)
    return code


if __name__ == "__main__":
    print(markdown(UpConfig))
