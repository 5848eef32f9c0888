"""--disaggregation-transfer-backend: each value it takes has its transports, and is refused for the other memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from baton import _native, config
from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.runtime.communicators import nccl
from baton.server.launch.engine import url_of
from baton.server.worker import transfer_setup
from baton.server.worker.transfer_setup import (
    ON_DEVICE,
    TRANSPORTS,
    advertised_host,
    start,
    transports,
    warn_of_reach,
)
from baton_ops.launch import cluster_plan


def record_node(made: list[dict[str, object]], settings: str) -> Mock:
    """Stands in for the native node, whose methods the wrapper looks up."""
    made.append(json.loads(settings))
    return Mock()


def choices(of: type, field: str) -> set[str]:
    (found,) = (f for f in dataclasses.fields(of) if f.name == field)
    return set(found.metadata["choices"])


def build(backend: str, device: str = "cpu") -> EngineConfig:
    return config.build_config({"disaggregation_transfer_backend": backend, "device": device})


def test_every_value_of_the_flag_names_transports() -> None:
    assert set(TRANSPORTS) | set(ON_DEVICE) == choices(
        EngineConfig, "disaggregation_transfer_backend"
    )
    assert {*TRANSPORTS, *ON_DEVICE} - {"auto"} == choices(cluster_plan.UpConfig, "transport")


def test_auto_on_a_gpu_logs_the_transports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(nccl, "find_obstacle", lambda: None)
    assert transports(build("auto", "cuda"), on_device=True) == ["cuda_ipc", "nccl", "tcp"]
    assert caplog.messages == [
        "KV pages are in GPU memory and travel by cuda_ipc, else nccl, else tcp"
    ]
    caplog.clear()
    monkeypatch.setattr(nccl, "find_obstacle", lambda: "there is no libnccl")
    assert transports(build("auto", "cuda"), on_device=True) == ["cuda_ipc", "tcp"]
    assert caplog.messages[0] == "KV pages do not travel by nccl: there is no libnccl"
    assert transports(build("auto"), on_device=False) == ["shm", "tcp"]


def test_transport_of_the_other_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="shm: the KV pages are in GPU memory with --device cuda; use auto, cuda_"
    ):
        transports(build("shm", "cuda"), on_device=True)
    with pytest.raises(
        ConfigError,
        match="cuda_ipc: the KV pages are in host memory with --device cpu; use auto, shm",
    ):
        transports(build("cuda_ipc"), on_device=False)


@pytest.mark.parametrize(
    ("values", "kv_host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "::1"}, "::1"),
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "10.0.0.1"}, "127.0.0.1"),
        ({"host": "0.0.0.0", "cluster_key": "k"}, "0.0.0.0"),
        ({"host": "10.0.0.1", "insecure_kv": True}, "10.0.0.1"),
    ],
)
def test_kv_stays_on_loopback_without_a_cluster_key(
    values: dict[str, object], kv_host: str, caplog: pytest.LogCaptureFixture
) -> None:
    c = config.build_config({"disaggregation_mode": "decode", **values})
    assert c.kv_listen_host == c.bootstrap_listen_host == kv_host
    warn_of_reach(c)
    warned = " ".join(caplog.messages)
    assert ("--cluster-key" in warned) == (kv_host != c.host or c.insecure_kv)


def test_prefill_node_that_no_decode_node_could_reach_is_refused() -> None:
    values = {"disaggregation_mode": "prefill", "host": "10.0.0.1"}
    with pytest.raises(ConfigError, match=r"--host 10\.0\.0\.1: without a cluster key KV"):
        config.build_config(values)
    with pytest.raises(ConfigError, match="--cluster-key is empty"):
        config.build_config({**values, "cluster_key": ""})
    assert config.build_config({**values, "host": "0.0.0.0"}).bootstrap_listen_host == "127.0.0.1"
    assert config.build_config({**values, "cluster_key": "k"}).bootstrap_listen_host == "10.0.0.1"


def test_second_cluster_key_needs_the_first_and_is_never_shown() -> None:
    with pytest.raises(ConfigError, match="--second-cluster-key needs --cluster-key"):
        config.build_config({"second_cluster_key": "old"})
    with pytest.raises(ConfigError, match="--second-cluster-key is empty"):
        config.build_config({"cluster_key": "new", "second_cluster_key": ""})
    engine = config.build_config({"cluster_key": "new", "second_cluster_key": "old"})
    assert {"cluster_key", "second_cluster_key"} <= config.SECRETS.keys()
    assert (engine.cluster_key, engine.second_cluster_key) == ("new", "old")


def prefill(**values: object) -> EngineConfig:
    return config.build_config({"disaggregation_mode": "prefill", "cluster_key": "k", **values})


def test_kv_host_moves_the_transfer_ports_alone() -> None:
    c = prefill(host="10.0.0.1", kv_host="10.1.0.1")
    assert (c.bootstrap_listen_host, c.kv_listen_host) == ("10.0.0.1", "10.1.0.1")
    assert advertised_host(c) == "10.1.0.1"


@pytest.mark.parametrize("flag", ["kv_host", "kv_advertise_host"])
def test_kv_addresses_of_other_hosts_need_a_cluster_key(flag: str) -> None:
    with pytest.raises(
        ConfigError, match=r"10\.1\.0\.1: without a cluster key KV transfers stay on loopback"
    ):
        prefill(cluster_key=None, **{flag: "10.1.0.1"})
    prefill(cluster_key=None, insecure_kv=True, **{flag: "10.1.0.1"})
    prefill(cluster_key=None, **{flag: "::1"})


@pytest.mark.parametrize("host", ["10.1.0.1", "fd00::7", "prefill-0.kv.svc.cluster.local"])
def test_kv_advertise_host_is_announced_as_it_is(host: str) -> None:
    assert advertised_host(prefill(host="0.0.0.0", kv_advertise_host=host)) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[fd00::7]", "http://p", "p:8998", ""])
def test_kv_advertise_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-advertise-host .*: give one IPv4 address"):
        prefill(kv_advertise_host=host)


def route_of(families: dict[int, str]) -> Callable[[int, str], str | None]:
    return lambda family, target: families.get(family)


def test_without_an_ipv4_route_the_ipv6_address_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    v4, v6 = {socket.AF_INET: "10.0.0.1"}, {socket.AF_INET6: "fd00::7"}
    monkeypatch.setattr(transfer_setup, "source_address", route_of({**v4, **v6}))
    assert (
        advertised_host(prefill(host="::"))
        == advertised_host(prefill(host="0.0.0.0"))
        == "10.0.0.1"
    )
    monkeypatch.setattr(transfer_setup, "source_address", route_of(v6))
    assert advertised_host(prefill(host="::")) == "fd00::7"
    with pytest.raises(
        ConfigError, match=r"listen on 0\.0\.0\.0, and no default route.*--kv-advertise-host"
    ):
        advertised_host(prefill(host="0.0.0.0"))


def test_loopback_is_announced_by_a_decode_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_setup, "source_address", route_of({}))
    assert advertised_host(prefill(host="127.0.0.1")) == "127.0.0.1"
    with pytest.raises(ConfigError, match="--kv-advertise-host"):
        advertised_host(prefill(host="::"))
    assert advertised_host(
        config.build_config({"disaggregation_mode": "decode", "cluster_key": "k", "host": "::"})
    )


def test_url_of_an_engine_answers_on_this_machine() -> None:
    shown = [url_of(host, 1) for host in ("0.0.0.0", "", "::", "fd00::7", "p")]
    assert shown == [
        "http://127.0.0.1:1",
        "http://127.0.0.1:1",
        "http://[::1]:1",
        "http://[fd00::7]:1",
        "http://p:1",
    ]


def test_source_address_on_loopback_is_none() -> None:
    assert transfer_setup.source_address(socket.AF_INET, "127.0.0.1") is None


def test_announcing_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_reach(prefill(host="127.0.0.1", kv_advertise_host="127.0.0.1"))
    assert not caplog.messages
    warn_of_reach(prefill(host="0.0.0.0", kv_advertise_host="127.0.0.1"))
    assert "--kv-advertise-host 127.0.0.1: only decode nodes of this machine" in caplog.messages[0]


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_and_streams_reach_the_transfer_runtime(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr(
        _native, "TransferNode", lambda pool, settings, backend: record_node(made, settings)
    )
    flags = {"kv_copy_threads": threads, "kv_tcp_streams": threads + 1}
    start(config.build_config(flags), SimpleNamespace(on_device=False), {}, 0, 0, None)
    assert (made[0]["copy_threads"], made[0]["tcp_streams"]) == (threads, threads + 1)


def test_pages_on_a_gpu_have_one_copy_thread() -> None:
    with pytest.raises(
        ConfigError, match="--kv-copy-threads 4: pages in GPU memory are copied by one thread"
    ):
        start(
            config.build_config({"kv_copy_threads": 4}),
            SimpleNamespace(on_device=True),
            {},
            0,
            0,
            None,
        )


def test_slabs_on_a_gpu_are_few_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr(
        _native, "TransferNode", lambda pool, settings, backend: record_node(made, settings)
    )
    for on_device in (False, True):
        start(build("tcp"), SimpleNamespace(on_device=on_device), {}, 0, 0, None)
    assert "slabs" not in made[0], "the crate's default: 4 of 4 MiB"
    assert (made[1]["slabs"], made[1]["slab_bytes"]) == (2, 16 << 20)
