"""Description of this machine: the head of tests/gpu/run.sh's report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess

import torch

from baton.layers import flashinfer_loader
from baton.runtime.device import no_cuda

PACKAGES = (
    "torch", "triton", "transformers", "flashinfer-python", "flashinfer-jit-cache", "apache-tvm-ffi", "pyzmq", "msgspec"
)  # fmt: skip


def main() -> int:
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    print(
        f"Python {platform.python_version()}, glibc {platform.libc_ver()[1]}, CUDA of torch {torch.version.cuda}"
    )
    print(", ".join(f"{name} {installed.get(name, 'absent')}" for name in PACKAGES))
    nvcc = flashinfer_loader.find_nvcc()
    print(
        f"nvcc {nvcc}: {flashinfer_loader.nvcc_version(nvcc) if nvcc else 'absent'}; ninja {shutil.which('ninja')}"
    )
    print(
        f"C compiler for Triton: {os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang') or 'absent'}"
    )
    print(f"flashinfer: {flashinfer_loader.find_obstacle() or 'can be used'}")
    if shutil.which("nvidia-smi"):
        fields = "name,driver_version,memory.total,memory.used,clocks.sm,power.limit"
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True, text=True
        )
        print(said.stdout.strip() or said.stderr.strip())
    if reason := no_cuda():
        print(f"no GPU: {reason}")
        return 3
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        print(f"GPU {i}: {p.name}, compute {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
