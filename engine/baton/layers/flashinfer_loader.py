"""The flashinfer package: whether it can work here, said in one sentence when not, and the module
itself.

It compiles its kernels when they are first used, with nvcc and ninja, unless flashinfer-jit-cache
holds them. What is missing is said before anything is compiled; what only shows while compiling is
found by the warm-up steps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

SLOWER = "torch, which is 10 to 100 times slower"
"""Alternatives to name at the end of a sentence."""


def load_flashinfer() -> Any:
    """The module. Raises ImportError, RuntimeError or OSError: absent, of mismatched versions, or
    without libraries."""
    # Its norms are compiled by nvcc, or by CuTe where nvidia-cutlass-dsl is installed: take the
    # same ones everywhere.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    _use_wheels()
    return importlib.import_module("flashinfer")


@functools.cache
def find_obstacle() -> str | None:
    """Reason that keeps flashinfer from working in this process, as the middle of a sentence; None:
    nothing."""
    try:
        load_flashinfer()
    except (ImportError, RuntimeError, OSError) as err:
        return f"it cannot be imported: {err}; install Baton's extra 'gpu' (pip install '.[gpu]')"
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    return _no_nvcc() or _no_ninja()


def _no_nvcc() -> str | None:
    nvcc = find_nvcc()
    if nvcc is None:
        where = "not at CUDA_HOME, in PATH, in /usr/local/cuda or beside torch"
        wheels = f"pip install 'nvidia-cuda-nvcc=={torch.version.cuda}.*' nvidia-curand"
        get = f"install a CUDA {torch.version.cuda} toolkit, or {wheels}"
        return f"it compiles its kernels with nvcc, which is {where}; {get}"
    nvcc_cuda = nvcc_version(nvcc)
    torch_cuda = torch.version.cuda
    if (
        nvcc_cuda is not None
        and torch_cuda is not None
        and nvcc_cuda.split(".")[0] != torch_cuda.split(".")[0]
    ):
        return f"{nvcc} is of CUDA {nvcc_cuda} and torch of CUDA {torch_cuda}; point CUDA_HOME to a CUDA {torch_cuda}"
    return None


def find_nvcc() -> str | None:
    """Where flashinfer 0.6 looks, in its order: CUDA_HOME or CUDA_PATH alone when set, PATH, the usual folder; then
    NVIDIA's wheels, whose place `load` names."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        home_nvcc = Path(home) / "bin" / "nvcc"
        return str(home_nvcc) if home_nvcc.is_file() else None
    if in_path := shutil.which("nvcc"):
        return in_path
    homes = (Path("/usr/local/cuda"), *_wheel_homes())
    return next((str(nvcc) for home in homes if (nvcc := home / "bin" / "nvcc").is_file()), None)


def _wheel_homes() -> list[Path]:
    """Folders of NVIDIA's wheels for CUDA 13: those torch needs, and the compiler of
    nvidia-cuda-nvcc."""
    nvidia = importlib.util.find_spec("nvidia")
    return [
        Path(folder) / "cu13" for folder in (nvidia and nvidia.submodule_search_locations) or ()
    ]


def _use_wheels() -> None:
    """Let flashinfer compile with the wheels where no other nvcc is found; it links libcudart.so,
    which they lack."""
    nvcc = find_nvcc()
    home = next((home for home in _wheel_homes() if nvcc == str(home / "bin" / "nvcc")), None)
    if home is None or os.environ.get("CUDA_HOME") == str(home):
        return
    links = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "cuda"
    links.mkdir(parents=True, exist_ok=True)
    for library in (home / "lib").glob("libcudart.so.*"):
        link = links / f"libcudart.so.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
        link.replace(links / "libcudart.so")  # at once: other engines may be linking
    os.environ["CUDA_HOME"] = str(home)
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = (
        f"-L{links} {os.environ.get('FLASHINFER_EXTRA_LDFLAGS', '')}".strip()
    )


def nvcc_version(nvcc: str) -> str | None:
    """Like 13.0; None: it does not say."""
    try:
        output = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"release (\d+\.\d+),", output)
    return version.group(1) if version else None


def _no_ninja() -> str | None:
    """Find ninja, which is called by name: an environment that was not activated has it beside its
    interpreter."""
    if shutil.which("ninja"):
        return None
    try:
        folder = importlib.import_module("ninja").BIN_DIR
    except ImportError:
        return "it compiles its kernels with ninja, which is not in PATH; install ninja"
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return None


def summarize_error(err: BaseException) -> str:
    """The line of an error that says most: those of its compiler come with pages of output."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()] or ["no message"]
    kind = "" if isinstance(err, RuntimeError) else f"{type(err).__name__}: "
    return kind + next(
        (line for line in lines if "error:" in line or "not found" in line), lines[0]
    )
