#!/usr/bin/env bash
# Every check and measurement that needs a GPU, in one command of at most ten minutes: parts one after the other, each with a time
# limit of its own, the most important first; goes on after a failure and leaves a report.
#   tests/gpu/run.sh                      report in gpu-report.txt, measurements also in gpu-report.jsonl
#   tests/gpu/run.sh --cpu                the same commands where there is no GPU: tests are skipped, measurements are small
#   PARTS=engine,bench tests/gpu/run.sh   only these; all: compile engine graphs drafts grammars bench constrained pages start attention more bench8b constrained8b pair
#   COMPILE='norm rope'                   kernels of part compile;  JOBS=7 of them at once
#   OUT=DIR                               where reports go;  BUDGET=570 seconds for everything;  PYTHON=…;  WHEELS=gpu-wheels
# Uses what is installed, or where it finds a folder of tests/gpu/pack.sh, that, offline: nothing of `make setup` is needed then.
# Exit code 0: all passed, 1: something failed, was skipped or had no time, 3: no GPU.
set -u
cd "$(dirname "$0")/../.." || exit 2
cpu=0
[ "${1:-}" = --cpu ] && cpu=1
out=${OUT:-.}
mkdir -p "$out" || exit 2
report=$out/gpu-report.txt jsonl=$out/gpu-report.jsonl
: > "$report" || exit 2
rm -f "$jsonl"
wheels=${WHEELS:-gpu-wheels}
parts=${PARTS:-compile,engine,graphs,drafts,grammars,bench,constrained,pages,start,attention,more,bench8b,constrained8b,pair}
began=$SECONDS budget=${BUDGET:-570}
log=$(mktemp) || exit 2
site=$(mktemp -d) || exit 2
trap 'rm -rf "$log" "$site"' EXIT
verdicts=() worst=0

if [ -n "${PYTHON:-}" ]; then py=$PYTHON
elif [ -x .venv/bin/python ]; then py=$PWD/.venv/bin/python
else py=python3; fi
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/engine${PYTHONPATH:+:$PYTHONPATH}

say() { printf '%s\n' "$*" | tee -a "$report"; }

