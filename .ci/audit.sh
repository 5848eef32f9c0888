#!/usr/bin/env bash
# Look for known weaknesses in the locked crates and packages (`make audit`). It needs the advisory databases
# of RustSec and PyPI from the network, so it is no part of `.ci/run`, which builds and tests without one.
#
# The exit code is that of the first tool that finds something, after both have run; 1 if one cannot run.
set -uo pipefail
cd "$(dirname "$0")/.."
pip_audit=pip-audit==2.10.1
code=0

if cargo deny --version >/dev/null 2>&1; then
    cargo deny --locked check advisories sources || code=$?
else
    printf 'audit: cargo-deny is not installed: cargo install --locked cargo-deny\n' >&2
    code=1
fi

# The lock files name all packages with their hashes: nothing is resolved or installed. --strict: a package of which
# the database says nothing is a failure, as where a mirror does not pass on advisories.
for lock in engine/*.lock; do
    .venv/bin/uv tool run "$pip_audit" --strict --requirement "$lock" --require-hashes --disable-pip ||
        code=$((code ? code : $?))
done
exit "$code"
