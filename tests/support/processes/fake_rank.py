"""A scheduler process for tests of the front: speaks the real messages over real sockets and scripts the tokens.

Started like the real one (server.worker.rank_config on stdin). The script is a JSON object: what $FAKE_RANK holds,
updated with what a request brings in its `cache_salt`:
  reply        text to answer with (default: the prompt's own tokens, over and over)
  delay        seconds before the first token of a request; step: seconds between tokens
  hold         a file: no token before it exists
  burst        tokens per TokenBatch
  drafts       [accepted, rejected]: drafted tokens, reported with the last token
  loading      [done, total]: parameters reported as loaded before Ready
  ready_when   a file: not Ready before it exists
  error        [code, message]: instead of an answer; error_after: tokens before it
  silent       true: never answer (until Abort)
  leased       [n, file]: the first n looks at the books show a lease; each look is a line in the file
  unsuspendable message: refuse to suspend (a request whose KV is in transfer)
  fail_start   message: send Fatal instead of Ready and exit with 1
Control operation ReadLedger is answered with what was seen: submits, aborts, running.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from baton.layers.kv_spec import KVSpec, describe_heads
from baton.sched.state.load_report import LoadReport, WaitingLoad
from baton.sched.types.events import EmittedTokens, RowError
from baton.sched.types.plan import TokenLogprobs
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages, PulledPages
from baton.server.worker.control import (
    AbortByRoom,
    CountRemaining,
    ReadLedger,
    ReadSteps,
    ResumeItems,
    SuspendItems,
)
from baton.server.worker.messages import (
    AbortMessage,
    ControlMessage,
    FatalMessage,
    LoadingMessage,
    ReadyMessage,
    ReplyMessage,
    StatsMessage,
    SubmitMessage,
    TokenBatch,
    encoder,
    to_rank_decoder,
)
from baton.server.worker.rank_config import RankConfig, decode_line

BAND = {"4": WaitingLoad(2, 300)}
LOAD = LoadReport(BAND, BAND, 2, 310, 300, 40, 1, 99, 0, 0, 0, 1, 7, 2, 12, 16, {}, 1000.0, 10.4)
STAGES = FirstTokenStages(0.0015, PulledPages("shm", 3, 12288, 0.00025, 0.001))


@dataclass
class FakeRank:
    order: RankConfig
    script: dict[str, Any]
    tokenizer: Tokenizer
    push: zmq.asyncio.Socket
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    started_at: dict[int, float] = field(default_factory=dict)
    submits: list[dict[str, Any]] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    suspended: dict[int, asyncio.Event] = field(default_factory=dict)

    async def send(self, message: Any) -> None:
        await self.push.send(encoder.encode(message))

    def script_of(self, job: ValidatedRequest) -> dict[str, Any]:
        salt = job.namespace.decode().partition("\0")[0]
        return {**self.script, **(json.loads(salt) if salt.startswith("{") else {})}

    async def answer(self, job: ValidatedRequest) -> None:
        script = self.script_of(job)
        reply = script.get("reply")
        if "tokens" in script:
            ids = script["tokens"]
        elif reply is not None:
            ids = [*self.tokenizer.encode(reply, add_special_tokens=False).ids, 1]
        else:
            ids = list(job.prompt) * 4096
        prefill_only = self.order.config.disaggregation_mode == "prefill" and job.rendezvous
        most = 1 if prefill_only else job.params.max_new_tokens
        burst = script.get("burst", 1)
        await asyncio.sleep(script.get("delay", 0))
        while "hold" in script and not Path(script["hold"]).exists():
            await asyncio.sleep(0.01)
        if script.get("silent"):
            await asyncio.Event().wait()
        error_after = script.get("error_after", 0) if "error" in script else None
        sent = 0
        while True:
            if resumed := self.suspended.get(job.handle):
                await resumed.wait()
            if error_after is not None and sent >= error_after:
                await self.row(job, [], FinishReason.ERROR, RowError(*script["error"]))
                return
            part = ids[sent : min(sent + burst, most)]
            if error_after is not None:
                part = part[: max(error_after - sent, 1)]
            finish: FinishReason | None = None
            for i, token in enumerate(part):
                if token in job.params.stop_token_ids and sent + i >= job.params.min_new_tokens:
                    part, finish = part[: i + 1], FinishReason.STOP
                    break
            stages = STAGES if part and not sent else None
            sent += len(part)
            if not finish and (sent >= most or not part):
                finish = FinishReason.LENGTH
            await self.row(job, part, finish, stages=stages)
            if finish:
                return
            await asyncio.sleep(script.get("step", 0))

    async def row(
        self,
        job: ValidatedRequest,
        part: list[int],
        finish: FinishReason | None,
        error: RowError | None = None,
        stages: FirstTokenStages | None = None,
    ) -> None:
        cached, k = self.script_of(job).get("cached", 0), job.params.logprobs
        rows = [EmittedTokens(job.handle, tuple(part), finish, cached, error=error, stages=stages)]
        if k >= 0 and part:  # a row for each token
            found = TokenLogprobs(-0.5, list(range(3, 3 + k)), [-1.0] * k)
            rows = [EmittedTokens(job.handle, (token,), None, cached, found) for token in part]
            rows[0], rows[-1] = rows[0]._replace(stages=stages), rows[-1]._replace(finish=finish)
        if finish is not None and (drafts := self.script_of(job).get("drafts")):
            rows[-1] = rows[-1]._replace(drafts=tuple(drafts))
        await self.send(TokenBatch(self.order.dp_rank, rows))

    def looked(self) -> bool:
        """True if the ledger shows a lease this time."""
        if "leased" not in self.script:
            return False
        most, file = self.script["leased"]
        with open(file, "a+") as looks:
            looks.write("looked\n")
            looks.seek(0)
            return len(looks.readlines()) <= most

    async def control(self, message: ControlMessage) -> None:
        operation = message.operation
        result: dict[str, Any] = {}
        if isinstance(operation, AbortByRoom):
            result = {"aborted": len(operation.rooms)}
        if isinstance(operation, ReadLedger):
            result = {
                "submits": self.submits,
                "aborts": self.aborts,
                "running": len(self.running),
                "pid": os.getpid(),
            }
            result["suspended"] = len(self.suspended)
        if isinstance(operation, CountRemaining):
            ages = [time.monotonic() - at for at in self.started_at.values()]
            counts = {"running": len(self.running), "leased": int(self.looked())}
            result = {"requests": counts, "rooms": 0, "oldest_secs": max(ages, default=None)}
        if isinstance(operation, SuspendItems | ResumeItems):
            await self.send(self.change(message.id, operation))
            return
        if isinstance(operation, ReadSteps):
            result = {"steps": [{"asked": operation.limit}]}
        await self.send(ReplyMessage(message.id, True, result))

    def change(self, id: int, operation: SuspendItems | ResumeItems) -> ReplyMessage:
        is_suspension = isinstance(operation, SuspendItems)
        if is_suspension and "unsuspendable" in self.script:
            return ReplyMessage(id, False, {"message": self.script["unsuspendable"]})
        found = [h for h in operation.handles if h in self.running]
        for handle in found:
            if is_suspension:
                self.suspended.setdefault(handle, asyncio.Event())
            elif resumed := self.suspended.pop(handle, None):
                resumed.set()
        return ReplyMessage(id, True, {"found": len(found)})

    def start(self, job: ValidatedRequest) -> None:
        seen = msgspec.to_builtins(job.params)
        meet = None if job.rendezvous is None else msgspec.to_builtins(job.rendezvous)
        self.submits.append(
            {
                "handle": job.handle, "rid": job.rid, "prompt": list(job.prompt), "params": seen, "rendezvous": meet,
                "priority": job.priority, "priority_class": job.priority_class, "tenant": job.tenant,
                "namespace": job.namespace.decode(), "deadline": job.deadline,
                "prediction": list(job.prediction), "draft_limit": job.draft_limit,
            }
        )  # fmt: skip
        task = asyncio.create_task(self.answer(job))
        self.running[job.handle] = task
        self.started_at[job.handle] = job.arrival
        task.add_done_callback(lambda _: self.ended(job.handle))

    def ended(self, handle: int) -> None:
        del self.running[handle], self.started_at[handle]

    async def serve(self, pull: zmq.asyncio.Socket) -> None:
        if "fail_start" in self.script:
            await self.send(FatalMessage(self.order.dp_rank, self.script["fail_start"]))
            return
        if (loaded := self.script.get("loading")) is not None:
            await self.send(LoadingMessage(self.order.dp_rank, 0, *loaded))
        if (sign := self.script.get("ready_when")) is not None:
            while not Path(sign).exists():
                await asyncio.sleep(0.01)
        group = describe_heads([0], [0], 1, dtype="float32", page_tokens=16)
        info = {
            "max_total_num_tokens": self.script.get("pool_tokens", 100_000),
            "dtype": "float32",
            "layout": KVSpec((group,)).layout("test"),
        }
        rank = self.order.dp_rank
        await self.send(ReadyMessage(rank, info))
        gauges = {
            'requests{state="waiting"}': 2.0,
            'requests{state="running"}': 1.0,
            "kv_usage_ratio": 0.25,
        }
        gauges['kv_pages{state="free"}'] = 7.0
        counters = {
            "engine_steps_total": 5.0,
            "prompt_tokens_computed_total": 80.0,
            "generated_tokens_total": 7.0,
        }
        await self.send(StatsMessage(rank, gauges, counters, load=LOAD))
        while True:
            message = to_rank_decoder.decode(await pull.recv())
            if isinstance(message, SubmitMessage):
                self.start(message.request)
            elif isinstance(message, AbortMessage):
                self.aborts += message.handles
                for handle in message.handles:
                    if task := self.running.get(handle):
                        task.cancel()
            else:
                await self.control(message)


async def main() -> None:
    order = decode_line(sys.stdin.readline())
    context = zmq.asyncio.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.connect(order.to_front)
    pull.connect(order.to_rank)
    config = order.config
    tokenizer = Tokenizer.from_file(
        os.path.join(config.tokenizer_path or config.model_path, "tokenizer.json")
    )
    rank = FakeRank(order, json.loads(os.environ.get("FAKE_RANK", "{}")), tokenizer, push)
    await rank.serve(pull)
    push.close(linger=1000)
    if "fail_start" in rank.script:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
