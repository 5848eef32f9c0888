#!/usr/bin/env bash
# Install the locked Python packages into /opt/baton: part of the engine images.
# With --print: list what TORCH_INDEX would install, of the lock file LOCK; .ci/setup.sh uses it.
#
# With TORCH_INDEX torch comes from that package index, in the locked version, and the CUDA
# libraries are left out. Its hash is not locked then: the lock file knows the CUDA build of the
# default index.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
lock=${LOCK:-$here/requirements.lock}

# Blocks of the lock file except torch's, Triton's and the CUDA libraries'.
without_torch() {
    awk '/^[^ #]/ { kept = !/^(torch|triton|cuda-[a-z-]*|nvidia-[a-z0-9-]*)==/ } /^ / || kept { if (kept) print }' "$lock"
}

# torch==VERSION for Python 3.11 and newer.
torch_version() { sed -n "/python_full_version >= '3.11'/s/^\(torch==[^ ]*\) .*/\1/p" "$lock"; }

if [ "${1:-}" = --print ]; then # what would be installed with TORCH_INDEX
    torch_version
    without_torch
    exit
fi
python3 -m venv /opt/baton
if [ -n "${TORCH_INDEX:-}" ]; then
    without_torch >"$here/requirements.txt"
    /opt/baton/bin/pip install --no-cache-dir --require-hashes --no-deps -r "$here/requirements.txt"
    /opt/baton/bin/pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$(torch_version)"
else
    /opt/baton/bin/pip install --no-cache-dir --require-hashes --no-deps -r "$lock"
fi
