"""Start an engine: the front in this process, one scheduler process per DP rank, and on P nodes the
bootstrap server.

1. read the model directory, bind the HTTP port (503 `not_ready` from now on), bind the ZMQ sockets,
   spawn the ranks, with --tp-size several processes each;
2. every rank loads the model and sends Ready; the last one turns /health to 200 and prints the
   READY line;
3. SIGTERM or SIGINT drains: no new requests, running ones finish, leases end, ranks exit; a second
   signal ends at once;
4. a rank that dies fails its requests, and is dead when one of its processes is; the other ranks
   finish theirs, then the process exits with 1 and a supervisor starts it again.

Ranks run in their own sessions, so that Ctrl-C reaches this process alone and is handled once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import baton
from baton.config import LOOPBACK, UNSPECIFIED_HOSTS, EngineConfig, parse_config, uses_four_bytes
from baton.config.flags import flag_name
from baton.errors import ConfigError, EngineError, counted
from baton.models import checkpoint
from baton.sched.metrics.histogram import GAP_BUCKETS
from baton.server import logs
from baton.server.http.app import HttpServer
from baton.server.launch.draft_model import resolve_draft_model
from baton.server.launch.listener import (
    BACKLOG,
    HEALTH_CONNECTIONS,
    ConnectionLimits,
    ConnectionTable,
    HttpConnection,
    fit_descriptors,
)
from baton.server.launch.process_group import ChildProcessGroup, describe_exit, first_of
from baton.server.text import model_info
from baton.server.text.answer_format import AnswerFormat, load_answer_format
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker import transfer_setup
from baton.server.worker.client import SEND_QUEUE, RankClient, RankSet
from baton.server.worker.control import EndTransfers
from baton.server.worker.rank_config import (
    BootstrapAddress,
    GrammarFiles,
    RankConfig,
    encode_line,
)

log = logging.getLogger("baton.launch")

RANK_COMMAND = (sys.executable, "-m", "baton.server.worker.process")
EXIT_GRACE_SECS = 5.0
"""From SIGTERM to SIGKILL for a rank that should go."""
LAST_ANSWERS_SECS = 2.0
"""For error events to leave before the HTTP server closes."""
PROGRESS_SECS = 10.0
TRANSFER_END_SECS = 2.0
"""For a rank to refuse the KV transfers that begin after all its requests have ended."""


def main(argv: Sequence[str]) -> int:
    """`baton engine`; returns the exit code."""
    return run_engine(parse_config(argv, find_others=_missing_models))


def _missing_models(values: dict[str, Any]) -> list[str]:
    """Directories of --model-path and other paths of models that are not there."""
    found = []
    for name in ("model_path", "tokenizer_path", "speculative_draft_model_path"):
        flag = flag_name(name)
        given = values.get(name)
        if given in (None, "demo"):
            continue
        try:
            model_info.model_directory(flag, given)
        except ConfigError as err:
            found.append(err.message)
    return found


def run_engine(config: EngineConfig, rank_command: Sequence[str] = RANK_COMMAND) -> int:
    """Run until a signal or the last rank's death; returns the exit code (0 drained, 1 died, 2
    cannot start).
    """
    logs.start_logs(config.log_level, config.log_format)
    logging.getLogger("aiohttp.server").addFilter(_one_line_for_no_request)
    try:
        if config.simulate is None and rank_command is RANK_COMMAND:  # ranks of tests have no model
            config = resolve_draft_model(config)
            checkpoint.check_checkpoint(config, model_info.resolve(config.model_path))
        return asyncio.run(_Launcher(config, rank_command).run())
    except ConfigError as err:
        logs.report_failure(config.log_format, err.message)
        return 2


def _one_line_for_no_request(record: logging.LogRecord) -> bool:
    """A port scan, or a router that tries HTTP/2 for gRPC, is refused in one line, not in a
    traceback.
    """
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.msg = record.msg + ": this is no HTTP/1.1 request"
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True


class _Launcher:
    """Owns the processes, sockets and servers of one engine; `run` is its whole life."""

    def __init__(self, config: EngineConfig, rank_command: Sequence[str]) -> None:
        self._config = config
        self._rank_command = rank_command
        self._children: dict[tuple[int, int], ChildProcessGroup] = {}
        """By DP and TP rank."""
        self._watchers: list[asyncio.Task[None]] = []
        self._exit_codes: list[int] = []
        self._signaled = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closing = False
        self._health_port: int | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        started = time.monotonic()
        facts = model_info.load(self._config)
        tokenizer = (
            Tokenizer.four_byte()
            if uses_four_bytes(self._config)
            else Tokenizer(facts.tokenizer_path)
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(tokenizer.close)
            folder = Path(tempfile.mkdtemp(prefix="baton-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            answer_format = load_answer_format(self._config, facts, tokenizer)
            context, ranks = self._open_sockets(folder, tokenizer, answer_format)
            stack.callback(context.destroy, 0)
            stack.callback(ranks.close)
            front = HttpServer(self._config, facts, tokenizer, answer_format, ranks)
            stack.callback(front.validator.grammars.close)
            for warning in front.validator.warnings:
                log.warning("%s: %s", facts.tokenizer_path, warning)
            if front.tracer is not None:
                stack.push_async_callback(front.tracer.flush)
            url = await self._serve_http(stack, front)
            transfer_setup.warn_of_reach(self._config)
            front.lifecycle.bootstrap = bootstrap = self._start_bootstrap(stack)
            stack.push_async_callback(self._end_children)
            grammar = self._grammar_files(facts, tokenizer, front)
            for dp_rank, tp_rank in itertools.product(
                range(self._config.dp_size), range(self._config.tp_size)
            ):
                await self._spawn(dp_rank, tp_rank, folder, ranks, bootstrap, grammar)
            processes = counted(len(self._children), "process")
            log.info("%s: loading %s in %s", url, facts.path, processes)
            log.info(
                "tool calls are read as %s, reasoning as %s",
                answer_format.tool_parser,
                answer_format.reasoning_parser,
            )
            if facts.has_response_template:
                log.info(
                    "the response_template in %s/tokenizer_config.json is not used; choose with "
                    "--tool-parser and "
                    "--reasoning-parser if answers are read wrongly",
                    facts.tokenizer_path,
                )
            if not await self._wait_ready(ranks, started):
                return await self._give_up(ranks)
            front.became_ready()
            gc.collect()
            # modules and tables: a full collection would walk them while all streams wait
            gc.freeze()
            log.info(
                "ready after %.1f s: %s serves %s", time.monotonic() - started, url, facts.name
            )
            port = None if bootstrap is None else bootstrap.port
            ready = {
                "url": url,
                "pid": os.getpid(),
                "bootstrap_port": port,
                "incarnation": front.incarnation,
            }
            if self._health_port is not None:
                ready["health_port"] = self._health_port
            logs.announce_ready(self._config.log_format, ready)
            return await self._serve_until_end(front, ranks)

    # ---- parts of the start ----------------------------------------------------------------------

    def _open_sockets(
        self, folder: Path, tokenizer: Tokenizer, answer_format: AnswerFormat
    ) -> tuple[zmq.Context[Any], RankSet]:
        """PUSH to each rank and a shared PULL from all, as ipc sockets in a directory only this
        user can enter.
        """
        context: zmq.Context[Any] = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.set_hwm(SEND_QUEUE)
        pull.bind(f"ipc://{folder}/front")
        pushes = [context.socket(zmq.PUSH) for _ in range(self._config.dp_size)]
        for rank, push in enumerate(pushes):
            push.set_hwm(SEND_QUEUE)
            push.bind(f"ipc://{folder}/rank{rank}")
        limit = self._config.max_running_requests + self._config.max_queued_requests
        answers = native_extension().AnswerTable(
            tokenizer.native, answer_format.native, GAP_BUCKETS
        )
        return context, RankSet(pull, pushes, limit, answers, self._config.tp_size)

    async def _serve_http(self, stack: contextlib.AsyncExitStack, front: HttpServer) -> str:
        most = fit_descriptors(self._config.max_connections)
        port = await self._listen(stack, front.application(), "port", most)
        if self._config.health_port is not None:
            app = front.health_application()
            self._health_port = await self._listen(stack, app, "health_port", HEALTH_CONNECTIONS)
        return url_of(self._config.host, port)

    async def _listen(
        self, stack: contextlib.AsyncExitStack, app: web.Application, field: str, most: int
    ) -> int:
        """Serve `app` on the port that this field names; returns the port."""
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=LAST_ANSWERS_SECS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        idle_secs = self._config.idle_connection_timeout_secs
        limits = ConnectionLimits(most, self._config.header_read_timeout_secs, idle_secs)
        table = ConnectionTable(limits)
        server = runner.server
        assert server is not None, "set up above"
        host = self._config.host
        port = getattr(self._config, field)
        try:
            listener = await asyncio.get_running_loop().create_server(
                lambda: HttpConnection(table, server, idle_secs), host, port, backlog=BACKLOG
            )
        except OSError as err:
            why = (
                "is already in use"
                if err.errno == errno.EADDRINUSE
                else f"cannot be bound ({err.strerror or err})"
            )
            raise ConfigError(
                f"--host {host} {flag_name(field)} {port} {why}; choose another, or 0 for a free "
                "port"
            ) from err
        stack.callback(listener.close)  # before the connections end
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    def _start_bootstrap(self, stack: contextlib.AsyncExitStack) -> Any:
        """On a P node the server where D's transfer runtime finds our ranks."""
        config = self._config
        if config.disaggregation_mode != "prefill":
            return None
        port = config.disaggregation_bootstrap_port
        try:
            server = native_extension().BootstrapServer(
                config.bootstrap_listen_host, port, config.cluster_key, config.second_cluster_key
            )
        except OSError as err:
            why = f"cannot be bound ({err}); choose another, or 0"
            raise ConfigError(f"--disaggregation-bootstrap-port {port} {why}") from err
        stack.callback(server.stop)
        return server

    def _grammar_files(
        self, facts: model_info.ModelFacts, tokenizer: Tokenizer, front: HttpServer
    ) -> GrammarFiles | None:
        """Files from which ranks make the trie for grammars; None for a simulated engine."""
        if self._config.simulate is not None:
            return None
        eos_token_ids = list(front.validator.eos_token_ids)
        return GrammarFiles(str(facts.tokenizer_path), tokenizer.added_tokens(), eos_token_ids)

    async def _spawn(
        self,
        dp_rank: int,
        tp_rank: int,
        folder: Path,
        ranks: RankSet,
        bootstrap: Any,
        grammar: GrammarFiles | None,
    ) -> None:
        # A rank finds the package where this process found it, installed or not.
        package_root = str(Path(baton.__path__[0]).parent)
        search_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        listens = self._config.bootstrap_listen_host
        reachable = LOOPBACK if listens in UNSPECIFIED_HOSTS else listens
        address = None if bootstrap is None else BootstrapAddress(reachable, bootstrap.port)
        rank_config = RankConfig(
            config=self._config,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
            folder=str(folder),
            to_rank=f"ipc://{folder}/rank{dp_rank}",
            to_front=f"ipc://{folder}/front",
            bootstrap=address,
            grammar=grammar,
        )
        env = {**os.environ, "PYTHONPATH": search_path}
        self._children[dp_rank, tp_rank] = await ChildProcessGroup.spawn(
            self._rank_command,
            env,
            stdout=sys.stderr.fileno(),
            stdin=encode_line(rank_config),
            death_signal=signal.SIGKILL,
        )
        self._watchers.append(asyncio.create_task(self._watch(dp_rank, tp_rank, ranks)))

    async def _watch(self, dp_rank: int, tp_rank: int, ranks: RankSet) -> None:
        child = self._children[dp_rank, tp_rank]
        code = await child.wait()
        self._exit_codes.append(code)
        if not self._closing:
            which = f"process {child.pid}" + (
                f" (tensor-parallel rank {tp_rank})" if self._config.tp_size > 1 else ""
            )
            ranks.died(dp_rank, f"{which} {describe_exit(code)}")
        if (
            code or not self._closing
        ):  # else it ended in order, and so do those that compute with it
            for (dp, _), other in self._children.items():
                if dp == dp_rank:
                    other.kill()

    async def _wait_ready(self, ranks: RankSet, started: float) -> bool:
        """True when all ranks are ready; False on a death or a signal."""
        while not ranks.all_ready:
            if self._signaled.is_set() or not ranks.all_alive:
                return False
            ranks.changed.clear()
            await first_of(ranks.changed.wait(), self._signaled.wait(), timeout_secs=PROGRESS_SECS)
            if ranks.all_alive:
                ready = sum(r.ready for r in ranks.ranks)
                log.info(
                    "%d of %d ranks ready after %.1f s",
                    ready,
                    len(ranks.ranks),
                    time.monotonic() - started,
                )
        return True

    async def _give_up(self, ranks: RankSet) -> int:
        """A signal or a rank's death before everything was ready."""
        dead = [f"rank {r.dp_rank}: {r.dead}" for r in ranks.ranks if r.dead is not None]
        if not dead:
            return 0
        logs.report_failure(self._config.log_format, "\n".join(["could not start", *dead]))
        # A rank exits with 2 when the configuration is at fault: a supervisor should not try again.
        # It has sent its message and is about to exit: let it.
        await asyncio.wait(
            self._watchers, timeout=EXIT_GRACE_SECS, return_when=asyncio.FIRST_COMPLETED
        )
        await self._end_children()
        return 2 if 2 in self._exit_codes else 1

    # ---- the end ---------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self._signaled.is_set():
            self._hurry.set()
        self._signaled.set()

    async def _serve_until_end(self, front: HttpServer, ranks: RankSet) -> int:
        while ranks.all_alive and not self._signaled.is_set():
            ranks.changed.clear()
            await first_of(ranks.changed.wait(), self._signaled.wait())
        is_whole = ranks.all_alive
        if not is_whole:
            alive = sum(r.dead is None for r in ranks.ranks)
            total = len(ranks.ranks)
            log.error(
                "%d of %d ranks are alive: exiting with 1 so that a supervisor starts all again",
                alive,
                total,
            )
        if ranks.any_alive:
            await self._drain(
                front, ranks, "it got a signal to end" if is_whole else "one of its ranks died"
            )
        else:
            await first_of(
                front.answering.is_idle.wait(), timeout_secs=LAST_ANSWERS_SECS
            )  # the error events leave
        return 0 if is_whole else 1

    async def _drain(self, front: HttpServer, ranks: RankSet, why: str) -> None:
        """POST /drain that cannot be undone, then the end: at most --drain-timeout-secs, or until a
        second signal.
        """
        limit = self._config.drain_timeout_secs
        log.info("ending, because %s: at most %g s; a second signal ends at once", why, limit)
        front.lifecycle.begin_drain(final_reason=why)
        await first_of(self._finish_work(front, ranks), self._hurry.wait(), timeout_secs=limit)
        if ranks.in_flight:
            log.warning("%d requests did not finish in time and are cut", ranks.in_flight)
            front.answering.cut_all()
            await first_of(front.answering.is_idle.wait(), timeout_secs=LAST_ANSWERS_SECS)
        log.info("drained")

    @staticmethod
    async def _finish_work(front: HttpServer, ranks: RankSet) -> None:
        """Wait until nothing is left, then have the transfer runtimes refuse what D nodes still ask
        for.
        """

        async def end_transfers(rank: RankClient) -> None:
            try:
                await ranks.control(rank, EndTransfers(), TRANSFER_END_SECS)
            except EngineError as err:
                log.warning("rank %d did not end its transfers: %s", rank.dp_rank, err.message)

        await front.lifecycle.until_finished()
        await asyncio.gather(*(end_transfers(r) for r in ranks.ranks if r.dead is None))

    async def _end_children(self) -> None:
        """SIGTERM, a short grace, SIGKILL; every child is reaped."""
        self._closing = True
        children = self._children.values()
        ended = await asyncio.gather(*(child.stop(EXIT_GRACE_SECS) for child in children))
        if stubborn := [
            child.pid for child, by_itself in zip(children, ended, strict=True) if not by_itself
        ]:
            log.warning("rank processes %s ignored SIGTERM and were killed", stubborn)
        await asyncio.gather(*self._watchers, return_exceptions=True)


def url_of(host: str, port: int) -> str:
    """URL of a server on this machine that listens on `host`. asyncio's sockets on :: take no
    IPv4.
    """
    shown = {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
