"""Compiles flashinfer's kernels that tests/gpu and tests/perf/bench_gpu use; no GPU is needed, but nvcc is.

    CUDA_HOME=… FLASHINFER_CUDA_ARCH_LIST=9.0a python tests/gpu/prebuild.py --into DIR [KERNEL …]     9.0a: H100, H200

Each comes to lie at DIR/NAME/NAME.so. Copied to flashinfer's own folder data/aot (tests/gpu/run.sh does that) they are
loaded from there without a compiler: on one core some take minutes, and a borrowed GPU has better things to do. They
know flashinfer's version and the GPU's generation, but neither Python nor torch. Without --into they are left in
flashinfer's cache, for this machine.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

KERNELS = (
    "norm", "rope", "silu",
    "decode:bfloat16:128", "prefill:bfloat16:128",  # Qwen3-0.6B and Llama-3-8B
    "decode:bfloat16:64", "prefill:bfloat16:64",  # the demo model, most of test_attention.py
    "prefill:bfloat16:64:window", "decode:bfloat16:64:window", "decode:float16:64", "prefill:float16:64",
    "prefill:bfloat16:64:cap", "decode:bfloat16:64:cap", "decode:float16:64:cap", "prefill:float16:64:cap",
    "prefill:bfloat16:256", "decode:bfloat16:256",
)  # fmt: skip
"""Most important first. The wrapper for decode rows takes the prefill kernel for groups of more than two queries."""


def jit_spec(kernel: str) -> Any:
    """Build specification that flashinfer 0.6 makes of what our backend gives its wrappers and functions."""
    import torch
    from flashinfer.jit import gen_act_and_mul_module
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.rope import gen_rope_module

    plain = {
        "norm": gen_norm_module,
        "rope": gen_rope_module,
        "silu": lambda: gen_act_and_mul_module("silu"),
    }
    if kernel in plain:
        return plain[kernel]()
    kind, name, dim, *more = kernel.split(":")
    dtype, no_positions = getattr(torch, name), 0
    shared = (
        dtype, dtype, dtype, torch.int32, int(dim), int(dim), no_positions, "window" in more, "cap" in more
    )  # fmt: skip
    if kind == "decode":
        return gen_batch_decode_module(*shared)
    return gen_batch_prefill_module("fa2", *shared, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--into", type=Path)
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    args = parser.parse_args()
    for kernel in args.kernels:
        started = time.monotonic()
        spec = jit_spec(kernel)
        library = (
            args.into / spec.name / f"{spec.name}.so" if args.into else spec.get_library_path()
        )
        if not library.exists():
            spec.build(verbose=False)
            if args.into:
                library.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(spec.jit_library_path, library)
        size = library.stat().st_size / 2**20
        print(
            f"{kernel}: {spec.name}, {size:.1f} MiB, {time.monotonic() - started:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
