"""`baton up`: a whole cluster on this machine, as child processes: nodes first, then the router,
then a line to paste.

 1. flags → `ClusterPlan` (cluster_plan.py) + free ports;
 2. all nodes start at once; each prints READY with the address it got; the router starts when all
    are ready;
 3. the state file tells other programs who runs where; what dies is restarted on the same port,
    with back-off;
 4. a terminal shows what loads and, while it serves, the traffic (screen.py, traffic.py);
 5. Ctrl-C, SIGTERM, or the end of --smoke: router first, then nodes; nothing is left behind.

A node that cannot start the first time (a bad flag, no such model) ends `up`; only what has been
ready is restarted, when it dies, and when it runs but has not answered its health check for
--hang-timeout-secs.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baton.config import SECRETS, build_config, uses_four_bytes
from baton.config.flags import exit_with_mistakes
from baton.server.launch.process_group import cancel, describe_exit, first_of
from baton.server.text import model_info
from baton_ops.clients.instance import OtherProcess, wait_until_well
from baton_ops.clients.local_keys import forget_control_key, keep_control_key, write_private
from baton_ops.launch.cluster_node import ClusterNode, command_words
from baton_ops.launch.cluster_plan import (
    CONTROL_KEYS_ENV,
    PROG,
    ROLES,
    SHARED_WITH_ROUTER,
    ClusterPlan,
    parse_flags,
)
from baton_ops.launch.preflight import check_place
from baton_ops.launch.screen import StatusScreen, is_live, make_greeting
from baton_ops.launch.supervisor import (
    ChildFailed,
    ChildProcess,
    RestartBackoff,
    until_unresponsive,
)
from baton_ops.launch.traffic import TrafficMonitor

ROUTER_GRACE_SECS = 5.0
"""Running requests get this long to end by themselves."""
ROUTER_STOP_SECS = ROUTER_GRACE_SECS + 5.0
"""The router is killed after this: it waits half a second before the grace, and up to two after it
for last events.
"""
NODE_GRACE_SECS = 10.0
PORTS_TRIED = 100
PORT_TAKEN = "is in use already"
"""Part of the router's message when it cannot bind its port."""
ROUTER_PORT_TRIES = 5
DRAW_SECS = 0.25
PROGRESS_SECS = 3.0
"""Between two lines about a node that loads its model; small ones are ready sooner."""


