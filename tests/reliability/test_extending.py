"""The code of docs/extending.md and docs/add_*.md is that of examples/plugins/, and trains: one custom part of each kind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from skyrl_train.config import Config
from skyrl_train.config.fields import parts_of
from tests.support import warm_python
from tests.support.command_runs import RAY, records

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "examples" / "plugins"
EXPERIMENT = ("--config-dir", str(PLUGINS / "conf"), "+experiment=plugins")


def run(output: Path, *arguments: str, command: str = "main") -> list[dict[str, float]]:
    paths = (ROOT, ROOT / "examples")
    environ = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PLUGINS_DATA": str(PLUGINS / "words.txt")}
    words = ("-m", f"skyrl_train.{command}", *arguments, f"hydra.run.dir={output}")
    finished = warm_python.run(*words, environment=environ, folder=output.parent)
    assert finished.returncode == 0, finished.stdout
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def rollouts(output: Path) -> list[dict[str, object]]:
    return records(output, "rollouts/train_step_000001.parquet")


def test_the_guide_shows_the_example_package_as_it_stands() -> None:
    pages = [ROOT / "docs" / "extending.md", *sorted((ROOT / "docs").glob("add_*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    shown = dict(re.findall(r"^```(?:python|yaml)\n# (examples/\S+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    files = [*PLUGINS.glob("*.py"), *PLUGINS.glob("conf/**/*.yaml")]
    expected = {str(file.relative_to(ROOT)) for file in files} - {"examples/plugins/__init__.py"}
    assert set(shown) == expected
    for name, code in shown.items():
        assert code == (ROOT / name).read_text(), f"{name} differs from what the pages on custom parts show"


def test_the_guide_names_every_setting_that_chooses_a_part() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    for path in parts_of(Config):
        of_a_package = path == "data.reasoning_gym.tasks"  # whose names are all that it can be
        assert f"`{path}`" in text or path.startswith("critic.optimizer.") or of_a_package, path


def check_plugins(output: Path, metrics: list[dict[str, float]]) -> None:
    assert [step["failures/count"] for step in metrics] == [0, 0]
    for step in metrics:
        assert step["plugins/longest_turn"] >= step["response_length/mean"] / step["turns/mean"]
        assert 0 <= step["plugins/long_turns"] <= 1
    # The schedule halves the rate twice over four optimizer steps: at progress 0, 1/4, 1/2, 3/4.
    assert [step["policy/lr"] for step in metrics] == [1e-4, 5e-5]
    assert (output / "handover").is_dir(), "weights came by the custom transport"
    assert not list((output / "handover").iterdir())
    diary = (output / "diary.txt").read_text().split("\n")
    assert diary == ["start 0/2", "step 1/2", "evaluation 2/2", "step 2/2", "checkpoint 2/2", "end 2/2", ""]
    lines = [json.loads(line) for line in (output / "rewards.jsonl").read_text().splitlines()]
    assert lines == [{"step": index + 1, "reward/mean": step["reward/mean"]} for index, step in enumerate(metrics)]
    for record in rollouts(output):
        assert "How many letters are in" in str(record["prompt"])
        assert len(record["turns"]) == 1 or record["sample"] == 0  # type: ignore[arg-type]
        assert float(str(record["reward"])) in (0.0, 0.25, 0.5, 1.0, 1.25)


@pytest.mark.slow
def test_one_custom_part_of_each_kind_trains_in_one_process(tmp_path: Path) -> None:
    check_plugins(tmp_path / "run", run(tmp_path / "run", *EXPERIMENT))


@pytest.mark.nightly
@pytest.mark.cluster
def test_one_custom_part_of_each_kind_trains_on_two_ranks(tmp_path: Path) -> None:
    engine = "generator.backend={_target_: plugins.engines:Apart, repetition_penalty: 0.0}"
    metrics = run(tmp_path / "run", *EXPERIMENT, "placement=cpu_2", "strategy=fsdp2", *RAY[1:], engine)
    check_plugins(tmp_path / "run", metrics)
    actors = json.loads((tmp_path / "run" / "actors.json").read_text())
    assert len(actors["engine"]) == 1, "the custom engine has an actor of its own"
    syncs = [json.loads(line) for line in (tmp_path / "run" / "weight_sync.jsonl").read_text().splitlines()]
    assert [sync["version"] for sync in syncs] == [0, 1, 2]
    assert syncs[0]["probe_difference"] < 1e-3, "it computes with the weights that the custom transport brought"


@pytest.mark.nightly
@pytest.mark.slow
def test_custom_parts_of_supervised_training_train(tmp_path: Path) -> None:
    output = tmp_path / "run"
    metrics = run(output, "--config-dir", str(PLUGINS / "conf"), "+experiment=plugins_sft", command="main_sft")
    for step in metrics:
        assert step["plugins/trained_share"] == step["batch/trained_tokens"] / step["batch/tokens"]
    assert [step["policy/lr"] for step in metrics] == [1e-4, 5e-5, 2.5e-5]
    diary = (output / "diary.txt").read_text().split()
    assert diary == ["start", "0/3", "step", "1/3", "step", "2/3", "step", "3/3", "checkpoint", "3/3", "end", "3/3"]
    lines = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    assert lines == [{"step": step["step"], "train/loss": step["train/loss"]} for step in metrics]


@pytest.mark.nightly
@pytest.mark.slow
def test_reward_of_the_guide(tmp_path: Path) -> None:
    sizes = ("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "trainer.critic_mini_batch_size=2")
    few = ("generator.n_samples_per_prompt=4", "trainer.total_steps=1", "data.validation=[]")
    reward = "environment.env_class={_target_: plugins.rewards:ShortAnswers, per_character: 0.001}"
    run(tmp_path / "run", "platform=cpu", *sizes, *few, reward)
    for record in rollouts(tmp_path / "run"):
        length = sum(len(turn["text"]) for turn in record["turns"])  # type: ignore[attr-defined]
        unshaped = float(str(record["reward"])) + 0.001 * length
        assert min(abs(unshaped - level) for level in (0.0, 0.5, 1.0)) < 0.02
