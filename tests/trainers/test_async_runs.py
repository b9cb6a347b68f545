"""Real runs of the bundled model whose rollouts are made while the learner updates."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms import differing_prompts
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import StopRequested
from skyrl_train.runs import load_data, train
from skyrl_train.telemetry import phase_seconds, read_metrics
from skyrl_train.telemetry.records import read_timeline
from skyrl_train.trainers.observers import RunEvent
from skyrl_train.types import RolloutBatch
from tests.support.async_runs import (
    BATCH,
    check_each_prompt_once,
    check_versions,
    exported,
    make_config,
    trained,
)


def stop_after_two_steps(event: RunEvent) -> None:
    """For `trainer.callbacks`: a signal arrives at the end of step 2, while the groups of step 3 are in flight."""
    if event.kind == "step" and event.step == 2:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_each_prompt_is_trained_on_once_and_with_tokens_that_are_young_enough(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(config)
    check_each_prompt_once(tmp_path, config, num_steps=3)
    assert check_versions(tmp_path, max_staleness=1) == {0, 1}
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[1]["off_policy/age/max"] == 1.0
    assert "eval/accuracy" in records[-1]
    assert all(record["timing/wait/rollouts"] >= 0 for record in records)
    check_ledger(tmp_path, records, is_stream=True)


def check_ledger(root: Path, records: list[dict[str, Any]], *, is_stream: bool) -> None:
    """What the record and the timeline say of waits, the engine and groups belongs together."""
    for record in records:
        step_s = record["timing/step"]
        assert 0 <= record["timing/engine/busy"] <= step_s + 0.01
        assert 0 <= record.get("timing/wait/environments_alone", 0.0) <= 1
        assert 0 < record["timing/wait/sync"] <= phase_seconds(record)["sync"]
        assert ("timing/wait/admission" in record) == is_stream
    # Of a step whose rollouts were all there already the engine has nothing left to do.
    for name in ("timing/engine/busy", "timing/wait/environments"):
        assert sum(record[name] for record in records) > 0
    # What is computed while a batch is scored may all be over when the next one is taken.
    assert sum("timing/group/max" in record for record in records) >= len(records) - 1
    lines = read_timeline(root / "timeline.jsonl")
    assert {line.step for line in lines} >= {record["step"] for record in records}
    assert max(count for line in lines for _, count in line.groups) == (2 * BATCH if is_stream else BATCH)
    overlap = [
        min(end, ended) - max(begin, began)
        for line in lines
        for begin, end in line.engine
        for name, began, ended in line.learner
        if is_stream or name == "update"
    ]
    assert (max(overlap) > 0) == is_stream, "only a stream has the engine compute while the learner does"
    assert (root / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_serial_run_has_the_same_ledger(tmp_path: Path) -> None:
    train(make_config(tmp_path, max_staleness=0, total_steps=2))
    check_ledger(tmp_path, read_metrics(tmp_path / "metrics.jsonl"), is_stream=False)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_without_losing_or_repeating_a_prompt(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_staleness=2, total_steps=4, callbacks=("test_async_runs:stop_after_two_steps",))
    with pytest.raises(StopRequested):
        train(config)
    state = json.loads((tmp_path / "checkpoints/step_000002/trainer_state.json").read_text())
    settled = state["settled"]
    assert settled["frontier"] + len(settled["beyond"]) == 2 * BATCH
    assert state["data_position"] == settled["frontier"] // BATCH
    train(config)
    check_each_prompt_once(tmp_path, config, num_steps=4)
    check_versions(tmp_path, max_staleness=2)


NIGHTLY = [pytest.mark.nightly]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        pytest.param(
            *(kind, kept),
            marks=[]
            if kind in ("", "curriculum", "dynamic sampling") and (kept == "rollouts" or not kind)
            else NIGHTLY,
        )
        for kind in ("", "curriculum", "greedy samples", "oversampling", "dynamic sampling", "copies", "critic")
        for kept in ("rollouts", "journal")
    ],
)
def test_steps_after_the_checkpoint_are_taken_again_and_replays_give_the_same_weights(
    tmp_path: Path, kind: str, kept: str
) -> None:
    """As if killed at the end of step 3: with the checkpoint of step 1, and where the journal is the only record, which
    stays whole, without any."""
    root = tmp_path / "run"
    config = make_config(root, ckpt_interval=1, export_hf=True, dump_rollouts=kept == "rollouts")
    config = changed(config, KINDS.get(kind, {}))
    train(config)
    weights = exported(root)
    records = [steady(record) for record in read_metrics(root / "metrics.jsonl")]
    journal = root / "journal" / "journal.jsonl"
    content = journal.read_bytes()
    for name in ("step_000002", "step_000003") if kept == "rollouts" else ("",):
        shutil.rmtree(root / "checkpoints" / name)
    shutil.rmtree(root / "export")
    (root / "complete.json").unlink()
    train(config)
    assert exported(root) == weights
    assert [steady(record) for record in read_metrics(root / "metrics.jsonl")] == records
    # Groups that the run did not need any more are run to their ends where they are surplus.
    assert journal.read_bytes() == content or kind == "oversampling"
    if kind == "curriculum":  # it would choose among what is replayed
        return
    serial = {"max_staleness": 0, "stale_groups": "wait", "oversample": 1.0}
    replayed = changed(make_config(tmp_path / "replayed", export_hf=True), KINDS.get(kind, {}))
    replayed = changed(replayed, {"trainer": serial})
    generator = replace(replayed.generator, backend="replay", replay_path=str(root / kept))
    train(replace(replayed, generator=generator))
    assert exported(tmp_path / "replayed") == weights


def steady(record: dict[str, Any]) -> dict[str, Any]:
    """A step's metrics without those of time, and of what else was in flight."""
    kept = ("timing/", "stream/in_flight", "stream/ready", "memory/", "time")
    return {name: value for name, value in record.items() if not name.startswith(kept)}


