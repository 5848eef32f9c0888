"""Rules between flags of an engine.

Each yields sentences that name the flag, the value and what to do.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Collection, Iterator

from baton.config import kv_events, tenants
from baton.config.classes import parse_classes
from baton.config.engine import (
    KV_REMEDY,
    LOOPBACK,
    UNSPECIFIED_HOSTS,
    EngineConfig,
    is_loopback,
)
from baton.config.flags import flag_name, out_of_range
from baton.config.groups.ranks import MEM_FRACTION
from baton.config.groups.steps import HEADS, SpeculationFlags
from baton.errors import ConfigError


def find_mistakes(config: EngineConfig) -> Iterator[str]:
    """All that is wrong with a config."""
    yield from out_of_range(config)
    for rules in (
        _check_transfer,
        _check_device,
        _check_step,
        _check_queue,
        _check_sharing,
        _check_priority,
        _check_memory,
        _check_speculation,
        _check_simulated,
    ):
        yield from rules(config)
    yield from kv_events.find_mistakes(config.kv_events_config, config.dp_size)


def _check_transfer(c: EngineConfig) -> Iterator[str]:
    if c.cluster_key == "":
        yield "--cluster-key is empty: give a long random text, or leave it out"
    if c.second_cluster_key == "":
        yield "--second-cluster-key is empty: give the other key, or leave it out"
    if c.second_cluster_key is not None and c.cluster_key is None:
        yield (
            "--second-cluster-key needs --cluster-key, the key that signs; give both, or only "
            "--cluster-key"
        )
    if (
        c.disaggregation_mode == "prefill"
        and c.bootstrap_listen_host != c.host
        and c.host not in UNSPECIFIED_HOSTS
    ):
        reason = (
            f"without a cluster key KV transfers stay on {LOOPBACK}, where no decode node "
            "would look for them"
        )
        yield f"--host {c.host}: {reason}; {KV_REMEDY}"
    for name in ("kv_host", "kv_advertise_host"):
        host = getattr(c, name)
        if host is not None and not c.is_kv_open and not is_loopback(host):
            yield (
                f"{flag_name(name)} {host}: without a cluster key KV transfers stay on loopback; "
                f"{KV_REMEDY}"
            )
    if c.kv_advertise_host is not None and not _is_address_or_name(c.kv_advertise_host):
        form = "one IPv4 address, IPv6 address without brackets or host name, without a port"
        yield f"--kv-advertise-host {c.kv_advertise_host}: give {form}"


def _is_address_or_name(text: str) -> bool:
    """True for an IP address of one host, and for a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", text) is not None
    return text not in UNSPECIFIED_HOSTS


def _check_device(c: EngineConfig) -> Iterator[str]:
    if c.ep_size not in (1, c.tp_size):
        yield f"--ep-size {c.ep_size}: give 1 or the value of --tp-size ({c.tp_size})"
    if c.tp_size > 1 and c.dp_size > 1 and c.disaggregation_mode == "prefill":
        yield (
            f"--dp-size {c.dp_size}: with --tp-size {c.tp_size} a prefill node has one DP rank; "
            "start more nodes"
        )
    if c.attention_backend == "flashinfer" and c.device == "cpu":
        yield (
            f"--attention-backend flashinfer: needs a CUDA device, --device is {c.device}; use "
            "auto, cpu or torch"
        )
    if c.cuda_graph_max_bs is not None:
        for why_not, reason in (
            (c.device == "cpu", "there are no CUDA graphs on --device cpu"),
            (c.tp_size > 1, f"steps are not recorded with --tp-size {c.tp_size}"),
            (c.disable_cuda_graph, "--disable-cuda-graph is set, too"),
        ):
            if why_not:
                yield f"--cuda-graph-max-bs {c.cuda_graph_max_bs}: {reason}; leave it out"


def _check_step(c: EngineConfig) -> Iterator[str]:
    if c.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
        yield f"--page-size {c.page_size}: use a power of two from 1 to 128"
    chunk = c.chunked_prefill_size
    if chunk != -1 and (chunk < c.page_size or chunk % max(c.page_size, 1)):
        remedy = (
            f"use a positive multiple of --page-size ({c.page_size}), or -1 to compute each "
            "prompt in one step"
        )
        yield f"--chunked-prefill-size {chunk}: {remedy}"
    for name in ("enable_dynamic_chunking", "step_target_ms", "long_prefill_token_threshold"):
        if chunk == -1 and getattr(c, name):
            yield (
                f"{flag_name(name)}: --chunked-prefill-size -1 splits no prompt; leave one of "
                "the two out"
            )
    if c.long_prefill_token_threshold and c.long_prefill_token_threshold < c.page_size:
        remedy = f"use at least --page-size ({c.page_size}), or 0 for no limit"
        yield f"--long-prefill-token-threshold {c.long_prefill_token_threshold}: {remedy}"
    if c.max_decode_gap_ms and (not c.prefill_first or c.enable_mixed_chunk):
        reason = "decode rows wait only with --prefill-first and without --enable-mixed-chunk"
        yield (
            f"--max-decode-gap-ms {c.max_decode_gap_ms}: {reason}; otherwise they join every "
            "step: leave it out"
        )


