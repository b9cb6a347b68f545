#!/bin/sh
# Trains a tiny policy with GRPO on multi-turn word problems, on a CPU, from nothing: makes .venv, installs, runs.
# Arguments are overrides of the configuration: ./scripts/quickstart.sh trainer.total_steps=5
# With +experiment=smollm2 a real model, which is fetched, learns to add.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
ensure_env plots
case " $*" in
*" +experiment="*) ;;
*)
    say "training: about four minutes on two cores"
    set -- +experiment=gsm8k_multiturn "$@"
    ;;
esac
case "$*" in
*experiment=smollm2_steps*) ensure_smollm2 smollm2,reasoning-gym "accelerate, gguf, reasoning_gym" ;;
*experiment=smollm2*) ensure_smollm2 smollm2 "accelerate, gguf" ;;
esac
exec "$python" -m skyrl_train.main "$@"