install() { # what pack.sh carried, into a folder of its own; of the package itself only what is compiled, the rest is this tree's
    "$py" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "$wheels"/*.whl || return 1
    local native
    [ ! -f "$wheels/native/_native.abi3.so.gz" ] || gzip -dc "$wheels/native/_native.abi3.so.gz" > "$site/_native.abi3.so" || return 1
    native=$(ls "$site"/_native*.so "$site"/baton/_native*.so 2>/dev/null | head -1)
    [ -z "$native" ] || cp -f --remove-destination "$native" engine/baton/_native.abi3.so || return 1
    rm -rf "$site/baton" "$site/_native.abi3.so"
    # unpacked by Python, which has xz where the machine may not
    [ ! -f "$wheels/aot.txz" ] || "$py" -m tarfile -e "$wheels/aot.txz" "$site/flashinfer/data" || return 1
    echo "installed $(ls "$wheels"/*.whl | wc -l) wheels and $(ls "$site/flashinfer/data/aot" 2>/dev/null | wc -l) kernels from $wheels"
}

part() { # NAME SECONDS COMMAND…
    local name=$1 secs=$2 from=$SECONDS left=$((budget - (SECONDS - began))) rc verdict=PASSED
    shift 2
    case ",$parts," in *",$name,"*) ;; *) return ;; esac
    [ "$secs" -le "$left" ] || secs=$left
    say "== $name, $((SECONDS - began)) s after the start, at most $secs s: $*"
    if [ "$left" -lt 15 ]; then
        verdict="NO TIME"
    else
        # as Ctrl-C, and to it alone: what it started it also ends, and nothing is left on the GPU
        timeout --foreground -s INT -k 40 "$secs" "$@" 2>&1 | tee -a "$report" | tee "$log"
        rc=${PIPESTATUS[0]}
        case $rc in
            0) ! grep -q '^SKIPPED' "$log" || verdict=INCOMPLETE ;;   # a test that is skipped proves nothing
            124 | 137) verdict="CUT OFF" ;;
            *) verdict=FAILED ;;
        esac
    fi
    [ "$verdict" = PASSED ] || { [ $cpu = 1 ] && [ "$verdict" = INCOMPLETE ]; } || worst=1
    verdicts+=("$verdict $name, $((SECONDS - from)) s")
    say "$verdict $name"
}

say "Baton GPU checks, $(date -u +%FT%TZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo "${COMMIT:-unknown}")"
if ls "$wheels"/*.whl >/dev/null 2>&1; then
    export PYTHONPATH=$PYTHONPATH:$site
    install > "$log" 2>&1 || { say "the wheels in $wheels could not be installed:"; worst=1; }
    tee -a "$report" < "$log"
fi
timeout 120 "$py" -m tests.gpu.about > "$log" 2>&1
there=$?
tee -a "$report" < "$log"
if [ $there != 0 ] && [ $cpu = 0 ]; then
    say "SKIPPED everything: no GPU, or not what is needed to use one"
    exit 3
fi

tests=("$py" -m pytest -m gpu -rs -v -p no:cacheprovider)
bench=("$py" -m tests.perf.bench_gpu --jsonl "$jsonl")
big=qwen3-0.6b bigger=llama-3-8b
if [ $cpu = 1 ]; then
    bench+=(--device cpu --quick)
    big=tiny bigger=tiny
fi
# Kernels that were not carried are compiled first, several at once; what is missing then is compiled by the tests that need it.
read -ra kernels <<< "${COMPILE:-norm rope silu decode:bfloat16:64 prefill:bfloat16:64 decode:bfloat16:128 prefill:bfloat16:128}"
[ $cpu = 1 ] || part compile 240 xargs -a <(printf '%s\n' "${kernels[@]}") -P "${JOBS:-7}" -n 1 "$py" -m tests.gpu.prebuild
part engine 150 "${tests[@]}" tests/gpu/test_engine.py
mapfile -t rest < <(ls tests/gpu/test_*.py | grep -v 'test_engine\|test_attention\|test_ops\|test_start\|test_graphs\|test_drafts\|test_device_pa')
part graphs 120 "${tests[@]}" tests/gpu/test_graphs.py tests/gpu/sampling/test_sampler.py
part drafts 120 "${tests[@]}" tests/gpu/test_drafts.py
part grammars 150 "${tests[@]}" tests/gpu/sampling/test_grammars.py tests/gpu/sampling/test_answers.py
part bench 150 "${bench[@]}" --shapes $big --sections copy,decode,prefill,workload
# Long prompts are no part of it: with short chunks their kernels need not be compiled.
constrained=("$py" -m tests.perf.grammars.bench_constrained --jsonl "$jsonl" --engine chunked_prefill_size=192)
[ $cpu = 0 ] || constrained+=(--device cpu --quick)
part constrained 120 "${constrained[@]}" --shape $big
part pages 250 "${tests[@]}" tests/gpu/test_device_pages.py tests/gpu/test_device_pairs.py
part start 100 "${tests[@]}" tests/gpu/test_ops.py tests/gpu/test_start.py
part attention 120 "${tests[@]}" tests/gpu/test_attention.py
part more 200 "${tests[@]}" "${rest[@]}"
part bench8b 100 "${bench[@]}" --shapes $bigger --sections copy,decode,prefill
[ $cpu = 1 ] || part constrained8b 100 "${constrained[@]}" --shape $bigger --batches 64
part pair 150 "${bench[@]}" --shapes $big --sections ttft,transfer

say "-- $((SECONDS - began)) s, reports in $out:"
for verdict in "${verdicts[@]}"; do say "$verdict"; done
say "$([ $worst = 0 ] && echo 'ALL PASSED' || echo 'NOT ALL PASSED')"
exit $worst
