"""Recorded rollouts in place of an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms import shape_rewards
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import FilterConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import BatchError, ConfigError, DataError, EngineError, SkyrlTrainError
from skyrl_train.rollout.stream.replay import ReplayGenerator
from skyrl_train.runs import assembler, load_data
from skyrl_train.telemetry.records import read_rollouts, write_rollouts
from skyrl_train.types import RolloutBatch, SamplingParams
from tests.support.journal_cases import SAMPLES, STEPS, run


def line(uid: str, step: int | None = None, **changes: Any) -> str:
    turn = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "reward": 1.0, **changes}
    record = {"uid": uid, "turns": [turn]} if step is None else {"uid": uid, "global_step": step, "turns": [turn]}
    return json.dumps(record) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def replay(generator: ReplayGenerator, step: int, *, n: int = 2, purpose: str = "train") -> RolloutBatch:
    return generator.generate(
        generator.prompts_for_step(step),
        n_samples_per_prompt=n,
        sampling=SamplingParams(),
        global_step=step,
        purpose=purpose,
    )


def test_a_recorded_run_is_replayed_step_by_step(tmp_path: Path) -> None:
    source = ReplayGenerator(write(tmp_path / "mine.jsonl", *[line("a"), line("b")] * 2))
    batch = replay(source, 1)
    folder = tmp_path / "rollouts"
    for step in (1, 2, 3):
        write_rollouts(folder, batch, purpose="train", global_step=step)
    write_rollouts(folder, batch, purpose="eval", global_step=3)
    generator = ReplayGenerator(folder)
    assert generator.num_steps == 3
    assert [replay(generator, step) for step in (1, 2, 3)] == [batch] * 3
    assert [prompt.uid for prompt in generator.prompts] == ["a", "b"] * 3
    assert generator.batch(2) == generator.prompts_for_step(3)


def test_a_run_that_an_older_version_began_is_replayed_from_both_kinds_of_files(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / f"train_step_00000{step}.jsonl", *[line("a", step), line("b", step)] * 2)
    write(tmp_path / "eval_step_000002.jsonl", line("c", 2))
    (later,) = read_rollouts(tmp_path / "train_step_000002.jsonl").values()
    for step, purpose in ((3, "train"), (4, "train"), (4, "eval"), (5, "failed")):
        write_rollouts(tmp_path, later, purpose=purpose, global_step=step)
    generator = ReplayGenerator(tmp_path)
    assert generator.num_steps == 4
    assert [replay(generator, step) for step in (1, 2, 3, 4)] == [later] * 4


def test_steps_are_counted_from_one_whatever_their_numbers_were(tmp_path: Path) -> None:
    path = write(tmp_path / "late.jsonl", line("a", 17), line("b", 40), line("a", 17), line("b", 40))
    generator = ReplayGenerator(path)
    assert [[p.uid for p in generator.prompts_for_step(step)] for step in (1, 2)] == [["a"], ["b"]]
    assert replay(generator, 2).trajectories[1].prompt_uid == "b"


def test_past_the_end_of_the_recording_is_an_error_that_says_where_it_ends(tmp_path: Path) -> None:
    generator = ReplayGenerator(write(tmp_path / "mine.jsonl", line("a")))
    with pytest.raises(DataError, match=r"has 1 step, and step 2 was asked for. Set trainer.total_steps=1"):
        generator.prompts_for_step(2)


def test_an_evaluation_cannot_be_replayed(tmp_path: Path) -> None:
    generator = ReplayGenerator(write(tmp_path / "mine.jsonl", line("a"), line("a")))
    with pytest.raises(EngineError, match=r"Set data.validation=\[\]"):
        replay(generator, 1, purpose="eval")


def test_other_prompts_or_samples_than_recorded_are_refused(tmp_path: Path) -> None:
    generator = ReplayGenerator(write(tmp_path / "mine.jsonl", line("a"), line("b")))
    with pytest.raises(
        DataError, match=r"the recording has 1 sample of each prompt. Set generator.n_samples_per_prompt=1"
    ):
        replay(generator, 1, n=2)
    with pytest.raises(DataError, match="not those asked for"):
        generator.generate(
            generator.prompts[:1], n_samples_per_prompt=1, sampling=SamplingParams(), global_step=1, purpose="train"
        )


def test_a_configuration_that_does_not_fit_is_refused_with_all_reasons(tmp_path: Path) -> None:
    generator = ReplayGenerator(write(tmp_path / "mine.jsonl", line("a"), line("b")))
    generator.check(train_batch_size=2, n_samples_per_prompt=1, total_steps=1)
    with pytest.raises(ConfigError) as caught:
        generator.check(train_batch_size=4, n_samples_per_prompt=8, total_steps=3)
    assert [violation.remedy for violation in caught.value.violations] == [
        "Set trainer.train_batch_size=2",
        "Set generator.n_samples_per_prompt=1",
        "Set trainer.total_steps=1",
    ]


def test_more_epochs_than_were_recorded_are_told_at_the_start_with_what_works(tmp_path: Path) -> None:
    recorded = str(write(tmp_path / "mine.jsonl", line("a"), line("b")))
    generator = GeneratorConfig(backend="replay", replay_path=recorded, n_samples_per_prompt=1)

    def trainer(**steps: int) -> TrainerConfig:
        return TrainerConfig(train_batch_size=2, policy_mini_batch_size=2, critic_mini_batch_size=2, **steps)

    with pytest.raises(
        ConfigError, match=r"trainer\.total_steps: must be at most the number of recorded steps, 1; got 3"
    ):
        load_data(Config(generator=generator, trainer=trainer(epochs=3)))
    for steps in ({"epochs": 3, "total_steps": 1}, {"total_steps": 0}):
        assert load_data(Config(generator=generator, trainer=trainer(**steps))).num_train == 2


def test_a_missing_path_and_an_empty_folder_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        ReplayGenerator(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="holds no training rollouts"):
        ReplayGenerator(tmp_path)


def assembled(generator: ReplayGenerator, num_prompts: int) -> Any:
    trainer = TrainerConfig(
        train_batch_size=num_prompts, policy_mini_batch_size=num_prompts, critic_mini_batch_size=num_prompts
    )
    config = Config(trainer=trainer)
    return assembler(config, rows="per_trajectory")(replay(generator, 1, n=1), step=1, weight_version=0)


def test_rollouts_without_logprobs_become_a_batch_without_that_column(tmp_path: Path) -> None:
    batch = assembled(ReplayGenerator(write(tmp_path / "mine.jsonl", line("a"), line("b"))), 2)
    assert "rollout_logprobs" not in batch
    assert batch["input_ids"].tolist() == [1, 2, 3, 4] * 2
    assert batch["loss_mask"].tolist() == [False, False, True, True] * 2


def test_rollouts_with_logprobs_for_some_turns_only_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", line("a", logprobs=[-1.0, -2.0]), line("b"))
    with pytest.raises(BatchError, match="record them for all or none"):
        assembled(ReplayGenerator(path), 2)


@pytest.mark.parametrize(
    ("changes", "limits", "reason"),
    [
        ({"response_token_ids": [3, 400]}, {"vocabulary_size": 300}, "the token id 400"),
        ({"prompt_token_ids": [300, 1]}, {"vocabulary_size": 300}, "the token id 300"),
        ({"response_token_ids": [3] * 9}, {"max_context_length": 10}, "11 tokens of prompt and response, more than"),
        ({"logprobs": [-1.0, 5.0]}, {}, "must be finite and at most 0"),
        ({"reward": 1e39}, {}, "not finite in float32"),
    ],
)
def test_a_recorded_trajectory_that_cannot_be_trained_on_fails_alone(
    tmp_path: Path, changes: dict[str, Any], limits: dict[str, int], reason: str
) -> None:
    path = write(tmp_path / "mine.jsonl", line("a", **changes), line("b"), line("a"), line("b"))
    batch = replay(ReplayGenerator(path, **limits), 1)
    assert [each.failed for each in batch.trajectories] == [True, False, False, False]
    assert batch.trajectories[0].failure is not None
    assert reason in batch.trajectories[0].failure.message
    with pytest.raises(SkyrlTrainError, match=r"1 of 4 trajectories failed, more than .*max_failed_fraction=0.2"):
        ReplayGenerator(path, max_failed_fraction=0.2, **limits)


def test_a_journal_is_replayed_batch_by_batch(tmp_path: Path) -> None:
    streamed = run(tmp_path / "journal" / "journal.jsonl", environment="tests.support.fakes_resumable:Secret")
    for path in (tmp_path / "journal", tmp_path / "journal" / "journal.jsonl"):
        generator = ReplayGenerator(path)
        assert generator.num_steps == STEPS
        for version, taken in streamed.taken.items():
            batch = replay(generator, version + 1, n=SAMPLES)
            assert batch == taken.rollouts
    stale = [
        one.version for trajectory in batch.trajectories for turn in trajectory.turns for one in turn.weight_versions
    ]
    assert min(stale) < STEPS - 1, "tokens keep the versions that sampled them"


def test_rewards_of_a_journal_are_shaped_as_those_of_its_run_were(tmp_path: Path) -> None:
    run(tmp_path / "journal.jsonl")
    generator = ReplayGenerator(
        tmp_path, shape=lambda rollouts: shape_rewards(rollouts, FilterConfig(reward_clip_high=0.25))
    )
    assert {trajectory.reward for trajectory in replay(generator, 1, n=SAMPLES).trajectories} == {0.25}


def test_a_journal_that_was_killed_has_the_batches_until_then(tmp_path: Path) -> None:
    content = run(tmp_path / "journal.jsonl").content
    (tmp_path / "journal.jsonl").write_bytes(content[: content.index(b'{"batch": 2') - 10])
    assert ReplayGenerator(tmp_path).num_steps == 2


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"prompts": "p", "from": 3}'], r"begins at step 4: .* Set generator.replay_path=.*rollouts, which has all"),
        (['{"prompts": "p"}'], r"must have the batch of each step from 1 on; it has none"),
        (['{"batch": 1, "groups": [], "dropped": {}}'], r"must have the batch of each step from 1 on; it has 2"),
        (['{"batch": 0, "groups": [4], "dropped": {}}'], r"line 1: not a line of a journal \(KeyError: 4\)"),
        (
            ['{"group": 4, "trajectories": [{}]}', '{"batch": 0, "groups": [4], "dropped": {}}'],
            "the group at byte 0 cannot",
        ),
        (
            ['{"group": 4, "trajectories": []}', '{"batch": 0, "groups": [4], "dropped": {}}'],
            r"a batch must have as many .* got \[0\]",
        ),
    ],
)
def test_a_journal_that_cannot_be_replayed_is_refused(tmp_path: Path, lines: list[str], told: str) -> None:
    write(tmp_path / "journal.jsonl", *(f"{each}\n" for each in lines))
    with pytest.raises(DataError, match=told):
        ReplayGenerator(tmp_path)
