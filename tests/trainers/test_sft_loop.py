"""Supervised runs: what a step leaves behind, resume, the best checkpoint, early stop, and how a run ends."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import CheckpointError, ConfigError, NonFiniteError, StopRequested
from skyrl_train.telemetry import Metric, Sum, read_metrics
from skyrl_train.trainers.checkpoints.folder import verify
from skyrl_train.trainers.evaluation.sft_evaluate import LossHistory, evaluation_line
from skyrl_train.trainers.observers import RunEvent, StepFacts
from tests.support.sft_runs import (
    FakeSFTRun,
    Killed,
    RecordingLearner,
    make_data,
    raise_at,
    records_without_timings,
    sft_run,
    workers,
)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut is tested here, and it takes most of the time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def records(run: FakeSFTRun) -> list[dict[str, Any]]:
    return records_without_timings(run.folder.metrics_file)


def exported(run: FakeSFTRun) -> list[float]:
    content: list[float] = json.loads((run.folder.export / "model.json").read_text())
    return content


def test_a_run_records_every_step_and_leaves_an_export(tmp_path: Path) -> None:
    run = sft_run(tmp_path)
    run.run()
    steps = records(run)
    assert [record["step"] for record in steps] == list(range(9))
    assert [record["step"] for record in steps if "eval/loss" in record] == [0, 3, 6, 8]
    last = steps[-1]
    assert last["total/examples"] == 32
    assert last["total/optimizer_steps"] == 8
    assert last["batch/examples"] == 4
    assert {"train/loss", "policy/lr", "policy/grad_norm", "batch/trained_tokens"} <= last.keys()
    assert exported(run) == [run.learner.weight, 8]
    assert json.loads(run.folder.complete_file.read_text()) == {"global_step": 8}
    assert "loss" in run.output.getvalue()


def test_time_spent_waiting_for_data_is_told_apart(tmp_path: Path) -> None:
    run = sft_run(tmp_path)
    run.run()
    record = read_metrics(run.folder.metrics_file)[-1]
    assert {"timing/collate", "timing/update", "timing/step", "timing/tokens_per_s"} <= record.keys()


def test_a_complete_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    sft_run(tmp_path).run()
    again = sft_run(tmp_path)
    assert again.run() is None
    assert "nothing to do" in again.output.getvalue()


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))])
def test_a_run_killed_anywhere_is_identical_to_one_that_was_not(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    settings = {
        "layout": rng.choice(["padded", "packed"]),
        "incomplete_step": rng.choice(["keep", "wrap", "drop"]),
        "ckpt_interval": rng.choice([0, 1, 2, 3]),
    }
    alone = sft_run(tmp_path / "alone", **settings)
    alone.run()
    for _ in range(2):
        killed_at = rng.randint(1, alone.total_steps)
        learner = RecordingLearner(on_update=raise_at(killed_at, Killed()))
        try:
            sft_run(tmp_path / "run", learner=learner, **settings).run()
        except Killed:
            assert workers() == []
    run = sft_run(tmp_path / "run", **settings)
    run.run()
    assert records(run) == records(alone)
    assert exported(run) == exported(alone)


def test_a_kill_between_record_and_checkpoint_repeats_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = sft_run(tmp_path / "alone", keep_best=True)
    alone.run()
    run = sft_run(tmp_path / "run", keep_best=True)
    begin = run.checkpoints.begin

    def killed_before(step: int) -> Any:
        if step == 6:
            raise Killed
        return begin(step)

    monkeypatch.setattr(run.checkpoints, "begin", killed_before)
    with pytest.raises(Killed):
        run.run()
    assert read_metrics(run.folder.metrics_file)[-1]["step"] == 6
    again = sft_run(tmp_path / "run", keep_best=True)
    again.run()
    assert records(again) == records(alone)
    assert [path.name for path in (tmp_path / "run" / "best").glob("step_*")] == [
        path.name for path in (tmp_path / "alone" / "best").glob("step_*")
    ]


def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    def on_update(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    alone = sft_run(tmp_path / "alone")
    alone.run()
    run = sft_run(tmp_path / "run", learner=RecordingLearner(on_update=on_update))
    with pytest.raises(StopRequested) as stop:
        run.run()
    assert stop.value.global_step == 3
    verify(run.folder.checkpoints / "step_000003")
    resumed = sft_run(tmp_path / "run")
    resumed.run()
    assert resumed.learner.batches == alone.learner.batches[3:]
    assert records(resumed) == records(alone)


def test_a_step_that_is_not_finite_ends_the_run_and_says_where_to_go_on(tmp_path: Path) -> None:
    run = sft_run(tmp_path, learner=RecordingLearner(fail_at=4))
    with pytest.raises(NonFiniteError, match=r"training step 4 was refused: .*step_000002; it was not touched"):
        run.run()
    assert [record["step"] for record in records(run)] == [0, 1, 2, 3]


def test_other_data_is_not_resumed(tmp_path: Path) -> None:
    sft_run(tmp_path, num_steps=4).run()
    with pytest.raises(CheckpointError, match="changed since"):
        sft_run(tmp_path, data=make_data((5, 6, 7, 8, 9, 10)), num_steps=4).run()


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"batch_size": 5}, False),
        ({"incomplete_step": "drop"}, False),
        ({"num_steps": 9}, False),  # the learning rate is scheduled over the run
        ({"eval_interval": 1}, True),
        ({"async_batch_collation": False}, True),
        ({"layout": "packed"}, True),
        ({"keep_best": True}, True),
    ],
)
def test_settings_that_training_depends_on_are_kept(tmp_path: Path, change: dict[str, Any], allowed: bool) -> None:
    first = {"num_steps": 8, "ckpt_interval": 2}
    with pytest.raises(Killed):
        sft_run(tmp_path, learner=RecordingLearner(on_update=raise_at(5, Killed())), **first).run()
    run = sft_run(tmp_path, **{**first, **change})
    if allowed:
        run.run()
        assert run.learner.num_loads == 1
    else:
        with pytest.raises(ConfigError, match="must be as it was"):
            run.run()


LOSSES = {3: 0.5, 6: 0.4, 9: 0.6, 12: 0.45, 15: 0.41, 18: 0.3, 20: 0.7}


def losing(step: int) -> float:
    """Held-out loss after `step` steps: 0.4 at step 6 is the best for a while."""
    return LOSSES.get(step, 1.0)


@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_with_the_lowest_held_out_loss(tmp_path: Path) -> None:
    run = sft_run(tmp_path, learner=RecordingLearner(loss_of=losing), num_steps=15, keep_best=True)
    result = run.run()
    assert result is not None
    assert result.history.best_step == 6
    assert [path.name for path in run.folder.best.glob("step_*")] == ["step_000006"]
    verify(run.folder.best / "step_000006")
    assert exported(run)[1] == 15


@pytest.mark.slow
def test_the_best_weights_are_exported_where_asked(tmp_path: Path) -> None:
    run = sft_run(tmp_path, learner=RecordingLearner(loss_of=losing), num_steps=15, export="best")
    run.run()
    assert exported(run)[1] == 6
    assert "exporting the weights of" in run.output.getvalue()


def test_without_export_there_is_none(tmp_path: Path) -> None:
    run = sft_run(tmp_path, num_steps=2, export="none")
    run.run()
    assert not run.folder.export.exists()


@pytest.mark.slow
def test_a_run_stops_early_when_evaluations_bring_no_lower_loss(tmp_path: Path) -> None:
    run = sft_run(
        tmp_path, learner=RecordingLearner(loss_of=losing), num_steps=20, ckpt_interval=0, early_stopping_patience=2
    )
    result = run.run()
    assert result is not None
    assert (result.global_step, result.stopped_early) == (12, True)
    assert "stopped after step 12 of 20: no lower loss in the last 2 evaluations" in run.output.getvalue()
    assert exported(run)[1] == 12
    verify(run.folder.checkpoints / "step_000012")


@pytest.mark.slow
def test_a_run_that_stopped_early_is_not_continued_by_starting_it_again(tmp_path: Path) -> None:
    settings = {"num_steps": 20, "early_stopping_patience": 2}
    sft_run(tmp_path, learner=RecordingLearner(loss_of=losing), **settings).run()
    again = sft_run(tmp_path, learner=RecordingLearner(loss_of=losing), **settings)
    result = again.run()
    assert result is not None
    assert (result.global_step, again.learner.batches) == (12, [])


def test_patience_survives_a_kill(tmp_path: Path) -> None:
    settings = {"num_steps": 20, "ckpt_interval": 2, "early_stopping_patience": 2}
    alone = sft_run(tmp_path / "alone", learner=RecordingLearner(loss_of=losing), **settings)
    alone.run()
    with pytest.raises(Killed):
        sft_run(
            tmp_path / "run", learner=RecordingLearner(loss_of=losing, on_update=raise_at(11, Killed())), **settings
        ).run()
    run = sft_run(tmp_path / "run", learner=RecordingLearner(loss_of=losing), **settings)
    run.run()
    assert records(run) == records(alone)


@pytest.mark.parametrize("killed_at", [7, 13])
def test_a_run_whose_folder_is_lost_exports_the_best_from_its_url(tmp_path: Path, killed_at: int) -> None:
    alone = sft_run(tmp_path / "alone", learner=RecordingLearner(loss_of=losing), num_steps=15, export="best")
    alone.run()
    settings: dict[str, Any] = {"num_steps": 15, "export": "best", "checkpoint_url": f"file://{tmp_path}/url"}
    learner = RecordingLearner(loss_of=losing, on_update=raise_at(killed_at, Killed()))
    with pytest.raises(Killed):
        sft_run(tmp_path / "lost", learner=learner, **settings).run()
    shutil.rmtree(tmp_path / "lost")
    again = sft_run(tmp_path / "again", learner=RecordingLearner(loss_of=losing), **settings)
    again.run()
    assert exported(again) == exported(alone)
    assert records(again) == records(alone)


def test_the_history_knows_the_best_and_when_to_stop() -> None:
    history = LossHistory(entries=((3, 0.5), (6, 0.4), (9, 0.4), (12, 0.39)))
    assert history.best_step == 12
    assert LossHistory(entries=history.entries[:3]).best_step == 6  # the earliest of equals
    assert not history.should_stop(patience=0, min_delta=0.0)
    assert not history.should_stop(patience=2, min_delta=0.0)
    assert history.should_stop(patience=2, min_delta=0.05)
    assert LossHistory(entries=history.entries[:3]).should_stop(patience=1, min_delta=0.0)
    assert LossHistory().best_step is None
    assert history.plus(15, math.nan) == history


def test_a_loss_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    run = sft_run(
        tmp_path,
        learner=RecordingLearner(loss_of=lambda step: math.nan if step > 3 else 0.5),
        num_steps=8,
        keep_best=True,
    )
    result = run.run()
    assert result is not None
    assert result.history.entries == ((3, 0.5),)
    last = records(run)[-1]
    assert (last["eval/loss"], last["metrics/non_finite"]) == (None, 2)


def test_every_set_has_a_loss_of_its_own_and_all_tokens_weigh_the_same(tmp_path: Path) -> None:
    run = sft_run(tmp_path, data=make_data(held_out=("easy", "hard")), num_steps=1)
    run.run()
    record = records(run)[-1]
    assert record["eval/easy/loss"] == record["eval/hard/loss"] == pytest.approx(record["eval/loss"])
    assert record["eval/perplexity"] == pytest.approx(math.exp(record["eval/loss"]))


def test_without_held_out_examples_nothing_is_evaluated(tmp_path: Path) -> None:
    run = sft_run(tmp_path, data=make_data(held_out=()), num_steps=2)
    run.run()
    assert not any("eval/loss" in record for record in records(run))


def test_an_evaluation_is_told_in_one_line() -> None:
    metrics = {"eval/loss": 0.5, "eval/perplexity": math.exp(0.5), "eval/a/loss": 0.4, "eval/a/perplexity": 1.5}
    assert evaluation_line(metrics, step=10) == "evaluation at step 10: loss 0.5000, perplexity 1.649; a 0.4000"


@pytest.mark.slow
def test_settings_of_the_evaluation_do_not_touch_training(tmp_path: Path) -> None:
    plain = sft_run(tmp_path / "plain", eval_interval=0, eval_before_train=False)
    plain.run()
    often = sft_run(tmp_path / "often", eval_interval=1, eval_batch_size=1)
    often.run()
    assert often.learner.batches == plain.learner.batches
    assert exported(often) == exported(plain)


@pytest.mark.slow
def test_a_run_may_start_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    sft_run(tmp_path / "first", num_steps=4).run()
    run = sft_run(tmp_path / "second", num_steps=4)
    trainer = replace(run.config.trainer, resume_mode="from_path", resume_path=str(tmp_path / "first"))
    run.config = replace(run.config, trainer=trainer)
    run.run()
    assert run.learner.batches == []
    assert [record["step"] for record in records(run)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("killed_at", [0, 8])
def test_the_evaluation_that_a_fork_begins_with_is_none_of_its_own(tmp_path: Path, killed_at: int) -> None:
    sft_run(tmp_path / "first", learner=RecordingLearner(loss_of=losing), num_steps=6).run()
    fork = {"num_steps": 12, "resume_mode": "fork", "resume_path": str(tmp_path / "first"), "keep_best": True}
    if killed_at:
        learner = RecordingLearner(loss_of=losing, on_update=raise_at(killed_at, Killed()))
        with pytest.raises(Killed):
            sft_run(tmp_path / "fork", learner=learner, **fork, ckpt_interval=1).run()
    run = sft_run(tmp_path / "fork", learner=RecordingLearner(loss_of=losing), **fork, ckpt_interval=1)
    result = run.run()
    assert result is not None
    assert result.history.entries == ((9, 0.6), (12, 0.45))
    assert [path.name for path in run.folder.best.glob("step_*")] == ["step_000012"]


HEARD: list[RunEvent] = []


def hear(event: RunEvent) -> None:
    HEARD.append(event)


def tokens_with_loss(facts: StepFacts, *, scale: float) -> dict[str, Metric]:
    assert facts.rollouts is None
    return {"own/tokens": Sum(scale * float(facts.batch["loss_mask"].sum()))}


def test_callbacks_and_custom_metrics_see_a_supervised_run(tmp_path: Path) -> None:
    HEARD.clear()
    metric = {"_target_": "test_sft_loop:tokens_with_loss", "scale": 2.0}
    run = sft_run(tmp_path, num_steps=3, metrics=(metric,), callbacks=("test_sft_loop:hear",), keep_best=True)
    run.run()
    told = [(event.kind, event.step, event.path and event.path.parent.name) for event in HEARD]
    # The one of step 2 is told when it is on the disk, which is behind that step or the next one.
    written = told.index(("checkpoint", 2, "checkpoints"))
    assert told[written - 1][:2] in (("step", 2), ("step", 3))
    told.insert(4, told.pop(written))
    assert told == [
        ("start", 0, tmp_path.parent.name),
        ("evaluation", 0, None),
        ("step", 1, None),
        ("step", 2, None),
        ("checkpoint", 2, "checkpoints"),
        ("evaluation", 3, None),
        ("step", 3, None),
        ("checkpoint", 3, "best"),
        ("checkpoint", 3, "checkpoints"),
        ("end", 3, tmp_path.parent.name),
    ]
    for record in records(run)[1:]:
        assert record["own/tokens"] == 2 * record["batch/trained_tokens"]
    (first, *_) = (event for event in HEARD if event.kind == "step")
    assert first.metrics["train/loss"] == records(run)[1]["train/loss"]
