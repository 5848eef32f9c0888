"""One GPU: decode steps against its memory bandwidth, idle time between steps, prefill, a workload, transfers, TTFT.

    python -m tests.perf.bench_gpu                                         everything on the GPU, weights at random
    python -m tests.perf.bench_gpu --device cpu --shapes tiny --quick      the same code where there is none

Sections (--sections), each in a table with n and spread, and as JSON lines (--jsonl):

    copy       bytes/s that a copy on the device reads and writes together: the roofline of what follows
    decode     a step that only decodes, by batch: ms, bytes it must move at least, share of the roofline, idle share
    prefill    prompt tokens/s, by length
    workload   256 requests of nano-vllm's README: prompts and answers of 100 to 1024 random tokens, temperature 0.6
    transfer   GB/s of KV pages between a prefill and a decode process, by transport
    ttft       time to the first token through router, prefill and decode process on the one device

`decode`, `prefill` and `workload` drive the real engine (scheduler, runner, sampler) in this process; a step's idle
share is what the device did not compute between the start of one step and that of the next. Nothing is asserted; a
section that fails is named, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.config import build_config
from baton.models.spec.model import ModelSpec, weight_bytes
from baton.runtime import build as runtime
from baton.runtime.build import LoadedModel
from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.request import SamplingParams, ValidatedRequest
from tests.support.models import shapes
from tests.support.probes import RunnerProbe

_handles = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run."""

    copy_bytes: int = 2 << 30
    copies: int = 20
    batches: tuple[int, ...] = (1, 8, 32, 128)
    context: int = 512
    """Tokens in KV of each decoding row, at first."""
    steps: int = 200
    prompts: tuple[int, ...] = (512, 2048, 8000)
    rounds: int = 5
    requests: int = 256
    answer: tuple[int, int] = (100, 1024)
    running: int = 256
    chunk: int = 8192
    transports: tuple[str, ...] = ("cuda_ipc", "nccl", "tcp")
    pair_prompts: tuple[int, ...] = (256, 1024, 4000)


QUICK = Effort(
    copy_bytes=32 << 20, copies=5, batches=(1, 4), context=32, steps=10, prompts=(64, 256), rounds=2, requests=8,
    answer=(4, 12), running=8, chunk=256, transports=("shm", "tcp"), pair_prompts=(64, 200),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- what is written


@dataclass
class Report:
    jsonl: Path | None
    about: dict[str, Any]
    failed: list[str] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str]) -> Callable[..., None]:
        """Returns what prints a row: values in the order of the columns."""
        print(f"\n## {title}\n" + "  ".join(f"{c:>14}" for c in columns), flush=True)

        def row(section: str, *values: Any) -> None:
            shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
            print("  ".join(f"{v:>14}" for v in shown), flush=True)
            self.note(section, dict(zip(columns, values, strict=True)))

        return row

    def note(self, section: str, values: dict[str, Any]) -> None:
        if self.jsonl is not None:
            with self.jsonl.open("a") as f:
                f.write(json.dumps({"section": section, **self.about, **values}) + "\n")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as err:  # noqa: BLE001 - the next section may still be measured
            self.failed.append(name)
            traceback.print_exc()
            print(f"FAILED {name}: {type(err).__name__}: {err}", flush=True)
            self.note(name, {"failed": f"{type(err).__name__}: {err}"})


