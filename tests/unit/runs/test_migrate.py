"""Configurations of TRL, verl and SkyRL, written from what their documentation says of their settings, become ours."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from skyrl_train.config import SFTConfig
from skyrl_train.errors import DataError
from skyrl_train.runs.cli import migrate as command
from skyrl_train.runs.cli.command_line import preflight
from skyrl_train.runs.cli.foreign_files import MAX_BYTES, read_settings
from skyrl_train.runs.cli.foreign_names import Migration
from skyrl_train.runs.cli.migrate import command_of, main, migrate, preset_of, report_of
from skyrl_train.runs.planning import main as plan

# Data and models are the bundled ones, so that a plan reads them; all else is as people set it.
DATA = "builtin:word_problems/train"
MODEL = "builtin:tiny_qwen2"
REWARD = "tests.other_trainers.functions.reward"

TRL = {
    "grpo.yaml": f"""
model_name_or_path: {MODEL}
reward_funcs: [exact.match]
learning_rate: 1e-5
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_completion_length: 128
beta: 0.04
report_to: none
logging_steps: 5
""",
    "dapo.yaml": f"""
model_name_or_path: {MODEL}
reward_funcs: [my_lib.correct, my_lib.brief]
reward_weights: [1.0, 0.25]
loss_type: dapo
epsilon: 0.2
epsilon_high: 0.28
scale_rewards: false
mask_truncated_completions: true
num_generations: 4
per_device_train_batch_size: 8
steps_per_generation: 2
num_iterations: 2
max_steps: 400
save_steps: 100
eval_strategy: "no"
max_completion_length: 64
use_vllm: true
vllm_mode: colocate
optim: adamw_torch_fused
warmup_ratio: 0.1
lr_scheduler_type: cosine
""",
    "dr_grpo.json": """{"model_name_or_path": "builtin:tiny_qwen2", "reward_funcs": ["my_lib.correct"],
"loss_type": "dr_grpo", "scale_rewards": "none", "num_generations": 4, "per_device_train_batch_size": 8,
"max_completion_length": 96, "max_prompt_length": 64, "temperature": 0.9, "top_p": 0.95, "seed": 7,
"chat_template_kwargs": {"enable_thinking": false}, "gradient_checkpointing": true, "push_to_hub": true}""",
    "script.py": """
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from my_lib import correct

MODEL = "builtin:tiny_qwen2"
DEVICES = 2
def brief(completions, **kwargs):
    return [-len(each) for each in completions]
args = GRPOConfig(
    output_dir="runs/one", learning_rate=5e-6, num_generations=8, per_device_train_batch_size=8 * DEVICES,
    max_completion_length=int(os.environ["LENGTH"]), importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
)
trainer = GRPOTrainer(
    model=MODEL, args=args, reward_funcs=[correct], train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
raise SystemExit("a script that is run")
""",
}
VERL = {
    "grpo.yaml": """
data: {train_files: [DATA], val_files: [DATA], train_batch_size: 64, max_prompt_length: 128, max_response_length: 64}
actor_rollout_ref:
  model: {path: MODEL, enable_gradient_checkpointing: true, use_remove_padding: true}
  actor:
    optim: {lr: 1e-6, weight_decay: 0.1}
    ppo_mini_batch_size: 32
    ppo_micro_batch_size_per_gpu: 4
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
    fsdp_config: {param_offload: false, optimizer_offload: false}
  rollout: {name: vllm, n: 4, temperature: 1.0, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.6}
  ref: {log_prob_micro_batch_size_per_gpu: 8}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
custom_reward_function: {path: my_code.py, name: compute_score}
trainer: {n_gpus_per_node: 4, nnodes: 1, total_epochs: 3, save_freq: 20, test_freq: 5, logger: [console, wandb]}
""",
    "ppo.yaml": """
data: {train_files: DATA, val_files: DATA, train_batch_size: 32, max_prompt_length: 128, max_response_length: 64}
actor_rollout_ref:
  model: {path: MODEL}
  actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: 32, ppo_epochs: 2, clip_ratio: 0.2, use_dynamic_bsz: true}
  rollout: {name: vllm, n: 1}