class LocalCluster:
    """The running processes. `start` once, then `watch`; `stop` always."""

    def __init__(
        self,
        plan: ClusterPlan,
        log_dir: Path,
        print_line: Callable[[str], None],
        *,
        shows_progress: bool = True,
    ) -> None:
        """`say` prints a line; `shows_progress`: with it, lines about nodes that load."""
        self.plan = plan
        self._print_line = print_line
        self._shows_progress = shows_progress
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
        self.control_key = make_control_key(plan, env)
        if self.control_key is not None:
            env = {**env, CONTROL_KEYS_ENV: f"up:baton-up:admin:{self.control_key}"}
        self.router = ChildProcess(
            "router", self._router_argv, log_dir / "router.log", without_empty_keys(env)
        )
        self.host = plan.up.host
        self.port = 0
        self._router_health_port = 0
        """Port of its probes, which clients cannot fill; 0 until it has reported the one it got."""
        self._state_text: str | None = None
        """Content of the state file when it was last written."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Nodes at once, then the router.

        Raises ChildFailed, with the end of a log, when one is not ready in time.
        """
        self.port, note = choose_port(self.host, self.plan.up.port)
        if note:
            self._print_line(note)
        progress = asyncio.ensure_future(
            self._print_progress() if self._shows_progress else _wait_forever()
        )
        try:
            starts = [
                self._start_guarded(node.child, self._start_node(node)) for node in self.nodes
            ]
            await first_of(
                *starts, return_when=asyncio.FIRST_EXCEPTION
            )  # the first failure, else the end of all
        finally:
            await cancel(progress)
        ends = [self._start_guarded(node.child, _fail_at_end(node.child)) for node in self.nodes]
        # The router would wait for a node that is gone.
        await first_of(self._start_guarded(self.router, self._start_router_first()), *ends)
        self._keep_control_key()
        self.write_state()

    async def watch(self) -> None:
        """Restart what dies, until cancelled."""
        await asyncio.gather(
            *(
                self._keep_alive(node.child, partial(self._start_node, node), node.health_url)
                for node in self.nodes
            ),
            # A restarted router is well when it answers: it may be waiting for a node that is down
            # too.
            self._keep_alive(
                self.router,
                partial(self._start_router, "/livez"),
                lambda: f"{self.url.rpartition(':')[0]}:{self._router_health_port}/livez",
            ),
        )

    def progress_lines(self) -> list[str]:
        """State of each node that is not ready, and of the router."""
        lines = [
            f"{child.name:<10} {child.last_progress() or 'starting'}"
            for child in (node.child for node in self.nodes)
            if child.ready_at is None and child.pid
        ]
        is_waiting = self.router.ready_at is None
        if is_waiting and (lines or self.router.pid):
            state = "starting" if self.router.pid else "waiting for the nodes"
            lines.append(f"{self.router.name:<10} {state}")
        return lines

    async def stop(self) -> None:
        """Router first, so that no request finds half a cluster; then all nodes at once.

        Cancel `watch` before.
        """
        await self._stop_child(self.router, ROUTER_STOP_SECS)
        await asyncio.gather(
            *(self._stop_child(node.child, NODE_GRACE_SECS) for node in self.nodes)
        )
        if self.control_key is not None:
            forget_control_key(self.port, self.control_key)
        if self._owns_state_file():
            Path(str(self.plan.up.state_file)).unlink(missing_ok=True)

    def _keep_control_key(self) -> None:
        """Let other commands of this user find the key."""
        if self.control_key is None:
            return
        try:
            keep_control_key(self.port, self.control_key)
        except OSError as err:
            self._print_line(
                f"the control key cannot be kept for baton top, drain and doctor ({err}); "
                "give them --key, or set BATON_CONTROL_KEY"
            )

    async def _stop_child(self, child: ChildProcess, grace_secs: float) -> None:
        if not await child.stop(grace_secs):
            self._print_line(
                f"{child.name} did not end within {grace_secs:g} s and was killed; its log: "
                f"{child.log_path}"
            )

    def kill(self) -> None:
        for child in (self.router, *(node.child for node in self.nodes)):
            child.kill()

    def write_state(self) -> None:
        """Atomically: a reader sees the old file or the new one."""
        if not self.plan.up.state_file:
            return
        path = Path(self.plan.up.state_file)
        is_first = self._state_text is None
        # Another cluster that was started with the same file has it now.
        if not is_first and path.exists() and not self._owns_state_file():
            return
        state = {
            "router": {
                "pid": self.router.pid,
                "url": self.url,
                "incarnation": self.router.incarnation,
                "control_key": self.control_key,
            },
            "nodes": [
                {
                    "role": node.role,
                    "pid": node.child.pid,
                    "url": node.url,
                    "incarnation": node.child.incarnation,
                    "bootstrap_port": node.bootstrap_port or None,
                    "restarts": node.child.restarts,
                }
                for node in self.nodes
            ],
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._state_text = json.dumps(state, indent=1) + "\n"
        write_private(temporary, self._state_text)
        temporary.replace(path)

    def _owns_state_file(self) -> bool:
        """True if the state file has what this cluster wrote there last."""
        if self._state_text is None:
            return False
        try:
            return Path(str(self.plan.up.state_file)).read_text() == self._state_text
        except (OSError, UnicodeDecodeError):  # removed, or replaced by something else
            return False

    async def _start_node(self, node: ClusterNode) -> None:
        await node.child.start()
        ready = await node.child.until_ready(self.plan.start_timeout_secs)
        node.port = int(ready["url"].rpartition(":")[2])
        node.health_port = int(ready["health_port"])
        node.bootstrap_port = int(ready.get("bootstrap_port") or 0)
        self._print_line(f"{node.name:<10} ready at {node.url}")

    async def _print_progress(self) -> None:
        """Print the newest log line of each node that is not ready, until canceled."""
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
                    self._print_line(f"{node.name:<10} {text}")
                    shown[node.name] = text

    async def _start_router_first(self) -> None:
        """Start the router.

        It gets another free port if the one chosen before the nodes started is taken by now.
        """
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
        await self.router.until_ready(
            self.plan.start_timeout_secs, self._wait_for_router(f"{self.url}{path}")
        )
        self._print_line(f"router     ready at {self.url}")

    async def confirm_router(self) -> None:
        """Return while the router that was started has its address. Raises ChildFailed."""
        await self.router.until_ready(
            self.plan.start_timeout_secs, self._wait_for_router(f"{self.url}/livez")
        )

    async def _wait_for_router(self, url: str) -> None:
        """Return once the router that was started answers GET `url` with 200.

        What answers there before that router has opened its address is another program.
        """
        ready = await self.router.announced()
        self._router_health_port = int(ready["health_port"])
        try:
            await wait_until_well(url, ready["incarnation"])
        except OtherProcess as err:
            raise ChildFailed(
                f"{err}, not the router that was started, which listens on {ready['url']}; "
                "give another --host or --port",
                exit_code=2,
            ) from err

    async def _start_guarded(
        self, child: ChildProcess, starting: Coroutine[Any, Any, None]
    ) -> None:
        """A failure to start, with the end of the log."""
        try:
            await starting
        except ChildFailed as err:
            log_end = _indent_text(child.last_errors())
            raise ChildFailed(f"{err}; {child.log_path} says:\n{log_end}", err.exit_code) from err

    def _router_argv(self) -> list[str]:
        argv = [
            sys.executable,
            "-m",
            "baton_ops.cli",
            "router",
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--health-port",
            str(self._router_health_port),
        ]
        # A laptop's cluster comes and goes: probe it every second, and do not linger when it has to
        # stop.
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
            count and self.plan.role_size(role, "dp_size") > 1
            for role, count in self.plan.counts.items()
        ):
            argv += ["--dp-aware"]
        return argv + _tokenizer_flags(self.plan.engine) + _router_flags(self.plan)

    async def _until_end(self, child: ChildProcess, url: Callable[[], str]) -> int:
        """Wait for the child's end, and end it when it hangs; returns its exit code."""
        limit_secs = self.plan.up.hang_timeout_secs
        if limit_secs > 0:
            hanging = asyncio.ensure_future(
                until_unresponsive(url, lambda: child.incarnation, limit_secs)
            )
            ended = await first_of(hanging, child.wait())
            if hanging in ended:
                self._print_line(
                    f"{child.name} has not answered {url()} for {limit_secs:g} s "
                    "(--hang-timeout-secs) and is killed"
                )
                child.kill()
        return await child.wait()

    async def _keep_alive(
        self,
        child: ChildProcess,
        start: Callable[[], Coroutine[Any, Any, None]],
        url: Callable[[], str],
    ) -> None:
        """Restart a child that ends or hangs; `url` answers while it is well."""
        backoff = RestartBackoff()
        while True:
            code = await self._until_end(child, url)
            pause = backoff.next_pause(
                0.0 if child.ready_at is None else time.monotonic() - child.ready_at
            )
            self._print_line(
                f"{child.name} {describe_exit(code)}; restarting it in {pause:g} s. "
                f"{child.log_path} says:"
            )
            self._print_line(_indent_text(child.last_errors()))
            await asyncio.sleep(pause)
            child.restarts += 1
            try:
                await start()
            except ChildFailed as err:
                self._print_line(str(err))
                child.kill()
            self.write_state()


