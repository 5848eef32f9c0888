#!/usr/bin/env bash
# The peers of tests/peers, each in an environment of its own under .venv-peers: their pins exclude each other and ours.
#
# An environment is kept while its line below is unchanged. One that cannot be made (no network, no wheel for this
# Python) is named, its log stays in .venv-peers/NAME.log, and the tests that need it skip: the exit code is 0 all the same.
set -uo pipefail
cd "$(dirname "$0")/../.."

peers=(
    'sglang-router sglang-router==0.3.2'
    'smg smg==1.13.0'
    'openai-2 openai==2.54.0'
    'openai-3 openai==3.52.0'
    'openai-responses openai==3.57.0'
    'anthropic anthropic==2.14.0'
    'litellm litellm==1.106.2' # requires openai < 3
)
newest=2026-11-20 # upload date of the newest package taken for what these lines leave open

uv=$PWD/.venv/bin/uv
python=$PWD/.venv/bin/python
mkdir -p .venv-peers

make_peer() {
    local folder=.venv-peers/$1 package=$2
    "$uv" venv --clear --python "$python" "$folder" &&
        "$uv" pip install --python "$folder" --exclude-newer "$newest" "$package"
}

for line in "${peers[@]}"; do
    read -r name package <<<"$line"
    key="$package $newest $("$python" -VV)"
    [ "$(cat ".venv-peers/$name/.installed" 2>/dev/null)" = "$key" ] && continue
    printf 'peers: %s …\n' "$package"
    if make_peer "$name" "$package" >".venv-peers/$name.log" 2>&1; then
        printf '%s' "$key" >".venv-peers/$name/.installed"
    else
        rm -f ".venv-peers/$name/.installed"
        printf 'peers: %s could not be installed; its tests will skip. The end of .venv-peers/%s.log:\n' "$package" "$name" >&2
        tail -n 5 ".venv-peers/$name.log" >&2
    fi
done
