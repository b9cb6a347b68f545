"""The files under conf/ against the schema."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from skyrl_train.config import Config
from skyrl_train.config.door import read_root
from skyrl_train.config.environment import AGENT_RULES
from skyrl_train.config.fields import walk
from skyrl_train.config.models import ModelConfig, PlacementConfig, PlatformConfig, SamplingConfig
from skyrl_train.config.rules import run_rules, validate_config
from skyrl_train.data import GSM8K_ENV_CLASS
from skyrl_train.rollout.rewards import Judge
from skyrl_train.runs.cli import machine, resolvers
from skyrl_train.runs.cli.composition import load_node, plain_values
from skyrl_train.runs.cli.conf_folder import conf_dir
from tests.support.composing import composed

FILES = sorted(
    path
    for path in conf_dir().glob("*/*.yaml")
    if path.parent.name != "hydra" and not path.parent.name.startswith("sft_") and not path.stem.startswith("sft_")
)
"""Those of reinforcement learning; `test_conf_sft.py` has the others."""
EXPERIMENTS = sorted(path.stem for path in FILES if path.parent.name == "experiment")
PLATFORMS = ("cpu", "gpu")
ASKS_FOR_MORE = {
    "algorithm=distillation": ["reference.model.path=hub/teacher"],
    "data=reasoning_gym": ["environment=reasoning_gym"],
    "batching=auto": ["trainer.memory_budget_gb=1"],
    "environment=text2sql": ["environment.env_class.db_path=/databases"],
    "generator=agent": ["generator.agent_loop.run=json:dumps"],
    "generator=http": ["generator.http.url=http://127.0.0.1:8000"],
    "generator=replay": ["generator.replay_path=."],
    "generator=vllm": ["placement=ray"],
    "strategy=ddp": ["placement=ray"],
    "strategy=fsdp2": ["placement=ray"],
    "placement=inline": ["strategy=single", "generator=hf"],
    "placement=cpu_2": ["strategy=fsdp2"],
    "placement=gpu_2x8": ["strategy=fsdp2"],
    "placement=gpu_2x8_split": ["strategy=fsdp2", "generator=vllm"],
    "placement=gpu_8_colocated": ["strategy=fsdp2"],
    "placement=gpu_8_split": ["strategy=fsdp2"],
}
"""Choices that do not stand alone, and what goes with them."""


def choice(file: Path) -> str:
    prefix = "+" if file.parent.name == "experiment" else ""
    return f"{prefix}{file.parent.name}={file.stem}"


def leaves(node: Any, prefix: str) -> list[str]:
    """Dotted names of what a YAML file sets, the arguments of a part left out."""
    if not isinstance(node, Mapping) or "_target_" in node:
        return [prefix.rstrip(".")]
    return [leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}{key}.") if key != "defaults"]


def package(file: Path) -> str:
    """Where a group file's content goes: its `# @package` line, else the group's name."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    name = first.removeprefix("# @package").strip() if first.startswith("# @package") else file.parent.name
    return "" if name == "_global_" else f"{name}."


def test_cpu_without_choices_is_the_schema_but_for_layout_rate_tracker_and_folder() -> None:
    settings = ["tracker=[]", "output_dir=outputs", "derived=[]", "trainer.layout=padded"]
    config = load_node(composed("platform=cpu", "trainer.policy.optimizer.lr=1e-6", *settings), Config)
    assert config == Config()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_layout_is_predicted_on_every_platform(platform: str) -> None:
    assert composed(f"platform={platform}").trainer.layout == "auto"
    assert composed(f"sft_platform={platform}", root="sft").trainer.layout == "auto"


def test_everything_in_the_schema_can_be_set_without_a_plus_sign() -> None:
    node = composed("platform=cpu")
    for field in walk(Config):
        parent, _, name = f"root.{field.path}".rpartition(".")
        section = node
        for part in parent.split(".")[1:]:
            section = section[part]
        assert name in section


@pytest.mark.parametrize("file", FILES, ids=choice)
def test_every_leaf_of_a_file_is_a_setting(file: Path) -> None:
    known = {field.path for field in walk(Config) if not field.section}
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    # A setting may itself be a mapping, whose keys are the user's.
    assert not [leaf for leaf in leaves(content, package(file)) if not {leaf, leaf.rpartition(".")[0]} & known]


