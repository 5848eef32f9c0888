"""Each check of `baton doctor` with planted facts: what is well passes, each fault is named with a remedy."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from baton.server.observability.diagnosis import key_proof
from baton.server.observability.host_facts import DiskSpace, HostFacts
from baton_ops.clients.http_client import HttpAnswer, HttpClient
from baton_ops.clients.metrics import MetricSample, parse_metrics
from baton_ops.doctor import check, engines, gpu, host, main, pairs, routers
from baton_ops.doctor import fleet as fleet_module
from baton_ops.doctor.check import CheckResult, CheckStatus
from baton_ops.doctor.fleet import EngineView, FleetKeys, FleetView, RouterView
from baton_ops.doctor.gpu import GpuFacts

GIB = 1 << 30
PRINT = {
    "model": "m",
    "tokenizer": "t",
    "chat_template": "c",
    "page_size": "16",
    "dtype": "float32",
    "kv_layout": "k",
}


def facts(**changes: Any) -> HostFacts:
    healthy = HostFacts(
        hostname="a", boot_id="boot", network_namespace="net:1", uid=1, kernel="6.1", machine="x86_64", cpu_count=8,
        cpu_features=["avx2"], cpu_isa="avx2", memory_total=64 * GIB, memory_available=32 * GIB, memory_limit=None,
        shm_total=GIB, shm_free=GIB, sealed_memfd_error=None, open_files_limit=65536, open_files_hard_limit=65536,
        locked_memory_limit=8 << 20, has_rdma=False, unix_seconds=time.time(), is_clock_synchronized=True,
        versions={"python": "3.11", "baton": "1.0", "extension": "1.0", "torch": "2.6"},
        disks=[DiskSpace("/tmp", 100 * GIB, 50 * GIB)],
    )  # fmt: skip
    return dataclasses.replace(healthy, **changes)


def sole(results: list[CheckResult], status: CheckStatus) -> CheckResult:
    """The one result, which has `status`; problems have a remedy, others have none."""
    assert [result.status for result in results] == [status], results
    assert bool(results[0].remedy) == check.is_problem(results[0])
    return results[0]


# ---- a machine -------------------------------------------------------------------------------------------------


def test_healthy_machine_passes_every_check() -> None:
    results = host.check_host(facts())
    assert not [r for r in results if check.is_problem(r)]
    assert check.exit_code(results) == 0


@pytest.mark.parametrize(
    ("changes", "name", "status", "sentence"),
    [
        (
            {"sealed_memfd_error": "Invalid argument"},
            "host.memfd",
            "fail",
            "no sealed memory file: Invalid argument",
        ),
        ({"shm_total": 64 << 20}, "host.shm", "warn", "/dev/shm has 64 MiB"),
        ({"shm_total": None}, "host.shm", "warn", "/dev/shm is not there"),
        (
            {"disks": [DiskSpace("/tmp", GIB, GIB), DiskSpace("/logs", 10 * GIB, 100 << 20)]},
            "host.disk",
            "warn",
            "100 MiB of 10.0 GiB are free at /logs",
        ),
        (
            {"disks": [DiskSpace("/logs", GIB, 0)]},
            "host.disk",
            "fail",
            "0 MiB of 1.0 GiB are free at /logs: logs are lost",
        ),
        (
            {"open_files_limit": 512},
            "host.open_files",
            "warn",
            "only 512 files can be open, 1024 are wanted",
        ),
        ({"open_files_limit": 128}, "host.open_files", "fail", "only 128 files"),
        ({"has_rdma": True}, "host.locked_memory", "warn", "only 8 MiB of memory can be locked"),
        ({"memory_available": 100 << 20}, "host.memory", "warn", "100 MiB of memory are available"),
        ({"memory_limit": 512 << 20}, "host.memory", "warn", "the control group allows 512 MiB"),
        ({"cpu_isa": "scalar"}, "host.cpu", "warn", "kernels of level scalar"),
        ({"is_clock_synchronized": False}, "host.clock", "warn", "no time service"),
        (
            {"versions": {"python": "3.11"}},
            "host.versions",
            "fail",
            "baton._native cannot be imported",
        ),
        ({"versions": {"extension": "1.0"}}, "host.versions", "fail", "torch is not installed"),
        (
            {"versions": {"extension": "1.0", "baton": "1.1", "torch": "2"}},
            "host.versions",
            "fail",
            "extension of version 1.0",
        ),
    ],
)
def test_fault_of_a_machine_is_named(
    changes: dict[str, Any], name: str, status: str, sentence: str
) -> None:
    found = sole(
        [r for r in host.check_host(facts(**changes)) if check.is_problem(r)], CheckStatus(status)
    )
    assert found.name == name
    assert sentence in found.sentence


def test_facts_of_this_machine_survive_json_and_an_older_peer_leaves_out_fields() -> None:
    own = HostFacts()
    sent = json.loads(json.dumps(dataclasses.asdict(own)))
    assert HostFacts.from_json(sent) == own
    assert own.sealed_memfd_error is None, (
        "KV pools of this machine's tests are sealed memory files"
    )
    assert own.memory_total is not None
    assert own.memory_total > GIB
    del sent["versions"], sent["shm_total"]
    assert HostFacts.from_json({**sent, "of_a_newer_version": 1}).versions == {}


@pytest.mark.parametrize(("offset", "status"), [(0.4, "ok"), (-30.0, "warn"), (600.0, "fail")])
def test_clock_skew_is_judged_by_the_age_of_signatures(offset: float, status: str) -> None:
    assert host.check_skew("x", offset).status == status


# ---- GPUs ------------------------------------------------------------------------------------------------------

TORCH = {
    "cuda_build": "13.0",
    "is_available": True,
    "devices": ["H200", "H200"],
    "no_peer": [],
    "flashinfer": "0.6",
}
LINKS = "GPU 0: H200\n\t Link 0: 26.562 GB/s\nGPU 1: H200\n\t Link 0: 26.562 GB/s\n"


def gpus(**changes: Any) -> GpuFacts:
    torch = {**TORCH, **changes.pop("torch", {})}
    return dataclasses.replace(
        GpuFacts(["H200", "H200"], "580.1", torch=torch, nvlink=LINKS), **changes
    )


def test_machine_without_gpu_skips_all_gpu_checks_with_the_reason() -> None:
    results = gpu.check_gpu(None)
    assert [r.name for r in results] == [
        "gpu.driver",
        "gpu.torch",
        "gpu.p2p",
        "gpu.nvlink",
        "gpu.flashinfer",
    ]
    assert {(r.status, r.sentence) for r in results} == {
        (CheckStatus.SKIP, "this machine has no NVIDIA GPU")
    }


def test_healthy_gpus_pass() -> None:
    assert {r.status for r in gpu.check_gpu(gpus())} == {CheckStatus.OK}


@pytest.mark.parametrize(
    ("changes", "name", "sentence"),
    [
        ({"driver_problem": "NVML mismatch"}, "gpu.driver", "NVML mismatch"),
        ({"torch_problem": "CUDA error: 802"}, "gpu.torch", "CUDA error: 802"),
        ({"torch": {"cuda_build": None}}, "gpu.torch", "without CUDA"),
        (
            {"torch": {"is_available": False, "devices": []}},
            "gpu.torch",
            "sees no GPU with driver 580.1",
        ),
        ({"torch": {"devices": ["H200"]}}, "gpu.torch", "1 of 2 GPUs"),
        ({"torch": {"no_peer": [[0, 1], [1, 0]]}}, "gpu.p2p", "2 pairs of GPUs"),
        (
            {"nvlink": LINKS + "\t Link 1: <inactive>\n"},
            "gpu.nvlink",
            "1 of 3 NVLinks are inactive",
        ),
        (
            {"torch": {"flashinfer": None, "flashinfer_error": "no nvcc"}},
            "gpu.flashinfer",
            "no nvcc",
        ),
    ],
)
def test_fault_of_gpus_is_named(changes: dict[str, Any], name: str, sentence: str) -> None:
    problems = [r for r in gpu.check_gpu(gpus(**changes)) if check.is_problem(r)]
    assert [r.name for r in problems] == [name]
    assert sentence in problems[0].sentence


# ---- a fleet ---------------------------------------------------------------------------------------------------

P, D = "http://p:30000", "http://d:30000"


def engine(
    url: str,
    role: str,
    *,
    key: str | None = "secret",
    host_facts: HostFacts | None = None,
    **info: Any,
) -> EngineView:
    worker = {
        "url": url, "worker_type": role, "state": "ready", "reason": None, "circuit": "closed", "load": 0,
        "bootstrap_port": 8998 if role == "prefill" else None, "kv_events": [{"state": "off", "reason": "none"}],
    }  # fmt: skip
    server_info = {
        "engine": "baton",
        "version": "1.0",
        "host": "10.0.0.1",
        "state": "ready",
        "fingerprint": PRINT,
        "device": "cpu",
        "disaggregation_transfer_backend": "auto",
        "max_running_requests": 64,
        "dp_size": 1,
        "drain_timeout_secs": 60.0,
        "kv_lease_secs": 30.0,
        "request_timeout_secs": 1800.0,
        "kv_transfer_timeout_secs": 60.0,
        "queue_timeout_secs": 0.0,
        **info,
    }
    here = host_facts or facts()
    look = {"host": "p", "port": 8998, "bootstrap": "ok", "detail": "", "ranks": [rank()]}
    diagnosis = {
        "host": dataclasses.asdict(here),
        "asked_at": here.unix_seconds,
        "answered_at": here.unix_seconds,
        "has_cluster_key": bool(key),
        "cluster_key_proofs": [key_proof(one, "challenge") for one in (key or "").split()],
        "prefill": [look] if role == "decode" else [],
    }
    metrics = [MetricSample("baton_ready", {}, 1.0)]
    return EngineView(
        url, role, worker, server_info, metrics=metrics, diagnosis=diagnosis, clock_offset_secs=0.0
    )


def p(**changes: Any) -> EngineView:
    return engine(P, "prefill", **changes)


def d(**changes: Any) -> EngineView:
    return engine(D, "decode", **changes)


def rank(
    transfer: str = "linked", transport: str | None = "shm", detail: str = ""
) -> dict[str, Any]:
    return {
        "rank": 0,
        "address": "p:31000",
        "transfer": transfer,
        "detail": detail,
        "transport": transport,
    }


def fleet(*found: EngineView, router: RouterView | None = None, **changes: Any) -> FleetView:
    members = list(found) or [p(), d()]
    first = router or RouterView(
        "http://r:8000", workers=[e.worker for e in members], readiness={"status": "ready"}, is_ready=True,
        metrics=[MetricSample("baton_router_build_info", {"version": "1.0"}, 1.0)], clock_offset_secs=0.1,
    )  # fmt: skip
    return FleetView([dataclasses.replace(first, **changes)], members)


def judge(view: FleetView) -> list[CheckResult]:
    return routers.check_routers(view) + engines.check_engines(view) + pairs.check_pairs(view)


def with_sample(name: str, value: float, **labels: str) -> dict[str, Any]:
    return {"metrics": [*fleet().routers[0].metrics, MetricSample(name, labels, value)]}


def changed(source: EngineView, **diagnosis: Any) -> EngineView:
    return dataclasses.replace(source, diagnosis={**source.diagnosis, **diagnosis})


def worker(source: EngineView, **changes: Any) -> EngineView:
    return dataclasses.replace(source, worker={**source.worker, **changes})


def look(
    outcome: str, detail: str = "", ranks: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    target = {"host": "p", "port": 8998, "bootstrap": outcome, "detail": detail}
    return {"prefill": [{**target, "ranks": ranks or []}]}


def test_healthy_fleet_has_no_problem() -> None:
    results = judge(fleet())
    assert not [r for r in results if check.is_problem(r)], results
    assert {r.name for r in results} >= {
        "router.ready",
        "engine.open_files",
        "pair.cluster_key",
        "pair.transport",
    }


FAULTS: dict[str, tuple[Callable[[], FleetView], str, str, str]] = {
    "router away": (
        lambda: FleetView([RouterView("http://r", "refused")], []),
        "router.reachable",
        "fail",
        "refused",
    ),
    "no prefill": (
        lambda: fleet(is_ready=False, readiness={"reason": "no prefill worker is ready (0 known)"}),
        "router.ready",
        "fail",
        "no prefill worker is ready",
    ),
    "router that serves nothing": (
        lambda: fleet(readiness={"status": "ready", "serves": False, "reason": "no decode worker"}),
        "router.serves",
        "fail",
        "http://r:8000 can serve no request: no decode worker",
    ),
    "router metrics": (
        lambda: fleet(metrics_problem="status 404"),
        "router.metrics",
        "warn",
        "status 404",
    ),
    "stale": (
        lambda: fleet(**with_sample("baton_router_discovery_is_stale", 1.0, source="file")),
        "router.discovery",
        "fail",
        "cannot read its workers from file",
    ),
    "kept": (
        lambda: fleet(
            **with_sample("baton_router_discovered_workers", 2.0, source="file", state="kept")
        ),
        "router.discovery",
        "warn",
        "keeps 2 workers",
    ),
    "open router": (
        lambda: fleet(is_open=True, outer_address="10.0.0.9:8000"),
        "router.keys",
        "warn",
        "anyone who reaches 10.0.0.9:8000",
    ),
    "router clock": (
        lambda: fleet(clock_offset_secs=400.0),
        "router.clock",
        "fail",
        "400.0 s ahead",
    ),
    "doubtful events": (
        lambda: fleet(p(), worker(d(), kv_events=[{"state": "doubtful", "reason": "a gap"}])),
        "router.kv_events",
        "warn",
        "doubtful, a gap",
    ),
    "engine dead": (
        lambda: fleet(
            p(),
            EngineView(
                D,
                "decode",
                {"url": D, "state": "unhealthy"},
                problem="connection refused",
                is_unreachable=True,
            ),
        ),
        "engine.reachable",
        "fail",
        "does not answer: connection refused; the router has it as unhealthy",
    ),
    "doctor stands elsewhere": (
        lambda: fleet(
            p(),
            EngineView(
                D, "decode", {"url": D, "state": "ready"}, problem="timed out", is_unreachable=True
            ),
        ),
        "engine.reachable",
        "warn",
        "does not answer here (timed out)",
    ),
    "engine key": (
        lambda: fleet(p(), EngineView(D, "decode", d().worker, problem="send the key")),
        "engine.reachable",
        "fail",
        "refuses to show its settings: send the key",
    ),
    "draining": (lambda: fleet(p(), d(state="draining")), "engine.state", "warn", "is draining"),
    "loading": (lambda: fleet(p(), d(state="loading")), "engine.state", "warn", "loads its model"),
    "engine dead to itself": (
        lambda: fleet(p(), d(state="dead")),
        "engine.state",
        "fail",
        "decode http://d:30000 reports that it is dead",
    ),
    "rank dead": (
        lambda: fleet(
            p(), d(state="dead", internal_states=[{"dp_rank": 1, "dead": "exit code -9"}])
        ),
        "engine.state",
        "fail",
        "has lost rank 1: exit code -9",
    ),
    "unhealthy": (
        lambda: fleet(p(), worker(d(), state="unhealthy", reason="status 503")),
        "engine.state",
        "fail",
        "is unhealthy for the router: status 503",
    ),
    "circuit": (
        lambda: fleet(p(), worker(d(), circuit="open")),
        "engine.state",
        "warn",
        "circuit of decode http://d:30000 is open",
    ),
    "versions": (lambda: fleet(p(), d(version="1.1")), "engine.versions", "warn", "1.1: decode"),
    "extension": (
        lambda: fleet(
            p(),
            d(host_facts=facts(versions={"torch": "2", "baton": "1.0", "extension": "0.9"})),
        ),
        "engine.versions",
        "fail",
        "extension of version 0.9",
    ),
    "engine metrics": (
        lambda: fleet(p(), dataclasses.replace(d(), metrics_problem="status 404")),
        "engine.metrics",
        "warn",
        "cannot be scraped: status 404",
    ),
    "open engine": (
        lambda: fleet(p(), dataclasses.replace(d(host="0.0.0.0"), is_open=True)),
        "engine.keys",
        "warn",
        "listens on all addresses without a key",
    ),
    "insecure KV": (
        lambda: fleet(p(), d(insecure_kv=True)),
        "engine.keys",
        "warn",
        "--insecure-kv",
    ),
    "engine files": (
        lambda: fleet(p(), d(host_facts=facts(open_files_limit=300))),
        "engine.open_files",
        "warn",
        "only 300 files can be open, 384 are wanted",
    ),
    "engine shm": (
        lambda: fleet(p(), d(host_facts=facts(shm_total=64 << 20))),
        "engine.shm",
        "warn",
        "decode http://d:30000: /dev/shm has 64 MiB",
    ),
    "processors": (
        lambda: fleet(p(), d(host_facts=facts(cpu_isa="avx512"))),
        "engine.cpu",
        "warn",
        "avx2, avx512",
    ),
    "engine clock": (
        lambda: fleet(p(), changed(d(), asked_at=1.0, answered_at=2.0)),
        "engine.clock",
        "fail",
        "the clock of decode http://d:30000 is ",
    ),
    "lease outlives drain": (
        lambda: fleet(p(drain_timeout_secs=10.0), d()),
        "engine.time_limits",
        "warn",
        "drains for at most 10 s, but leases of KV last 30 s",
    ),
    "queue timeout": (
        lambda: fleet(p(), d(queue_timeout_secs=3600.0)),
        "engine.time_limits",
        "warn",
        "--queue-timeout-secs 3600 is never reached",
    ),
    "other key": (
        lambda: fleet(p(), engine(P + "2", "prefill"), d(key="other")),
        "pair.cluster_key",
        "fail",
        "decode http://d:30000: the cluster key differs from that of prefill",
    ),
    "no key": (
        lambda: fleet(p(), d(key=None)),
        "pair.cluster_key",
        "fail",
        "decode http://d:30000: no cluster key, the other engines have one",
    ),
    "change of keys": (
        lambda: fleet(p(key="old new"), d(key="new old")),
        "pair.cluster_key",
        "warn",
        "signs with another cluster key, which all others accept",
    ),
    "change of keys begun on one side": (
        lambda: fleet(p(key="old"), d(key="new old")),
        "pair.cluster_key",
        "fail",
        "the cluster key differs",
    ),
    "page size": (
        lambda: fleet(
            p(), d(), engine(D + "2", "decode", fingerprint={**PRINT, "page_size": "32"})
        ),
        "pair.fingerprint",
        "fail",
        "decode http://d:300002 pairs with none of 1 prefill nodes: page_size 16 / 32",
    ),
    "two generations": (
        lambda: fleet(
            *(
                engine(f"{P}{model}", "prefill", fingerprint={**PRINT, "model": model})
                for model in "ab"
            ),
            *(
                engine(f"{D}{model}", "decode", fingerprint={**PRINT, "model": model})
                for model in "ab"
            ),
        ),
        "pair.fingerprint",
        "warn",
        "2 of 4 pairs do not fit, e.g. http://p:30000a and http://d:30000b: model a / b",
    ),
    "bootstrap closed": (
        lambda: fleet(p(), changed(d(), **look("unreachable", "connection refused"))),
        "pair.reachable",
        "fail",
        "cannot fetch KV from prefill http://p:30000: bootstrap unreachable: connection refused",
    ),
    "transfer port closed": (
        lambda: fleet(
            p(), changed(d(), **look("ok", ranks=[rank("unreachable", None, "timed out")]))
        ),
        "pair.reachable",
        "fail",
        "transfer port of rank 0 unreachable: timed out",
    ),
    "slower transport": (
        lambda: fleet(p(), changed(d(), **look("ok", ranks=[rank(transport="tcp")]))),
        "pair.transport",
        "warn",
        "KV travels by tcp, shm should work",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_fleet_is_the_only_thing_named(fault: str) -> None:
    view, name, status, sentence = FAULTS[fault]
    found = sole([r for r in judge(view()) if check.is_problem(r)], CheckStatus(status))
    assert found.name == name
    assert sentence in found.sentence


def test_two_routers_must_agree_and_share_kv_events() -> None:
    view = fleet()
    other = dataclasses.replace(
        view.routers[0], url="http://r2:8000", workers=view.routers[0].workers[:1],
        metrics=[MetricSample("baton_router_build_info", {"version": "0.9"}, 1.0)],
    )  # fmt: skip
    two = FleetView([view.routers[0], other], view.engines)
    sentences = [r.sentence for r in routers.check_routers_agree(two)]
    assert "http://r2:8000 does not know http://d:30000" in sentences[0]
    assert "different versions" in sentences[1]
    assert (
        "without KV events each router"
        in sole(routers.check_kv_events(two), CheckStatus.WARN).sentence
    )
    on = [{**w, "kv_events": [{"state": "exact"}]} for w in view.routers[0].workers]
    same = [
        dataclasses.replace(view.routers[0], url=url, workers=on)
        for url in ("http://a", "http://b")
    ]
    assert (
        sole(routers.check_kv_events(FleetView(same, [])), CheckStatus.OK).sentence
        == "KV events: exact"
    )
    sole(routers.check_routers_agree(FleetView(same, [])), CheckStatus.OK)


@pytest.mark.parametrize(
    ("changes", "info", "best", "why"),
    [
        ({}, {}, "shm", ""),
        ({"boot_id": "other", "hostname": "b"}, {}, "tcp", "they run on different hosts (a, b)"),
        ({"network_namespace": "net:2"}, {}, "tcp", "different network namespaces"),
        ({"uid": 7}, {}, "tcp", "different users (1, 7)"),
        (
            {},
            {"disaggregation_transfer_backend": "tcp"},
            "tcp",
            "shm: --disaggregation-transfer-backend tcp of decode",
        ),
        (
            {},
            {"disaggregation_transfer_backend": "gloo"},
            "tcp",
            "--disaggregation-transfer-backend gloo of decode",
        ),
    ],
)
def test_transport_of_a_pair_is_explained(
    changes: dict[str, Any], info: dict[str, Any], best: str, why: str
) -> None:
    decode = d(host_facts=facts(**changes), **info)
    choice = pairs.choose_transport(p(), decode)
    assert choice is not None
    assert choice.best == best
    assert why in "; ".join(choice.refused)
    used = look("ok", ranks=[rank(transport=best)])
    shown = sole(pairs.check_transports(fleet(p(), changed(decode, **used))), CheckStatus.OK)
    assert shown.sentence.startswith(f"{P} -> {D}: {best}")
    assert why in shown.sentence


def test_transport_that_both_flags_name_is_expected() -> None:
    flags = {"disaggregation_transfer_backend": "gloo"}
    choice = pairs.choose_transport(p(**flags), d(**flags))
    assert choice == pairs.TransportChoice(
        "gloo", (f"shm: --disaggregation-transfer-backend gloo of prefill {P}",)
    )
    elsewhere = changed(
        d(host_facts=facts(boot_id="b", hostname="b")),
        **look("ok", ranks=[rank("reachable", None)]),
    )
    found = pairs.check_transports(fleet(p(disaggregation_transfer_backend="shm"), elsewhere))
    sentence = sole(found, CheckStatus.FAIL).sentence
    assert "no transport serves this pair" in sentence
    assert "shm: they run on different hosts (a, b)" in sentence


def test_key_proof_shows_neither_the_key_nor_what_else_the_key_signs() -> None:
    assert key_proof("secret", "c") == key_proof("secret", "c") != key_proof("secret", "d")
    assert key_proof("secret", "c") != key_proof("secrets", "c")
    assert "secret" not in key_proof("secret", "c")


def test_workers_of_other_engines_are_not_judged_by_what_only_ours_report() -> None:
    other = EngineView(
        D, "decode", d().worker, {"version": "0.5.7", "host": "127.0.0.1"},
        metrics=[MetricSample("sglang:x", {}, 1.0)],
    )  # fmt: skip
    view = fleet(p(), other)
    assert not [r for r in judge(view) if check.is_problem(r)]
    blocked = dataclasses.replace(view, closed_from_here=frozenset({("p", 8998)}))
    found = sole([r for r in judge(blocked) if check.is_problem(r)], CheckStatus.WARN)
    assert "decode http://d:30000: the way to prefill nodes is unknown" in found.sentence


# ---- output and flags ------------------------------------------------------------------------------------------


def test_exit_code_and_output_follow_the_worst_result() -> None:
    results = [
        CheckResult("a.b", CheckStatus.OK, "well"), CheckResult("c", CheckStatus.SKIP, "no GPU"),
        CheckResult("d", CheckStatus.WARN, "odd", "do this"),
    ]  # fmt: skip
    assert check.exit_code(results[:2]) == 0
    assert check.exit_code(results) == 1
    assert check.exit_code([*results, check.fail("bad", "do that")]) == 2
    text = check.render_text(results, is_colored=False)
    assert text.splitlines()[2:4] == ["warn  d    odd", "           -> do this"]
    assert text.endswith("1 ok, 1 warning, 0 failures, 1 skipped")
    shown = json.loads(check.render_json(results))
    assert shown["exit_code"] == 1
    assert shown["checks"][2] == {
        "name": "d",
        "status": "warn",
        "sentence": "odd",
        "remedy": "do this",
    }
    assert "\x1b[33mwarn" in check.render_text(results, is_colored=True)


def test_wrong_bootstrap_port_is_advised_with_the_right_one() -> None:
    given = worker(p(disaggregation_bootstrap_port=33122), bootstrap_port=8998)
    closed = changed(d(), **look("unreachable", "connection refused"))
    found = [r for r in judge(fleet(given, closed)) if check.is_problem(r)]
    remedy = sole(found, CheckStatus.FAIL).remedy
    assert "the router was given bootstrap port 8998, the node's is 33122" in remedy
    assert f"--prefill {P} 33122" in remedy


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("[ssl: certificate_verify_failed] certificate verify failed: self-signed", "--ca-cert"),
        ("[ssl: wrong_version_number] wrong version number", "give http://r:1"),
        ("its answer is no HTTP", "give https://r:1"),
        ("connection refused", "give the router's address"),
    ],
)
def test_remedy_for_a_router_follows_what_went_wrong(problem: str, remedy: str) -> None:
    scheme = "http" if "HTTP" in problem else "https"
    results = routers.check_routers(FleetView([RouterView(f"{scheme}://r:1", problem)], []))
    assert remedy in sole(results, CheckStatus.FAIL).remedy


def test_router_can_be_given_without_a_flag() -> None:
    config = main.parse_flags(["http://a:1", "http://b:1/", "--router", "http://c:1"])
    assert config.fleet
    assert config.routers == ["http://a:1", "http://b:1", "http://c:1"]
    assert not main.parse_flags(["--router", "http://c:1"]).fleet


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["a:8000"], "baton doctor: a:8000: give http://HOST:PORT"),
        (["--router", "127.0.0.1:8000"], "give http://HOST:PORT"),
        (["--ca-cert", "/no-such-file"], "--ca-cert /no-such-file: No such file or directory"),
        (["--router", "http://a,b"], "--router b: give http://HOST:PORT"),
        (["--flet"], "--flet: there is no such flag; is it --fleet?"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(flags)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_keys_come_from_the_environment_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "client")
    assert main.keys_of(main.parse_flags([])).control == "client"
    monkeypatch.setenv("BATON_CONTROL_KEY", "admin")
    keys = main.keys_of(main.parse_flags([]))
    assert (keys.control, keys.engine) == ("admin", "client")
    assert main.keys_of(main.parse_flags(["--key", "k"])).control == "k"


def test_answers_say_what_went_wrong() -> None:
    client = HttpClient()
    refused = client.get("http://127.0.0.1:1/")
    assert (refused.status, refused.problem, refused.object) == (0, "connection refused", {})
    assert HttpAnswer(200, "[1]", "", None).object == {}


class AskedClient(HttpClient):
    """Answers a diagnosis with as many looks as it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def post(
        self, url: str, body: dict[str, Any], key: str | None = None, *, timeout_secs: float
    ) -> HttpAnswer:
        self.asked.append(len(body.get("prefill", [])))
        found = {"host": dataclasses.asdict(facts()), "prefill": body.get("prefill", [])}
        return HttpAnswer(200, json.dumps(found), "", None)


