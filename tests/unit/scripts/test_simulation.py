"""Simulated schedules, by hand where engines and environments are simple; rates that are found again in a run's files."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.studies.simulated_engines import (
    SimulatedTurn,
    batch_seconds,
)
from scripts.studies.simulated_runs import (
    Latency,
    paired_lengths,
    recorded_lengths,
    rollouts_of,
    run_rates,
    stated_lengths,
)
from scripts.studies.simulation import LearnerRates, Schedule, Simulated, SimulatedGroup, simulate
from skyrl_train.errors import DataError
from skyrl_train.plan.forms import EngineRates
from skyrl_train.telemetry.records import write_rollouts
from skyrl_train.types import Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[3]
GSM8K = Path(os.environ.get("SKYRL_TRAIN_GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))
LEARNER = LearnerRates(token_s=0.0, step_s=2.0, sync_s=0.5)


def turn(response: int, *, context: int = 0, prompt: int = 0, environment_s: float = 0.0) -> SimulatedTurn:
    return SimulatedTurn(
        prompt_tokens=prompt, context_tokens=context, response_tokens=response, environment_s=environment_s
    )


def steps(engine: EngineRates, *groups: SimulatedGroup, schedule: Schedule, num_steps: int = 1) -> Simulated:
    return simulate(
        schedule,
        engine=engine,
        learner=LEARNER,
        make_group=lambda ordinal: groups[ordinal % len(groups)],
        num_steps=num_steps,
    )


def test_a_serial_step_is_rollouts_then_update_then_sync() -> None:
    engine = EngineRates(step_s=0.01, sequence_s=0.001, prompt_token_s=0.1)
    one = [[turn(100, prompt=10, context=10, environment_s=3.0), turn(50)]]
    # 10 prompt tokens and 100 steps of one sequence, 3 s of the environment, 50 steps more.
    found = steps(engine, one, schedule=Schedule(batch_size=1, max_staleness=0), num_steps=3)
    assert found.step_s == pytest.approx([1.0 + 1.1 + 3.0 + 0.55 + 2.5] * 3)
    assert found.engine_busy == pytest.approx(2.65 / 8.15)
    assert found.age == (0.0, 0.0, 0.0)


def test_sequences_that_run_together_leave_as_they_end_and_others_take_their_slots() -> None:
    engine = EngineRates(step_s=1.0, sequence_s=0.5, slots=2)
    # 10 steps of two sequences, 20 of the longer with the third, which is left alone for 5.
    group = [[turn(10)], [turn(30)], [turn(25)]]
    found = steps(engine, group, schedule=Schedule(batch_size=1, max_staleness=0))
    assert found.wait_s == pytest.approx([30 * 2.0 + 5 * 1.5])


def test_steps_get_longer_with_the_keys_that_are_read() -> None:
    engine = EngineRates(step_s=1.0, context_token_s=0.01)
    group = [[turn(100, context=1000)], [turn(40, context=200)]]
    exact = sum(1 + 0.01 * (1000 + k + (200 + k) * (k < 40)) for k in range(100))
    found = steps(engine, group, schedule=Schedule(batch_size=1, max_staleness=0))
    assert found.wait_s[0] == pytest.approx(exact, rel=1e-2)
    assert batch_seconds(engine, [sample[0] for sample in group]) == pytest.approx(exact)


def test_prompts_are_computed_in_parts_beside_what_runs() -> None:
    engine = EngineRates(step_s=1.0, prompt_token_s=0.01, batched_tokens=50)
    # 200 prompt tokens are four parts of half a second, each with a step, before the answer's 10 steps.
    one = [[turn(10, prompt=200, context=200)]]
    schedule = Schedule(batch_size=1, max_staleness=0)
    assert steps(engine, one, schedule=schedule).wait_s == pytest.approx([4 * 1.5 + 10.0])
    assert steps(replace(engine, batched_tokens=0), one, schedule=schedule).wait_s == pytest.approx([2.0 + 10.0])
    # The second prompt comes at 6 s in two parts, beside which the long answer makes two of its steps; so it ends at 21 s.
    late = [[turn(20)], [turn(1, environment_s=5.0), turn(30, prompt=100, context=100)]]
    assert steps(engine, late, schedule=schedule).wait_s == pytest.approx([6.0 + 2 * 1.5 + 30.0])


def test_a_step_is_no_shorter_than_the_front_end_takes_for_its_tokens() -> None:
    engine = EngineRates(step_s=1.0, front_token_s=0.4)
    group = [[turn(10)], [turn(10)], [turn(20)]]
    found = steps(engine, group, schedule=Schedule(batch_size=1, max_staleness=0))
    assert found.wait_s == pytest.approx([10 * 1.2 + 10 * 1.0])


def test_the_loop_takes_its_time_for_each_row() -> None:
    found = simulate(
        Schedule(batch_size=2, max_staleness=0),
        engine=EngineRates(step_s=1.0),
        learner=replace(LEARNER, row_s=0.25),
        make_group=lambda ordinal: [[turn(10)], [turn(10)]],
        num_steps=1,
    )
    plain = steps(EngineRates(step_s=1.0), [[turn(10)], [turn(10)]], schedule=Schedule(batch_size=2, max_staleness=0))
    assert found.step_s[0] - plain.step_s[0] == pytest.approx(4 * 0.25)


def test_a_wave_waits_for_all_samples_of_a_serial_batch_and_for_none_of_a_stream() -> None:
    engine = EngineRates(step_s=1.0, batching="waves")
    quick, slow = [[turn(1, environment_s=1.0), turn(1)]], [[turn(1, environment_s=9.0), turn(1)]]
    serial = steps(engine, quick, slow, schedule=Schedule(batch_size=2, max_staleness=0))
    assert serial.wait_s == pytest.approx([1 + 9 + 1])
    many = EngineRates(step_s=1.0, batching="waves", slots=1)
    # One at a time: the slow one's second answer comes at 2 + 9 + 1, the quick one's meanwhile.
    assert steps(many, quick, slow, schedule=Schedule(batch_size=2, max_staleness=1)).wait_s == pytest.approx([12.0])


def test_weights_wait_for_what_runs_unless_updates_are_in_flight() -> None:
    engine = EngineRates(step_s=1.0)
    groups = [[[turn(10)]], [[turn(100)]]]
    waiting = steps(engine, *groups, schedule=Schedule(batch_size=1, max_staleness=1), num_steps=2)
    # Batch 0 at 10 s, update to 12 s; the other group runs to 100 s and the weights come then.
    assert waiting.step_s[0] == pytest.approx(100.5)
    in_flight = Schedule(batch_size=1, max_staleness=1, in_flight_updates=True)
    found = steps(engine, *groups, schedule=in_flight, num_steps=2)
    assert found.step_s == pytest.approx([12.5, 100.5 - 12.5 + 2.5])


def test_nothing_is_older_than_admission_allows_and_a_stream_hides_what_is_not_arithmetic() -> None:
    lengths = stated_lengths(prompt=200, median=300, sigma=1.0, longest=4000)
    engine = EngineRates(step_s=0.01, sequence_s=1e-4, slots=64)
    found = {}
    for max_staleness in (0, 1, 4):
        groups = lengths.groups(samples=4, seed=0, latency=Latency(median_s=2.0, sigma=1.0))
        found[max_staleness] = simulate(
            Schedule(batch_size=16, max_staleness=max_staleness, num_engines=4),
            engine=engine,
            learner=LearnerRates(token_s=1e-4, sync_s=0.1),
            make_group=groups,
            num_steps=20,
        )
        assert max(found[max_staleness].age) <= max_staleness
    assert found[4].mean_step_s(4) < found[1].mean_step_s(4) < found[0].mean_step_s(4)
    assert found[0].tokens == pytest.approx(found[1].tokens, rel=0.1)


def test_dropped_groups_are_counted_and_the_run_goes_on() -> None:
    slow, quick = [[turn(1000)]], [[turn(1)]]
    schedule = Schedule(batch_size=1, max_staleness=1, stale_groups="drop", in_flight_updates=True)
    found = steps(EngineRates(step_s=1.0), slow, quick, quick, schedule=schedule, num_steps=3)
    assert found.dropped == 1
    assert found.step_s[:2] == pytest.approx((3.5, 3.5)), "nobody waits for the slow one"


def recorded(step: int, answers: list[list[int]]) -> RolloutBatch:
    """Of one prompt of 20 tokens, with the tokens of each sample's answers; observations have 3."""

    def sample(index: int, lengths: list[int]) -> Trajectory:
        turns = [
            Turn(
                parent=place - 1 if place else None,
                added_token_ids=range(3 if place else 20),
                response_token_ids=range(length),
                response_text="",
                reward=0.0,
                stop_reason=StopReason.STOP,
                weight_versions=((0, step),),
            )
            for place, length in enumerate(lengths)
        ]
        return Trajectory(prompt_uid=f"p{step}", sample_index=index, turns=tuple(turns), outcome=Outcome.MAX_TURNS)

    prompt = Prompt(uid=f"p{step}", messages=())
    trajectories = tuple(sample(index, lengths) for index, lengths in enumerate(answers))
    return RolloutBatch(prompts=(prompt,), trajectories=trajectories, n_samples_per_prompt=len(answers))


