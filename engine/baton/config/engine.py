"""Engine configuration: one frozen dataclass; flags, help, defaults and docs/flags.md are all built
from its fields.

Two steps: `parse(argv)` reads no file but --tenant-config's and reports all mistakes at once;
`EngineConfig.resolve(...)` (runtime) reads the model's config and the machine. SGLang's flag names
are used where the semantics agree.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt

LOOPBACK = "127.0.0.1"
UNSPECIFIED_HOSTS = ("0.0.0.0", "::", "")
"""Values of --host that listen on every address."""
KV_REMEDY = (
    "give all engines the same --cluster-key (BATON_CLUSTER_KEY), or --insecure-kv where every "
    "host of the network is trusted"
)
SECRETS: Mapping[str, str] = {
    "api_key": "BATON_API_KEY",
    "cluster_key": "BATON_CLUSTER_KEY",
    "second_cluster_key": "BATON_SECOND_CLUSTER_KEY",
}
"""Fields that are never shown or recorded, and their environment variables."""
KV_TRANSPORTS = ("shm", "cuda_ipc", "tcp", "gloo", "nccl")
"""Values of --disaggregation-transfer-backend besides auto."""
QUEUE_ORDERS = (
    "auto",
    "fcfs",
    "lpm",
    "dfs-weight",
    "lof",
    "random",
    "short-first",
    "srpt-aging",
    "hrrn",
    "edf",
)
"""Values of --schedule-policy: auto and the names of sched.policies.POLICIES (a test compares)."""
EVICTION_ORDERS = ("lru", "lfu", "fifo", "mru", "filo", "priority")
"""Values of --radix-eviction-policy: the names of cache.eviction.EVICTION_POLICIES (a test
compares).
"""
MEM_FRACTION = 0.85
"""Steps need memory besides, which is measured and comes first (runtime.memory.device_memory)."""


CUDA_DEFAULTS: Mapping[str, int] = {"max_running_requests": 256, "chunked_prefill_size": 8192}
"""Defaults with --device cuda of flags that are not given. Small steps leave a GPU waiting for
launches; 8192 tokens match SGLang's on an H200, 256 rows are the largest recorded decode step
(runtime.runner.capture).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    GROUPS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model", "model_path"),
        ("HTTP server", "host"),
        ("prefill and decode nodes", "disaggregation_mode"),
        ("ranks and device", "tp_size"),
        ("KV memory", "page_size"),
        ("limits", "max_running_requests"),
        ("size of a step", "chunked_prefill_size"),
        ("order of the queue", "schedule_policy"),
        ("classes and tenants", "priority_classes"),
        ("priority and preemption", "enable_priority_scheduling"),
        ("estimates and cache", "starvation_threshold_ms"),
        ("the loop", "disable_overlap_schedule"),
        ("time limits, metrics and logs", "request_timeout_secs"),
    )
    """Headings of --help-all and docs/flags.md: title, and the first field that it stands above."""
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

    model_path: str = opt(
        "demo",
        "Hugging Face model directory, owner/name of one in the Hugging Face cache, or 'demo' for "
        "the built-in model",
        also=("--model",),
        simulated=False,
    )
    tokenizer_path: str | None = opt(
        None,
        "directory or cached hub id with tokenizer.json (default: the model's)",
        also=("--tokenizer",),
        simulated=False,
    )
    served_model_name: str | None = opt(
        None,
        "name in /v1/models and responses (default: the directory's name)",
        simulated=False,
    )
    load_format: str = opt(
        "auto",
        "auto: safetensors files; dummy: random weights of the config's shape",
        choices=("auto", "dummy"),
        on_device=True,
    )
    model_impl: str = opt(
        "auto",
        "native: blocks of this engine; transformers: the class of transformers, on the CPU and in "
        "one process (docs/support.md); auto: native where the family has blocks, else "
        "transformers",
        choices=("auto", "native", "transformers"),
        on_device=True,
    )
    dtype: str = opt(
        "auto",
        "compute type; auto: the checkpoint's; on the CPU bfloat16 for float16, which torch "
        "computes slowly there",
        choices=("auto", "float32", "bfloat16", "float16"),
        on_device=True,
    )
    simulate: str | None = opt(
        None,
        "no model: steps take the time of this device, reference or h200-8b; then name=number, "
        "separated by commas, for speed, length_scale and single numbers of the device "
        "(docs/simulate.md)",
        simulated=False,
    )
    context_length: int | None = opt(
        None,
        "longest prompt + answer accepted (default: the model's) [tokens]",
        also=("--max-model-len",),
        ge=1,
        simulated=False,
    )
    chat_template: str | None = opt(
        None,
        "file with a Jinja chat template that replaces the model's",
        simulated=False,
    )
    tool_parser: str = opt(
        "auto",
        "format in which the model writes tool calls, such as hermes or llama3; auto: found in its "
        "chat template, else by its model_type; none: calls are not read",
        also=("--tool-call-parser",),
        simulated=False,
    )
    unknown_tool_calls: str = opt(
        "text",
        "calls of tools that a request does not have; text: they are content; forward: they are "
        "calls, which clients answer with an error",
        choices=("text", "forward"),
        simulated=False,
    )
    reasoning_parser: str = opt(
        "auto",
        "markers between which the model reasons, such as think_tags; auto: found in its chat "
        "template, else by its model_type; none: reasoning is part of the content",
        simulated=False,
    )
    reasoning_field: str = opt(
        "reasoning_content",
        "member of chat answers that holds the reasoning",
        choices=("reasoning_content", "reasoning", "both"),
        simulated=False,
    )
    grammar: str = opt(
        "on",
        "structured output (docs/guide/structured-output.md); off: requests with a schema or "
        "grammar are refused, and the memory of the tokenizer's trie is saved, 0.03 to 0.5 GB per "
        "rank",
        choices=("on", "off"),
        simulated=False,
    )
    grammar_check_secs_per_minute: float = opt(
        10.0,
        "CPU time per minute that a client may use for checks of schemas and grammars that take "
        "longer than usual; later ones get 429; 0: no limit [seconds]",
        ge=0,
        simulated=False,
    )
    structured_whitespace: str = opt(
        "bounded",
        "white space between the parts of constrained JSON; bounded: one space, or a line break "
        "and at most 40 blanks; any: unlimited, with which some models write blanks until "
        "max_tokens; none: compact JSON",
        choices=("bounded", "any", "none"),
        simulated=False,
    )

    host: str = opt("127.0.0.1", "address the HTTP server listens on", simulated=False)
    port: int = opt(
        30000, "port of the HTTP server; 0 picks a free one", ge=0, le=65535, simulated=False
    )
    health_port: int | None = opt(
        None,
        "answer the health endpoints on this port of --host too, so that clients cannot take the "
        "connections of probes; 0 picks a free one",
        ge=0,
        le=65535,
        simulated=False,
    )
    api_key: str | None = opt(
        None,
        "require 'Authorization: Bearer KEY' on all but health endpoints",
        env=SECRETS["api_key"],
        simulated=False,
    )
    max_connections: int = opt(
        65_536,
        "most connections at once; a new one closes the one that has waited longest without a "
        "request (an address with a quarter of them that wait closes its own), or is closed while "
        "all have requests",
        ge=1,
        simulated=False,
    )
    header_read_timeout_secs: float = opt(
        10.0,
        "longest time from the first byte of a request's head to its last [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )
    idle_connection_timeout_secs: float = opt(
        90.0,
        "longest time that a connection may be idle [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )

    allowed_hosts: str = opt(
        "",
        "without --api-key: names, separated by commas, by which this engine may be asked besides "
        "addresses, localhost and, beyond loopback, names without a dot; *: any "
        "(docs/guide/security.md)",
        simulated=False,
    )

    disaggregation_mode: str = opt(
        "null",
        "null: both phases here; prefill / decode: one half of a pair",
        choices=("null", "prefill", "decode"),
        simulated=False,
    )
    disaggregation_bootstrap_port: int = opt(
        8998,
        "P node: port of the bootstrap server; 0 picks a free one",
        ge=0,
        le=65535,
        simulated=False,
    )
    disaggregation_transfer_backend: str = opt(
        "auto",
        "how KV pages travel; auto: shm on one host, else tcp; with --device cuda: cuda_ipc on one "
        "GPU, else nccl, else tcp; nccl has not run on GPUs yet (docs/gpu.md); gloo: nccl's code "
        "path through host memory",
        choices=("auto", *KV_TRANSPORTS),
        simulated=False,
    )
    transfer_port: int = opt(
        0,
        "first TCP port of the transfer runtime, one per DP rank; 0 picks free ones",
        ge=0,
        le=65535,
        simulated=False,
    )
    cluster_key: str | None = opt(
        None,
        "shared secret of all engines that authenticates KV transfers; without it they "
        "stay on loopback",
        env=SECRETS["cluster_key"],
        simulated=False,
    )
    second_cluster_key: str | None = opt(
        None,
        "key that is accepted besides cluster-key; only cluster-key signs. For changing the key "
        "node by node (docs/guide/security.md)",
        env=SECRETS["second_cluster_key"],
        simulated=False,
    )
    insecure_kv: bool = opt(
        False,
        "without cluster-key: listen for KV transfers on --host or --kv-host, and take KV from any "
        "host; any client of these ports can read prompts and forge answers",
        simulated=False,
    )
    kv_host: str | None = opt(
        None,
        "address the transfer ports listen on, e.g. of a network for KV; the bootstrap server "
        "stays on --host (default: --host, or 127.0.0.1 without cluster-key)",
        simulated=False,
    )
    kv_advertise_host: str | None = opt(
        None,
        "P node: address or host name that D nodes connect to for KV (default: the address that the "
        "transfer ports listen on, and for 0.0.0.0 or :: the address of the default route)",
        simulated=False,
    )
    kv_copy_threads: int = opt(
        1,
        "threads per rank that take checksums of KV pages in host memory and copy them by shm; one "
        "room keeps at most two busy",
        ge=1,
        le=32,
        simulated=False,
    )
    kv_tcp_streams: int = opt(
        1,
        "tcp streams from a D rank to each P rank, which share every prompt's pages, and threads "
        "per rank that serve tcp; more than 1 pays where a core or the network limits one stream",
        ge=1,
        le=8,
        simulated=False,
    )
    kv_lease_secs: float = opt(
        30.0,
        "how long P keeps a finished prompt's pages for D without a heartbeat [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )
    kv_transfer_timeout_secs: float = opt(
        60.0,
        "D: longest wait for P's answer and for a page being copied; waiting in a queue "
        "does not count [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )
    num_reserved_decode_tokens: int = opt(
        512,
        "D keeps room for this many more tokens per running request when admitting [tokens]",
        ge=0,
        simulated=False,
    )
    nccl_max_ctas: int | None = opt(
        None,
        "thread blocks that NCCL may use per KV transfer, 1 to 32; each occupies an SM and moves "
        "some 20 GB/s; P's value applies to the pair (default: 8, or 1 with "
        "NCCL_MULTI_RANK_GPU_ENABLE=1, for P and D on one GPU)",
        ge=1,
        le=32,
        simulated=False,
    )
    test_kv_fault: str | None = opt(
        None,
        "for tests: damage KV transfers by these rules, a JSON object "
        "(kv_transfer/src/transport/fault_injection.rs)",
        simulated=False,
    )

    tp_size: int = opt(
        1,
        "tensor-parallel ranks: processes per DP rank that divide every layer's heads "
        "and weights among them",
        also=("--tp", "--tensor-parallel-size"),
        ge=1,
        le=64,
        on_device=True,
    )
    dist_timeout: float = opt(
        120.0,
        "longest wait of a tensor-parallel rank for another one, at start and in every step [s]",
        gt=0,
        le=86_400,
        on_device=True,
    )
    ep_size: int = opt(
        1,
        "models with experts: divide whole experts among the tensor-parallel ranks, in place of "
        "each expert's weights; 1 or tp-size",
        also=("--ep", "--expert-parallel-size"),
        ge=1,
        le=64,
        on_device=True,
    )
    dp_size: int = opt(
        1,
        "data-parallel ranks, each with its own scheduler and KV pool",
        also=("--dp", "--data-parallel-size"),
        ge=1,
        le=64,
        simulated=False,
    )
    device: str = opt(
        "cpu",
        "compute device; cuda: one GPU (docs/gpu.md); auto: cuda where there is one, else cpu",
        choices=("cpu", "cuda", "auto"),
        on_device=True,
    )
    attention_backend: str = opt(
        "auto",
        "cpu: native paged kernels; flashinfer: CUDA devices only; torch: reference on any device; "
        "auto: the fastest that can serve here",
        choices=("auto", "cpu", "torch", "flashinfer"),
        on_device=True,
    )
    disable_cuda_graph: bool = opt(
        False,
        "CUDA: launch every kernel of a decode step, instead of replaying steps recorded at start",
        also=("--enforce-eager",),
        on_device=True,
    )
    cuda_graph_max_bs: int | None = opt(
        None,
        "CUDA: most rows of a decode step that is recorded, 1 to 1024; larger steps launch every "
        "kernel (default: 256; never more than max-running-requests)",
        ge=1,
        le=1024,
        on_device=True,
    )
    cpu_threads: int = opt(
        0,
        "compute threads per process, of which there are dp-size times tp-size; 0: "
        "cores / processes",
        ge=0,
        on_device=True,
    )

    page_size: int = opt(
        16, "tokens per KV page; equal on all nodes of a cluster [tokens]", also=("--block-size",)
    )
    max_total_tokens: int = opt(
        0,
        "KV pool size per DP rank; 0: sized from kv-pool-mib, or on a GPU "
        "from mem-fraction-static [tokens]",
        ge=0,
    )
    kv_pool_mib: int | None = opt(
        None,
        "memory of the KV pool per process when max-total-tokens is 0; tensor-parallel ranks each "
        "hold their heads' share of all pages (default: 128 on the CPU; on a CUDA device sized by "
        "mem-fraction-static) [MiB]",
        ge=1,
        on_device=True,
    )
    mem_fraction_static: float = opt(
        MEM_FRACTION,
        "CUDA: share of the device's whole memory for weights and KV pool together; less is taken "
        "when less is free. Several engines on one device share it, 0.4 each for two",
        gt=0,
        lt=1,
        on_device=True,
    )
    host_kv_gib: float = opt(
        0.0,
        "host memory per process for KV evicted from the pool; 0: none [GiB]",
        ge=0,
        lt=2**20,
        on_device=True,
    )
    max_running_requests: int = opt(
        64,
        "most requests decoding at once per DP rank (default with --device cuda: 256)",
        also=("--max-num-seqs",),
        ge=1,
    )
    max_queued_requests: int = opt(
        4096, "most requests waiting per DP rank; more are answered 503 with Retry-After", ge=1
    )
    max_queued_tokens: int | None = opt(
        None, "most prompt tokens waiting per DP rank; more are answered 503 [tokens]", ge=1
    )
    queue_timeout_secs: float = opt(
        0.0,
        "a request that has waited this long without having started is answered 503; 0: never [s]",
        ge=0,
        lt=1e9,
    )
    chunked_prefill_size: int = opt(
        512,
        "token budget of one step: decode rows first, then prompts; -1: prompts are not split, the "
        "budget is max-prefill-tokens (default with --device cuda: 8192) [tokens]",
        also=("--max-num-batched-tokens",),
    )
    max_prefill_tokens: int = opt(
        16384, "most prompt tokens in one step, for any chunk size [tokens]", ge=1
    )
    long_prefill_token_threshold: int = opt(
        0,
        "most tokens of one prompt per step, so that other prompts get a part of it; 0: no limit "
        "(as vLLM) [tokens]",
    )
    prefill_max_requests: int | None = opt(None, "most prompts that one step may work on", ge=1)
    enable_dynamic_chunking: bool = opt(
        False,
        "size chunks by predicted time, so that steps deep in a long prompt take no longer than "
        "its first one",
    )
    step_target_ms: float = opt(
        0.0,
        "size chunks so that a step takes about this long, decode rows included; at least one "
        "page, at most chunked-prefill-size; 0: no target, or with enable-dynamic-chunking the "
        "time of a full first chunk [ms]",
        ge=0,
        le=60_000,
    )
    watermark: float = opt(
        0.01,
        "share of the KV pool that must stay available when a request is admitted while others "
        "run, 0 to 0.5",
        ge=0,
        le=0.5,
    )
    clip_max_new_tokens: int = opt(
        4096,
        "an answer is never expected to be longer than this, unless ignore_eos fixes "
        "its length [tokens]",
        env="SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
        ge=1,
    )
    schedule_policy: str = opt(
        "auto",
        "order of the waiting queue; auto: srpt-aging on a prefill node, fcfs elsewhere",
        choices=QUEUE_ORDERS,
        simulated=False,
    )
    lpm_degrade_threshold: int = opt(
        4096, "lpm turns to fcfs above this many waiting requests; 0: never", ge=0
    )
    lpm_aging_tokens_per_s: float = opt(
        0.0, "lpm: waiting counts as this many cached tokens per second [tokens/s]", ge=0, lt=1e12
    )
    in_batch_prefix_caching_check_threshold: int = opt(
        -1,
        "lpm: a request with at most this many cached tokens goes last if an earlier waiting one "
        "has the same first tokens (SGLang: 32); -1: off, since requests of one step share their "
        "pages anyway [tokens]",
        env="IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
        ge=-1,
    )
    in_batch_prefix_caching_deprioritize_threshold: int = opt(
        32,
        "lpm: number of first tokens that are compared for that [tokens]",
        env="IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
        ge=1,
    )
    short_first_output_weight: str = opt(
        "auto",
        "short-first: share of max_tokens that counts as work; auto: as the engine measures; 0: "
        "prompts only",
    )
    short_first_aging_tokens_per_s: float = opt(
        500.0, "short-first: a waiting request counts as shorter by this [tokens/s]", ge=0, lt=1e12
    )
    srpt_aging: float = opt(
        0.05,
        "srpt-aging: a waiting prompt counts as shorter by this share of the prefill rate",
        ge=0,
        lt=1e12,
    )
    srpt_aging_backlog_secs: float = opt(
        60.0,
        "srpt-aging: with more work than this waiting, aging shrinks in proportion; 0: never "
        "[s of prefill]",
        ge=0,
        lt=1e12,
    )
    default_deadline_ms: int = opt(
        60000, "edf: first-token deadline of requests that state none [ms]", ge=1
    )
    deadline_miss_action: str = opt(
        "demote",
        "for a request that cannot meet its ttft_deadline_ms: demote: edf moves it back by "
        "edf-demotion-secs; keep: it keeps its place; abort: it ends with 504",
        choices=("demote", "keep", "abort"),
    )
    edf_demotion_secs: float = opt(
        300.0,
        "edf: a request that cannot meet its deadline is ordered as if the deadline were this much "
        "later, which bounds its wait behind requests that can [s]",
        ge=0,
        lt=1e12,
    )
    max_partial_prefills: int = opt(
        4,
        "srpt-aging, edf, or with priorities: behind this many unfinished prompts, which hold "
        "pages, a request starts only if one step completes it",
        ge=1,
    )
    admission_skip_ahead: int = opt(
        8,
        "waiting requests without enough pages (or behind max-partial-prefills) that a step may "
        "pass over, per class; pages are kept for the first of them; 0: nothing passes",
        ge=0,
    )
    priority_classes: str | None = opt(
        None,
        "classes that share by weight, most important first: name:weight or "
        "name:weight:min_priority, with commas between, e.g. interactive:8,standard:4,batch:1",
    )
    disable_class_charge_decode: bool = opt(
        False, "generated tokens do not count against their class, only prompts"
    )
    tenant_config: str | None = opt(
        None,
        "JSON file (or the JSON itself) with limits of tenants; the tenants of a class "
        "then share by weight",
    )
    prompt_token_weight: float = opt(
        1.0, "weight of a computed prompt token in its tenant's account", gt=0, le=1e6
    )
    output_token_weight: float = opt(
        2.0, "weight of a generated token in its tenant's account", gt=0, le=1e6
    )
    cached_token_weight: float = opt(
        0.1,
        "weight of a prompt token found in the cache, as a share of a computed one, 0 to 1",
        ge=0,
        le=1,
    )
    max_idle_tenants: int = opt(
        10000,
        "kept accounts of tenants without waiting requests; the longest idle one is dropped",
        ge=1,
    )
    enable_priority_scheduling: bool = opt(
        False, "order by the request field priority first, and preempt for it"
    )
    schedule_low_priority_values_first: bool = opt(
        False, "smaller priority values are more important"
    )
    abort_on_priority_when_disabled: bool = opt(
        False,
        "refuse requests with a priority while the feature is off",
        simulated=False,
    )
    priority_scheduling_preemption_threshold: int = opt(
        10,
        "a waiting request preempts running ones of a priority lower by more than this",
        ge=0,
    )
    default_priority: int | None = opt(
        None,
        "priority of requests that state none (default: below every stated one)",
        ge=1 - 2**31,
        le=2**31 - 1,
    )
    priority_aging_rate: float = opt(
        0.0, "priority gained per second of waiting (order only, never preemption)", ge=0, lt=1e12
    )
    priority_aging_max: float | None = opt(
        None, "most priority that waiting can gain (default: no limit)", ge=0, lt=1e12
    )
    priority_adjustment_function: str | None = opt(
        None,
        "module:callable that may replace a waiting request's priority, called "
        "as fn(request, load)",
        simulated=False,
    )
    priority_adjust_interval_ms: int = opt(
        250,
        "interval of the calls of that function for a waiting request [ms]",
        ge=1,
        le=3_600_000,
        simulated=False,
    )
    preemption_mode: str = opt(
        "cache",
        "a preempted request's KV: recompute drops it, cache keeps it evictable, offload moves it "
        "to the host pool, auto offloads where copying is faster than computing",
        choices=("recompute", "cache", "offload", "auto"),
    )
    max_preemptions_per_request: int = opt(
        8, "after this many preemptions a request is immune", ge=1
    )
    preemption_min_remaining_tokens: int = opt(
        8, "a request with fewer tokens to go is not preempted [tokens]", ge=0
    )
    starvation_threshold_ms: int = opt(
        10000,
        "a request waiting for longer, overtaken by later ones, counts as starving in "
        "the metrics [ms]",
        ge=1,
        le=86_400_000,
    )
    schedule_conservativeness: float = opt(
        1.0, "scales the estimate of how much running requests will still generate", gt=0, lt=1e6
    )
    disable_radix_cache: bool = opt(False, "do not reuse KV of equal prompt prefixes")
    radix_eviction_policy: str = opt(
        "lru",
        "which cached prefix goes first when pages run out (docs/scheduling/cache.md)",
        choices=EVICTION_ORDERS,
    )
    kv_events_config: str = opt(
        "",
        "announce cached pages: JSON object with the keys of vLLM's option (docs/scheduling/cache.md)",
        simulated=False,
    )
    disable_overlap_schedule: bool = opt(False, "plan step n+1 only after step n has finished")
    prefill_first: bool = opt(
        False,
        "SGLang's order, for comparison: while prompts wait, steps alternate between "
        "prompts and decode rows",
    )
    enable_mixed_chunk: bool = opt(
        False,
        "with prefill-first: decode rows join the steps that prefill, as they always do without it",
    )
    max_decode_gap_ms: float = opt(
        0.0,
        "with prefill-first: several prefill steps may follow each other while decode rows wait no "
        "longer than this; 0: one step [ms]",
        ge=0,
        le=60_000,
    )
    stream_interval: int = opt(1, "tokens per streamed event [tokens]", ge=1, simulated=False)
    request_timeout_secs: float = opt(
        1800.0, "a request ends with 'timeout' after this long [s]", gt=0, lt=1e9
    )
    drain_timeout_secs: float = opt(
        60.0,
        "on SIGTERM wait this long for running requests [s]",
        ge=0,
        lt=1e9,
        simulated=False,
    )
    random_seed: int = opt(0, "seed of dummy weights", simulated=False)
    metrics_compat: str = opt(
        "none",
        "names of other engines under which GET /metrics repeats its numbers (docs/metrics.md)",
        choices=("none", "sglang", "vllm", "all"),
        simulated=False,
    )
    enable_trace: bool = opt(
        False,
        "export a trace of each request: spans of the front and of the ranks",
        simulated=False,
    )
    otlp_traces_endpoint: str = opt(
        "localhost:4317",
        "address of the trace collector: HOST:PORT for OTLP/gRPC, "
        "http://HOST:PORT[/PATH] for OTLP/HTTP",
        simulated=False,
    )
    decision_log: str | None = opt(
        None,
        "append each scheduling decision to this file as a JSON line (docs/scheduling/metrics.md)",
        simulated=False,
    )
    scheduler_trace: str | None = opt(
        None,
        "write every input of the scheduler, prompts included, for baton simulate --replay",
        simulated=False,
    )
    log_level: str = opt(
        "info",
        "least severe log line shown",
        choices=("debug", "info", "warning", "error"),
        simulated=False,
    )
    log_format: str = opt("text", "format of log lines", choices=("text", "json"), simulated=False)

    @property
    def step_tokens(self) -> int:
        """Token budget of one step. Without chunking a longer prompt exceeds it, alone."""
        if self.chunked_prefill_size < 0:
            return self.max_prefill_tokens
        return min(self.chunked_prefill_size, self.max_prefill_tokens)

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