class ScriptedClient(HttpClient):
    """Answers GET of these URLs with JSON; the other ones refuse."""

    def __init__(self, answers: dict[str, object]) -> None:
        super().__init__()
        self.answers = answers

    def get(self, url: str, key: str | None = None) -> HttpAnswer:
        if url not in self.answers:
            return HttpAnswer(0, "", "connection refused", None)
        return HttpAnswer(200, json.dumps(self.answers[url]), "", None)


@pytest.mark.parametrize(
    ("described", "info", "is_other"),
    [
        ("a", {"incarnation": "a", "engine": "baton"}, False),
        (None, {"engine": "baton", "incarnation": "b"}, False),
        (None, {"random_seed": 7}, False),
        ("a", {"incarnation": "b", "engine": "baton"}, True),
        ("a", {"status": "ok"}, True),
        (None, ["another program"], True),
    ],
)
def test_engine_is_judged_by_the_process_that_the_router_describes(
    described: str | None, info: object, is_other: bool
) -> None:
    listed = (D, {"url": D, "worker_type": "decode", "state": "ready", "incarnation": described})
    client = ScriptedClient({f"{D}/get_server_info": info})
    found = fleet_module._read_engine(listed, FleetKeys(None, None), client)
    assert found.is_other == is_other
    assert bool(found.info) != is_other
    results = engines.check_engines_reachable(FleetView([], [found]))
    assert ("another process answers at" in results[0].sentence) == is_other


