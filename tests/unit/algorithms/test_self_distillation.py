"""The teacher reads the same responses after another first prompt, whether a trajectory is one row or one per turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.algorithms.self_distillation import teacher_logprobs, teacher_rows
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError, DataError
from skyrl_train.rollout import with_context
from skyrl_train.runs import assembler
from skyrl_train.telemetry.records import decode_trajectory, encode_trajectory
from skyrl_train.trainers import steps
from skyrl_train.types import Prompt, RolloutBatch, Trajectory
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn
from tests.support.learner_cases import make_learner, save_tiny_model

TEACHER = (7, 8, 9, 10)
ALGORITHM = AlgorithmConfig(advantage_estimator="self_distillation", policy_loss="importance_sampling")


def conversation(uid: str = "p0", *, teacher: tuple[int, ...] = TEACHER) -> Trajectory:
    """[5, 6] answered with [11, 12]; then the observation [13] answered with [14]."""
    first = make_turn((5, 6), (11, 12))
    second = make_turn((5, 6, 11, 12, 13), (14,))
    return make_trajectory(first, second, uid=uid, teacher_prompt_token_ids=teacher)


def rollouts(*trajectories: Trajectory) -> RolloutBatch:
    prompts = tuple(make_prompts(len(trajectories)))
    return RolloutBatch(prompts=prompts, trajectories=trajectories, n_samples_per_prompt=1)


def assembled(batch_of: RolloutBatch, folder: Path, *, step_wise: bool) -> TrainingInputBatch:
    size = len(batch_of.prompts)
    config = make_config(folder, train_batch_size=size, policy_mini_batch_size=size, algorithm=ALGORITHM)
    generator = replace(config.generator, step_wise_trajectories=step_wise, n_samples_per_prompt=1)
    return assembler(replace(config, generator=generator))(batch_of, step=1, weight_version=0)


def test_only_the_first_prompt_of_each_row_is_exchanged(tmp_path: Path) -> None:
    both = rollouts(conversation(), failed_trajectory(uid="p1"))
    one_row = teacher_rows(assembled(both, tmp_path, step_wise=False), both)
    assert one_row["input_ids"].tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 0, 0]
    assert one_row["loss_mask"].int().tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 0, 0]
    turns = teacher_rows(assembled(both, tmp_path, step_wise=True), both)
    assert turns["input_ids"].tolist() == [7, 8, 9, 10, 11, 12, 7, 8, 9, 10, 11, 12, 13, 14, 0, 0]
    assert turns["loss_mask"].int().tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("step_wise", [False, True])
def test_the_advantage_is_what_the_policy_shown_more_would_rather_have_said(tmp_path: Path, step_wise: bool) -> None:
    learner = make_learner(save_tiny_model(tmp_path / "model"), double=True)
    both = rollouts(conversation(), conversation("p1"))
    batch = assembled(both, tmp_path, step_wise=step_wise)
    config = make_config(tmp_path, algorithm=ALGORITHM)
    learners = steps.Learners(policy=learner, reference=None, critic=None)
    scored = steps.estimate(
        steps.score(batch, learners, config.trainer, rollouts=both),
        config.trainer.algorithm,
        kl_coef=0.0,
        seed=config.seed,
    )

    def logprobs(context: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([[*context, 11, 12, 13, 14]])
        with torch.no_grad():
            log_p = learner.engine.model(input_ids=ids).logits.log_softmax(-1)[0]
        start = len(context)
        return [float(log_p[place - 1, ids[0, place]]) for place in (start, start + 1, start + 3)]

    expected = [teacher - student for teacher, student in zip(logprobs(TEACHER), logprobs((5, 6)))]
    assert scored["advantages"][scored["loss_mask"]].tolist() == pytest.approx(expected * 2, abs=1e-6)
    assert max(map(abs, expected)) > 1e-3


def test_a_teacher_that_is_shown_nothing_has_nothing_to_teach(tmp_path: Path) -> None:
    same = rollouts(conversation(teacher=(5, 6)))
    batch = assembled(same, tmp_path, step_wise=False)
    learner = make_learner(save_tiny_model(tmp_path / "model"), double=True)
    assert torch.equal(teacher_logprobs(batch, same, learner.forward), learner.forward(batch))


def test_what_cannot_be_exchanged_is_named(tmp_path: Path) -> None:
    without = rollouts(conversation(teacher=()))
    with pytest.raises(BatchError, match="trajectory p0/0 has no prompt for the teacher"):
        teacher_rows(assembled(without, tmp_path, step_wise=False), without)
    other = make_trajectory(make_turn((5, 6), (11,)), make_turn((4, 6, 11), (14,)), teacher_prompt_token_ids=TEACHER)
    with pytest.raises(BatchError, match="p0/0: a turn does not begin with the first prompt"):
        teacher_rows(assembled(rollouts(other), tmp_path, step_wise=True), rollouts(other))


def test_the_teachers_prompt_is_recorded() -> None:
    record = json.loads(json.dumps(encode_trajectory(make_prompts(1)[0], conversation())))
    assert decode_trajectory(record)[1].teacher_prompt_token_ids.tolist() == list(TEACHER)


def test_the_context_stands_after_the_last_message() -> None:
    messages = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"})
    prompt = Prompt(uid="a", messages=messages, extras={"reward_spec": {"ground_truth": 4}})
    shown = with_context(prompt, "reward_spec.ground_truth")
    assert shown.messages == (messages[0], {"role": "user", "content": "2+2?\n\n4"})
    with pytest.raises(DataError, match=r"prompt a has no text 'reward_spec\.solution' to show"):
        with_context(prompt, "reward_spec.solution")
