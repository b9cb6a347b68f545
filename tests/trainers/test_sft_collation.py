"""With collation ahead or without, the train step gets the same batches, byte for byte, in the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.data import BatchLoader
from skyrl_train.data.sft import AsyncBatchCollator, DefaultCollator, Ints, PackedDataCollator
from skyrl_train.runs.sft import build_stream
from tests.support.sft_runs import RecordingLearner, make_config, make_data, raise_at, sft_run, workers

LAYOUTS = ("padded", "packed")
SIZES: dict[str, dict[str, Any]] = {
    "rows": {"batch_size": 4},
    "tokens": {"tokens_per_step": 25},
    "documents": {"docs_per_step": 3},
    "exact documents": {"docs_per_step": 3, "docs_per_step_exact": True},
}


@pytest.fixture(autouse=True)
def _no_thread_survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: None
    )  # no power cut is tested here, and it takes most of the time
    yield
    assert workers() == []


def batches_of(root: Path, **trainer: Any) -> list[str]:
    run = sft_run(root, **trainer)
    result = run.run()
    assert result is not None
    assert result.global_step == run.total_steps == len(run.learner.batches)
    return run.learner.batches


class Places:
    """Remembers which batches were made on the worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: dict[int, bool] = {}
        collate = DefaultCollator.__call__

        def remembering(collator: DefaultCollator, indices: Ints, step: int) -> Any:
            self.ahead[step] = threading.current_thread() is not threading.main_thread()
            return collate(collator, indices, step)

        monkeypatch.setattr(DefaultCollator, "__call__", remembering)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("incomplete", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_epoch_boundaries_with_evaluation_and_every_kind_of_step(
    tmp_path: Path, layout: str, incomplete: str, size: str
) -> None:
    settings = {"layout": layout, "incomplete_step": incomplete, "num_epochs": 3, **SIZES[size]}
    serial = batches_of(tmp_path / "serial", async_batch_collation=False, **settings)
    ahead = batches_of(tmp_path / "ahead", async_batch_collation=True, **settings)
    assert ahead == serial
    assert len(set(serial)) == len(serial)


def test_an_uneven_wrap_around_crosses_epochs_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    """10 examples in steps of 4: the third step holds the last two of one epoch and the first two of the next."""
    serial = batches_of(tmp_path / "serial", async_batch_collation=False, num_steps=9)
    assert batches_of(tmp_path / "ahead", num_steps=9) == serial


def test_every_batch_is_made_ahead_but_the_first_of_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(monkeypatch)
    batches_of(tmp_path, incomplete_step="keep")
    first_of_epoch = {1, 4, 7}
    assert places.ahead == {step: step not in first_of_epoch for step in range(1, 10)}


def test_a_batch_that_wraps_around_is_made_in_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(monkeypatch)
    batches_of(tmp_path, incomplete_step="wrap")  # the third step wraps around, the fifth ends the second epoch
    assert places.ahead == {1: False, 2: True, 3: False, 4: True, 5: True, 6: False, 7: True, 8: False}


def test_without_collation_ahead_there_is_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(monkeypatch)
    batches_of(tmp_path, async_batch_collation=False)
    assert not any(places.ahead.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("incomplete", ["keep", "wrap"])
@pytest.mark.parametrize("killed_at", [2, 5, 8])
def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_trains_what_was_not_trained(
    tmp_path: Path, layout: str, incomplete: str, killed_at: int
) -> None:
    settings = {"layout": layout, "incomplete_step": incomplete, "num_steps": 9}
    expected = batches_of(tmp_path / "alone", async_batch_collation=False, **settings)
    broken = sft_run(
        tmp_path / "run", learner=RecordingLearner(on_update=raise_at(killed_at, OSError("broken"))), **settings
    )
    with pytest.raises(OSError, match="broken"):
        broken.run()
    resumed = sft_run(tmp_path / "run", **settings)
    resumed.run()
    checkpoint = (killed_at - 1) // 2 * 2
    assert broken.learner.batches == expected[: killed_at - 1]
    assert resumed.learner.batches == expected[checkpoint:]


@pytest.mark.parametrize("incomplete", ["keep", "wrap", "drop"])
def test_withholding_at_the_end_of_an_epoch_is_what_keeps_batches_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incomplete: str
) -> None:
    """The test above fails without it: the worker would read the order of the wrong epoch."""

    def never_withheld(loader: BatchLoader, step: int) -> None:
        assert loader._worker is not None
        loader._worker.submit(step)

    monkeypatch.setattr(BatchLoader, "prefetch", never_withheld)
    with pytest.raises(RuntimeError, match="takes another epoch's order"):
        sft_run(tmp_path, incomplete_step=incomplete).run()


class SlowCollator:
    """Waits until it is let go, so that a batch is surely in flight."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started = threading.Event()

    def __call__(self, indices: Ints, step: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.started.set()
            assert self.go.wait(10)
        return DefaultCollator(make_data().train)(indices, step)


def slow_loader(tmp_path: Path) -> tuple[BatchLoader, SlowCollator]:
    data, collator = make_data(), SlowCollator()
    config = make_config(tmp_path, incomplete_step="keep")
    return BatchLoader(build_stream(config, data), data.train, collator, is_async=True), collator


def test_going_elsewhere_drains_what_is_in_flight_before_the_order_changes(tmp_path: Path) -> None:
    loader, collator = slow_loader(tmp_path)
    with loader:
        loader.seek(0)
        first = [loader.get(step).mini_batch.batch.metadata.uids for step in (1,)]
        loader.prefetch(2)
        assert collator.started.wait(10)
        threading.Timer(0.05, collator.go.set).start()
        loader.seek(20)  # the third epoch
        third = loader.get(7).mini_batch.batch.metadata.uids
    serial, collator = slow_loader(tmp_path)
    collator.go.set()
    with serial:
        serial.seek(20)
        assert serial.get(7).mini_batch.batch.metadata.uids == third
    assert first != third


def test_without_the_drain_the_batch_in_flight_would_be_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, collator = slow_loader(tmp_path)
    monkeypatch.setattr(AsyncBatchCollator, "clear", lambda self: None)
    loader.seek(0)
    loader.get(1)
    loader.prefetch(2)
    assert collator.started.wait(10)
    loader.seek(20)
    collator.go.set()
    with pytest.raises(RuntimeError, match="step 7 was asked for, but that of step 2 is in flight"):
        loader.get(7)
    monkeypatch.undo()
    loader.close()


@pytest.mark.parametrize("worker_error", [ValueError("worker"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failing_train_step_and_a_failing_worker_raise_the_steps_error_and_leave_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_error: BaseException
) -> None:
    collate = DefaultCollator.__call__

    def failing(collator: DefaultCollator, indices: Ints, step: int) -> Any:
        if step == 2:
            raise worker_error
        return collate(collator, indices, step)

    monkeypatch.setattr(DefaultCollator, "__call__", failing)
    run = sft_run(tmp_path, learner=RecordingLearner(on_update=raise_at(1, ArithmeticError("train step"))))
    with pytest.raises(ArithmeticError, match="train step"):
        run.run()
    assert workers() == []


def test_a_worker_that_fails_alone_is_heard_at_the_step_that_needs_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collate = DefaultCollator.__call__

    def failing(collator: DefaultCollator, indices: Ints, step: int) -> Any:
        if step == 2:
            raise ValueError("row 3 is broken")
        return collate(collator, indices, step)

    monkeypatch.setattr(DefaultCollator, "__call__", failing)
    run = sft_run(tmp_path)
    with pytest.raises(ValueError, match="row 3 is broken"):
        run.run()
    assert len(run.learner.batches) == 1


def test_weights_of_sources_reach_the_number_of_steps(tmp_path: Path) -> None:
    run = sft_run(tmp_path, data=replace(make_data(), weights=(2.0,)), num_epochs=1, batch_size=5)
    assert run.total_steps == 4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_packed_batches_fit_the_cap_and_the_ranks(tmp_path: Path, num_ranks: int) -> None:
    data = make_data()
    collate = PackedDataCollator(data.train, max_tokens_per_row=24, align=8, num_ranks=num_ranks)
    batch = collate(np.arange(10), step=1).batch
    assert int(batch.lengths.max()) <= 24
    assert batch.num_rows % num_ranks == 0
