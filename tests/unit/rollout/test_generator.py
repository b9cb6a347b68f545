"""The agent loop and the batch around it, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import ConfigError, DataError, EngineError, SkyrlTrainError
from skyrl_train.inference import HFEngine
from skyrl_train.rollout.agent_loop import Episode, multi_turn
from skyrl_train.rollout.checked_engine import check_answer
from skyrl_train.rollout.generator import RolloutGenerator, places_of
from skyrl_train.types import (
    FailureKind,
    GenerationOutput,
    GenerationRequest,
    Outcome,
    Prompt,
    RolloutBatch,
    SamplingParams,
    StopReason,
    Trajectory,
    Turn,
)
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment, done_with, go_on_with
from tests.support.fakes import FakeEngine, make_output, make_prompts, make_tiny_model, make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
"""`#### 4<|im_end|>`, three tokens."""
ON_THREADS: dict[str, Any] = {"env_class": FAKE_ENVIRONMENT, "step_timeout_s": 5.0, "isolation": "thread"}
FIRST_PROMPT_TOKENS = 12
"""`<|im_start|>` `user` `\\n` `0` ` +` ` 1` `?` `<|im_end|>` `\\n` `<|im_start|>` `assistant` `\\n`"""


@pytest.fixture(autouse=True)
def fresh_environments() -> Iterator[None]:
    FakeEnvironment.reset()
    yield
    FakeEnvironment.release.set()


@pytest.fixture
def make_generator() -> Iterator[Callable[..., RolloutGenerator]]:
    made: list[RolloutGenerator] = []

    def make(engine: FakeEngine, *, seed: int = 0, environment: dict[str, Any] | None = None, **generator: Any) -> Any:
        vocabulary_size = generator.pop("vocabulary_size", None)
        made.append(
            RolloutGenerator(
                engine,
                TOKENIZER,
                GeneratorConfig(**generator),
                EnvironmentConfig(**{**ON_THREADS, **(environment or {})}),
                seed,
                vocabulary_size=vocabulary_size,
            )
        )
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def roll_out(generator: RolloutGenerator, prompts: Sequence[Prompt], *, n: int = 1, **changes: Any) -> RolloutBatch:
    settings: dict[str, Any] = {"sampling": SamplingParams(), "global_step": 1, "purpose": "train", **changes}
    return generator.generate(prompts, n_samples_per_prompt=n, **settings)


def roll_out_one(generator: RolloutGenerator, **extras: Any) -> Trajectory:
    return roll_out(generator, make_prompts(1, **extras)).trajectories[0]


def answer(_: GenerationRequest) -> list[int]:
    return ANSWER


async def short_for_some(episode: Episode, *, turns: int) -> Trajectory:
    limits = replace(episode.limits, max_turns=turns) if episode.job.sample_index else episode.limits
    return await multi_turn(replace(episode, limits=limits))


async def says_nothing(episode: Episode) -> None:
    await episode.session.close()


def test_a_custom_agent_loop_makes_the_trajectories(make_generator: Any) -> None:
    loop = {"_target_": "test_generator:short_for_some", "turns": 1}
    steps = [{"observations": [{"role": "user", "content": "again"}], "reward": 0.0, "done": False, "metadata": {}}] * 3
    generator = make_generator(FakeEngine(answer), agent_loop=loop, max_turns=3)
    batch = roll_out(generator, make_prompts(1, steps=steps), n=2)
    assert [len(trajectory.turns) for trajectory in batch.trajectories] == [3, 1]


def test_an_agent_loop_that_makes_no_trajectory_is_refused(make_generator: Any) -> None:
    generator = make_generator(FakeEngine(answer), agent_loop="test_generator:says_nothing")
    with pytest.raises(DataError, match=r"agent_loop must give a Trajectory .* it gave NoneType"):
        roll_out(generator, make_prompts(1))


def test_trajectories_come_in_the_order_of_prompts_and_samples(make_generator: Any) -> None:
    batch = roll_out(make_generator(FakeEngine(answer)), make_prompts(3), n=2)
    assert [(trajectory.prompt_uid, trajectory.sample_index) for trajectory in batch.trajectories] == [
        ("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1), ("p2", 0), ("p2", 1),
    ]  # fmt: skip
    assert [prompt.uid for prompt in batch.prompts] == ["p0", "p1", "p2"]


def test_a_turn_keeps_tokens_text_reward_and_where_they_came_from(make_generator: Any) -> None:
    trajectory = roll_out_one(make_generator(FakeEngine(answer)), steps=[done_with(0.25)])
    (turn,) = trajectory.turns
    assert len(turn.added_token_ids) == FIRST_PROMPT_TOKENS
    assert turn.response_token_ids.tolist() == list(ANSWER)
    assert turn.response_logprobs.tolist() == [-0.5, -0.5, -0.5]
    assert (turn.response_text, turn.reward, turn.weight_versions) == ("#### 4", 0.25, ((0, 7),))
    assert (turn.stop_reason, turn.parent) == (StopReason.STOP, None)
    assert trajectory.outcome is Outcome.DONE
    assert trajectory.metrics == {"steps": 1.0}


def test_each_turn_has_its_reward_and_continues_the_one_before_token_by_token(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    trajectory = roll_out_one(
        make_generator(engine, max_turns=3),
        steps=[go_on_with("Wrong. Try again.", -1.0), go_on_with("Try again", 0.5), done_with(1)],
    )
    assert [turn.reward for turn in trajectory.turns] == [-1.0, 0.5, 1.0]
    assert trajectory.reward == 0.5
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    asked = [request.prompt_token_ids for request in engine.requests]
    assert [tuple(trajectory.prompt_token_ids(index)) for index in range(3)] == asked
    assert all(asked[index + 1][: len(asked[index]) + len(ANSWER)] == (*asked[index], *ANSWER) for index in range(2))


def test_a_trajectory_ends_after_its_last_turn(make_generator: Any) -> None:
    trajectory = roll_out_one(make_generator(FakeEngine(answer), max_turns=2), steps=[go_on_with("Try again")] * 3)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.MAX_TURNS, 2)


def test_a_trajectory_ends_where_the_context_has_no_room_for_another_token(make_generator: Any) -> None:
    second_prompt = FIRST_PROMPT_TOKENS + len(ANSWER) + len(TOKENIZER.encode("\n<|im_start|>user\nTry again"))
    second_prompt += len(TOKENIZER.encode("<|im_end|>\n<|im_start|>assistant\n"))
    steps = [go_on_with("Try again"), done_with(1.0)]
    engine = FakeEngine(lambda request: ANSWER[: request.sampling.max_generate_length])
    full = roll_out_one(make_generator(engine, max_context_length=second_prompt), steps=steps)
    roomy = roll_out_one(make_generator(engine, max_context_length=second_prompt + 1), steps=steps)
    assert (full.outcome, len(full.turns)) == (Outcome.CONTEXT_FULL, 1)
    assert (roomy.outcome, len(roomy.turns)) == (Outcome.DONE, 2)


def test_a_response_is_no_longer_than_the_room_that_is_left(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    generator = make_generator(engine, max_context_length=FIRST_PROMPT_TOKENS + 5)
    roll_out(generator, make_prompts(1), sampling=SamplingParams(max_generate_length=64))
    roll_out(generator, make_prompts(1), sampling=SamplingParams(max_generate_length=4))
    assert [request.sampling.max_generate_length for request in engine.requests] == [5, 4]


def test_a_first_prompt_without_room_for_a_token_fails(make_generator: Any) -> None:
    generator = make_generator(
        FakeEngine(answer), max_context_length=FIRST_PROMPT_TOKENS, environment={"max_failed_fraction": 1.0}
    )
    failure = roll_out_one(generator).failure
    assert failure is not None
    assert failure.kind is FailureKind.PROMPT_TOO_LONG
    assert "the prompt has 12 tokens; generator.max_context_length=12" in failure.message


def test_an_environment_may_write_the_first_prompt_itself(make_generator: Any) -> None:
    trajectory = roll_out_one(
        make_generator(FakeEngine(answer)), first_messages=[{"role": "user", "content": "Try again"}]
    )
    text = TOKENIZER.decode(trajectory.prompt_token_ids(0))
    assert text == "<|im_start|>user\nTry again<|im_end|>\n<|im_start|>assistant\n"


def test_the_environment_gets_its_row_and_the_turn_limit(make_generator: Any) -> None:
    roll_out_one(make_generator(FakeEngine(answer), max_turns=4), reward_spec={"ground_truth": "4"})
    (environment,) = FakeEnvironment.closed
    assert environment.extras == {
        "reward_spec": {"ground_truth": "4"},
        "max_turns": 4,
        "env_class": FAKE_ENVIRONMENT,
    }


def test_rows_name_their_environment_where_the_configuration_names_none(make_generator: Any) -> None:
    by_row = {"env_class": None}
    prompt = replace(make_prompts(1, reward_spec={"ground_truth": "4"})[0], env_class="gsm8k")
    assert roll_out(make_generator(FakeEngine(answer), environment=by_row), [prompt]).trajectories[0].reward == 1.0
    with pytest.raises(DataError, match="names no environment"):
        roll_out(make_generator(FakeEngine(answer), environment=by_row), [replace(prompt, env_class=None)])


def test_a_row_does_not_choose_code(make_generator: Any) -> None:
    prompt = replace(make_prompts(1)[0], env_class="os.path:join")
    generator = make_generator(FakeEngine(answer), environment={"env_class": None, "allowed": (FAKE_ENVIRONMENT,)})
    with pytest.raises(DataError, match=r"p0: its env_class 'os.path:join' is code that environment.allowed does not"):
        roll_out(generator, [prompt])


def test_a_row_may_name_what_is_allowed(make_generator: Any) -> None:
    prompt = replace(make_prompts(1)[0], env_class=FAKE_ENVIRONMENT)
    generator = make_generator(FakeEngine(answer), environment={"env_class": None, "allowed": (FAKE_ENVIRONMENT,)})
    assert roll_out(generator, [prompt]).trajectories[0].reward == 1.0


def test_the_configured_environment_judges_rows_that_name_another(make_generator: Any) -> None:
    prompt = replace(make_prompts(1)[0], env_class="gsm8k")
    assert roll_out(make_generator(FakeEngine(answer)), [prompt]).trajectories[0].failure is None


def test_an_environment_that_does_not_exist_is_refused_before_anything_runs(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    with pytest.raises(ConfigError, match="gsm9k"):
        make_generator(engine, environment={"env_class": "gsm9k"})
    prompt = replace(make_prompts(1)[0], env_class="gsm9k")
    with pytest.raises(ConfigError, match="gsm9k"):
        roll_out(make_generator(engine, environment={"env_class": None}), [prompt])
    assert engine.requests == []


# Seeds


def seeds(generator: RolloutGenerator, engine: FakeEngine, prompts: Sequence[Prompt], **changes: Any) -> list[int]:
    engine.requests.clear()
    roll_out(generator, prompts, n=2, **changes)
    return [request.seed for request in sorted(engine.requests, key=lambda request: request.request_id)]


def test_seeds_differ_by_run_purpose_step_prompt_sample_and_turn(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    prompts = make_prompts(2, steps=[go_on_with("Try again"), done_with(1.0)])
    generator = make_generator(engine)
    drawn = seeds(generator, engine, prompts)
    drawn += seeds(generator, engine, prompts, global_step=2)
    drawn += seeds(generator, engine, prompts, purpose="eval")
    drawn += seeds(make_generator(engine, seed=1), engine, prompts)
    assert len(drawn) == 4 * 2 * 2 * 2
    assert len(set(drawn)) == len(drawn)


def test_seeds_are_the_same_on_every_run_and_wherever_the_prompt_stands(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    prompts = make_prompts(3)
    together = seeds(make_generator(engine), engine, prompts)
    assert seeds(make_generator(engine), engine, prompts) == together
    assert seeds(make_generator(engine), engine, prompts[2:]) == together[4:]


def test_a_prompt_that_is_twice_in_a_batch_is_sampled_twice(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    assert len(set(seeds(make_generator(engine), engine, make_prompts(1) * 2))) == 4


def test_the_parts_of_a_batch_ask_what_the_batch_asks(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    prompts = [*make_prompts(3), *make_prompts(1)]  # the first is there twice
    generator = make_generator(engine)
    settings: dict[str, Any] = {"sampling": SamplingParams(), "global_step": 1, "purpose": "train"}
    whole = generator.generate(prompts, n_samples_per_prompt=2, **settings)
    asked = {request.request_id: request.seed for request in engine.requests}
    engine.requests.clear()
    places = places_of(prompts)
    later, first = (
        generator.thread.run(generator.run_part(prompts[part], places[part], n_samples_per_prompt=2, **settings))
        for part in (slice(3, None), slice(3))
    )
    assert {request.request_id: request.seed for request in engine.requests} == asked
    assert (*first, *later) == whole.trajectories


def test_who_has_a_part_does_not_judge_how_many_may_fail(make_generator: Any) -> None:
    generator = make_generator(FakeEngine(EngineError("out of memory")))
    prompts = make_prompts(2)
    made = generator.thread.run(
        generator.run_part(
            prompts,
            places_of(prompts),
            n_samples_per_prompt=1,
            sampling=SamplingParams(),
            global_step=1,
            purpose="train",
        )
    )
    assert [each.failed for each in made] == [True, True]


# Failures


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (EngineError("out of memory"), FailureKind.ENGINE_ERROR, "EngineError: out of memory"),
        (make_output([], stop_reason=StopReason.ABORT), FailureKind.ENGINE_ERROR, "aborted the request after 0 tokens"),
        (make_output([5, 5], stop_reason=StopReason.ABORT), FailureKind.ENGINE_ERROR, "aborted .* after 2 tokens"),
        (make_output([]), FailureKind.ENGINE_ERROR, "returned no tokens"),
        (make_output([5, 5], logprobs=(-1.0,)), FailureKind.ENGINE_ERROR, "1 log-probabilities for 2 tokens"),
        (make_output([5], logprobs=(float("nan"),)), FailureKind.ENGINE_ERROR, "not finite"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_a_failure(
    make_generator: Any, reply: Any, kind: FailureKind, message: str
) -> None:
    generator = make_generator(FakeEngine(lambda _: reply), environment={"max_failed_fraction": 1.0})
    trajectory = roll_out_one(generator)
    assert trajectory.failure is not None
    assert trajectory.failure.kind is kind
    assert re.search(message, trajectory.failure.message)
    with pytest.raises(ValueError, match="failed and has no reward"):
        _ = trajectory.reward


def test_a_request_that_is_not_answered_in_time_is_a_failure(make_generator: Any) -> None:
    generator = make_generator(
        FakeEngine(answer, delay_s=30), request_timeout_s=0.05, environment={"max_failed_fraction": 1.0}
    )
    failure = roll_out_one(generator).failure
    assert failure is not None
    assert failure.kind is FailureKind.ENGINE_TIMEOUT
    assert failure.message == "the engine did not answer within generator.request_timeout_s=0.05"


def test_a_failure_names_its_turn_and_keeps_the_turns_before_it(make_generator: Any) -> None:
    generator = make_generator(FakeEngine(answer), max_turns=3, environment={"max_failed_fraction": 1.0})
    trajectory = roll_out_one(generator, steps=[go_on_with("Try again"), done_with(float("nan"))])
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.turn_index) == (FailureKind.INVALID_REWARD, 1)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.FAILED, 1)


def test_one_broken_environment_does_not_touch_its_neighbours(make_generator: Any) -> None:
    prompts = [*make_prompts(3), Prompt(uid="bad", messages=make_prompts(1)[0].messages, extras={"raise_in": "step"})]
    batch = roll_out(make_generator(FakeEngine(answer)), prompts)
    assert [trajectory.failed for trajectory in batch.trajectories] == [False, False, False, True]


def test_too_many_failures_stop_the_run_with_the_commonest_reasons(make_generator: Any) -> None:
    prompts = [*make_prompts(3, raise_in="step"), Prompt(uid="ok", messages=make_prompts(1)[0].messages)]
    with pytest.raises(SkyrlTrainError) as caught:
        roll_out(make_generator(FakeEngine(answer)), prompts)
    assert type(caught.value) is SkyrlTrainError
    text = str(caught.value)
    assert "3 of 4 trajectories failed, more than environment.max_failed_fraction=0.5" in text
    assert "3 x environment_error: ValueError: unknown city '...'" in text
    assert "e.g. environment_error: ValueError: unknown city 'Oz'" in text
    kept = [(prompt.uid, trajectory.failed) for prompt, trajectory in caught.value.trajectories]
    assert sum(failed for _, failed in kept) == 3
    assert len(kept) == len(set(kept))


def test_an_engine_that_always_fails_is_an_engine_error(make_generator: Any) -> None:
    with pytest.raises(EngineError, match="2 of 2 trajectories failed"):
        roll_out(make_generator(FakeEngine(lambda _: EngineError("gone"))), make_prompts(2))


def test_a_run_that_is_broken_for_good_stops_early(make_generator: Any) -> None:
    generator = make_generator(
        FakeEngine(answer), environment={"num_workers": 1, "step_timeout_s": 0.2, "max_failed_fraction": 0.0}
    )
    started = time.monotonic()
    with pytest.raises(SkyrlTrainError, match="1 of 50 trajectories failed"):
        roll_out(generator, make_prompts(50, hang_in="step"))
    assert time.monotonic() - started < 3.0


async def buggy(episode: Episode) -> Trajectory:
    raise TypeError("a bug")


def test_a_programming_error_of_an_agent_loop_is_not_swallowed(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    generator = make_generator(engine, environment={"max_failed_fraction": 1.0}, agent_loop="test_generator:buggy")
    with pytest.raises(TypeError, match="a bug"):
        roll_out(generator, make_prompts(4))
    assert engine.num_leases == 0


def test_an_engine_that_breaks_over_one_request_fails_that_trajectory_and_says_where(
    make_generator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    replies: Iterator[Any] = iter([TypeError("a bug")])
    generator = make_generator(FakeEngine(lambda _: next(replies, ANSWER)), environment={"max_failed_fraction": 1.0})
    trajectories = roll_out(generator, make_prompts(3)).trajectories
    (failed,) = [each for each in trajectories if each.failed]
    assert failed.failure is not None
    assert "TypeError: a bug" in failed.failure.message
    assert "Traceback" in caplog.text


# Answers


BAD_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "a fraction": ({"token_ids": (5, 3.7)}, r"token id 3.7 \(token 1 of the answer\); must be a whole number"),
    "a text": ({"token_ids": ("7", 5)}, "token id '7'"),
    "a truth value": ({"token_ids": (True, 5)}, "token id True"),
    "a text of ids": ({"token_ids": "55"}, "'55' in place of a token id for each token"),
    "a negative id": ({"token_ids": (5, -1)}, "token id -1"),
    "past the vocabulary": ({"token_ids": (5, len(TOKENIZER))}, f"must be from 0 to {len(TOKENIZER) - 1}"),
    "a huge id": ({"token_ids": (5, 10**5000)}, "token id a int that cannot be shown"),
    "a positive log-probability": ({"logprobs": (5.0, -1.0)}, "5.0 .* at most 0"),
    "a text as log-probability": ({"logprobs": ("-1", -1.0)}, "log-probability '-1'"),
    "a truth value as log-probability": ({"logprobs": (False, -1.0)}, "log-probability False"),
    "an infinite log-probability": ({"logprobs": (float("-inf"), -1.0)}, "not finite"),
    "infinite in float32": ({"logprobs": (-1e300, -1.0)}, "not finite"),
    "no log-probabilities": ({"logprobs": None}, "None in place of a log-probability"),
    "more than asked for": ({"token_ids": (5,) * 65, "logprobs": (-1.0,) * 65}, "65 tokens, and 64 were asked for"),
    "weights that there are not": ({"weight_version": 8}, "with weights 8, and has those of 7"),
    "weights of earlier": ({"weight_version": 6}, "with weights 6, and has those of 7"),
    "a version that is a text": ({"weight_version": "7"}, "with weights '7'"),
    "no version": ({"weight_versions": ()}, "as weight_versions; must be runs"),
    "versions that are no runs": ({"weight_versions": (7,)}, "as weight_versions; must be runs"),
    "a run of unknown weights": ({"weight_versions": ((0, 7), (1, 8))}, "with weights 8, and has those of 7"),
    "runs from the second token on": ({"weight_versions": ((1, 7),)}, "for 2 tokens; runs .* must begin at token 0"),
    "a run past the end": ({"weight_versions": ((0, 7), (2, 7))}, "for 2 tokens"),
    "runs out of order": ({"weight_versions": ((0, 7), (1, 7), (1, 7))}, "come in order"),
    "a start that is a text": ({"weight_versions": (("0", 7),)}, "must begin at token 0"),
    "a stop reason that is a text": ({"stop_reason": "stop"}, "stop reason 'stop'"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_with_wrong_data_fails_its_trajectory_alone(
    make_generator: Any, changes: dict[str, Any], message: str
) -> None:
    replies: Iterator[Any] = iter([replace(make_output((5, 5)), **changes)])
    generator = make_generator(FakeEngine(lambda _: next(replies, ANSWER)), environment={"max_failed_fraction": 0.5})
    batch = generator.generate(
        make_prompts(2),
        n_samples_per_prompt=1,
        sampling=SamplingParams(max_generate_length=64),
        global_step=1,
        purpose="train",
    )
    (failure,) = [each.failure for each in batch.trajectories if each.failure is not None]
    assert failure.kind is FailureKind.ENGINE_ERROR
    assert re.search(message, failure.message), failure.message


def test_numbers_of_numpy_are_taken_for_what_they_are(make_generator: Any) -> None:
    given: Any = replace(make_output(()), token_ids=np.array([5, 6]), logprobs=[np.float32(-0.5), 0])
    trajectory = roll_out_one(make_generator(FakeEngine(lambda _: given)))
    assert trajectory.turns[0].response_token_ids.tolist() == [5, 6]
    assert trajectory.turns[0].response_logprobs.tolist() == [-0.5, 0.0]


def test_an_answer_of_several_versions_keeps_them_by_token(make_generator: Any) -> None:
    """The engine takes weights of version 8 while it answers."""
    engine = FakeEngine(answer)

    def answer_over_a_sync(_: GenerationRequest) -> GenerationOutput:
        engine.weight_version = 8
        return replace(make_output((5, 6, 3)), weight_versions=[[0, 7], [2, 8]])  # type: ignore[arg-type]

    engine._answer = answer_over_a_sync
    assert roll_out_one(make_generator(engine)).turns[0].weight_versions == ((0, 7), (2, 8))


@pytest.mark.parametrize("runs", [((0, 8), (1, 7)), ((0, 6), (1, 8))])
def test_versions_neither_fall_nor_come_from_before_the_request(runs: tuple[tuple[int, int], ...]) -> None:
    request = GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(), seed=0)
    output = replace(make_output((5, 6)), weight_versions=runs)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"never fall|with weights 6, and has those of 7 to 8"):
        check_answer(output, request, vocabulary_size=len(TOKENIZER), versions=(7, 8))


def test_a_prompt_that_the_model_has_no_embedding_of_is_not_sent(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    generator = make_generator(engine, environment={"max_failed_fraction": 1.0}, vocabulary_size=12)
    failure = roll_out_one(generator).failure
    assert failure is not None
    assert "Set model.tokenizer_path" in failure.message
    assert not engine.requests


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_token_ids": (5, 5, 10_000)}, "token id 10000"),
        ({"response_logprobs": (-1.0, -1.0, 0.5)}, "log-probability"),
        ({"reward": 1e39}, "reward 1e.39 is not finite in float32"),
        ({"response_token_ids": (5,) * 300, "response_logprobs": ()}, "more than generator.max_context_length=256"),
    ],
)
def test_a_turn_of_a_custom_agent_loop_is_checked_too(
    make_generator: Any, changes: dict[str, Any], message: str
) -> None:
    loop = {"_target_": "test_generator:with_changes", "changes": changes}
    generator = make_generator(
        FakeEngine(answer), environment={"max_failed_fraction": 1.0}, agent_loop=loop, max_context_length=256
    )
    trajectory = roll_out_one(generator)
    assert trajectory.failure is not None
    assert re.search(message, trajectory.failure.message)
    assert trajectory.turns == ()


async def with_changes(episode: Episode, *, changes: dict[str, Any]) -> Trajectory:
    trajectory = await multi_turn(episode)
    values = {name: getattr(trajectory.turns[0], name) for name in Turn.__dataclass_fields__}
    return replace(trajectory, turns=(Turn(**{**values, **changes}),))


# The event loop


def test_all_trajectories_hold_a_lease_before_the_first_request_and_none_after(make_generator: Any) -> None:
    engine = FakeEngine(answer)
    roll_out(make_generator(engine), make_prompts(3), n=4)
    assert (engine.leases_at_first_request, engine.num_leases) == (12, 0)


def test_generating_works_again_and_from_inside_a_running_loop(make_generator: Any) -> None:
    generator = make_generator(FakeEngine(answer))
    first = roll_out(generator, make_prompts(2))

    async def inside() -> RolloutBatch:
        return roll_out(generator, make_prompts(2))

    assert asyncio.run(inside()) == first == roll_out(generator, make_prompts(2))


def test_what_hung_or_would_not_close_is_reported(make_generator: Any, caplog: pytest.LogCaptureFixture) -> None:
    generator = make_generator(FakeEngine(answer), environment={"step_timeout_s": 0.25, "max_failed_fraction": 1.0})
    roll_out(generator, make_prompts(2, raise_in="close"))
    roll_out(generator, make_prompts(1, hang_in="step"))
    assert [record.getMessage() for record in caplog.records] == [
        "2 environments could not be closed",
        "1 environment calls hung; their threads were given up",
    ]


def test_a_hung_environment_holds_up_an_engine_that_generates_in_waves_for_its_deadline_only(
    make_generator: Any,
) -> None:
    with contextlib.closing(HFEngine(make_tiny_model(), TOKENIZER, max_batch_size=8)) as engine:
        generator = make_generator(engine, environment={"step_timeout_s": 0.5})
        prompts = make_prompts(3, steps=[go_on_with("Try again"), done_with(1.0)])
        hung = replace(prompts[1], extras={**prompts[1].extras, "hang_in": "init"})
        batch = roll_out(generator, [prompts[0], hung, prompts[2]], sampling=SamplingParams(max_generate_length=4))
    assert [trajectory.outcome for trajectory in batch.trajectories] == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]


def test_progress_is_reported_up_to_the_last_trajectory(make_generator: Any) -> None:
    generator = make_generator(FakeEngine(answer))
    heard: list[tuple[int, int]] = []
    generator.on_progress = lambda done, total: heard.append((done, total))
    roll_out(generator, make_prompts(2), n=2)
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_ctrl_c_ends_the_rollout_and_leaves_the_generator_usable(make_generator: Any) -> None:
    engine = FakeEngine(answer, delay_s=60)
    generator = make_generator(engine)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            roll_out(generator, make_prompts(2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine.num_leases == 0
    assert len(FakeEnvironment.closed) == 2
    engine._delay_s = 0.0
    assert len(roll_out(generator, make_prompts(2)).trajectories) == 2