@pytest.mark.slow
def test_a_fork_may_turn_waiting_on_and_off(tmp_path: Path) -> None:
    train(make_config(tmp_path / "stream", ckpt_interval=2))
    serial = make_config(
        tmp_path / "serial", max_staleness=0, total_steps=4, resume_mode="fork", resume_path=str(tmp_path / "stream")
    )
    train(serial)
    (batch,) = trained(tmp_path / "serial")
    assert [prompt.uid for prompt in batch.prompts] == [prompt.uid for prompt in load_data(serial).train(3)]
    again = make_config(tmp_path / "again", total_steps=5, resume_mode="fork", resume_path=str(tmp_path / "serial"))
    train(again)
    assert {prompt.uid for prompt in trained(tmp_path / "again")[0].prompts} == {
        prompt.uid for prompt in load_data(again).train(4)
    }


KINDS: dict[str, dict[str, Any]] = {
    "documents close a step": {"trainer": {"docs_per_step": 3, "docs_per_step_exact": True}},
    "token budget": {"trainer": {"micro_batching": "token_budget", "max_tokens_per_microbatch": 256}},
    "sized by memory": {"trainer": {"micro_batching": "auto", "memory_budget_gb": 1.0}},
    "critic": {
        "critic": {"model": {"path": "policy"}},
        "trainer": {"algorithm": {"advantage_estimator": "gae"}},
    },
    "adapter": {"model": {"lora": {"rank": 2}}},
    "mix": {
        "data": {
            "mix": (
                {"name": "some", "train": ["builtin:word_problems/train"], "weight": 3.0, "max_train_prompts": 12},
                {"name": "others", "train": ["builtin:word_problems/validation"], "max_train_prompts": 12},
            )
        }
    },
    "curriculum": {"data": {"curriculum": {"enabled": True}}},
    "greedy samples": {"trainer": {"algorithm": {"advantage_estimator": "remax"}}},
    "oversampling": {"trainer": {"oversample": 1.5, "stale_groups": "drop"}},
    "in order": {"trainer": {"oversample": 1.5, "take_groups": "in_order"}},
    "dynamic sampling": {"trainer": {"algorithm": {"filters": {"dynamic_sampling": "filter"}}}},
    "copies": {"trainer": {"algorithm": {"filters": {"dynamic_sampling": "replace", "replace_min_share": 0.25}}}},
}


