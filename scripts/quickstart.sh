#!/bin/sh
# Trains a tiny policy with GRPO on multi-turn word problems, on a CPU, from nothing: makes .venv, installs, runs.
# Arguments are overrides of the configuration: ./scripts/quickstart.sh trainer.total_steps=5
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
ensure_env
# More threads than free cores make torch spin: on small models one is fastest.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
say "training: about four minutes on two cores"
exec "$python" -m skyrl_train.main +experiment=gsm8k_multiturn "$@"