def spread(values: Sequence[float]) -> str:
    """Range of the values without a tenth at either end."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return f"{ordered[cut]:.4g}-{ordered[-1 - cut]:.4g}"


def about(device: torch.device) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return {"commit": git.stdout.strip() or "unknown", "device": name, "torch": torch.__version__}


# ---------------------------------------------------------------------------------------------- the engine


class Driver:
    """A real engine, turned by hand."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.engine: EngineLoop = loaded.make_engine_loop()
        self.vocab = int(RunnerProbe(loaded.runner).model.spec.vocab_size)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        handle = next(_handles)
        self.engine.submit(
            ValidatedRequest(
                handle, f"r{handle}", array("i", prompt), params, arrival=time.monotonic()
            )
        )
        return handle

    def turn(self) -> dict[int, int]:
        """One turn: how many tokens each request got."""
        outputs, _ = self.engine.step(time.monotonic())
        got: dict[int, int] = {}
        for out in outputs:
            got[out.handle] = got.get(out.handle, 0) + len(out.tokens)
        return got

    def drain(self, open_handles: set[int]) -> None:
        """Until all these have ended."""
        while open_handles:
            outputs, busy = self.engine.step(time.monotonic())
            open_handles -= {out.handle for out in outputs if out.finish is not None}
            assert busy or not open_handles, (
                f"the engine stopped with {len(open_handles)} requests open"
            )
        self.rest()

    def rest(self) -> None:
        while self.engine.step(time.monotonic())[1]:
            pass

    def prompt(self, rng: random.Random, n: int) -> list[int]:
        return [rng.randrange(self.vocab) for _ in range(n)]

    @property
    def device_seconds(self) -> float:
        return self.engine.counters["engine_step_seconds_total"]


def params(tokens: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=temperature, ignore_eos=True, seed=1)


def load(shape: str, args: argparse.Namespace, effort: Effort, folder: Path) -> Driver:
    path = shapes.make(shape, folder / shape)
    flags: dict[str, Any] = {
        "model_path": str(path), "load_format": "dummy", "device": args.device, "page_size": 16,
        "max_running_requests": effort.running, "chunked_prefill_size": effort.chunk, **dict(args.engine),
    }  # fmt: skip
    started = time.monotonic()
    loaded = runtime.load_rank(build_config(flags), str(path))
    pages = f"{loaded.info['max_total_num_tokens']} tokens of KV"
    print(
        f"\n# {shape}: loaded in {time.monotonic() - started:.1f} s, {pages}, {dict(args.engine)}",
        flush=True,
    )
    return Driver(loaded)


# ---------------------------------------------------------------------------------------------- sections


