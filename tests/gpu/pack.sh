#!/usr/bin/env bash
# A folder that a bare GPU machine needs beside this working tree, to be carried there: tests/gpu/run.sh installs from it, offline.
#   tests/gpu/pack.sh [FOLDER]        default gpu-wheels, which git ignores
#   NATIVE=FILE.so                    take this built extension instead of building a release wheel
#   KERNELS=DIR                       kernels made by tests/gpu/prebuild.py, packed into one archive, aot.txz
# The machine is x86-64 Linux with Python 3.12, torch, transformers, pytest and nvcc; what it has besides is left out of PACKAGES.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu-wheels}
py=${PYTHON:-.venv/bin/python}
limit_mib=${LIMIT_MIB:-64}
llguidance=$(sed -n 's/.*"\(llguidance==[^"]*\)".*/\1/p' pyproject.toml)
flashinfer=$(sed -n 's/.*"\(flashinfer-python==[^"]*\)".*/\1/p' pyproject.toml)
PACKAGES=(
    "${flashinfer:?}" apache-tvm-ffi==0.1.9 einops tabulate          # the kernels, without the packages for other GPUs' formats; ran together
    pyzmq msgspec "${llguidance:?}"                                  # the engine
    jsonschema jsonschema-specifications referencing rpds-py         # tests.support.grammars
    openai==1.109.1 pydantic pydantic-core annotated-types typing-inspection typing-extensions jiter distro sniffio # tests.support.processes.cluster
)
mkdir -p "$out"
if [ -n "${NATIVE:-}" ]; then
    mkdir -p "$out/native"
    strip -o "$out/native/_native.abi3.so" "$NATIVE"
    gzip -f "$out/native/_native.abi3.so"
else
    "$(dirname "$py")/maturin" build --release --locked --out "$out"
fi
platforms=()
for p in manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux_2_12 manylinux_2_5 manylinux2014 manylinux1; do
    platforms+=(--platform "${p}_x86_64")
done
# One by one: a package may come for several platforms, and --no-deps keeps torch and its gigabytes out.
for package in "${PACKAGES[@]}"; do
    "$py" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$out" "$package"
done
# pydantic pins its core to one version; the newest of each need not fit.
core=$(unzip -p "$out"/pydantic-2*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==\([0-9.]*\).*/\1/p' | head -1)
if [ -n "$core" ] && ! ls "$out"/pydantic_core-"$core"-*.whl >/dev/null 2>&1; then
    rm -f "$out"/pydantic_core-*.whl
    "$py" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$out" "pydantic-core==$core"
fi
if [ -n "${KERNELS:-}" ]; then
    stripped=$(mktemp -d)
    cp -r "$KERNELS" "$stripped/aot"
    find "$stripped/aot" -name '*.so' -exec strip {} +
    tar -C "$stripped" -cJf "$out/aot.txz" aot
    rm -rf "$stripped"
fi
ls -l "$out"
carried=$(du -sm "$out" | cut -f1)
tree=$(git ls-files -z | xargs -0 du -cm --apparent-size | tail -1 | cut -f1)
echo "$out: $carried MiB, and the working tree $tree MiB, of $limit_mib MiB that travel"
[ $((carried + tree)) -le "$limit_mib" ] || { echo "too much: fewer KERNELS, or NATIVE with less in it" >&2; exit 1; }
