"""A recorded scheduler makes the same plans again, byte for byte, whatever happened to it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from array import array
from pathlib import Path

import pytest

from baton.config import EngineConfig
from baton.errors import EngineError, KvTransferFailed
from baton.sched import recording
from baton.sched.policies import POLICIES
from baton.sched.recording import RecordingScheduler, from_plain, plan_bytes, to_plain
from baton.sched.scheduler import Scheduler
from baton.sched.setup import from_config
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.events import AbortTransfer, GrantPages, PrefillDone
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN, StepPlan, StepResult, TokenLogprobs
from baton.sched.types.request import Rendezvous, SamplingParams, ValidatedRequest
from baton_ops.sim import main as sim

GOLDEN = Path(__file__).parents[1] / "golden"
LOOKS = {
    "next_deadline", "drain_events", "ledger", "host_ledger", "is_alive", "in_rooms", "leased", "handles",
    "draft_lengths",
}  # fmt: skip
"""Public methods of Scheduler that decide nothing. A new method belongs here or into replay.INPUTS."""


def test_every_public_method_of_the_scheduler_is_recorded_or_only_looks() -> None:
    methods = {
        name
        for name, member in vars(Scheduler).items()
        if callable(member) and not name.startswith("_")
    }
    assert methods == LOOKS | set(recording.INPUTS)


def config(rng: random.Random, role: str) -> EngineConfig:
    return EngineConfig(
        api_key="secret",
        disaggregation_mode=role,
        page_size=rng.choice((1, 4)),
        chunked_prefill_size=rng.choice((8, 16)),
        max_running_requests=rng.choice((2, 5)),
        max_queued_requests=30,
        schedule_policy=rng.choice(["auto", *POLICIES]),
        enable_priority_scheduling=rng.random() < 0.5,
        priority_scheduling_preemption_threshold=2,
        priority_aging_rate=rng.choice((0.0, 0.5)),
        lpm_degrade_threshold=rng.choice((3, 4096)),
        num_reserved_decode_tokens=4,
        schedule_conservativeness=rng.choice((0.1, 1.0)),
        prefill_first=rng.random() < 0.3,
        priority_classes=rng.choice((None, "a:3,b:1")),
        tenant_config=rng.choice((None, '{"tenants": {"x": {"max_running": 1}}}')),
        preemption_mode=rng.choice(("recompute", "cache", "offload", "auto")),
        host_kv_gib=1.0,
    )


class Storm:
    """Random calls at random times, with up to two plans in flight and, on D, a peer that delivers or fails."""

    def __init__(self, seed: int, role: str) -> None:
        self.rng = random.Random(seed)
        self.config = config(self.rng, role)
        self.lines: list[str] = []
        self.plans: list[bytes] = []
        self.sizes = (40, self.rng.choice((0, 7, 60)), 1000)
        self.lines.append(recording.header(self.config, *self.sizes))
        self.sched = RecordingScheduler(
            from_config.limits(self.config, *self.sizes), self.lines.append
        )
        self.role = role
        self.now = 0.0
        self.flight: list[StepPlan] = []
        self.granted: list[int] = []
        self.closing: list[int] = []
        self.leased: list[int] = []
        self.handles = 0
        self.drafted = 0
        self.damaged = 0

    def request(self) -> ValidatedRequest:
        rng = self.rng
        handle = self.handles
        self.handles += 1
        prompt = array("i", [rng.randrange(3) for _ in range(rng.randint(1, 30))])
        meet = Rendezvous("p", 1, handle) if self.role != "null" and rng.random() < 0.9 else None
        return ValidatedRequest(
            handle,
            f"r{handle}",
            prompt,
            SamplingParams(
                max_new_tokens=rng.randint(1, 20), stop_token_ids=(0,), logit_bias=((1, 0.5),)
            ),
            priority=rng.choice((None, 0, 5)),
            namespace=rng.choice((b"", b"\xff\x00")),
            arrival=self.now - rng.random(),
            rendezvous=meet,
            deadline=self.now + rng.uniform(1, 90) if rng.random() < 0.3 else None,
            ttft_deadline=self.now + rng.uniform(1, 9) if rng.random() < 0.3 else None,
            priority_class=rng.choice("ab"),
            tenant=rng.choice("xy"),
        )

    def disturb(self) -> None:
        rng, sched = self.rng, self.sched
        dice, someone = rng.random(), rng.randrange(max(self.handles, 1))
        try:
            if dice < 0.04:
                sched.abort(someone)
            elif dice < 0.06:
                sched.fail(someone, EngineError("x"))
            elif dice < 0.09:
                sched.suspend([someone])
            elif dice < 0.14:
                sched.resume(list(range(self.handles)))
            elif dice < 0.15:
                sched.flush_cache()
        except EngineError:
            return  # it cannot be suspended as it is: an input all the same

    def deliver(self) -> None:
        rng = self.rng
        for waiting in (self.granted, self.closing, self.leased):
            rng.shuffle(waiting)
        if self.granted and rng.random() < 0.6:
            room = self.granted.pop()
            if rng.random() < 0.8:
                ends = rng.random() < 0.1
                first = rng.randrange(3)
                self.sched.transfer_committed(
                    room, first, 1, TokenLogprobs(-1.0), completes_grammar=ends
                )
            else:
                self.sched.transfer_failed(room, KvTransferFailed("broken"))
        if self.closing and rng.random() < 0.6:
            self.sched.transfer_closed(self.closing.pop())
        if self.leased and rng.random() < 0.6:
            self.sched.release(self.leased.pop())

    def absorb(self) -> None:
        for event in self.sched.drain_events():
            if isinstance(event, GrantPages | AbortTransfer | PrefillDone):
                assert event.req.rendezvous
                table = {
                    GrantPages: self.granted,
                    AbortTransfer: self.closing,
                    PrefillDone: self.leased,
                }[type(event)]
                table.append(event.req.rendezvous.room)

    def turn(self, *, arrivals: bool) -> None:
        rng, sched = self.rng, self.sched
        self.now += rng.random()
        for _ in range(rng.randrange(3) if arrivals else 0):
            try:
                sched.add(self.request())
            except EngineError:
                continue  # the queue is full
        if arrivals:
            self.disturb()
        else:
            sched.resume(list(range(self.handles)))
        self.deliver()
        sched.expire(self.now)
        if rng.random() < 0.4:
            self.offer_drafts()
        plan = sched.plan(self.now)
        self.absorb()
        if plan is not None:
            self.plans.append(plan_bytes(plan))
            self.flight.append(plan)
        must_commit = plan is None or bool(plan.drafted)
        while self.flight and (must_commit or len(self.flight) > 1 or rng.random() < 0.5):
            self.commit_oldest()
        self.absorb()

    def offer_drafts(self) -> None:
        """Once the last tokens are known."""
        while self.flight:
            self.commit_oldest()
        self.absorb()
        rng = self.rng
        offers = [
            DraftOffer(
                seq.handle, len(seq.tokens),
                array("i", [rng.randrange(3) for _ in range(rng.randint(1, 5))]), rng.random(),
            )
            for seq in self.sched.report.answering()
        ]  # fmt: skip
        self.sched.offer_drafts(offers, rng.random() / 100, rng.random() / 100)

    def commit_oldest(self) -> None:
        rng = self.rng
        plan = self.flight.pop(0)
        self.drafted += sum(plan.drafted)
        drafted = [*[0] * plan.num_decode, *plan.drafted]
        sampled = [row for row in plan.rows if row.sample]
        drafted += [0] * (len(sampled) - len(drafted))
        runs = [rng.randint(1, 1 + drafts) for drafts in drafted]
        complete = [i for i in range(sum(runs)) if rng.random() < 0.05]
        tokens = [
            rng.randrange(3) if rng.random() < 0.98 else GRAMMAR_FAILED_TOKEN
            for _ in range(sum(runs))
        ]
        returned = sum(len(run.pages) for run in plan.copies if not run.to_host)
        damaged = tuple(place for place in range(returned) if rng.random() < 0.05)
        self.damaged += len(damaged)
        result = StepResult(
            tokens,
            completed=frozenset(complete),
            runs=tuple(runs) if plan.drafted else (),
            damaged_pages=damaged,
        )
        self.sched.commit(plan, result, self.now)
        seconds = 0.5 + 0.01 * plan.num_tokens + rng.random() / 10
        self.sched.observe(plan, seconds, rng.random() / 20)

    def run(self) -> None:
        for i in range(3000):
            self.turn(arrivals=i < 150)
            if i >= 150 and self.sched.is_idle:
                return
        raise AssertionError("it does not come to rest")


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
@pytest.mark.parametrize("seed", range(15))
def test_random_runs_replay_to_identical_plans(seed: int, role: str) -> None:
    storm = Storm(seed, role)
    storm.run()
    again: list[bytes] = []
    done = recording.replay(storm.lines, lambda _, plan: again.append(plan_bytes(plan)))
    assert done.difference is None
    assert again == storm.plans
    assert len(storm.plans) > 30
    assert "secret" not in storm.lines[0]


def test_the_random_runs_have_drafts_and_damaged_pages() -> None:
    storms = [Storm(seed, role) for seed in range(3) for role in ("null", "decode")]
    for storm in storms:
        storm.run()
    assert sum(storm.drafted for storm in storms) > 20
    assert sum(storm.damaged for storm in storms) > 5


@pytest.mark.parametrize("role", ["null", "decode"])
def test_recording_of_an_older_version_replays(role: str) -> None:
    """Recorded before the order `adaptive` was removed: the header names its flags."""
    trace = gzip.decompress((GOLDEN / f"trace_{role}.jsonl.gz").read_bytes()).decode()
    lines = trace.splitlines()
    assert set(json.loads(lines[0])["flags"]) >= recording.REMOVED_FLAGS
    done = recording.replay(lines)
    assert done.difference is None
    assert done.plans > 100


def test_changed_input_is_found_at_the_plan_it_changes() -> None:
    storm = Storm(1, "null")
    storm.run()
    first_add = next(i for i, line in enumerate(storm.lines) if line.startswith('["add"'))
    lines = storm.lines[:first_add] + storm.lines[first_add + 1 :]
    done = recording.replay(lines)
    assert done.difference is not None
    assert done.difference.line > first_add


def test_bad_files_are_named_with_their_line() -> None:
    head = recording.header(EngineConfig(), 8)
    for lines, text in (
        (["{}"], "line 1: not the header"),
        ([], "line 1: not the header"),
        ([json.dumps({"version": 9, "flags": {}, "sizes": {}})], "line 1: version 9"),
        ([json.dumps({"version": 1, "flags": {"novel": 1}, "sizes": {"num_pages": 1}})], "novel"),
        ([head, "x"], "line 2: not a line"),
        ([head, '["ledger"]'], "line 2: 'ledger' is no input"),
    ):
        with pytest.raises(recording.ReplayError, match=text):
            recording.replay(lines)


VALUES: tuple[object, ...] = (None, -1, 0, 1e9, "", [], {})


def variants_of(value: object) -> list[object]:
    """`value` with each value inside it replaced by each of VALUES, one at a time."""
    found = list(VALUES)
    if isinstance(value, dict):
        found += [{**value, key: other} for key in value for other in variants_of(value[key])]
    if isinstance(value, list):
        found += [
            [*value[:i], other, *value[i + 1 :]]
            for i in range(len(value))
            for other in variants_of(value[i])
        ]
    return found


def test_replaced_values_are_repeated_or_refused_with_their_line() -> None:
    storm = Storm(5, "null")
    storm.run()
    lines = storm.lines[:40]
    first_of_each: dict[str, int] = {}
    for i, line in enumerate(lines[1:], 1):
        first_of_each.setdefault(json.loads(line)[0], i)
    header = json.loads(lines[0])
    short = {**header, "flags": {k: header["flags"][k] for k in ("page_size", "schedule_policy")}}
    cases = [(0, value) for value in variants_of(short)]
    cases += [
        (i, value) for i in first_of_each.values() for value in variants_of(json.loads(lines[i]))
    ]
    refusals = []
    for i, value in cases:
        try:
            recording.replay([*lines[:i], json.dumps(value), *lines[i + 1 :]])
        except recording.ReplayError as err:
            refusals.append(str(err))
    assert 0 < len(refusals) < len(cases)
    assert all(text.startswith("line ") for text in refusals)


def test_values_survive_the_lines() -> None:
    req = ValidatedRequest(
        1, "r", array("i", [3, -1]), SamplingParams(stop_token_ids=(1, 2)), namespace=b"\x00\xff",
        rendezvous=Rendezvous("h", 2, 2**62), deadline=1 / 3,
    )  # fmt: skip
    plain = to_plain(req)
    assert from_plain(json.loads(json.dumps(plain))) == req
    assert "prediction" not in plain["fields"], "what has its default needs no place"
    error = from_plain(json.loads(json.dumps(to_plain(KvTransferFailed("gone")))))
    assert (type(error), error.message) == (KvTransferFailed, "gone")
    assert from_plain(to_plain({1: (2, [b"x"])})) == {1: (2, [b"x"])}
    with pytest.raises(TypeError, match="object"):
        to_plain(object())


def test_command_says_whether_the_plans_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storm = Storm(3, "null")
    storm.run()
    file, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(storm.lines) + "\n")
    assert sim.main(["--replay", str(file), "--json", str(out)]) == 0
    assert (
        f"{len(storm.plans)} plans\nevery plan equals the recorded one" in capsys.readouterr().out
    )
    assert len(out.read_text().splitlines()) == len(storm.plans)
    last = max(i for i, line in enumerate(storm.lines) if line.startswith('["="'))
    file.write_text(
        "\n".join(
            [*storm.lines[:last], '["=", "0000"]', *storm.lines[last + 1 :], '["expire", 1e9]']
        )
    )
    assert sim.main(["--replay", str(file)]) == 1
    assert "recorded plan 0000, here " in capsys.readouterr().out
    file.write_text("nonsense\n")
    assert sim.main(["--replay", str(file)]) == 2
    with pytest.raises(SystemExit):
        sim.main(["--replay", str(file), "--seed", "2"])
    assert "leave out --seed" in capsys.readouterr().err


def test_recording_changes_no_decision() -> None:
    storm, plain = Storm(5, "null"), Storm(5, "null")
    plain.sched = Scheduler(from_config.limits(plain.config, *plain.sizes))  # type: ignore[assignment]
    storm.run()
    plain.run()
    assert storm.plans == plain.plans
    assert dataclasses.asdict(storm.config) == dataclasses.asdict(plain.config)
