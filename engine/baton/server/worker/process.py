"""The scheduler process of one DP rank: ZMQ messages in, engine turns, ZMQ messages out.

1. The front starts it with one JSON line on stdin (config, addresses); it loads the model and sends
   Ready.
2. Loop: take all messages that are there, advance the engine, send one TokenBatch per turn. When
   the engine has nothing to do it sleeps on its socket and the transfer runtime's event descriptor:
   an idle rank uses no CPU.
3. SIGTERM ends it, and so does the front's death (launch/process_group.py); an error it cannot
   explain is sent as Fatal first.

With --tp-size there are more processes per DP rank: this is the first, the others are started by
the same command and follow it (server.worker.tensor_parallel.channel). Only these processes of an
engine import torch, and not with --simulate.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import zmq

from baton.config import EngineConfig, kv_events
from baton.config.flags import flag_name
from baton.disagg.calls import DrainCall, GroupIds
from baton.disagg.native_node import TransferRuntime
from baton.disagg.transfer_driver import (
    DecodeTransferDriver,
    PrefillTransferDriver,
    TransferDriver,
    TransferNode,
)
from baton.errors import ConfigError, EngineError, WrongState
from baton.runtime.engine_loop import refused_output
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import GrammarUnavailable, TokenizerSource, build_trie
from baton.runtime.grammar.waiting import GrammarQueue
from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import ValidatedRequest
from baton.server import logs
from baton.server.text import model_info
from baton.server.text.native import load_or_refuse, native_extension
from baton.server.worker import messages, transfer_setup
from baton.server.worker.control import (
    AbortByRoom,
    ControlOperation,
    CountRemaining,
    EndTransfers,
    FlushCache,
    ReadKvSnapshot,
    ReadLedger,
    ReadSteps,
    ResumeItems,
    SuspendItems,
)
from baton.server.worker.kv_events.publisher import KvPublisher
from baton.server.worker.log_file import LOG_BYTES, TRACE_BYTES, LogFile, path_of_rank
from baton.server.worker.rank_config import BootstrapAddress, RankConfig, decode_line
from baton.server.worker.tensor_parallel import channel
from baton.server.worker.tensor_parallel.process import load_first_rank, run_executor
from baton.server.worker.tensor_parallel.transfer_node import TpTransferNode

if TYPE_CHECKING:
    from baton.runtime.build import LoadedModel
    from baton.runtime.simulated.engine import SimLoaded

log = logging.getLogger("baton.rank")

STATS_EVERY_SECS = 1.0
QUIET_STATS_SECS = 5.0
"""Further wait of an idle rank with a transfer runtime, whose counters peers and strangers move."""
LOADING_EVERY_SECS = 0.25
MOST_MASK_THREADS = 8
"""256 rows of 60 us take 2 ms then, less than a decode step."""
INGEST_BURST = 256
"""Messages taken per turn: a flood of requests must not keep running ones from their next token."""


def main() -> int:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the front decides when we end
    sys.setswitchinterval(
        0.0005
    )  # planning and compute threads hand the GIL over within half a millisecond
    line = sys.stdin.readline()
    if not line:
        return 1  # the front died before it could say what to do
    rank_config = decode_line(line)
    config = rank_config.config
    dp_rank = rank_config.dp_rank
    tp_group = None
    if config.tp_size > 1:
        folder = Path(rank_config.folder)
        tp_group = channel.TpGroup(rank_config.tp_rank, config.tp_size, folder, dp_rank)
    name = f"rank{dp_rank}" + (f".{tp_group.tp_rank}" if tp_group else "")
    logs.start_logs(config.log_level, config.log_format, name)
    context: zmq.Context[Any] = zmq.Context()
    pull = context.socket(zmq.PULL)
    push = context.socket(zmq.PUSH)
    if tp_group is None or tp_group.tp_rank == 0:
        pull.connect(rank_config.to_rank)
    push.connect(rank_config.to_front)
    try:
        if tp_group is not None and tp_group.tp_rank:
            report = LoadReports(push, dp_rank, tp_group.tp_rank)
            run_executor(config, tp_group, context, rank_config.bootstrap, report)
        else:
            rank = RankProcess(rank_config, pull, push, tp_group)
            gc.collect()
            # modules and the model: a full collection within the loop would walk them for tens of
            # ms
            gc.freeze()
            rank.run()
        return 0
    except ConfigError as err:
        push.send(messages.encoder.encode(messages.FatalMessage(dp_rank, err.message)))
        return 2
    except Exception as err:
        log.exception("%s cannot go on", name)
        fatal = messages.FatalMessage(dp_rank, f"{type(err).__name__}: {err}")
        push.send(messages.encoder.encode(fatal))
        return 1
    finally:
        context.destroy(linger=1000)


class LoadReports:
    """Tells the front how much of the model this process has read: at once, then at most every
    LOADING_EVERY_SECS.
    """

    def __init__(self, push: zmq.Socket[bytes], dp_rank: int, tp_rank: int) -> None:
        self._push = push
        self._place = (dp_rank, tp_rank)
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._next or done >= total:
            self._next = now + LOADING_EVERY_SECS
            self._push.send(
                messages.encoder.encode(messages.LoadingMessage(*self._place, done, total))
            )


def _load(config: EngineConfig, report: LoadReports) -> LoadedModel | SimLoaded:
    if config.simulate is not None:
        from baton.runtime.simulated import engine

        return engine.load_simulated(config)
    from baton.runtime import build  # torch: seconds, and half a gigabyte

    return build.load_rank(config, str(model_info.resolve(config.model_path)), on_progress=report)


@dataclass(eq=False)
class RankProcess:
    rank_config: RankConfig
    pull: zmq.Socket[bytes]
    push: zmq.Socket[bytes]
    tp_group: channel.TpGroup | None = None

    def __post_init__(self) -> None:
        config = self.rank_config.config
        self.config = config
        self.dp_rank = self.rank_config.dp_rank
        self._stop = False
        # A handler alone does not end a wait: Python resumes poll() after it. The byte in this pipe
        # does.
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._executors: channel.TpExecutors | None = None
        loaded: LoadedModel | SimLoaded
        pids = [os.getpid()]
        report = LoadReports(self.push, self.dp_rank, 0)
        if self.tp_group is None:
            loaded = _load(config, report)
        else:
            loaded, self._executors = load_first_rank(
                config, self.tp_group, self.pull.context, report
            )
            pids += self._executors.pids
        self._info = {**loaded.info, "pids": pids}
        self._node: TransferRuntime | None = None
        driver = None
        if config.disaggregation_mode != "null":
            driver = self._attach_transfer(loaded, self.rank_config.bootstrap)
        self._decision_log = self._log_file(
            "decision_log", lambda made: json.dumps(made._asdict()), LOG_BYTES
        )
        self._trace = self._log_file("scheduler_trace", str, TRACE_BYTES, must_be_whole=True)
        grammars = make_grammar_queue(self.rank_config, loaded.vocab_size)
        self._info = {**self._info, "grammar": grammars.store is not None}
        trace = self._trace.put if self._trace else None
        self.engine = loaded.make_engine_loop(driver, trace, grammars)
        if self._decision_log:
            self.engine.sched.decisions.sink = self._decision_log.put
        self._poller = zmq.Poller()
        self._poller.register(self.pull, zmq.POLLIN)
        self._poller.register(woken, zmq.POLLIN)
        if grammars.store is not None:
            self._poller.register(grammars.store.event_fd, zmq.POLLIN)
        if self._node is not None:
            self._poller.register(self._node.event_fd, zmq.POLLIN)
        if self._executors is not None:
            self._poller.register(self._executors.reports, zmq.POLLIN)
        self._kv = self._announce_cache(loaded.layout["groups"][0]["kind"])
        self._next_stats = 0.0
        self._last_stats: tuple[float, float] | None = None
        """When the last report was made, and how many tokens had been generated by then."""
        self._reported_rest = False
        """The last report said that nothing is generated any more."""
        self._has_dumped_rooms = False
        self._stream = StreamBuffer(config.stream_interval)

    def _log_file(
        self, field: str, render: Callable[[Any], str], limit: int, *, must_be_whole: bool = False
    ) -> LogFile | None:
        path = getattr(self.config, field)
        if path is None:
            return None
        mine = path_of_rank(path, self.dp_rank, self.config.dp_size)
        return LogFile(flag_name(field), mine, render, limit, must_be_whole=must_be_whole)

    def _announce_cache(self, group_kind: str) -> KvPublisher | None:
        """--kv-events-config: the publisher, with its replay socket in the poller."""
        config = kv_events.parse_events_config(self.config.kv_events_config)
        if not config.enable_kv_cache_events:
            return None
        kv = KvPublisher(
            config, self.engine.sched, self.dp_rank, group_kind, self.pull.context, self._send
        )
        if kv.replay is not None:
            self._poller.register(kv.replay, zmq.POLLIN)
        self._info = {**self._info, "kv_events": kv.info()}
        return kv

    def _on_sigterm(self, _signum: int, _frame: FrameType | None) -> None:
        self._stop = True

    def _attach_transfer(
        self, loaded: LoadedModel | SimLoaded, bootstrap: BootstrapAddress | None
    ) -> TransferDriver:
        c = self.config
        own = transfer_setup.start(c, loaded.native_pool, loaded.layout, self.dp_rank, 0, bootstrap)
        runtime: TransferRuntime = own
        if self._executors is not None:
            late_secs = c.kv_transfer_timeout_secs + c.kv_lease_secs + c.dist_timeout
            runtime = TpTransferNode(own, self._executors, late_secs)
        self._node = runtime
        groups = GroupIds.of(loaded.layout)
        if c.disaggregation_mode == "decode":
            return DecodeTransferDriver(runtime, c.request_timeout_secs, groups, loaded.vocab_size)
        node: TransferNode = runtime
        if c.simulate is not None:
            from baton.runtime.simulated.engine import SimLoaded

            assert isinstance(loaded, SimLoaded), "with --simulate, no model is loaded"
            node = loaded.pace_transfer(runtime)
        return PrefillTransferDriver(node, c.request_timeout_secs, groups)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        self._send(messages.ReadyMessage(self.dp_rank, self._info))
        busy = True
        while not self._stop:
            self._ingest(wait=not busy)
            outputs, busy = self.engine.step(time.monotonic())
            if outputs := self._stream.take(outputs):
                self._send(messages.TokenBatch(self.dp_rank, outputs))
            if timelines := self.engine.take_timelines():
                self._send(messages.TimelinesMessage(self.dp_rank, timelines))
            if self._kv is not None:
                self._kv.publish()
            now = time.monotonic()
            if now >= self._next_stats or (not busy and self._next_stats > now - STATS_EVERY_SECS):
                was_well = self.engine.not_accepting_reason is None
                self._send_stats(now)
                if was_well and self.engine.not_accepting_reason is not None:
                    busy = True  # the engine ended requests: their errors leave
        log.info("rank %d stops", self.dp_rank)
        if self._node is not None:
            self._node.close()
        if self._executors is not None:
            self.engine.close()  # after the step that runs: the others are in it too
            self._executors.stop()
        for file in (self._decision_log, self._trace):
            if file is not None:
                file.close()

    def _wait_ms(self) -> int | None:
        """How long to sleep without messages: until the next deadline or report; None when nothing
        can change.
        """
        now = time.monotonic()
        if self.engine.is_idle:
            due = next_idle_report(
                self._next_stats, is_at_rest=self._reported_rest, has_peers=self._node is not None
            )
        else:
            deadline = self.engine.next_deadline()
            due = min(now + STATS_EVERY_SECS, math.inf if deadline is None else deadline)
        return None if due is None else max(int((due - now) * 1000) + 1, 1)

    def _ingest(self, *, wait: bool) -> None:
        if wait:
            self._poller.poll(self._wait_ms())
        self.engine.set_time(time.monotonic())
        if self._kv is not None and self._kv.replay is not None:
            self._kv.serve_replays()
        for _ in range(INGEST_BURST):
            try:
                raw = self.pull.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            message = messages.to_rank_decoder.decode(raw)
            if isinstance(message, messages.SubmitMessage):
                self._submit(message.request)
            elif isinstance(message, messages.AbortMessage):
                for handle in message.handles:
                    self.engine.abort(handle)
                    self._stream.forget(handle)
            else:
                self._send(self._control(message))

    def _submit(self, request: ValidatedRequest) -> None:
        try:
            self.engine.submit(request)
        except EngineError as err:
            refused = refused_output(request.handle, err)
            self._send(messages.TokenBatch(self.dp_rank, [refused]))

    def _control(self, message: messages.ControlMessage) -> messages.ReplyMessage:
        try:
            return messages.ReplyMessage(message.id, True, self._carry_out(message.operation))
        except WrongState as err:
            return messages.ReplyMessage(message.id, False, {"message": err.message})

    def _carry_out(self, operation: ControlOperation) -> dict[str, Any]:
        """Carry out a control operation. Raises WrongState when it cannot be done."""
        sched = self.engine.sched
        match operation:
            case FlushCache():
                return {"pages": sched.flush_cache()}
            case ReadKvSnapshot():
                if self._kv is None:
                    raise WrongState("this engine publishes no KV events (--kv-events-config)")
                return self._kv.snapshot()
            case ReadLedger():
                return self._ledger(operation.room)
            case CountRemaining():
                return self._remaining_work()
            case ReadSteps():
                return {"steps": sched.decisions.recent(operation.limit)}
            case AbortByRoom():
                aborted = self.engine.abort_where(
                    operation.rooms, operation.rid, all_leases=operation.all_leases
                )
                return {"aborted": aborted}
            case EndTransfers():
                if self._node is not None:
                    self._node.call(DrainCall())
                return sched.report.counts()
            case SuspendItems():
                return {"found": sched.suspend(operation.handles)}
            case ResumeItems():
                return {"found": sched.resume(operation.handles)}

    def _ledger(self, room: int | None) -> dict[str, Any]:
        """Pages, requests, and the transfers of this room or of all."""
        books: dict[str, Any] = {
            "pages": self.engine.page_gauges(),
            "requests": self.engine.request_counts(),
        }
        if self._node is not None:
            books["rooms"] = json.loads(self._node.rooms_json(room))
            books["transfer"] = json.loads(self._node.stats_json())
        return books

    def _remaining_work(self) -> dict[str, Any]:
        """Work that must end before this process can stop without a loss."""
        rooms = 0
        if self._node is not None:
            rooms = json.loads(self._node.stats_json())["detail"]["rooms_live"]
        oldest = self.engine.oldest_arrival()
        age = None if oldest is None else time.monotonic() - oldest
        return {"requests": self.engine.request_counts(), "rooms": rooms, "oldest_secs": age}

    # ------------------------------------------------------------------ reports

    def _send(self, message: messages.ToFront) -> None:
        self.push.send(messages.encoder.encode(message))

    def _send_stats(self, now: float) -> None:
        self._next_stats = now + STATS_EVERY_SECS
        engine = self.engine
        sched = self.engine.sched
        generated = engine.counters["generated_tokens_total"]
        then, before = self._last_stats or (now, generated)
        rate = (generated - before) / (now - then) if now > then else 0.0
        self._last_stats = (now, generated)
        self._reported_rest = not rate
        gauges = {
            **engine.gauges(),
            **sched.stats.gauges(),
            **sched.sharing.gauges(),
            "generated_tokens_per_second": rate,
        }
        counters = {
            **engine.counters,
            **(engine.driver.counters if engine.driver is not None else {}),
            **sched.report.counters(),
            **sched.stats.counters(),
            **sched.sharing.counters(),
            **sched.decisions.counters(),
            "priority_hook_errors_total": 0 if engine.hook is None else engine.hook.errors,
            **engine.grammars.counters(),
        }
        for name, file in (("decisions", self._decision_log), ("trace", self._trace)):
            if file is not None:
                counters[f'log_lines_dropped_total{{log="{name}"}}'] = file.dropped
        if self._kv is not None:
            counters["kv_event_batches_total"] = self._kv.batches
        if self._executors is not None:
            counters.update(self._executors.counters())
        reason = engine.not_accepting_reason
        if self._node is not None:
            if reason is not None and not self._has_dumped_rooms:
                self._has_dumped_rooms = True
                log.error("KV transfers and their last events: %s", self._node.rooms_json(None))
            failed = flatten_transfer_stats(json.loads(self._node.stats_json()), gauges, counters)
            reason = reason or failed
        if self.config.disaggregation_mode == "prefill":
            gauges["kv_oldest_lease_seconds"] = sched.stats.oldest_lease_seconds(now)
        histograms = {**sched.stats.histograms(), **engine.grammars.histograms()}
        self._send(
            messages.StatsMessage(
                self.dp_rank, gauges, counters, histograms, sched.report.load(), reason
            )
        )


def make_grammar_queue(rank_config: RankConfig, vocab_size: int) -> GrammarQueue:
    """The trie of the tokenizer, and what waits for grammars made with it."""
    config = rank_config.config
    aborts = config.deadline_miss_action == "abort"
    if config.grammar == "off":
        return GrammarQueue(None, "this engine was started with --grammar off")
    files = rank_config.grammar
    if files is None:
        return GrammarQueue(None, "this engine is simulated: it follows no grammar")
    folder = load_or_refuse(native_extension().TokenizerFiles, Path(files.tokenizer_path))
    text = load_or_refuse(folder.tokenizer_json)
    source = TokenizerSource(text, files.added_tokens, files.eos_token_ids)
    try:
        trie = build_trie(source, vocab_size)
    except GrammarUnavailable as err:
        log.warning("structured output is refused: %s", err)
        return GrammarQueue(None, f"this engine cannot follow a grammar: {err}")
    filler = MaskFiller(trie.vocab_size, vocab_size, mask_threads(config))
    return GrammarQueue(GrammarStore(trie, filler), aborts_missed_deadlines=aborts)


def mask_threads(config: EngineConfig) -> int:
    """Threads that fill the masks of one step: this machine's cores shared among the engine's
    ranks.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_MASK_THREADS, cores // config.dp_size))