critic: {optim: {lr: 1e-5}, model: {path: MODEL}, cliprange_value: 0.5}
algorithm: {adv_estimator: gae, gamma: 1.0, lam: 0.95, use_kl_in_reward: true, kl_ctrl: {type: fixed, kl_coef: 0.001}}
custom_reward_function: {path: my_code.py}
trainer: {n_gpus_per_node: 2, nnodes: 1, total_training_steps: 100, critic_warmup: 5, val_before_train: false}
""",
    "dapo.sh": """#!/bin/bash
set -x
MODEL_PATH=builtin:tiny_qwen2
clip_low=0.2
python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo \\
    data.train_files="['builtin:word_problems/train']" data.val_files="$HOME/data/test.parquet" \\
    data.train_batch_size=32 data.max_prompt_length=128 data.max_response_length=64 data.truncation=left \\
    actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.actor.clip_ratio_low=${clip_low} \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm \\
    +algorithm.filter_groups.enable=True custom_reward_function.path=my_code.py trainer.n_gpus_per_node=8 \\
    trainer.nnodes=2 trainer.total_epochs=1 $@
""",
    "multi_turn.yaml": """
data: {train_files: DATA, train_batch_size: 16, max_prompt_length: 128, max_response_length: 64, shuffle: false}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: MODEL, lora_rank: 8, lora_alpha: 16, target_modules: all-linear}
  actor: {optim: {lr: 3e-5, lr_warmup_steps: 5}, ppo_mini_batch_size: 16, policy_loss: {loss_mode: gspo},
          clip_ratio_low: 0.0003, clip_ratio_high: 0.0004, loss_agg_mode: seq-mean-token-mean}
  rollout: {name: sglang, n: 4, multi_turn: {enable: true, max_assistant_turns: 3, format: hermes}}
algorithm: {adv_estimator: rloo}
custom_reward_function: {path: my_code.py}
trainer: {n_gpus_per_node: 1, nnodes: 1, total_epochs: 1, experiment_name: tools, project_name: p}
""",
}
SKYRL = {
    "gsm8k.yaml": """
data: {train_data: [DATA], val_data: [DATA]}
trainer:
  algorithm: {advantage_estimator: grpo, use_kl_loss: true, kl_loss_coef: 0.001}
  strategy: fsdp2
  placement: {colocate_all: true, policy_num_gpus_per_node: 4, ref_num_gpus_per_node: 4, policy_num_nodes: 1}
  policy: {model: {path: MODEL}, optimizer_config: {lr: 1.0e-6, max_grad_norm: 1.0}}
  ref: {model: {path: "${trainer.policy.model.path}"}}
  epochs: 2
  train_batch_size: 64
  policy_mini_batch_size: 32
  micro_forward_batch_size_per_gpu: 16
  micro_train_batch_size_per_gpu: 8
  eval_interval: 5
  ckpt_interval: 10
  max_prompt_length: 128
  logger: console
  ckpt_path: "${oc.env:HOME}/ckpts/one"
generator: {backend: vllm, n_samples_per_prompt: 4, num_inference_engines: 4, sampling_params: {max_generate_length: 64}}
environment: {env_class: gsm8k}
""",
    "ppo.yaml": """
data: {train_data: [DATA], val_data: [DATA]}
trainer:
  algorithm: {advantage_estimator: gae, lambd: 0.95, gamma: 1.0, use_kl_loss: false, value_clip: 0.2}
  policy: {model: {path: MODEL}, optimizer_config: {lr: 1.0e-6, num_warmup_steps: 3, scheduler: constant_with_warmup}}
  critic: {model: {path: MODEL}, optimizer_config: {lr: 5.0e-6}}
  placement: {policy_num_gpus_per_node: 2}
  train_batch_size: 32
  policy_mini_batch_size: 16
  critic_mini_batch_size: 16
  max_prompt_length: 128
  use_sample_packing: true