def make_control_key(plan: ClusterPlan, env: Mapping[str, str]) -> str | None:
    """A new key for the paths that show or change the fleet; None where the user has decided about
    them.

    That is by an API key, which opens them too, by keys of the control plane, or by their variable
    without a value.
    """
    has_api_key = bool(plan.engine.get("api_key") or env.get(SECRETS["api_key"]))
    return None if has_api_key or CONTROL_KEYS_ENV in env else secrets.token_hex(32)


def without_empty_keys(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for a router, which reads keys of the control plane without a value as a
    wrong key.
    """
    return {name: value for name, value in env.items() if value or name != CONTROL_KEYS_ENV}


async def _wait_forever() -> None:
    await asyncio.Event().wait()


async def _fail_at_end(child: ChildProcess) -> None:
    raise ChildFailed(f"{child.name} {describe_exit(await child.wait())} just after it was ready")


def choose_port(host: str, wanted_port: int | None) -> tuple[int, str | None]:
    """The router's port and a sentence if it is not the expected one.

    Raises ChildFailed, with exit code 2, if `wanted_port` is taken.
    """
    if wanted_port is not None:
        if (port := _probe_port(host, wanted_port)) is not None:
            return port, None
        raise ChildFailed(
            f"port {wanted_port} on {host} is taken; give another --port, or none to take the next "
            "free one",
            exit_code=2,
        )
    for candidate in range(8000, 8000 + PORTS_TRIED):
        if _probe_port(host, candidate) is not None:
            return (
                candidate,
                None if candidate == 8000 else f"port 8000 is taken, the router uses {candidate}",
            )
    raise ChildFailed(
        f"ports 8000 to {8000 + PORTS_TRIED - 1} on {host} are all taken; give --port", exit_code=2
    )


def _probe_port(host: str, port: int) -> int | None:
    """`port` (or, for 0, a free one) if it can be bound now, else None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def _indent_text(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (empty)"


async def _serve_cluster(cluster: LocalCluster, api_key: str | None, screen: StatusScreen) -> int:
    from baton_ops.launch.drill import run_drill
    from baton_ops.launch.smoke_test import run_smoke, served_model

    started = time.monotonic()
    traffic = TrafficMonitor("", None, lambda: None)
    drawing = asyncio.ensure_future(_draw_status(cluster, screen, started, lambda: traffic.line))
    try:
        await cluster.start()
        try:
            model = await served_model(cluster.url, api_key)
        finally:
            # The address was the router's before and after it was asked: so was the answer.
            await cluster.confirm_router()
        if cluster.plan.up.drill:
            await cancel(drawing)
            screen.clear()
            watch = asyncio.ensure_future(cluster.watch())
            try:
                is_kept = await run_drill(cluster.url, model, cluster.nodes, api_key)
                # The address was the router's before the drill, too: all answers were its own.
                await cluster.confirm_router()
                return 0 if is_kept else 1
            finally:
                await cancel(watch)
        if cluster.plan.up.smoke:
            await cancel(drawing)
            screen.clear()
            watch = asyncio.ensure_future(cluster.watch())
            try:
                incarnation = cluster.router.incarnation
                return 0 if await run_smoke(cluster.url, model, incarnation, api_key) else 1
            finally:
                await cancel(watch)
        is_in_environment = os.environ.get(SECRETS["api_key"]) == api_key
        greeting = make_greeting(
            cluster.url,
            model,
            api_key=api_key,
            key_in_environment=is_in_environment,
            control_key=cluster.control_key,
        )
        screen.print_text(greeting)
        feed_key = cluster.control_key or api_key
        traffic = TrafficMonitor(cluster.url, feed_key, lambda: cluster.router.incarnation)
        await first_of(cluster.watch(), traffic.run() if screen.is_live else _wait_forever())
        return 0
    finally:
        await cancel(drawing)
        screen.clear()


async def _draw_status(
    cluster: LocalCluster, screen: StatusScreen, started: float, traffic_line: Callable[[], str]
) -> None:
    """Draw the live lines again and again, until cancelled."""
    while screen.is_live:
        elapsed = f"{time.monotonic() - started:6.1f} s  "
        lines = [elapsed + line for line in cluster.progress_lines()]
        line = traffic_line()
        screen.show_lines([*lines, line] if line else lines)
        await asyncio.sleep(DRAW_SECS)


async def _run_plan(plan: ClusterPlan, log_dir: Path) -> int:
    """Returns the exit code. Removes no logs."""
    started = time.monotonic()
    screen = StatusScreen(sys.stdout, is_live=is_live(sys.stdout))

    def print_line(text: str) -> None:
        is_detail = text.startswith(" ")
        screen.print_text(text if is_detail else f"{time.monotonic() - started:6.1f} s  {text}")

    shape = " + ".join(f"{n} {role}" for role, n in plan.counts.items() if n)
    screen.print_text(f"starting router + {shape}; logs in {log_dir}")
    cluster = LocalCluster(plan, log_dir, print_line, shows_progress=not screen.is_live)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            cluster.kill()  # asked twice: do not wait
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    api_key = plan.engine.get("api_key") or os.environ.get("BATON_API_KEY")
    serving = asyncio.ensure_future(_serve_cluster(cluster, api_key, screen))
    try:
        await first_of(serving, stop.wait())
        if stop.is_set():
            screen.print_text("stopping; once more to kill")
            return 0
        return serving.result()
    except ChildFailed as err:
        print(f"{PROG}: {err}", file=sys.stderr, flush=True)
        return 2 if err.exit_code == 2 else 1
    finally:
        await cluster.stop()
        print_line("stopped")


def _tokenizer_flags(engine: dict[str, Any]) -> list[str]:
    """The router tokenizes as the engines do, once for both nodes of a pair.

    Not what --simulate makes of text.
    """
    config = build_config(dict(engine))
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
    policies = {
        name: getattr(plan.up, name) for name in ("policy", "prefill_policy", "decode_policy")
    }
    return (
        command_words({name: value for name, value in (shared | policies).items() if value})
        + plan.args["router"]
    )


def check_router_flags(plan: ClusterPlan) -> str | None:
    """The router's complaint about its flags, read before any node has loaded a model."""
    argv = [sys.executable, "-m", "baton_ops.cli", "router", *_router_flags(plan), "--print-flags"]
    outcome = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=without_empty_keys(os.environ),
    )
    return outcome.stderr.strip() if outcome.returncode == 2 else None


def main(argv: Sequence[str]) -> int:
    plan = parse_flags(argv)
    if complaint := check_router_flags(plan):
        print(complaint, file=sys.stderr)
        return 2
    if complaint := check_place(plan):
        exit_with_mistakes(PROG, [complaint])
    log_dir = Path(plan.up.log_dir or tempfile.mkdtemp(prefix="baton-up-"))
    code = asyncio.run(_run_plan(plan, log_dir))
    if (
        code == 0 and not plan.up.log_dir
    ):  # else the logs are of interest; --log-dir keeps them always
        shutil.rmtree(log_dir, ignore_errors=True)
    return code