def make_run(folder: Path, **changes: float) -> Path:
    """A serial run whose waves took 10 ms a step, 1 ms a sequence and 2 ms a token of prompts."""
    batches = [
        recorded(1, [[9, 5], [4]]),
        recorded(2, [[30, 8], [12, 3]]),
        recorded(3, [[7, 20], [9]]),
        recorded(4, [[40], [3, 2]]),
    ]
    records, lines = [], []
    for step, batch in enumerate(batches, start=1):
        write_rollouts(folder / "rollouts", batch, purpose="train", global_step=step)
        spans, now = [], 0.0
        for place in range(2):
            turns = [each.turns[place] for each in batch.trajectories if len(each.turns) > place]
            answers = [len(each.response_token_ids) for each in turns]
            new = 3 * len(turns) if place else 20
            spans.append([now, now + 0.01 * max(answers) + 0.001 * sum(answers) + 0.002 * new])
            now = spans[-1][1] + 1.0
        lines.append({"step": step, "began": 0.0, "seconds": now, "learner": [], "engine": spans, "groups": []})
        record = {"step": step, "batch/tokens": 100.0, "timing/generate": now, "timing/update": 0.4, "timing/sync": 0.2}
        beside = {"timing/log": 0.05, "timing/step": now + 0.65, "timing/wait/environments": 3.0}
        records.append({**record, **beside, **changes})
    for name, content in (("metrics.jsonl", records), ("timeline.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
    return folder


def test_rates_of_a_run_are_found_in_its_files(tmp_path: Path) -> None:
    rates = run_rates(make_run(tmp_path), warm_up=0)
    assert (rates.engine.step_s, rates.engine.sequence_s) == pytest.approx((0.01, 0.001))
    assert rates.engine.prompt_token_s == pytest.approx(0.002)
    assert rates.engine_error < 1e-6
    assert rates.learner == LearnerRates(
        token_s=pytest.approx(0.004), step_s=pytest.approx(0.05), sync_s=pytest.approx(0.2)
    )
    assert rates.environment_s == pytest.approx(12.0 / 13)  # of 13 answers
    lengths = recorded_lengths(rollouts_of(tmp_path), source="run")
    assert lengths.prompts[0] == (((20, 20, 9), (3, 32, 5)), ((20, 20, 4),))


def test_a_stream_has_no_rates_of_waves(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"trainer\.max_staleness=0"):
        run_rates(make_run(tmp_path, **{"timing/wait/rollouts": 1.0}), warm_up=0)
    with pytest.raises(DataError, match="4 steps in its metrics"):
        run_rates(tmp_path, warm_up=4)


def test_stated_latencies_have_the_mean_that_was_measured() -> None:
    latency = Latency.of_mean(0.6, 0.5)
    assert latency.median_s * math.exp(0.5**2 / 2) == pytest.approx(0.6)
    with pytest.raises(DataError, match="no lengths"):
        paired_lengths([], source="nowhere")


@pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason=f"no GSM8K in {GSM8K}; set SKYRL_TRAIN_GSM8K_DIR")
def test_lengths_of_gsm8k_make_a_schedule() -> None:
    rows = map(json.loads, (GSM8K / "train.jsonl").read_text(encoding="utf-8").splitlines()[:2000])
    pairs = [tuple(len(re.findall(r"\w+|[^\w\s]", row[name])) for name in ("question", "answer")) for row in rows]
    lengths = paired_lengths(pairs, source="GSM8K")
    groups = lengths.groups(samples=8, seed=0, latency=Latency())
    engine = EngineRates(step_s=0.01, sequence_s=1e-5)
    serial, stream = (
        simulate(
            Schedule(batch_size=32, max_staleness=max_staleness),
            engine=engine,
            learner=LearnerRates(token_s=5e-5),
            make_group=groups,
            num_steps=6,
        )
        for max_staleness in (0, 1)
    )
    assert stream.mean_step_s(1) < serial.mean_step_s(1)
