"""Flags about the steps of the scheduler: how much waits, how much one step computes, which step
follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt


@dataclass(frozen=True, kw_only=True)
class LimitFlags:
    HEADING: ClassVar = "limits"

    max_running_requests: int = opt(
        64,
        "most requests decoding at once per DP rank (default with --device cuda: 256)",
        also=("--max-num-seqs",),
        ge=1,
    )
    state_snapshot_tokens: int = opt(
        1024,
        "tokens from one snapshot of a sequence's state to the next, for models whose layers keep "
        "one: prefixes are reused up to a snapshot [tokens]",
        on_device=True,
        ge=1,
    )
    state_snapshot_share: float = opt(
        0.5,
        "most of the KV pool that snapshots of states take; 0: such models reuse no prefixes",
        ge=0.0,
        le=1.0,
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


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    HEADING: ClassVar = "size of a step"

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


HEADS = ("EAGLE3", "NEXTN", "EAGLE")
"""Algorithms that draft by hidden states of the model; EAGLE is SGLang's other name of NEXTN."""


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    HEADING: ClassVar = "speculative decoding"

    speculative_algorithm: str | None = opt(
        None,
        "draft tokens and compute several of an answer in one step, without changing any: NGRAM "
        "drafts what followed the last tokens earlier in the request or in a recent answer, "
        "STANDALONE what a smaller model answers, EAGLE3 what a head reads in the model's hidden "
        "states, NEXTN (or EAGLE) the same with the MTP layer of the checkpoint",
        choices=("NGRAM", "STANDALONE", *HEADS),
        on_device=True,
    )
    speculative_draft_model_path: str | None = opt(
        None,
        "directory of what drafts: a model with the tokenizer of --model-path, or a head of "
        "EAGLE-3 for it",
        on_device=True,
    )
    speculative_num_draft_tokens: int = opt(
        16,
        "most drafted tokens of a row and step; how many there are is decided in each step by "
        "measured acceptance and time [tokens]",
        on_device=True,
        ge=1,
        le=64,
    )
    speculative_num_steps: int | None = opt(
        None,
        "most drafts of a row that a model or head makes one after the other, if fewer than "
        "speculative-num-draft-tokens [tokens]",
        on_device=True,
        ge=1,
        le=64,
    )
    speculative_eagle_topk: int = opt(
        1, "drafts of a head that follow the same token: 1, they are a chain", on_device=True
    )
    speculative_ngram_min_match_window_size: int = opt(
        2,
        "an answer's last tokens are looked for from this many on [tokens]",
        on_device=True,
        ge=1,
        le=64,
    )
    speculative_ngram_capacity: int = opt(
        1_000_000,
        "most tokens of recent answers that drafts are taken from, per DP rank; those of another "
        "tenant or cache_salt are never used; 0: of the request alone [tokens]",
        on_device=True,
        ge=0,
        le=100_000_000,
    )


@dataclass(frozen=True, kw_only=True)
class LoopFlags:
    HEADING: ClassVar = "the loop"

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