def test_each_url_has_to_lead_to_one_router() -> None:
    def view(url: str, alive: str, ready: str) -> RouterView:
        answers = {f"{url}/workers": {"workers": []}, f"{url}/livez": {"incarnation": alive}}
        client = ScriptedClient({**answers, f"{url}/readyz": {"incarnation": ready}})
        return fleet_module.read_router(url, FleetKeys(None, None), client)

    one, same, other = (view(f"http://10.0.0.{i}", *"aa") for i in range(3))
    other = dataclasses.replace(other, incarnation="b")
    balanced = view("http://10.0.0.9", "a", "b")
    sole(routers.check_router_processes(FleetView([one, other], [])), CheckStatus.OK)
    twice = sole(routers.check_router_processes(FleetView([one, same], [])), CheckStatus.WARN)
    assert twice.sentence == "http://10.0.0.0, http://10.0.0.1 lead to the same router"
    several = sole(routers.check_router_processes(FleetView([balanced], [])), CheckStatus.WARN)
    assert "leads to several processes" in several.sentence


def test_outer_address_is_open_only_if_the_router_answers_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "source_address", lambda *_: "10.0.0.7")
    url = "http://127.0.0.1:8000"
    for stated, address in (("a", "10.0.0.7:8000"), ("b", None)):
        client = ScriptedClient({"http://10.0.0.7:8000/livez": {"incarnation": stated}})
        assert fleet_module._outer_address(url, "a", client) == address


def test_more_prefill_nodes_than_one_request_takes_are_asked_for_in_turn() -> None:
    targets = [{"host": "p", "port": port} for port in range(1, 151)]
    client = AskedClient()
    found = fleet_module._diagnose_engine(d(), targets, "c", FleetKeys(None, None), client)
    assert client.asked == [0, 64, 64, 22]
    assert found.diagnosis["prefill"] == targets
    other = AskedClient()
    fleet_module._diagnose_engine(p(), targets, "c", FleetKeys(None, None), other)
    assert other.asked == [0], "only decode nodes fetch KV"


def test_metrics_are_read_up_to_a_line_in_another_format() -> None:
    text = '# HELP a b\na{x="1",y="a\\"b"} 2\nb 3 1700000000\nc NaN?\nd 1\n'
    found = [(sample.name, sample.labels, sample.value) for sample in parse_metrics(text)]
    assert found == [("a", {"x": "1", "y": 'a"b'}, 2.0), ("b", {}, 3.0)]
