"""Flags of SGLang's and vLLM's servers that an engine does not have, and what to say instead.
Stdlib only.

Flags with equal meaning are aliases (`also` in `config.flags.opt`). The others are refused with a
sentence that says what to do instead.
"""

from __future__ import annotations

_ONE_MACHINE = (
    "one engine runs on one machine; start an engine on each "
    "and name them to baton router with --prefill and --decode"
)
_GPUS = "choose GPUs with the environment variable CUDA_VISIBLE_DEVICES"
_TOOLS = (
    "tool calls are read where a request has tools; leave it out, or choose their format with "
    "--tool-parser"
)
_TOOL_SERVER = "the server runs no tools; leave it out"
_GRAMMARS = "llguidance is the only one; leave it out"
_REASONING = (
    "reasoning is separated where there is some; leave it out, or choose its markers with "
    "--reasoning-parser"
)
_LORA = "there are no LoRA adapters in this version; merge the adapter into the checkpoint"
_DOWNLOAD = (
    "nothing is downloaded at start; run hf download MODEL first, with its own --revision "
    "and --local-dir"
)
_LOGS = "an engine logs one line per request; use --log-level warning for none"
_TLS = (
    "engines speak HTTP; for clients give baton router --tls-cert-path and --tls-key-path, "
    "and between router and engines put a mesh or a tunnel"
)
_ALWAYS = "it is always on; leave it out"

INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"), _ONE_MACHINE
    ),
    **dict.fromkeys(("--base-gpu-id", "--gpu-id-step"), _GPUS),
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-server": _TOOL_SERVER,
    **dict.fromkeys(
        ("--grammar-backend", "--guided-decoding-backend", "--structured-outputs-config"), _GRAMMARS
    ),
    "--enable-reasoning": _REASONING,
    **dict.fromkeys(
        ("--enable-lora", "--lora-paths", "--lora-modules", "--max-loras", "--max-lora-rank"), _LORA
    ),
    "--speculative-config": (
        "use --speculative-algorithm, --speculative-draft-model-path and "
        "--speculative-num-draft-tokens"
    ),
    "--enable-expert-parallel": "use --ep-size with the value of --tp-size",
    **dict.fromkeys(
        ("--revision", "--download-dir", "--speculative-draft-model-revision"), _DOWNLOAD
    ),
    **dict.fromkeys(
        ("--disable-log-requests", "--log-requests", "--log-requests-level", "--disable-log-stats"),
        _LOGS,
    ),
    **dict.fromkeys(
        ("--enable-metrics", "--enable-prefix-caching", "--enable-chunked-prefill"), _ALWAYS
    ),
    **dict.fromkeys(
        (
            "--ssl-certfile",
            "--ssl-keyfile",
            "--ssl-keyfile-password",
            "--ssl-ca-certs",
            "--ssl-cert-reqs",
            "--ssl-ciphers",
            "--enable-ssl-refresh",
        ),
        _TLS,
    ),
    "--no-enable-prefix-caching": "use --disable-radix-cache",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--gpu-memory-utilization": "use --mem-fraction-static: the share for weights and KV pool, "
    "without activations",
    **dict.fromkeys(
        ("--pp-size", "--pipeline-parallel-size"), "there are no pipeline stages; use --tp-size"
    ),
    "--enable-dp-attention": "use --dp-size, or --tp-size",
    "--kv-transfer-config": "use --disaggregation-mode and --disaggregation-transfer-backend",
    "--disaggregation-ib-device": "pages travel by NCCL, TCP or shared memory; leave it out",
    **dict.fromkeys(
        ("--swap-space", "--cpu-offload-gb"), "use --host-kv-gib for KV; weights stay on the device"
    ),
    "--cuda-graph-bs": "use --cuda-graph-max-bs",
    "--limit-mm-per-prompt": "models are text only; leave it out",
    **dict.fromkeys(
        ("--task", "--runner", "--is-embedding"), "engines generate text only; leave it out"
    ),
    **dict.fromkeys(("--uvicorn-log-level", "--log-level-http"), "use --log-level"),
    "--seed": "requests bring their own seed; --random-seed is that of dummy weights",
    "--config": "give flags; they are not read from a file",
}


def unsupported_table() -> str:
    """The table of docs/flags.md."""
    names: dict[str, list[str]] = {}
    for flag, text in INSTEAD.items():
        names.setdefault(text, []).append(f"`{flag}`")
    return "\n".join(
        [
            "| flag | instead |",
            "|---|---|",
            *(f"| {' '.join(f)} | {text} |" for text, f in names.items()),
        ]
    )


if __name__ == "__main__":
    print(unsupported_table())