generator: {n_samples_per_prompt: 4, sampling_params: {max_generate_length: 64, temperature: 0.8}}
environment: {env_class: gsm8k}
""",
    "dapo.sh": """
DATA_DIR=builtin:word_problems
: "${NUM_GPUS:=4}"
uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train']" data.val_data="['$DATA_DIR/validation']" \\
  trainer.algorithm.advantage_estimator="grpo" trainer.algorithm.policy_loss_type="dual_clip" \\
  trainer.algorithm.clip_ratio_c=10.0 trainer.algorithm.eps_clip_high=0.28 trainer.algorithm.use_kl_loss=false \\
  trainer.algorithm.dynamic_sampling.type=filter trainer.algorithm.dynamic_sampling.max_sample_batches=30 \\
  trainer.policy.model.path=builtin:tiny_qwen2 trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  trainer.train_batch_size=32 trainer.policy_mini_batch_size=16 trainer.max_prompt_length=128 \\
  generator.apply_overlong_filtering=true generator.sampling_params.max_generate_length=64 \\
  generator.n_samples_per_prompt=8 environment.env_class=gsm8k trainer.run_name="dapo_$(date +%s)"
""",
    "lora_async.yaml": """
data: {train_data: [DATA]}
trainer:
  policy: {model: {path: MODEL, lora: {rank: 8, alpha: 16}}, optimizer_config: {lr: 3.0e-5}}
  algorithm: {use_kl_loss: false, policy_loss_type: gspo, loss_reduction: sequence_mean}
  placement: {policy_num_gpus_per_node: 1}
  fully_async: {max_staleness_steps: 2, num_parallel_generation_workers: 64}
  train_batch_size: 16
  policy_mini_batch_size: 16
  max_prompt_length: 128
  seed: 3
generator: {n_samples_per_prompt: 4, max_turns: 2, sampling_params: {max_generate_length: 64}}
environment: {env_class: gsm8k}
""",
}
CONFIGURATIONS = [
    (trainer, name, text)
    for trainer, all_of in (("trl", TRL), ("verl", VERL), ("skyrl", SKYRL))
    for name, text in all_of.items()
]


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., Migration]:
    def run(trainer: str, name: str, text: str, **more: object) -> Migration:
        path = tmp_path / name
        if trainer != "trl":
            text = text.replace("DATA,", f"{DATA},").replace("DATA]", f"{DATA}]").replace(" MODEL", f" {MODEL}")
        path.write_text(text, encoding="utf-8")
        kind = "sft" if more.get("schema") is SFTConfig else "rl"
        return migrate(read_settings(path, kind=kind), trainer, **more)  # type: ignore[arg-type]

    return run


def words_of(trainer: str, found: Migration) -> list[str]:
    """The printed command's arguments, with what its report leaves to a person, of this repository."""
    program, *words = shlex.split(command_of(found, program="skyrl-train").replace("\\\n", " "))
    assert program == "skyrl-train"
    report = report_of(found, trainer).splitlines()
    assert all(line.startswith("#") for line in report)
    mine = ["plan.rates=none", "plan.num_train_prompts=256", "environment.reward=exact_match", "environment.rewards=[]"]
    mine += [f"data.train=[{DATA}]"] if any(word.startswith("data.train=[trl-lib") for word in words) else []
    return [*words, *mine, *(["platform=cpu", "generator=hf"] if trainer == "trl" else [])]


IN_CI = ("trl", "grpo.yaml")
"""A plan for several GPUs traces a step of the model, which takes a minute of a core: one in CI, the others at night."""
of_each = pytest.mark.parametrize(
    ("trainer", "name", "text"), CONFIGURATIONS, ids=[f"{trainer}-{name}" for trainer, name, _ in CONFIGURATIONS]
)


