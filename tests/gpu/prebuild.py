"""Compiles flashinfer's kernels that tests/gpu and tests/perf/bench_gpu use; no GPU is needed, but nvcc is.

    FLASHINFER_CUDA_ARCH_LIST=9.0a python -m tests.gpu.prebuild --into DIR [KERNEL …]     9.0a: H100, H200

nvcc is found where an engine finds it: CUDA_HOME, PATH, /usr/local/cuda, NVIDIA's wheels beside torch.

Each kernel is written to DIR/NAME/NAME.so. Copied to flashinfer's own folder data/aot (tests/gpu/run.sh does that) they
are loaded from there without a compiler: on one core some take minutes, which a borrowed GPU should not wait for. They
depend on flashinfer's version and the GPU's generation, but neither on Python nor on torch. Without --into they are
left in flashinfer's cache, for this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.layers import flashinfer_loader
from baton.layers.attention.flashinfer import KERNELS as ALL_GPUS
from baton.layers.attention.flashinfer import LONG_KERNELS as HOPPER
from baton.layers.attention.flashinfer_latent import SIZES as LATENTS

KERNELS = (
    "norm", "rope", "silu",
    "decode:bfloat16:128", "prefill:bfloat16:128",  # Qwen3-0.6B and Llama-3-8B
    "decode:bfloat16:64", "prefill:bfloat16:64",  # the demo model, most of test_attention.py
    "prefill:bfloat16:64:window", "decode:bfloat16:64:window", "decode:float16:64", "prefill:float16:64",
    "prefill:bfloat16:64:cap", "decode:bfloat16:64:cap", "decode:float16:64:cap", "prefill:float16:64:cap",
    "prefill:bfloat16:256", "decode:bfloat16:256",
    # the rest of test_attention.py
    "prefill:bfloat16:128:window", "prefill:bfloat16:256:window",
    "prefill:float16:64:window", "decode:float16:64:window",
    "prefill:bfloat16:64:window:cap", "decode:bfloat16:64:window:cap",
    "prefill:float16:64:window:cap", "decode:float16:64:window:cap",
    "latent:bfloat16:512",  # test_latent_attention.py
    "prefill:bfloat16:64:codes", "decode:bfloat16:64:codes",  # test_start.py, pages of FP8 codes
)  # fmt: skip
"""Most important first. The wrapper for decode rows takes the prefill kernel for groups of more than two queries. The
kernels for long rows, `long:bfloat16:64` and `long:bfloat16:128`, are built when they are named: they are for compute
capability 9.x alone, and each takes many minutes."""


def jit_spec(kernel: str) -> Any:
    """Build specification that flashinfer 0.6 makes of what our backend gives its wrappers and functions."""
    import torch
    from flashinfer.jit import gen_act_and_mul_module
    from flashinfer.jit.attention.modules import (
        gen_batch_decode_module,
        gen_batch_mla_module,
        gen_batch_prefill_module,
    )
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
    page_dtype = torch.float8_e4m3fn if "codes" in more else dtype
    types = (dtype, page_dtype, dtype, torch.int32)
    shared = (*types, int(dim), int(dim), no_positions, "window" in more, "cap" in more)
    if kind == "latent":
        return gen_batch_mla_module(ALL_GPUS, dtype, dtype, dtype, torch.int32, *LATENTS, False)
    if kind == "decode":
        return gen_batch_decode_module(*shared)
    return gen_batch_prefill_module(HOPPER if kind == "long" else ALL_GPUS, *shared, False)


@contextlib.contextmanager
def linkable_libraries() -> Iterator[None]:
    """Let kernels be linked on a machine that has neither a driver nor a CUDA toolkit.

    flashinfer links `-lcuda` and `-lcudart`. An empty library with the driver's soname stands in for libcuda.so, since
    these kernels get the driver's functions from the runtime. NVIDIA's wheels name the runtime libcudart.so.13 only.
    Folders of a toolkit are searched before ours.
    """
    nvcc = flashinfer_loader.find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc is not at CUDA_HOME, in PATH, in /usr/local/cuda or beside torch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stub = folder / "libcuda.so"
        compiler = os.environ.get("CC", "gcc")
        subprocess.run(
            [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", stub],
            check=True,
        )
        for library in (Path(nvcc).parents[1] / "lib").glob("libcudart.so.*"):
            (folder / "libcudart.so").symlink_to(library)
            break
        before = os.environ.get("FLASHINFER_EXTRA_LDFLAGS", "")
        os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"{before} -L{folder}".strip()
        try:
            yield
        finally:
            os.environ["FLASHINFER_EXTRA_LDFLAGS"] = before


def build_kernel(kernel: str, into: Path | None) -> None:
    """Compile one kernel unless it is there, and print its size and the time."""
    started = time.monotonic()
    spec = jit_spec(kernel)
    library = spec.get_library_path()
    if into is not None:
        library = into / spec.name / f"{spec.name}.so"
    if not library.exists():
        spec.build(verbose=False)
        if into is not None:
            library.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.jit_library_path, library)
    size_mib = library.stat().st_size / 2**20
    took_secs = time.monotonic() - started
    print(f"{kernel}: {spec.name}, {size_mib:.1f} MiB, {took_secs:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--into", type=Path)
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    args = parser.parse_args()
    flashinfer_loader.load_flashinfer()
    with linkable_libraries():
        for kernel in args.kernels:
            build_kernel(kernel, args.into)


if __name__ == "__main__":
    main()
