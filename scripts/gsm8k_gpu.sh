#!/bin/sh
# Trains Qwen2.5-1.5B-Instruct on GSM8K for 100 steps on all GPUs of this machine, and writes score, wall time, and tokens
# per second and GPU to summary.json and summary.md in the run's folder: what to compare with another trainer's.
#   ./scripts/gsm8k_gpu.sh                              model and data come from the hub where they are not here
#   OUTPUT_DIR=/data/gsm8k ./scripts/gsm8k_gpu.sh trainer.total_steps=20     arguments are overrides of the configuration
# Without a GPU the bundled tiny model and problems stand in, which shows that the script works and nothing else.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
gpus=$(nvidia-smi --query-gpu=uuid --format=csv,noheader 2>/dev/null | grep -c .) || gpus=0
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .) || gpus=0
fi
if [ "$gpus" -eq 0 ]; then
    say "no GPU: the tiny model on the CPU"
    ensure_env
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
else
    ensure_env vllm
    ensure_gsm8k
fi
output=${OUTPUT_DIR:-$root/outputs/gsm8k-$(date +%Y%m%d-%H%M%S)}
started=$(date +%s)
"$python" -m skyrl_train.main +experiment=gsm8k_multiturn hydra.run.dir="$output" trainer.total_steps=100 "$@"
"$python" scripts/summarize_run.py "$output" --num-gpus "$gpus" --wall-s "$(($(date +%s) - started))"