@of_each
def test_a_configuration_becomes_a_command_line_without_a_problem(
    trainer: str, name: str, text: str, converted: Callable[..., Migration]
) -> None:
    preflight(words_of(trainer, converted(trainer, name, text)), config_name="config", rules=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "name", "text"),
    [
        pytest.param(*each, marks=[] if each[:2] == IN_CI else pytest.mark.nightly, id=f"{each[0]}-{each[1]}")
        for each in CONFIGURATIONS
    ],
)
def test_a_configuration_becomes_a_command_line_that_passes_the_plan(
    trainer: str, name: str, text: str, capfd: pytest.CaptureFixture[str], converted: Callable[..., Migration]
) -> None:
    status = plan(words_of(trainer, converted(trainer, name, text)))
    assert status == 0, capfd.readouterr()


def test_what_a_cluster_and_a_tracker_need_is_there(converted: Callable[..., Migration]) -> None:
    two_nodes = converted("verl", "dapo.sh", VERL["dapo.sh"]).settings
    assert (two_nodes["placement.num_nodes"], two_nodes["placement.ray_address"]) == (2, "auto")
    found = converted("verl", "multi_turn.yaml", VERL["multi_turn.yaml"])
    assert "tracker.wandb.project" not in found.settings
    assert found.not_needed["project_name"] == "p: for tracker=wandb, which is off"
    # Engines that generate during updates have a GPU beside the policy's.
    assert converted("skyrl", "lora_async.yaml", SKYRL["lora_async.yaml"]).settings["placement.num_gpus"] == 2


def test_samples_of_trl_become_prompts(converted: Callable[..., Migration]) -> None:
    settings = converted("trl", "grpo.yaml", TRL["grpo.yaml"]).settings
    # 16 rows x 4 accumulated = 64 samples, of 8 each: 8 prompts.
    assert settings["trainer.train_batch_size"] == settings["trainer.policy_mini_batch_size"] == 8
    assert settings["trainer.micro_train_batch_size_per_gpu"] == 16
    assert settings["trainer.algorithm.kl_loss_coef"] == 0.04
    assert settings["trainer.policy.optimizer.lr"] == 1e-5
    assert converted("trl", "grpo.yaml", TRL["grpo.yaml"], gpus=4).settings["trainer.train_batch_size"] == 32


def test_steps_of_trl_are_updates(converted: Callable[..., Migration]) -> None:
    found = converted("trl", "dapo.yaml", TRL["dapo.yaml"])
    # Two updates of 8 samples a batch, each batch passed over twice: 400 optimizer steps are 100 batches.
    assert found.settings["trainer.train_batch_size"] == 4
    assert found.settings["trainer.policy_mini_batch_size"] == 2
    assert found.settings["trainer.total_steps"] == 100
    assert found.settings["trainer.ckpt_interval"] == 25
    assert found.settings["trainer.policy.optimizer.warmup_steps"] == 40
    assert found.settings["environment.rewards"] == [
        {"_target_": "my_lib:correct", "weight": 1.0},
        {"_target_": "my_lib:brief", "weight": 0.25},
    ]
    assert "vllm_mode" in found.not_needed
    assert "trainer.epochs" not in found.settings


def test_a_group_that_is_cut_by_an_update_is_left_to_a_person(converted: Callable[..., Migration]) -> None:
    found = converted("trl", "c.yaml", "num_generations: 8\nper_device_train_batch_size: 12\nreward_funcs: [a.b]")
    assert "whole prompts" in found.by_hand["per_device_train_batch_size"]
    assert "trainer.train_batch_size" not in found.settings


def test_a_script_is_read_and_never_run(converted: Callable[..., Migration]) -> None:
    found = converted("trl", "script.py", TRL["script.py"])
    assert found.settings["model.path"] == MODEL
    assert found.settings["data.train"] == ["trl-lib/DeepMath-103K:train"]
    assert found.settings["environment.reward"] == "my_lib:correct"
    assert found.settings["trainer.algorithm.policy_loss"] == "gspo"
    assert found.settings["model.lora.targets"] == ["q_proj", "v_proj"]
    assert found.settings["trainer.train_batch_size"] == 2  # 8 * DEVICES
    assert found.by_hand == {}
    assert found.unknown == {"max_completion_length": "int(os.environ['LENGTH'])"}
    assert "generator.sampling.max_generate_length" not in found.settings