def flatten_transfer_stats(
    stats: dict[str, Any], gauges: dict[str, float], counters: dict[str, float]
) -> str | None:
    """Put the transfer runtime's numbers (kv_transfer's stats_json) under their metric names.

    Returns why the rank should get no new requests; None while the runtime works.
    """
    gauges.update(stats["gauges"])
    counters.update(stats["counters"])
    return (
        None
        if stats["healthy"]
        else f"its KV transfer runtime has failed: {stats['unhealthy_reason']}"
    )


def next_idle_report(next_stats: float, *, is_at_rest: bool, has_peers: bool) -> float | None:
    """When an idle rank reports again; None: not before it has worked."""
    if not is_at_rest:
        return next_stats
    return next_stats + QUIET_STATS_SECS if has_peers else None


class StreamBuffer:
    """--stream-interval: a request's tokens leave in groups of `interval`; its first one and its
    end leave at once.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, list[EmittedTokens]] = {}

    def take(self, outputs: list[EmittedTokens]) -> list[EmittedTokens]:
        """Add a turn's outputs; returns those that may leave now, in order."""
        if self._interval == 1:
            return outputs
        leaving: list[EmittedTokens] = []
        for out in outputs:
            if out.prompt_logprobs is not None:
                leaving.append(out)  # they come before the first token
                continue
            is_first = out.handle not in self._held
            held = self._held.setdefault(out.handle, [])
            held.append(out)
            if out.finish is not None:
                leaving.extend(self._held.pop(out.handle))
            elif is_first or len(held) >= self._interval:
                leaving.extend(held)
                held.clear()
        return leaving

    def forget(self, handle: int) -> None:
        self._held.pop(handle, None)


if __name__ == "__main__":
    raise SystemExit(main())