def _check_speculation(c: EngineConfig) -> Iterator[str]:
    algorithm = c.speculative_algorithm
    if algorithm is None:
        for f in dataclasses.fields(SpeculationFlags):
            if getattr(c, f.name) != f.default:
                yield (
                    f"{flag_name(f.name)} {getattr(c, f.name)}: nothing is drafted without "
                    "--speculative-algorithm; give that, too, or leave it out"
                )
        return
    if c.disaggregation_mode == "prefill":
        yield f"--speculative-algorithm {algorithm}: a prefill node decodes nothing; leave it out"
    if c.is_drafted_by_head and c.tp_size > 1:
        yield (
            f"--speculative-algorithm {algorithm}: heads draft with --tp-size 1 in this version; "
            "use NGRAM or STANDALONE, or one rank"
        )
    if c.speculative_eagle_topk != 1:
        yield (
            f"--speculative-eagle-topk {c.speculative_eagle_topk}: drafts are one chain, not a "
            "tree; give 1, or leave it out"
        )
    if algorithm in ("STANDALONE", "EAGLE3") and c.speculative_draft_model_path is None:
        yield f"--speculative-algorithm {algorithm}: give --speculative-draft-model-path, too"
    for f in dataclasses.fields(SpeculationFlags):
        owners = _OWNERS.get(f.name, (algorithm,))
        if algorithm not in owners and getattr(c, f.name) != f.default:
            yield (
                f"{flag_name(f.name)} {getattr(c, f.name)}: is for "
                f"--speculative-algorithm {' or '.join(owners)}; leave it out"
            )


_OWNERS = {
    "speculative_draft_model_path": ("STANDALONE", "EAGLE3"),
    "speculative_num_steps": ("STANDALONE", *HEADS),
    "speculative_eagle_topk": HEADS,
    "speculative_ngram_min_match_window_size": ("NGRAM",),
    "speculative_ngram_capacity": ("NGRAM",),
}
"""Algorithms whose flags these are; all others are for each."""


def _check_queue(c: EngineConfig) -> Iterator[str]:
    if c.short_first_output_weight != "auto" and not _is_share(c.short_first_output_weight):
        yield (
            f"--short-first-output-weight {c.short_first_output_weight}: use auto, or a number "
            "from 0 to 1"
        )
    if c.decision_log is not None and c.decision_log == c.scheduler_trace:
        yield f"--scheduler-trace {c.scheduler_trace}: is also --decision-log; give two files"


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _check_sharing(c: EngineConfig) -> Iterator[str]:
    class_names: Collection[str] = ()
    if c.priority_classes is not None:
        classes, wrong = parse_classes(
            c.priority_classes, low_values_first=c.schedule_low_priority_values_first
        )
        class_names = classes.names
        yield from (f"--priority-classes {c.priority_classes}: {mistake}" for mistake in wrong)
    elif c.disable_class_charge_decode:
        yield (
            "--disable-class-charge-decode: there are no classes; give --priority-classes, or "
            "leave it out"
        )
    if c.tenant_config is not None:
        try:
            tenants.load_rules(c.tenant_config, class_names)
        except ConfigError as err:
            yield err.message


def _check_priority(c: EngineConfig) -> Iterator[str]:
    if c.priority_aging_max is not None and c.priority_aging_rate <= 0:
        yield f"--priority-aging-max {c.priority_aging_max}: needs a --priority-aging-rate above 0"
    if c.priority_adjustment_function is not None and not c.enable_priority_scheduling:
        yield (
            f"--priority-adjustment-function {c.priority_adjustment_function}: needs "
            "--enable-priority-scheduling"
        )
    if c.preemption_mode == "offload" and not c.host_kv_gib:
        yield (
            "--preemption-mode offload: there is no host pool to offload to; set --host-kv-gib, "
            "or use auto or cache"
        )


def _check_memory(c: EngineConfig) -> Iterator[str]:
    if c.device == "cpu" and c.mem_fraction_static != MEM_FRACTION:
        reason = "it sizes the pool of a CUDA device, --device is cpu"
        yield f"--mem-fraction-static {c.mem_fraction_static:g}: {reason}; use --kv-pool-mib"
    if c.max_total_tokens and c.max_total_tokens < 2 * c.page_size:
        yield f"--max-total-tokens {c.max_total_tokens}: give at least two pages"
    if c.disable_radix_cache:
        for flag, value in (
            (
                "--radix-eviction-policy",
                c.radix_eviction_policy if c.radix_eviction_policy != "lru" else "",
            ),
            ("--kv-events-config", c.kv_events_config[:100]),
            ("--host-kv-gib", f"{c.host_kv_gib:g}" if c.host_kv_gib else ""),
        ):
            if value:
                yield (
                    f"{flag} {value}: nothing is cached with --disable-radix-cache; drop one of "
                    "the two"
                )


def _check_simulated(c: EngineConfig) -> Iterator[str]:
    """Flags about a device, where there is none."""
    if c.simulate is None:
        return
    for f in dataclasses.fields(c):
        if f.metadata["on_device"] and (value := getattr(c, f.name)) != f.default:
            yield f"{flag_name(f.name)} {value}: there is no device with --simulate; leave it out"