def test_a_reward_that_the_script_defines_is_to_be_moved(converted: Callable[..., Migration]) -> None:
    text = TRL["script.py"].replace("[correct]", "[correct, brief]")
    found = converted("trl", "script.py", text)
    assert "move it to my_code.py" in found.by_hand["reward_funcs brief"]
    assert "environment.reward" not in found.settings


def test_vanilla_of_verl_has_its_second_bound(converted: Callable[..., Migration]) -> None:
    found = converted("verl", "grpo.yaml", VERL["grpo.yaml"])
    assert found.settings["trainer.algorithm.policy_loss"] == {"_target_": "dual_clip", "clip_ratio_c": 3.0}
    assert found.settings["trainer.train_batch_size"] == 64
    assert found.settings["trainer.algorithm.kl_estimator"] == "k3"
    assert found.settings["tracker"] == ["console", "wandb"]
    assert found.settings["placement.num_gpus"] == 4
    assert found.settings["generator.max_context_length"] == 192


def test_words_of_a_shell_are_read_and_what_it_computes_is_unknown(converted: Callable[..., Migration]) -> None:
    found = converted("verl", "dapo.sh", VERL["dapo.sh"])
    assert found.settings["trainer.algorithm.eps_clip_low"] == 0.2
    assert found.settings["model.path"] == MODEL
    assert found.unknown["data.val_files"] == "$HOME/data/test.parquet"
    assert found.settings["placement.num_gpus"] == 16
    assert found.settings["placement.num_nodes"] == 2
    skyrl = converted("skyrl", "dapo.sh", SKYRL["dapo.sh"])
    assert skyrl.settings["data.train"] == [DATA]
    assert skyrl.settings["placement.num_gpus"] == 4
    assert skyrl.unknown == {"trainer.run_name": "dapo_$(date +%s)"}


@pytest.mark.parametrize(
    ("trainer", "name", "text", "unknown"),
    [
        ("trl", "epochs.py", "GRPOConfig(num_train_epochs=args.epochs)", {"num_train_epochs"}),
        ("trl", "loss.py", "GRPOConfig(loss_type=args.loss)", {"loss_type"}),
        ("trl", "norm.py", "GRPOConfig(loss_type='dr_grpo', max_completion_length=n)", {"max_completion_length"}),
        ("skyrl", "prompt.sh", "python -m main trainer.max_prompt_length=$(tokens)", {"trainer.max_prompt_length"}),
        (
            "skyrl",
            "response.sh",
            "python -m main generator.sampling_params.max_generate_length=$(tokens)",
            {"generator.sampling_params.max_generate_length"},
        ),
    ],
)
def test_a_program_that_computes_what_others_follow_from_leaves_the_rest_to_be_converted(
    trainer: str, name: str, text: str, unknown: set[str], converted: Callable[..., Migration]
) -> None:
    found = converted(trainer, name, text)
    assert {*found.unknown} == unknown
    assert unknown.isdisjoint(found.by_hand)
    assert found.settings["trainer.policy.optimizer.lr"] == 1e-6


def test_what_the_file_leaves_out_is_their_default_and_said(converted: Callable[..., Migration]) -> None:
    found = converted("skyrl", "gsm8k.yaml", SKYRL["gsm8k.yaml"])
    assert "generator.max_turns" in found.assumed
    assert "Not in the file, but what SkyRL would take: " in report_of(found, "skyrl")
    assert found.unknown == {"trainer.ckpt_path": "${oc.env:HOME}/ckpts/one"}
    assert "trainer.train_batch_size" not in found.assumed


def test_a_supervised_configuration_is_that_of_skyrl_sft(converted: Callable[..., Migration]) -> None:
    text = (
        "model_name_or_path: m\ndataset_name: trl-lib/Capybara\nlearning_rate: 2e-5\nnum_train_epochs: 2\npacking: true\n"
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nmax_length: 2048\nlr_scheduler_type: cosine\n"
        "dataset_num_proc: 8\n"
    )
    found = converted("trl", "sft.yaml", text, schema=SFTConfig)
    assert found.settings == {
        "trainer.batch_size": 32,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.optimizer.schedule": "cosine",
        "trainer.optimizer.lr": 2e-5,
        "trainer.num_epochs": 2,
        "trainer.layout": "packed",
        "data.train": ["trl-lib/Capybara:train"],
        "data.validation": [],
        "data.max_length": 2048,
        "model.path": "m",
    }
    assert found.no_equal == {"dataset_num_proc": 8}