def copy(report: Report, device: torch.device, effort: Effort) -> float:
    """Bytes/s, read and written together."""
    here = torch.empty(effort.copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    there = torch.empty_like(here)
    there.copy_(here)
    rates = []
    for _ in range(effort.copies):
        synchronize(device)
        started = time.perf_counter()
        there.copy_(here)
        synchronize(device)
        rates.append(2 * effort.copy_bytes / (time.perf_counter() - started))
    row = report.table("copy on the device", ("GB/s", "spread", "n"))
    row("copy", statistics.median(rates) / 1e9, spread([r / 1e9 for r in rates]), len(rates))
    return statistics.median(rates)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(report: Report, driver: Driver, shape: str, bandwidth: float, effort: Effort) -> None:
    columns = (
        "shape",
        "batch",
        "step ms",
        "spread",
        "n",
        "least MB",
        "of roofline",
        "idle share",
        "tokens/s",
    )
    row = report.table(f"decode steps, rows of {effort.context} tokens and more", columns)
    spec = RunnerProbe(driver.loaded.runner).model.spec
    assert isinstance(spec, ModelSpec), "modules of transformers run on the CPU"
    weights = weight_bytes(spec)
    if not spec.tied:  # a row of the embedding is looked up; the head is a matrix of its own
        weights -= spec.vocab_size * spec.hidden_size * 2
    kv_token_bytes = driver.loaded.kv_spec.token_bytes
    for batch in effort.batches:
        rng = random.Random(batch)
        room = effort.steps + 3 * (batch * effort.context // effort.chunk + 2) + 8
        open_rows = {
            driver.submit(driver.prompt(rng, effort.context), params(room)) for _ in range(batch)
        }
        started_rows: dict[int, int] = {}
        while len(started_rows) < batch or min(started_rows.values()) < 2:
            for handle, n in driver.turn().items():
                started_rows[handle] = started_rows.get(handle, 0) + n
        times: list[float] = []
        tokens = effort.context * batch + sum(started_rows.values())
        busy, began = driver.device_seconds, time.perf_counter()
        last = began
        while len(times) < effort.steps:
            if sum(driver.turn().values()) == batch:
                now = time.perf_counter()
                times.append(now - last)
                last = now
        wall, busy = last - began, driver.device_seconds - busy
        for handle in open_rows:
            driver.engine.sched.abort(handle)
        driver.rest()
        step = statistics.median(times)
        least = weights + kv_token_bytes * (tokens + batch * effort.steps // 2 + batch)
        row(
            "decode", shape, batch, step * 1e3, spread([t * 1e3 for t in times]), len(times), least / 1e6,
            least / bandwidth / step, max(0.0, 1 - busy / wall), batch / step,
        )  # fmt: skip


def prefill(report: Report, driver: Driver, shape: str, effort: Effort) -> None:
    row = report.table("prefill, one prompt", ("shape", "prompt", "ms", "spread", "n", "tokens/s"))
    rng = random.Random(2)
    for length in effort.prompts:
        if length >= RunnerProbe(driver.loaded.runner).model.spec.max_context:
            continue
        times = []
        for _ in range(effort.rounds + 1):
            started = time.perf_counter()
            driver.drain({driver.submit(driver.prompt(rng, length), params(1))})
            times.append(time.perf_counter() - started)
        times = times[1:]
        middle = statistics.median(times)
        row(
            "prefill",
            shape,
            length,
            middle * 1e3,
            spread([t * 1e3 for t in times]),
            len(times),
            length / middle,
        )


def nano_vllm(requests: int, answer: tuple[int, int]) -> tuple[list[list[int]], list[int]]:
    """Prompts and lengths of answers, drawn as its bench.py draws them: 256 make the 133,966 tokens of its README."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(requests)
    ]
    return prompts, [rng.randint(*answer) for _ in range(requests)]


def workload(report: Report, driver: Driver, shape: str, effort: Effort) -> None:
    prompts, lengths = nano_vllm(effort.requests, effort.answer)
    prompts = [[token % driver.vocab for token in prompt] for prompt in prompts]
    steps, busy = driver.engine.counters["engine_steps_total"], driver.device_seconds
    began = time.perf_counter()
    requests = zip(prompts, lengths, strict=True)
    driver.drain({driver.submit(prompt, params(n, temperature=0.6)) for prompt, n in requests})
    secs = time.perf_counter() - began
    columns = ("shape", "requests", "answer tokens", "s", "tokens/s", "steps", "idle share")
    row = report.table("workload of nano-vllm's README (n = 1)", columns)
    row(
        "workload", shape, len(prompts), sum(lengths), secs, sum(lengths) / secs,
        int(driver.engine.counters["engine_steps_total"] - steps), max(0.0, 1 - (driver.device_seconds - busy) / secs),
    )  # fmt: skip


@contextmanager
def pair(
    shape: str, args: argparse.Namespace, effort: Effort, folder: Path, transport: str
) -> Iterator[Any]:
    """`baton up`: a router, a prefill and a decode process, on the one device."""
    from tests.support.processes.cluster import Cluster

    path = shapes.make(shape, folder / shape)
    flags = [
        "--model-path", str(path), "--load-format", "dummy", "--device", args.device, "--page-size", "16",
        "--chunked-prefill-size", str(effort.chunk), "--start-timeout-secs", "500",
    ]  # fmt: skip
    if transport != "auto":
        flags += ["--transport", transport]
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # two ranks on one GPU
    with Cluster.up(*flags, env=shared, start_secs=500.0) as cluster:
        yield cluster


def transfer(
    report: Report, args: argparse.Namespace, effort: Effort, shape: str, folder: Path
) -> None:
    """From the decode node's own count of bytes and of the time from grant to verified page."""
    from tests.support.processes.cluster import metric

    columns = ("shape", "transport", "MB", "GB/s while pulling", "pulls")
    row = report.table("transfer between two processes", columns)
    for transport in effort.transports:
        if transport == "nccl" and torch.cuda.nccl.version() < (2, 30):
            version = ".".join(map(str, torch.cuda.nccl.version()))
            print(f"nccl not measured: NCCL {version} refuses two ranks on one GPU, 2.30 does not")
            continue
        with (
            report.section(f"transfer {transport}"),
            pair(shape, args, effort, folder, transport) as cluster,
        ):
            rng = random.Random(3)
            for _ in range(4 * effort.rounds):
                cluster.generate_ids(ids(rng, effort.pair_prompts[-1]), 1)
            url = cluster.node("decode")["url"]
            names = ("pull_bytes", "pull_seconds", "pulls")
            moved, secs, pulls = (
                metric(url, f"baton_kv_{name}_total", transport=transport) for name in names
            )
            slower = metric(url, "baton_kv_transport_fallbacks_total")
            if not moved > 0 or slower > 0:
                raise RuntimeError(
                    f"{transport} moved {moved:g} bytes, {slower:g} pairs changed to a slower transport"
                )
            row(
                "transfer",
                shape,
                transport,
                moved / 1e6,
                moved / secs / 1e9 if secs else float("nan"),
                int(pulls),
            )


def ttft(
    report: Report, args: argparse.Namespace, effort: Effort, shape: str, folder: Path
) -> None:
    row = report.table(
        "TTFT through router, P and D on one device", ("shape", "prompt", "ms", "spread", "n")
    )
    with pair(shape, args, effort, folder, "auto") as cluster:
        rng = random.Random(4)
        for length in effort.pair_prompts:
            times = []
            for _ in range(4 * effort.rounds + 1):
                times.append(first_token_secs(cluster.url, ids(rng, length)))
            times = times[1:]
            row(
                "ttft",
                shape,
                length,
                statistics.median(times) * 1e3,
                spread([t * 1e3 for t in times]),
                len(times),
            )


def ids(rng: random.Random, n: int) -> list[int]:
    """A prompt of tokens that the small tokenizer of shapes.make knows."""
    return [rng.randrange(3, 300) for _ in range(n)]


def first_token_secs(url: str, prompt: list[int]) -> float:
    """To the first event of a stream, and reads the rest."""
    body = {
        "input_ids": prompt, "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as response:
        line = response.readline()
        took = time.perf_counter() - started
        assert line.startswith(b"data:"), line
        response.read()
    return took


# ---------------------------------------------------------------------------------------------- all of it

IN_PROCESS = ("decode", "prefill", "workload")
SECTIONS = ("copy", *IN_PROCESS, "transfer", "ttft")


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name.replace("-", "_"), json.loads(value) if value[:1].isdigit() or value in (
        "true",
        "false",
    ) else value


def main() -> int:
    sys.setswitchinterval(0.0005)  # as server.worker.process has it
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--shapes", type=words, default=("qwen3-0.6b", "llama-3-8b"), help="with commas between"
    )
    parser.add_argument("--sections", type=words, default=SECTIONS, help="with commas between")
    parser.add_argument(
        "--engine",
        type=setting,
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="of an engine",
    )
    parser.add_argument(
        "--quick", action="store_true", help="little of everything: to try the script"
    )
    parser.add_argument("--jsonl", type=Path, help="append every row to this file")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"--sections {','.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    effort = QUICK if args.quick else Effort()
    device = torch.device(args.device)
    report = Report(args.jsonl, about(device))
    print(report.about, flush=True)
    bandwidth = float("nan")
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as name:
        folder = Path(name)
        if "copy" in args.sections or "decode" in args.sections:
            with report.section("copy"):
                bandwidth = copy(report, device, effort)
        if set(args.sections) & set(IN_PROCESS):
            for shape in args.shapes:
                with report.section(shape):
                    in_process(report, args, effort, shape, bandwidth, folder)
        for section, run in (("transfer", transfer), ("ttft", ttft)):
            if section in args.sections:
                with report.section(section):
                    run(report, args, effort, args.shapes[0], folder)
    if report.failed:
        print(f"\nFAILED: {', '.join(report.failed)}")
    return 1 if report.failed else 0


def in_process(
    report: Report,
    args: argparse.Namespace,
    effort: Effort,
    shape: str,
    bandwidth: float,
    folder: Path,
) -> None:
    driver = load(shape, args, effort, folder)
    try:
        if "decode" in args.sections:
            with report.section(f"decode {shape}"):
                decode(report, driver, shape, bandwidth, effort)
        if "prefill" in args.sections:
            with report.section(f"prefill {shape}"):
                prefill(report, driver, shape, effort)
        if "workload" in args.sections and shape == args.shapes[0]:
            with report.section(f"workload {shape}"):
                workload(report, driver, shape, effort)
    finally:
        driver.engine.close()
        del driver
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
