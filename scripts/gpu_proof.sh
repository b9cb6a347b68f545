#!/bin/sh
# The first half hour on a GPU, without thought: what computes rightly, how fast, whether a run learns, resumes identical, and
# trains a model of 1.5 billion parameters. Each piece has a deadline and one line of verdict; one that fails ends no other.
#   ./scripts/gpu_proof.sh                      all of them; logs and figures go to outputs/gpu_proof-TIME
#   ./scripts/gpu_proof.sh measure resume       some of: selftest measure learn resume large
#   DEVICE=cpu ./scripts/gpu_proof.sh           a rehearsal of the same commands in tiny sizes, whose pages are copies
#   TINY=1 ./scripts/gpu_proof.sh               the same on a GPU
# OUTPUT_DIR is the folder, PYTHON an interpreter that has the package (else .venv, which is made), SELFTEST_ARGS what the
# self-test gets beside, RUN_ARGS what the runs do. What a piece started ends with it. Writes the verdicts into docs/status.md and the rates into docs/gpu.md. Exit status 1 where a piece failed.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

device=${DEVICE:-cuda}
out=${OUTPUT_DIR:-$root/outputs/gpu_proof-$(date +%Y%m%d-%H%M%S)}
mkdir -p -- "$out"
out=$(cd -- "$out" && pwd -P)
run="+experiment=gsm8k_multiturn generator=hf placement=inline strategy=single data=word_problems environment=word_problems"
# Random weights get no reward: the entropy is what they learn from.
small="trainer.algorithm.entropy_coef=0.01 trainer.train_batch_size=8 trainer.policy_mini_batch_size=8 trainer.critic_mini_batch_size=8 trainer.eval_before_train=false trainer.eval_interval=0"
# Those of the quickstart on a CPU: a GPU's are for a model of billions, at whose rate a million parameters learn nothing.
quickstart="trainer.train_batch_size=32 trainer.policy_mini_batch_size=16 trainer.critic_mini_batch_size=16 trainer.policy.optimizer.lr=5e-5"
case $device in
cuda)
    platform=gpu docs=$root/docs patience=1 shape=1.5B budget=${BUDGET:-520} selftest='' kind='--kind gpu --kills 2'
    [ -n "${PYTHON:-}" ] || ensure_env vllm
    [ -z "${TINY:-}" ] || docs=$out/docs patience=4 shape=tiny
    ;;
cpu)
    platform=cpu docs=$out/docs patience=4 shape=tiny budget=${BUDGET:-60} selftest='--only kernels/packed --only ipc --only engine/hf' kind='--kind rl --kills 1'
    [ -n "${PYTHON:-}" ] || ensure_env
    ;;
*) die "DEVICE=$device: choose cuda or cpu" ;;
esac
if [ $shape = tiny ]; then
    mkdir -p -- "$docs"
    cp -- docs/gpu.md docs/status.md "$docs"
fi
python=${PYTHON:-$python}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
[ $# -gt 0 ] || set -- selftest measure learn resume large
for name; do
    case $name in
    selftest | measure | learn | resume | large) ;;
    *) die "unknown piece '$name': choose from selftest, measure, learn, resume, large" ;;
    esac
done

# What the piece started in sessions of its own outlives a deadline, and would hold the GPU against the next one.
end_what_is_left() {
    for process in /proc/[0-9]*; do
        ! grep -qsxzF -- "GPU_PROOF=$out/$piece" "$process/environ" || kill -9 "${process#/proc/}" 2>/dev/null || :
    done
}

# $1: a piece, $2: its deadline in seconds, $3: what the line of its log with its figure holds; then the command.
try() {
    piece=$1 limit=$(($2 * patience)) figure=$3
    shift 3
    started=$(date +%s)
    status=0
    GPU_PROOF="$out/$piece" timeout -k 20 "$limit" "$@" >"$out/$piece.log" 2>&1 </dev/null || status=$?
    end_what_is_left
    case $status in
    0) verdict=passed ;;
    124 | 137) verdict="FAILED, over $limit s" ;;
    *) verdict="FAILED, exit status $status" ;;
    esac
    [ "$status" -eq 0 ] || failed="$failed $piece"
    told=$(grep -E -- "$figure" "$out/$piece.log" | tail -n 1 | tr '|' '/') || told=
    [ -n "$told" ] || told=$(tail -n 1 "$out/$piece.log" | tr '|' '/')
    line="| $piece | $verdict | $(($(date +%s) - started)) s | $told |"
    printf '%s\n' "$line" | tee -a "$out/verdicts.md"
}

piece() {
    # shellcheck disable=SC2086
    case $1 in
    selftest) try selftest 450 'passed, .* failed' "$python" -m skyrl_train.selftest --device "$device" --json "$out/selftest.json" $selftest ${SELFTEST_ARGS:-} ;;
    measure) try measure $((budget + 60)) '^measured ' "$python" -m skyrl_train.selftest --device "$device" --measure --budget "$budget" --output "$out/measured" --docs "$docs/gpu.md" ${TINY:+--tiny} ;;
    learn) try learn 240 '^step ' "$python" -m skyrl_train.main $run $quickstart "platform=$platform" model=tiny_qwen2 "hydra.run.dir=$out/learn" trainer.total_steps=10 ${RUN_ARGS:-} ;;
    resume) try resume 300 'identical to the undisturbed' "$python" -m tests.reliability.kill_and_resume $kind --output "$out/resume" generator=hf placement=inline strategy=single deterministic=true ${RUN_ARGS:-} ;;
    large)
        timeout 120 "$python" -c 'import sys; from skyrl_train.selftest.pieces import save_shape; save_shape(*sys.argv[1:])' "$device" "$shape" "$out/large/model" >"$out/model.log" 2>&1 || say "no model: $out/model.log"
        try large 300 '^step ' "$python" -m skyrl_train.main $run $small "platform=$platform" "model.path=$out/large/model" "hydra.run.dir=$out/large/run" trainer.total_steps=3 ${RUN_ARGS:-}
        rm -rf -- "$out/large/model" "$out/large/run/checkpoints" "$out/large/run/export"
        ;;
    esac
}

failed=
begin='<!-- gpu proof: written by scripts/gpu_proof.sh -->' end='<!-- end of gpu proof -->'
{
    printf '%s, commit %s, %s.\n\n' "$("$python" -c "import torch; print(torch.cuda.get_device_name() if '$device' == 'cuda' else 'A rehearsal on a CPU')" || printf '%s' "$device")" \
        "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "$(date +%Y-%m-%d)"
    printf '| piece | verdict | took | found |\n|---|---|---|---|\n'
} >"$out/verdicts.md"
for name; do piece "$name"; done
awk -v begin="$begin" -v end="$end" -v table="$out/verdicts.md" '
    $0 == end { inside = 0 }
    !inside { print }
    $0 == begin { inside = 1; while ((getline line < table) > 0) print line }
' "$docs/status.md" >"$out/status.md" && cp -- "$out/status.md" "$docs/status.md"
say "verdicts in $out/verdicts.md and $docs/status.md"
[ -z "$failed" ] || die "failed:$failed"
