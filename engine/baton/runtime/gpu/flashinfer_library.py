"""The flashinfer package: whether it can work here, said in one sentence when not, and the module itself.

It compiles its kernels when they are first used, with nvcc and ninja, unless flashinfer-jit-cache holds them. What is
missing is said before anything is compiled; what only shows while compiling is the rehearsals' to find (fit).
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


def load() -> Any:
    """The module. Raises ImportError, RuntimeError or OSError: absent, of mismatched versions, or without libraries."""
    # Its norms are compiled by nvcc, or by CuTe where nvidia-cutlass-dsl is installed: take the same ones everywhere.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    return importlib.import_module("flashinfer")


@functools.cache
def obstacle() -> str | None:
    """What keeps flashinfer from working in this process, as the middle of a sentence; None: nothing."""
    try:
        load()
    except (ImportError, RuntimeError, OSError) as err:
        return f"it cannot be imported: {err}; install flashinfer-python 0.6"
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    return _no_nvcc() or _no_ninja()


def _no_nvcc() -> str | None:
    nvcc = find_nvcc()
    if nvcc is None:
        where = "not at CUDA_HOME, in PATH or in /usr/local/cuda"
        return f"it compiles its kernels with nvcc, which is {where}; install CUDA's compiler or flashinfer-jit-cache"
    made, wanted = nvcc_version(nvcc), torch.version.cuda
    if made is not None and wanted is not None and made.split(".")[0] != wanted.split(".")[0]:
        return f"{nvcc} is of CUDA {made} and torch of CUDA {wanted}; point CUDA_HOME to a CUDA {wanted}"
    return None


def find_nvcc() -> str | None:
    """Where flashinfer 0.6 looks, in its order: CUDA_HOME or CUDA_PATH alone when set, PATH, the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        found = Path(home) / "bin" / "nvcc"
        return str(found) if found.is_file() else None
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def nvcc_version(nvcc: str) -> str | None:
    """Like 13.0; None: it does not say."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+),", said)
    return found.group(1) if found else None


def _no_ninja() -> str | None:
    """It is called by name. A virtual environment that was not activated has it beside its interpreter only."""
    if shutil.which("ninja"):
        return None
    try:
        folder = importlib.import_module("ninja").BIN_DIR
    except ImportError:
        return "it compiles its kernels with ninja, which is not in PATH; install ninja"
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return None


def reason(err: BaseException) -> str:
    """The line of an error that says most: those of its compiler come with pages of output."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()] or ["no message"]
    kind = "" if isinstance(err, RuntimeError) else f"{type(err).__name__}: "
    return kind + next((line for line in lines if "error:" in line or "not found" in line), lines[0])
