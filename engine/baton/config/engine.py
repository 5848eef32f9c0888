"""Engine configuration: one frozen dataclass; flags, help, defaults and docs/flags.md are all built
from its fields, which stand in `groups`, a class for each heading.

`parsing.parse_config` reads no file but --tenant-config's and reports all mistakes at once. The
model's config.json and the machine are read later (`models.spec_reader`, `runtime.device`).
SGLang's flag names are used where the semantics agree.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from baton.config.groups.disaggregation import DisaggregationFlags
from baton.config.groups.http_server import HttpFlags
from baton.config.groups.model import ModelFlags
from baton.config.groups.queue import CacheFlags, FairnessFlags, OrderFlags, PriorityFlags
from baton.config.groups.ranks import MemoryFlags, RankFlags
from baton.config.groups.service import ServiceFlags
from baton.config.groups.steps import HEADS, LimitFlags, LoopFlags, SpeculationFlags, StepFlags

LOOPBACK = "127.0.0.1"
UNSPECIFIED_HOSTS = ("0.0.0.0", "::", "")
"""Values of --host that listen on every address."""
KV_REMEDY = (
    "give all engines the same --cluster-key (BATON_CLUSTER_KEY), or --insecure-kv where every "
    "host of the network is trusted"
)
CUDA_DEFAULTS: Mapping[str, int] = {"max_running_requests": 256, "chunked_prefill_size": 8192}
"""Defaults with --device cuda of flags that are not given. Small steps leave a GPU waiting for
launches; 8192 tokens match SGLang's on an H200, 256 rows are the largest recorded decode step
(runtime.runner.capture).
"""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    # The first heading comes last: a dataclass counts the fields of its last base first.
    ServiceFlags,
    SpeculationFlags,
    LoopFlags,
    CacheFlags,
    PriorityFlags,
    FairnessFlags,
    OrderFlags,
    StepFlags,
    LimitFlags,
    MemoryFlags,
    RankFlags,
    DisaggregationFlags,
    HttpFlags,
    ModelFlags,
):
    ESSENTIALS: ClassVar[tuple[str, ...]] = (
        "model_path",
        "context_length",
        "host",
        "port",
        "api_key",
        "disaggregation_mode",
        "disaggregation_bootstrap_port",
        "cluster_key",
        "device",
        "tp_size",
    )
    """Fields whose flags --help shows."""

    @property
    def step_tokens(self) -> int:
        """Token budget of one step. Without chunking a longer prompt exceeds it, alone."""
        if self.chunked_prefill_size < 0:
            return self.max_prefill_tokens
        return min(self.chunked_prefill_size, self.max_prefill_tokens)

    @property
    def most_answer_tokens(self) -> int:
        """Most tokens of a step that computes no prompt: one of each answer, and the drafts that
        the step has room for."""
        rows = self.max_running_requests
        return min(rows * (1 + self.most_drafts), max(rows, self.step_tokens))

    @property
    def is_drafted_by_head(self) -> bool:
        """True if drafts follow from hidden states of the model."""
        return self.speculative_algorithm in HEADS

    @property
    def most_drafts(self) -> int:
        """Most drafted tokens of a row and step."""
        if self.speculative_algorithm is None:
            return 0
        return min(
            self.speculative_num_draft_tokens,
            self.speculative_num_steps or self.speculative_num_draft_tokens,
        )

    @property
    def max_rooms(self) -> int:
        """Most KV transfers of a rank: one per request that waits or runs, and as many that are
        leased or closing.

        The transfer runtime derives its other limits from this one
        (kv_transfer/src/node/config.rs).
        """
        return 2 * (self.max_queued_requests + self.max_running_requests)

    @property
    def host_names(self) -> frozenset[str]:
        """Names of --allowed-hosts, and that of --host, in lower case."""
        names = (name.strip().lower() for name in (self.host, *self.allowed_hosts.split(",")))
        return frozenset(filter(None, names))

    @property
    def is_on_loopback(self) -> bool:
        """True if the HTTP server listens on this machine alone."""
        return is_loopback(self.host)

    @property
    def is_kv_open(self) -> bool:
        """True if KV may cross hosts: with a cluster key, or by --insecure-kv."""
        return self.cluster_key is not None or self.insecure_kv

    @property
    def bootstrap_listen_host(self) -> str:
        """Address that the bootstrap server listens on: --host, where routers tell D to ask, or
        loopback.
        """
        return self.host if self.is_kv_open or is_loopback(self.host) else LOOPBACK

    @property
    def kv_listen_host(self) -> str:
        """Address that the transfer runtime listens on."""
        return self.bootstrap_listen_host if self.kv_host is None else self.kv_host


SECRETS: Mapping[str, str] = {
    f.name: f.metadata["env"] for f in dataclasses.fields(EngineConfig) if f.metadata["secret"]
}
"""Fields that are never shown or recorded, and their environment variables."""


def uses_four_bytes(config: EngineConfig) -> bool:
    """Without a tokenizer of one's own, a token is four bytes of text."""
    return (
        config.simulate is not None
        and config.tokenizer_path is None
        and config.model_path == "demo"
    )


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address.

    A name other than localhost counts as reachable.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