SLOW_KINDS = ("sized by memory", "dynamic sampling", "copies", "adapter", "token budget", "oversampling")


def check_kind(kind: str, records: list[dict[str, Any]], batches: list[RolloutBatch]) -> None:
    trajectories = [trajectory for batch in batches for trajectory in batch.trajectories]
    if kind == "documents close a step":
        assert [record["batch/documents_per_step/max"] for record in records] == [3.0, 3.0]
    if kind == "critic":
        assert all("critic/value_loss" in record for record in records)
    if kind == "mix":  # over the run: a batch has what has finished
        counts = Counter(prompt.dataset for batch in batches for prompt in batch.prompts)
        assert counts == {"some": 6, "others": 2}
    if kind == "curriculum":
        assert [record["curriculum/tried"] for record in records] == [0.0, 4.0]
    if kind == "greedy samples":
        assert all(trajectory.greedy_reward is not None for trajectory in trajectories)
    if kind in ("dynamic sampling", "copies"):
        assert all(all(differing_prompts(batch)) for batch in batches)
        assert records[-1]["total/prompts"] > 2 * BATCH
    if kind == "oversampling":
        assert len({prompt.uid for batch in batches for prompt in batch.prompts}) == 2 * BATCH
    if kind == "in order":
        assert [prompt.uid for batch in batches for prompt in batch.prompts] == [
            prompt.uid for position in range(2) for prompt in load_data(make_config(Path())).train(position)
        ]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW_KINDS else []) for kind in KINDS]
)
def test_a_stream_feeds_every_kind_of_training(tmp_path: Path, kind: str) -> None:
    config = make_config(tmp_path, total_steps=2)
    train(changed(changed(config, {"data": {"validation": ()}}), KINDS[kind]))
    batches = trained(tmp_path)
    assert [len({prompt.uid for prompt in batch.prompts}) for batch in batches] == [BATCH] * 2
    check_versions(tmp_path, max_staleness=1)
    records = read_metrics(tmp_path / "metrics.jsonl")
    # What the learner's own weights sampled is what the learner says of it: the engine has what was trained.
    assert all(record.get("off_policy/abs/age_0", 0.0) < 1e-4 for record in records)
    assert any(record["off_policy/age/max"] == 1.0 for record in records) or kind in ("dynamic sampling", "copies")
    check_kind(kind, records, batches)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"generator": {"backend": "replay"}}, "trainer.max_staleness"),
        ({"generator": {"backend": "vllm"}, "placement": {"colocate_all": True}}, "placement.colocate_all"),
        ({"generator": {"backend": "vllm"}, "platform": {"name": "gpu"}}, "placement.backend"),
        ({"trainer": {"oversample": 1.5}}, "trainer.stale_groups"),
        ({"trainer": {"take_groups": "in_order", "stale_groups": "drop"}}, "trainer.stale_groups"),
        ({"trainer": {"max_staleness": 0, "oversample": 1.5}}, "trainer.oversample"),
        ({"trainer": {"max_staleness": 0, "take_groups": "in_order"}}, "trainer.take_groups"),
        ({"trainer": {"max_staleness": 0, "stale_groups": "drop"}}, "trainer.stale_groups"),
    ],
)
def test_what_does_not_work_on_a_stream_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    config = changed(make_config(tmp_path), changes)
    assert [one.field for one in validate_config(config) if field in one.field]
    serial = changed(
        config,
        {"trainer": {"max_staleness": 0, "stale_groups": "wait", "oversample": 1.0, "take_groups": "first_finished"}},
    )
    assert not [one.field for one in validate_config(serial) if "max_staleness" in one.rule]


def changed(section: Any, changes: dict[str, Any]) -> Any:
    """Return a section with these settings, by their names within it."""
    values = {
        name: changed(getattr(section, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(section, **values)