@pytest.mark.parametrize(
    ("platform", "file"),
    [
        pytest.param(platform, file, id=f"{platform}-{choice(file)}")
        for file in FILES
        for platform in PLATFORMS
        if file.parent.name not in ("algorithm", "experiment")
        and (platform == "cpu" or "per_platform" in file.read_text(encoding="utf-8"))
    ],
)
def test_every_choice_composes_and_breaks_no_rule(file: Path, platform: str) -> None:
    """Experiments: below. Algorithms: `tests/unit/algorithms/test_preset_files.py`."""
    first = [] if file.parent.name == "platform" else [f"platform={platform}"]
    loaded = read_root(plain_values(composed(*first, choice(file), *ASKS_FOR_MORE.get(choice(file), []))), Config)
    assert [str(problem) for problem in (*loaded.violations, *validate_config(loaded.config))] == []


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_fits_every_platform(experiment: str, platform: str) -> None:
    more = ASKS_FOR_MORE.get(f"+experiment={experiment}", [])
    loaded = read_root(plain_values(composed(f"+experiment={experiment}", f"platform={platform}", *more)), Config)
    assert [str(problem) for problem in (*loaded.violations, *validate_config(loaded.config))] == []
    assert loaded.config.platform.name == platform


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name in ("data", "experiment")], ids=choice)
def test_evaluation_samples_as_training_does_with_every_preset(file: Path) -> None:
    more = ASKS_FOR_MORE.get(choice(file), [])
    node = composed("platform=cpu", choice(file), *more, "generator.sampling.max_generate_length=16")
    generator = load_node(node, Config).generator
    assert generator.eval_sampling.max_generate_length == 16
    greedy = "temperature=0.0 (training: 1.0)" if file.stem.startswith("smollm2") else ""
    assert generator.eval_differences == greedy


def test_evaluation_follows_all_of_training_but_the_temperature_unless_told_otherwise() -> None:
    sampling = "generator.sampling={temperature: 0.5, top_p: 0.9, top_k: 5, min_p: 0.1, stop: [a, b]}"
    generator = load_node(composed("platform=cpu", sampling, "generator.eval_sampling.top_k=1"), Config).generator
    assert generator.eval_sampling == SamplingConfig(top_p=0.9, top_k=1, min_p=0.1, stop=("a", "b"))
    assert generator.eval_differences == "temperature=1.0 (training: 0.5), top_k=1 (training: 5)"


def test_the_cpu_platform_is_small_and_in_one_process() -> None:
    config = load_node(composed("+experiment=gsm8k_multiturn", "platform=cpu"), Config)
    assert config.model.path == "builtin:tiny_qwen2"
    assert config.data.train == ("builtin:word_problems/train",)
    assert config.environment.env_class == "word_problems"
    assert config.generator.backend == "hf"
    assert config.placement.backend == "inline"
    assert list(run_rules(config, machine.RL_MACHINE_RULES)) == []


def test_vllm_in_one_process_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_node(
        composed("+experiment=gsm8k_multiturn", "platform=cpu", "generator=vllm", "placement=inline"), Config
    )
    assert validate_config(config) == []
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    (missing,) = run_rules(config, machine.RL_MACHINE_RULES)
    assert missing.field == "generator.backend"
    assert "extra `cpu`" in missing.remedy
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    assert list(run_rules(config, machine.RL_MACHINE_RULES)) == []


def test_what_is_missing_is_told_on_ray_too_where_all_of_it_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["+experiment=gsm8k_multiturn", "platform=cpu", "generator=vllm", "placement=ray"]
    config = load_node(composed(*settings, "model.attention=flash_attention_2"), Config)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    found = list(run_rules(config, machine.RL_MACHINE_RULES))
    assert [violation.field for violation in found] == ["model.attention", "generator.backend"]
    assert found[0].rule == "needs a GPU"
    elsewhere = load_node(composed(*settings, "placement.ray_address=head:6379"), Config)
    assert list(run_rules(elsewhere, machine.RL_MACHINE_RULES)) == []


def test_flash_attention_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ModelConfig(attention="flash_attention_2")
    on_gpu = PlatformConfig(name="gpu", device="cuda:0")
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    (missing,) = machine._attention(chosen, PlacementConfig(), on_gpu)
    assert missing.rule == "needs the package flash-attn, which is not installed here"
    assert "pip install flash-attn" in missing.remedy
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if name == "flash_attn" else None)
    assert list(machine._attention(chosen, PlacementConfig(), on_gpu)) == []


def test_the_gpu_platform_is_qwen_on_gsm8k_with_vllm_on_ray() -> None:
    config = load_node(composed("+experiment=gsm8k_multiturn", "platform=gpu"), Config)
    assert config.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.environment.env_class == GSM8K_ENV_CLASS == "gsm8k_multi_turn"
    assert config.generator.backend == "vllm"
    assert (config.placement.backend, config.placement.auto) == ("ray", True)
    assert (config.trainer.layout, config.trainer.micro_batching) == ("auto", "auto")
    assert config.trainer.train_batch_size > load_node(composed("platform=cpu"), Config).trainer.train_batch_size


def test_gsm8k_is_taken_from_its_files_where_they_are_and_from_the_hub_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_DATA", str(tmp_path))
    from_hub = load_node(composed("platform=gpu"), Config).data
    assert (from_hub.train, from_hub.held_out) == (("openai/gsm8k/main:train",), ("openai/gsm8k/main:test",))
    assert from_hub.row_format == "gsm8k"
    (tmp_path / "gsm8k").mkdir()
    files = [tmp_path / "gsm8k" / f"{split}.parquet" for split in ("train", "validation")]
    for file in files:
        file.touch()
    from_files = load_node(composed("platform=gpu"), Config).data
    assert (*from_files.train, *from_files.held_out) == tuple(map(str, files))


