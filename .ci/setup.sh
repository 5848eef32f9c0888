#!/usr/bin/env bash
# Everything `make` needs, in .venv: Python packages from the hashed lock file, and the native extension.
#
# Each step is skipped while what it depends on is unchanged (content hashes in .venv/.stamps), so a second run takes
# about a second and a changed Rust file only rebuilds the extension. Environment variables:
#
# PYTHON          the interpreter
# NATIVE_PROFILE  release (default); dist: with link-time optimization, as in the wheel; dev: in half the time, slower,
#                 with assertions
# TORCH_INDEX     package index with CPU builds of torch; without it torch is that of the lock file, a CUDA build of 5 GB
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
profile=${NATIVE_PROFILE:-release}
stamps=$venv/.stamps
log=$venv/setup.log
export VIRTUAL_ENV=$PWD/$venv

die() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if supported "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.10 to 3.13 found (tried: ${PYTHON:-python3 python3.13 … python3.10}); install one, or set PYTHON=/path/to/python3"
}

# step NAME KEY COMMAND…: run COMMAND unless it succeeded before with the same KEY; say how long it took.
step() {
    local name=$1 key=$2 started=$SECONDS
    shift 2
    [ "$(cat "$stamps/$name" 2>/dev/null)" = "$key" ] && return
    printf 'setup: %s …\n' "$name"
    if ! "$@" >"$log" 2>&1; then
        tail -n 60 "$log" >&2
        die "$name failed after $((SECONDS - started)) s; the end of $log is above"
    fi
    mkdir -p "$stamps"
    printf '%s' "$key" >"$stamps/$name"
    printf 'setup: %s, %s s\n' "$name" $((SECONDS - started))
}

digest() { sha256sum "$@" | sha256sum | cut -c1-16; }

make_venv() {
    if [ -f "$stamps/venv" ]; then # another interpreter, or the checkout moved: scripts in it hold absolute paths
        rm -rf "$stamps"
        "$python" -m venv --clear "$venv"
    else
        "$python" -m venv "$venv"
    fi
}

# uv itself comes from the lock too: its block there is a complete requirements file with hashes.
install_uv() {
    sed -n '/^uv==/,/[^\\]$/p' engine/requirements-dev.lock >"$venv/uv.txt"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r "$venv/uv.txt"
}

# Where Python may not write bytecode later (PYTHONDONTWRITEBYTECODE), each start would compile all of torch: 5 s of CPU.
install_packages() {
    local uv_install=("$venv/bin/uv" pip install -q ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode})
    if [ -z "${TORCH_INDEX:-}" ]; then
        "${uv_install[@]}" --require-hashes -r engine/requirements-dev.lock
        return
    fi
    # No hash is locked for the torch of another index: it is installed by its version.
    LOCK=engine/requirements-dev.lock bash deploy/docker/install_packages.sh --print >"$venv/packages.txt"
    sed '1d' "$venv/packages.txt" >"$venv/without-torch.txt"
    "${uv_install[@]}" --no-deps --index-url "$TORCH_INDEX" "$(head -n 1 "$venv/packages.txt")"
    "${uv_install[@]}" --no-deps --require-hashes -r "$venv/without-torch.txt"
}

# The distribution was once called `baton`: both would own the command, so the old one goes before the new one comes.
build_native() {
    "$venv/bin/uv" pip uninstall -q baton
    "$venv/bin/maturin" develop --profile "$profile" --locked --uv
}

native_key() {
    {
        rustc --version
        echo "$profile"
        find Cargo.toml Cargo.lock pyproject.toml router kv_transfer engine/drafts engine/kernels engine/native engine/text \
            -type f -not -path '*/tests/*' -not -path '*/benches/*' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum | cut -c1-16
}

python=$(find_python)
command -v cargo >/dev/null || die "cargo not found: install a stable Rust toolchain, 1.89 or newer (rustup)"
command -v cc >/dev/null || die "no C compiler found: sudo apt-get install build-essential"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments: sudo apt-get install python$version-venv"

mkdir -p "$venv"
[ -x "$venv/bin/python" ] || rm -rf "$stamps"
ls engine/baton/_native*.so >/dev/null 2>&1 || rm -f "$stamps/native extension"

step venv "$PWD $("$python" -VV)" make_venv
step uv "$(digest engine/requirements-dev.lock)" install_uv
step packages "$(digest engine/requirements-dev.lock) ${TORCH_INDEX:-}" install_packages
step "native extension" "$(native_key)" build_native
