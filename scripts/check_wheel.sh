#!/bin/sh
# Builds the source archive and the wheel, installs the wheel in an empty environment, and trains there, from another folder:
# two steps of the quickstart, and one of the README's own task, whose module and data lie in that folder. Prints what the
# installation took.
# ./scripts/check_wheel.sh: everything from the package index. With --quick: the packages that it needs are those of .venv.
set -eu
unset PYTHONPATH  # what is asked for is the wheel, wherever Python would find the checkout
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
quick=false
[ "${1:-}" != --quick ] || quick=true

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
if [ "$quick" = true ]; then base_python=$python; else find_base_python; fi

say "building"
"$base_python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -qq --disable-pip-version-check build "$(sed -n 's/^requires = \["\(setuptools[^"]*\)"\]/\1/p' pyproject.toml)" ||
    die "the build tools could not be installed: the reason is above"
# From a copy: a build leaves folders of its own behind, and takes in what lies in them.
mkdir "$work/source"
cp -R pyproject.toml setup.py README.md LICENSE conf skyrl_train "$work/source"
(cd -- "$work/source" && "$work/tools/bin/python" -m build --no-isolation --outdir "$work/dist" .) >"$work/build.log" 2>&1 || {
    tail -n 20 "$work/build.log" >&2
    die "the build failed"
}
wheel=$(ls "$work"/dist/*.whl)
ls "$work"/dist/*.tar.gz >/dev/null

say "installing $(basename -- "$wheel")"
began=$(date +%s)
"$base_python" -m venv "$work/venv"
if [ "$quick" = true ]; then
    "$work/venv/bin/python" -m pip install -qq --no-deps --disable-pip-version-check "$wheel"
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$work/venv/bin/python" -c 'import sys, sysconfig
with open(sysconfig.get_path("purelib") + "/packages.pth", "w") as file:
    file.write(sys.argv[1] + "\n")' "$packages"
else
    read_package_index
    python=$work/venv/bin/python
    if has_uv; then
        uv pip install --quiet --python "$python" "$wheel"
    else
        "$python" -m pip install -qq --disable-pip-version-check ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} "$wheel"
    fi || die "the wheel could not be installed: the reason is above"
fi
say "installed in $(($(date +%s) - began)) s: $(du -sm "$work/venv" | cut -f1) MB"

mkdir "$work/elsewhere"
cd -- "$work/elsewhere"
"$work/venv/bin/python" -c 'import pathlib, sys, skyrl_train
assert pathlib.Path(skyrl_train.__file__).is_relative_to(sys.prefix), skyrl_train.__file__'
"$work/venv/bin/skyrl-train" --version
"$work/venv/bin/skyrl-train" +experiment=gsm8k_multiturn trainer.total_steps=2 trainer.eval_before_train=false \
    hydra.run.dir="$work/elsewhere/run" >"$work/run.log" 2>&1 || {
    tail -n 30 "$work/run.log" >&2
    die "the quickstart failed"
}
[ "$(wc -l <run/metrics.jsonl)" -ge 2 ] || die "two steps should have left two lines in metrics.jsonl"
say "two steps of the quickstart ran from $PWD"

# The README's own task, by the console command, as small as it comes.
sed -n '/^# my_code.py$/,/^```$/p' "$root/README.md" | sed '$d' >my_code.py
for number in 1 2 3 4; do
    printf '{"question": "How much is %s + 1?", "answer": "%s"}\n' "$number" "$((number + 1))"
done >questions.jsonl
# shellcheck disable=SC2046
"$work/venv/bin/skyrl-train" $(sed -n '/^python -m skyrl_train.main environment.reward=my_code:score/,/^```$/p' "$root/README.md" |
    sed 's/^python -m skyrl_train.main//; s/\\$//; /^```/d') \
    trainer.total_steps=1 \
    trainer.train_batch_size=2 trainer.policy_mini_batch_size=2 trainer.critic_mini_batch_size=2 \
    generator.n_samples_per_prompt=2 generator.sampling.max_generate_length=8 hydra.run.dir="$work/elsewhere/own" \
    >"$work/own.log" 2>&1 || {
    tail -n 30 "$work/own.log" >&2
    die "the README's own task failed"
}
say "a step of the README's own task ran by skyrl-train"
"$work/venv/bin/skyrl-generate" model.path=own/export data.validation=questions.jsonl \
    generator.eval_sampling.max_generate_length=8 hydra.run.dir="$work/elsewhere/evaluated" >"$work/evaluated.log" 2>&1 || {
    tail -n 30 "$work/evaluated.log" >&2
    die "the evaluation of its export failed"
}
grep -q "environment.reward=my_code:score" "$work/evaluated.log" || die "the evaluation should have taken the run's reward"
say "its export was evaluated by the reward of its run"