def test_the_preset_of_a_judge_states_all_that_a_judge_takes_as_it_would_be_unless_stated() -> None:
    reward = load_node(composed("platform=cpu", "environment=judge"), Config).environment.reward
    assert isinstance(reward, Mapping)
    parameters = inspect.signature(Judge).parameters
    assert {*reward} == {"_target_", "weight", *parameters}
    for name, one in parameters.items():
        usual = list(one.default) if isinstance(one.default, tuple) else one.default
        assert name in ("url", "model", "cache") or reward[name] == usual, name


@pytest.mark.parametrize("found", PLATFORMS)
def test_the_platform_is_detected_unless_stated(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(resolvers, "detect_platform", lambda: SimpleNamespace(name=found, reason="a test"))
    other = {"cpu": "gpu", "gpu": "cpu"}[found]

    assert load_node(composed(), Config).platform.name == found
    assert load_node(composed("+experiment=gsm8k_multiturn"), Config).platform.name == found
    assert load_node(composed(f"platform={other}"), Config).platform.name == other


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model=qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("environment=aime", "aime"),
        ("generator=replay", "replay"),
        ("generator.backend=replay", "replay"),
        ("strategy=fsdp2", "fsdp2"),
        ("placement=ray", "ray"),
        ("placement.backend=ray", "ray"),
    ],
)
@pytest.mark.parametrize("first", [[], ["+experiment=gsm8k_multiturn"]])
def test_the_command_line_wins_over_platform_and_experiment(first: list[str], argument: str, expected: str) -> None:
    node = composed("platform=cpu", *first, argument)
    fields = {"model": "path", "environment": "env_class", "generator": "backend", "strategy": "name"}
    group = argument.partition("=")[0].partition(".")[0]
    assert node[group][fields.get(group, "backend")] == expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("run=json:dumps", {"run": "json:dumps"}),
        ('command=[python, agent.py, "{task_file}"]', {"command": ["python", "agent.py", "{task_file}"]}),
        ("url=http://127.0.0.1:9000/play", {"url": "http://127.0.0.1:9000/play"}),
    ],
)
@pytest.mark.parametrize("further", [[], ["+experiment=gsm8k_multiturn"], ["generator.backend=vllm", "placement=ray"]])
def test_agents_play_with_any_program_experiment_and_engine(
    program: str, expected: dict[str, Any], further: list[str]
) -> None:
    node = composed("platform=cpu", "generator=agent", f"generator.agent_loop.{program}", *further)
    config = load_node(node, Config)
    assert isinstance(config.generator.agent_loop, Mapping)
    assert {**config.generator.agent_loop, **expected} == config.generator.agent_loop
    assert (config.environment.env_class, config.generator.is_step_wise) == ("reported", True)
    assert config.generator.max_turns == 20
    assert config.generator.backend == ("vllm" if further[1:] else "hf")
    assert validate_config(config) == []


def test_agents_report_rewards_unless_something_else_scores_them() -> None:
    settings = ["platform=cpu", "generator=agent", "generator.agent_loop.run=json:dumps", "data.train=rows.jsonl"]
    for further, expected in (
        ([], "reported"),
        (["environment.reward=json:dumps"], "single_turn"),
        (["environment=gsm8k"], "gsm8k"),
    ):
        assert load_node(composed(*settings, *further), Config).environment.env_class == expected
    bare = {"generator.agent_loop": "{_target_: agent, run: json:dumps}"}
    node = composed("platform=gpu", *(f"{name}={value}" for name, value in bare.items()))
    assert load_node(node, Config).environment.env_class == "reported"
    node = composed("platform=gpu", "generator=agent")
    (violation,) = run_rules(load_node(node, Config), AGENT_RULES)
    assert "write generator=agent generator.agent_loop.run=my_code:play" in violation.remedy


def test_trackers_combine() -> None:
    tracker = load_node(composed("tracker=[console,wandb]"), Config).tracker
    assert (tracker.console.enabled, tracker.wandb.enabled, tracker.tensorboard.enabled) == (True, True, False)
    tracker = load_node(composed("tracker=tensorboard"), Config).tracker
    assert (tracker.console.enabled, tracker.wandb.enabled, tracker.tensorboard.enabled) == (False, False, True)


def test_a_value_per_platform_fails_for_a_platform_it_does_not_name() -> None:
    loaded = read_root(plain_values(composed("platform=cpu", "seed='${per_platform:{gpu:1}}'")), Config)
    (violation,) = loaded.violations
    assert violation.field == "seed"
    assert "per_platform has no value for platform 'cpu', only for gpu" in violation.remedy


def test_small_numbers_on_the_command_line_are_numbers() -> None:
    assert load_node(composed("trainer.policy.optimizer.lr=1e-6"), Config).trainer.policy.optimizer.lr == 1e-6
