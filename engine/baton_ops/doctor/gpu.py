"""Checks of this machine's NVIDIA GPUs: the driver, torch's view of them, and their links.

torch is asked in a process of its own, which may hang in a broken driver and costs 500 MB only
while it runs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton_ops.doctor.check import CheckResult, fail, ok, skip, warn

SMI_SECS = 30.0
TORCH_SECS = 120.0
GPU_CHECKS = ("driver", "torch", "p2p", "nvlink", "flashinfer")
TORCH_SCRIPT = """
import importlib, json, torch
found = {
    "cuda_build": torch.version.cuda, "is_available": torch.cuda.is_available(),
    "devices": [], "no_peer": []
}
if found["is_available"]:
    count = torch.cuda.device_count()
    for i in range(count):
        torch.zeros(1, device=f"cuda:{i}").add_(1).item()
        found["devices"].append(torch.cuda.get_device_name(i))
    found["no_peer"] = [
        [i, j] for i in range(count) for j in range(count)
        if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
try:
    found["flashinfer"] = importlib.import_module("flashinfer").__version__
except Exception as err:
    found["flashinfer_error"] = f"{type(err).__name__}: {err}"
print("FOUND " + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """None instead of it where there is no GPU."""

    devices: list[str]
    """Names, as nvidia-smi lists them."""
    driver: str
    driver_problem: str = ""
    torch: dict[str, Any] = field(default_factory=dict)
    """Output of TORCH_SCRIPT."""
    torch_problem: str = ""
    nvlink: str = ""
    """Output of `nvidia-smi nvlink --status`."""


def read_gpu_facts() -> GpuFacts | None:
    """Facts of this machine; takes seconds where there is a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        if not Path("/dev/nvidiactl").exists():
            return None
        return GpuFacts([], "", "there is /dev/nvidiactl, but no nvidia-smi in PATH")
    code, listed, error = _run_command(
        [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"], SMI_SECS
    )
    if code != 0:
        return GpuFacts([], "", (error or listed).strip()[:300] or f"nvidia-smi ended with {code}")
    rows = [line.rsplit(",", 1) for line in listed.splitlines() if "," in line]
    if not rows:
        return None
    code, shown, error = _run_command([sys.executable, "-c", TORCH_SCRIPT], TORCH_SECS)
    interpreter = next(
        (line.removeprefix("FOUND ") for line in shown.splitlines() if line.startswith("FOUND ")),
        None,
    )
    problem = "" if interpreter else (error.strip().splitlines() or [f"it ended with {code}"])[-1]
    nvlink = _run_command([smi, "nvlink", "--status"], SMI_SECS)[1]
    devices = [name.strip() for name, _ in rows]
    return GpuFacts(
        devices,
        rows[0][1].strip(),
        "",
        json.loads(interpreter) if interpreter else {},
        problem,
        nvlink,
    )


def _run_command(command: list[str], timeout_secs: float) -> tuple[int, str, str]:
    try:
        outcome = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_secs, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"{Path(command[0]).name} did not end within {timeout_secs:g} s"
    except OSError as err:
        return 127, "", str(err)
    return outcome.returncode, outcome.stdout, outcome.stderr


def check_driver(facts: GpuFacts) -> CheckResult:
    if not facts.driver_problem:
        names = ", ".join(sorted(set(facts.devices)))
        return ok(f"{len(facts.devices)} GPUs ({names}), driver {facts.driver}")
    remedy = (
        "run nvidia-smi and dmesg | grep -i nvrm; containers: give the GPU to them (--gpus "
        "all, nvidia.com/gpu)"
    )
    return fail(f"the NVIDIA driver does not answer: {facts.driver_problem}", remedy)


def check_torch(facts: GpuFacts) -> CheckResult:
    torch_facts = facts.torch
    if facts.torch_problem:
        return fail(
            f"torch failed on the GPU: {facts.torch_problem}",
            "install torch for this driver's CUDA version",
        )
    if not torch_facts["cuda_build"]:
        return fail(
            "torch is a build without CUDA",
            "install a CUDA build of torch: pytorch.org names the index",
        )
    if not torch_facts["is_available"]:
        sentence = (
            f"torch for CUDA {torch_facts['cuda_build']} sees no GPU with driver {facts.driver}"
        )
        return fail(
            sentence,
            "update the driver, or install torch for an older CUDA; look at CUDA_VISIBLE_DEVICES",
        )
    if len(torch_facts["devices"]) != len(facts.devices):
        sentence = f"torch computes on {len(torch_facts['devices'])} of {len(facts.devices)} GPUs"
        return warn(sentence, "look at CUDA_VISIBLE_DEVICES")
    return ok(
        f"torch for CUDA {torch_facts['cuda_build']} computes on {len(torch_facts['devices'])} GPUs"
    )


def check_p2p(facts: GpuFacts) -> CheckResult:
    count = len(facts.torch.get("devices", []))
    if count < 2:
        return skip(f"torch computes on {count} GPUs: there is no pair of them")
    if blocked := facts.torch["no_peer"]:
        pairs = ", ".join(f"{i}-{j}" for i, j in blocked[:8])
        sentence = (
            f"{len(blocked)} pairs of GPUs reach each other through host memory only ({pairs})"
        )
        remedy = (
            "nvidia-smi topo -p2p r says why; in virtual machines: turn off ACS, or pass the "
            "switch through"
        )
        return warn(sentence, remedy)
    return ok(f"all {count} GPUs read each other's memory directly")


def check_nvlink(facts: GpuFacts) -> CheckResult:
    if len(facts.devices) < 2:
        return skip("there is one GPU")
    links = re.findall(r"Link \d+: (.+)", facts.nvlink)
    if not links:
        return skip("these GPUs have no NVLink")
    if idle := [link for link in links if "inactive" in link.lower()]:
        sentence = f"{len(idle)} of {len(links)} NVLinks are inactive"
        return warn(
            sentence,
            "nvidia-smi nvlink --status; on NVSwitch machines nvidia-fabricmanager must run",
        )
    return ok(f"{len(links)} NVLinks are active")


def check_flashinfer(facts: GpuFacts) -> CheckResult:
    if facts.torch_problem:
        return skip("torch does not run")
    if version := facts.torch.get("flashinfer"):
        return ok(f"flashinfer {version} can be imported")
    remedy = (
        "pip install 'baton-serve[gpu]'; without it only --attention-backend torch serves, 10 "
        "to 100 times slower"
    )
    return fail(
        f"flashinfer cannot be imported: {facts.torch.get('flashinfer_error', 'unknown')}", remedy
    )


def check_gpu(facts: GpuFacts | None) -> list[CheckResult]:
    """All checks, skipped with the reason where there is no GPU, or no driver for the others."""
    if facts is None:
        results = [skip("this machine has no NVIDIA GPU")] * len(GPU_CHECKS)
    elif facts.driver_problem:
        results = [check_driver(facts)] + [skip("the driver does not answer")] * (
            len(GPU_CHECKS) - 1
        )
    else:
        results = [
            check(facts)
            for check in (check_driver, check_torch, check_p2p, check_nvlink, check_flashinfer)
        ]
    return [
        replace(result, name=f"gpu.{name}")
        for name, result in zip(GPU_CHECKS, results, strict=True)
    ]
