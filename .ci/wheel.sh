#!/usr/bin/env bash
# Build one wheel in dist/, with the profile and the features of the images. Needs Rust, a C compiler and Python; no
# other package than maturin, which the hashed lock file names. PYTHON=… chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=target/wheel-tools
lock=engine/requirements-dev.lock

if [ ! -x "$tools/bin/maturin" ] || [ "$lock" -nt "$tools/bin/maturin" ]; then
    "${PYTHON:-python3}" -m venv --clear "$tools"
    sed -n '/^maturin==/,/[^\\]$/p' "$lock" >"$tools/maturin.txt"
    "$tools/bin/pip" install -q --disable-pip-version-check --no-deps --require-hashes -r "$tools/maturin.txt"
    touch "$tools/bin/maturin" # pip keeps the time of the file in its archive
fi
rm -f dist/baton_serve-*.whl
"$tools/bin/maturin" build --profile dist --locked --compatibility linux --out dist
