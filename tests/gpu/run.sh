#!/usr/bin/env bash
# Every check that needs a GPU, one file after the other; goes on after a failure and writes a report.
#   tests/gpu/run.sh [REPORT]     default gpu-report.txt; exit code 0: all passed, 1: some failed or were skipped, 3: no GPU
# Before: `make setup`, then a CUDA build of torch and flashinfer-python >= 0.6 in .venv (docs/gpu.md).
set -u
cd "$(dirname "$0")/../.." || exit 2
report=${1:-gpu-report.txt}
py=${PYTHON:-.venv/bin/python}
failed=0
part=$(mktemp) || exit 2
trap 'rm -f "$part"' EXIT
say() { printf '%s\n' "$*" | tee -a "$report"; }
: > "$report" || exit 2

say "Baton GPU checks, $(date -u +%FT%TZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
"$py" - 2>&1 <<'PY' | tee -a "$report"
import importlib.metadata as m, torch
versions = {p: next((d.version for d in m.distributions() if d.metadata["Name"] == p), "absent")
            for p in ("torch", "flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin")}
print(versions, "CUDA", torch.version.cuda)
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(f"GPU {i}: {p.name}, compute {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
PY
if ! reason=$("$py" -c 'import sys; from baton.runtime.device import no_cuda; r = no_cuda(); print(r or ""); sys.exit(bool(r))' 2>&1); then
    say "SKIPPED everything: $reason"
    exit 3
fi
for file in tests/gpu/test_*.py; do
    say "== $file"
    "$py" -m pytest -m gpu -rs "$file" 2>&1 | tee -a "$report" | tee "$part"
    rc=${PIPESTATUS[0]}
    if [ "$rc" != 0 ]; then
        say "FAILED $file"
        failed=1
    elif grep -q '^SKIPPED' "$part"; then   # flashinfer is not installed, for one: that proves nothing
        say "INCOMPLETE $file: tests were skipped, reasons above"
        failed=1
    else
        say "PASSED $file"
    fi
done
say "$([ $failed = 0 ] && echo 'ALL PASSED' || echo 'NOT ALL PASSED'): report in $report"
exit $failed