def test_the_preset_says_the_same(converted: Callable[..., Migration]) -> None:
    found = converted("verl", "grpo.yaml", VERL["grpo.yaml"])
    text = preset_of(found)
    assert text.startswith("# @package _global_\n# Groups are chosen on the command line: platform=gpu tracker=")
    tree = yaml.safe_load(text)
    assert tree["trainer"]["algorithm"]["policy_loss"] == {"_target_": "dual_clip", "clip_ratio_c": 3.0}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(8)
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [1", "is not valid yaml"),
        ("a.yaml", "- 1\n- 2\n", "a mapping of settings is expected, not list"),
        ("a.yaml", "a: !!python/object/apply:os.system [echo]\n", "is not valid yaml"),
        ("a.yaml", BOMB, "more than 20,000 values"),
        ("a.yaml", "a: &a {b: *a}\n", "is not valid yaml"),
        ("a.json", "{", "is not valid json"),
        ("a.json", "[" * 100_000, "is not valid json"),
        ("a.py", "def f(:\n", "is not valid py"),
        ("a.py", "(" * 5_000 + ")" * 5_000, "is not valid py"),
        ("a.py", "x = 1\n", "it calls none of GRPOConfig"),
        ("a.py", "import trl\ntrl.SFTConfig(learning_rate=1)\n", "skyrl-sft reads the others"),
        ("a.sh", "echo hello\n", "no command of it is"),
        ("a.toml", "a = 1\n", "must end in one of"),
        ("a.yaml", "a: 1\n" * (MAX_BYTES // 5 + 1), "a configuration has at most"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        read_settings(path)


def test_a_name_that_is_bound_twice_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "LR = 1e-5\nif x:\n    LR = 2e-5\nM = M2 = 'm'\n\ndef f(B):\n    B = 3\nN = 4\nfor N in range(3): pass\n"
        "DEEP = DEEP2\nDEEP2 = DEEP\n"
        "GRPOConfig(learning_rate=LR, beta=B, num_generations=N, epsilon=DEEP, seed=1 / 0, **more)\n"
    )
    given = read_settings(path)
    assert given.values == {}
    assert {*given.unknown} == {"learning_rate", "beta", "num_generations", "epsilon", "seed", "**more"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from"], "takes a trainer and a file"),
        (["--from", "nemo", "a.yaml"], "takes a trainer and a file"),
        (["--from", "trl", "a.yaml", "seed=1"], "takes a trainer and a file"),
        (["--from", "trl", "a.yaml", "--gpus", "many"], "must be a number of devices"),
        (["--from", "trl", "nowhere.yaml"], "cannot be read"),
    ],
)
def test_wrong_arguments_end_with_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments, config_name="config") == 2
    assert said in capsys.readouterr().err


def test_verl_is_no_supervised_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n")
    assert main(["--from", "verl", str(tmp_path / "a.yaml")], config_name="sft") == 2
    assert "reinforcement learning alone" in capsys.readouterr().err


@pytest.mark.slow
def test_the_console_command_prints_what_a_shell_takes(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(VERL["grpo.yaml"].replace("DATA", DATA).replace("MODEL", MODEL))
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_train.main", command.FLAG, "verl", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (tmp_path / "run.sh").write_text(done.stdout.replace("skyrl-train", "printf '%s\\n'", 1))
    said = subprocess.run(["sh", "run.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "trainer.train_batch_size=64" in said.stdout.splitlines()
    assert "trainer.algorithm.policy_loss={_target_: dual_clip,clip_ratio_c: 3.0}" in said.stdout.splitlines()
    assert {each.name for each in tmp_path.iterdir()} == {"grpo.yaml", "run.sh"}, "no run folder"
