"""`skyrl-view --terminal`: samples of real files of rollouts, whatever a model wrote."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.telemetry.records import write_failed_rollouts, write_rollouts
from skyrl_train.types import RolloutBatch, StopReason, Turn
from skyrl_train.view.__main__ import main
from skyrl_train.view.terminal import show
from tests.support.tracker_cases import rollouts


def run_of(folder: Path, *, text: str = "fine", steps: tuple[int, ...] = (1, 2)) -> Path:
    """Two steps; in the last the second prompt's sample says `text` and its rewards differ."""
    batch = rollouts()
    turn = Turn(
        added_token_ids=[1],
        response_token_ids=[2],
        stop_reason=StopReason.STOP,
        response_text=text,
        reward=0.0,
        weight_versions=((0, 0),),
    )
    changed = (*batch.trajectories[:3], replace(batch.trajectories[3], turns=(turn,)))
    for step in steps:
        write_rollouts(folder / "rollouts", replace(batch, trajectories=changed), purpose="train", global_step=step)
    (folder / "metrics.jsonl").write_text('{"step": 2}\n')
    return folder


def printed(folder: Path, **options: int) -> str:
    output = io.StringIO()
    show([folder], file=output, **options)
    return output.getvalue()


def test_the_last_step_is_shown_with_prompts_that_differ_first(tmp_path: Path) -> None:
    text = printed(run_of(tmp_path))
    assert f"{tmp_path.name}: train, step 2, 4 samples, 1 failed" in text
    assert text.index("second") < text.index("other") < text.index("fine")
    assert "environment_error" in text
    assert "step 1" in printed(tmp_path, step=1)
    assert "fine" not in printed(tmp_path, limit=2)


def test_what_a_model_wrote_reaches_the_terminal_as_text_alone(tmp_path: Path) -> None:
    text = printed(run_of(tmp_path, text="\x1b[2J[bold]gone[/bold]\x07\u202e"))
    assert "\\x1b[2J[bold]gone[/bold]" in text
    assert not set(text) & set("\x1b\x07\u202e")


def test_failed_steps_are_shown_and_what_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch: RolloutBatch = rollouts()
    folder = run_of(tmp_path)
    pairs = [(batch.prompts[0], batch.trajectories[0])]
    write_failed_rollouts(folder / "rollouts", pairs, global_step=3, error="NonFiniteError: loss")
    assert "failed, step 3, 1 sample, 0 failed" in printed(folder)
    with pytest.raises(SkyrlTrainError, match="has no rollouts of step 9"):
        printed(folder, step=9)
    assert main([str(folder), "--terminal", "--step", "9"]) == 2
    assert "has no rollouts of step 9" in capsys.readouterr().err
    assert main([str(folder), "--terminal"]) == 0
    assert "train, step 2" in capsys.readouterr().out
