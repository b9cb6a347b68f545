"""What an evaluation takes of the run whose export or checkpoint it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from skyrl_train.runs.cli.hydra_files import with_arguments_of_run

TYPED = [
    "data.train=questions.jsonl",
    "data.prompt_column=question",
    "environment.reward=my_code:score",
    "generator.sampling.max_generate_length=16",
    "trainer.train_batch_size=2",
    "trainer.total_steps=2",
    "model.path=base",
    "tracker.wandb.project=mine",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run", TYPED)


def recorded(folder: Path, typed: list[str], root: str = "config") -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(typed))
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"job": {"config_name": root}}}))
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["model.path={run}/export"],
        ["trainer.resume_mode=from_path", "trainer.resume_path={run}"],
        ["trainer.resume_path={run}/checkpoints/global_step_2", "model.path=elsewhere"],
    ],
)
def test_an_evaluation_takes_data_reward_and_sampling_of_the_run_that_it_names(
    names: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [name.format(run=run) for name in names]
    assert with_arguments_of_run(arguments) == [*TYPED[:5], *arguments]
    assert capsys.readouterr().err == f"evaluated as {run} was trained: {' '.join(TYPED[:5])}\n"


def test_what_the_command_states_is_not_taken(run: Path) -> None:
    arguments = [f"model.path={run}/export", "data=word_problems", "+environment.reward=other:score"]
    assert with_arguments_of_run(arguments) == [*TYPED[3:5], *arguments]
    stated = [f"model.path={run}/export", "+experiment=gsm8k_multiturn"]
    assert with_arguments_of_run(stated) == stated


def test_nothing_is_taken_where_no_run_of_reinforcement_learning_left_the_model(tmp_path: Path) -> None:
    recorded(tmp_path / "sft", ["data.train=[a]"], root="sft")
    for arguments in ([f"model.path={tmp_path}/sft/export"], ["model.path=builtin:tiny_qwen2"], ["seed=1"], []):
        assert with_arguments_of_run(arguments) == arguments


def test_a_secret_that_was_not_recorded_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "run", ["generator=http", "generator.http.url=http://<redacted>@h:9"])
    arguments = [f"model.path={folder}/export"]
    assert with_arguments_of_run(arguments) == ["generator=http", *arguments]
    said = "To be stated here, as no secret is recorded: generator.http.url=http://<redacted>@h:9\n"
    assert capsys.readouterr().err.endswith(said)
