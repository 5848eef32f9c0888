#!/usr/bin/env bash
# Re-resolve engine/requirements*.lock from pyproject.toml: run after changing dependencies, commit the result.
# Universal for Linux and Python >= 3.10, with hashes. Extra arguments go to uv (e.g. --upgrade).
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
    .venv/bin/uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --custom-compile-command ".ci/lock.sh" "$@"
}
compile pyproject.toml "$@" --extra test --extra build -o engine/requirements-dev.lock
compile pyproject.toml "$@" -c engine/requirements-dev.lock -o engine/requirements.lock
compile engine/requirements-gpu.in "$@" -c engine/requirements-dev.lock --no-deps -o engine/requirements-gpu.lock
