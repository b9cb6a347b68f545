"""Rewards of a trajectory that has ended: asks the configured functions, and adds what they say to it.

    agent loop -> Trajectory -> score: one trajectory each -> score_group: all samples of a prompt -> RolloutBatch

A function runs in a worker process (or on a thread) of the environments, those of this package that hold a model or
connections in this process. Whatever it does wrong fails the trajectory that it was asked about.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import OWN_REWARD, RewardEntry, has_own_reward, reward_entries
from skyrl_train.data import names_of, near_column
from skyrl_train.errors import ConfigError, DataError, Violation
from skyrl_train.registry import PartSpec, part_name, split_spec
from skyrl_train.rollout.boundary import (
    OF_REWARDS,
    EnvironmentFailed,
    Environments,
    check_reward,
    check_scores,
    describe,
    invalid_reward,
    read_answer,
)
from skyrl_train.rollout.envs.environments import uses_processes
from skyrl_train.rollout.hosts.local import LocalWorkers, check_arguments, import_in_process
from skyrl_train.rollout.rewards import HeldReward
from skyrl_train.rollout.rewards.reward_functions import (
    SCORE,
    RewardFacts,
    call_reward_here,
    reward_facts,
    reward_function,
    reward_violations,
)
from skyrl_train.telemetry.logs import redact_text
from skyrl_train.types import FailureKind, Outcome, Prompt, Trajectory

Score = float | Mapping[str, float] | None


class Rewards:
    """The rewards of a run. Used from one event loop."""

    def __init__(self, environment: EnvironmentConfig, environments: Environments) -> None:
        """Raises ConfigError where one of them cannot be called. `environments` is where functions run."""
        self._environments = environments
        self._entries = reward_entries(environment)
        self._facts = facts_of(environment)
        self._has_own = has_own_reward(environment)
        self.of_groups = any(self._form(entry) != "each" for entry in self._entries)
        """Whether some function takes several trajectories."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with the rewards of functions of one trajectory; failed where one of them failed."""
        if trajectory.failed or not trajectory.turns or not self._entries:
            return trajectory
        if self._has_own:
            trajectory = replace(trajectory, rewards={OWN_REWARD: trajectory.reward})
        entries = [entry for entry in self._entries if self._form(entry) == "each"]
        answers = await asyncio.gather(*(self._ask(entry, prompt, [trajectory]) for entry in entries))
        for entry, (answer,) in zip(entries, answers):
            trajectory = _with_score(trajectory, entry, answer, self._facts[entry.setting])
        return trajectory

    async def score_group(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], *, global_step: int | None = None
    ) -> list[Trajectory]:
        """Return the samples of a prompt with the rewards of functions of several; they see those that have not failed.
        `global_step` is what functions of TRL's signature find in `trainer_state`; None where rollouts are made ahead."""
        scored = list(trajectories)
        for entry in self._entries:
            left = [index for index, trajectory in enumerate(scored) if not trajectory.failed]
            if self._form(entry) == "each" or not left:
                continue
            answers = await self._ask(entry, prompt, [scored[index] for index in left], global_step)
            if (
                self._form(entry) == "batched"
                and len(left) > 1
                and all(isinstance(one, EnvironmentFailed) for one in answers)
            ):
                alone = await asyncio.gather(
                    *(self._ask(entry, prompt, [scored[index]], global_step) for index in left)
                )
                answers = [answer for (answer,) in alone]
            for index, answer in zip(left, answers):
                scored[index] = _with_score(scored[index], entry, answer, self._facts[entry.setting])
        return [self._scored_at_all(one) for one in scored]

    def _scored_at_all(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory; failed where each of its rewards said that it does not apply, as TRL's may."""
        if trajectory.failed or trajectory.rewards or not trajectory.turns:
            return trajectory
        names = ", ".join(entry.name for entry in self._entries)
        broken = EnvironmentFailed(FailureKind.NOT_SCORED, f"none of its rewards applies: {names} returned None")
        return _failed(trajectory, broken)

    def take_metrics(self) -> dict[str, float]:
        """Return what the rewards of this process did since the last time, as `timing/REWARD/...`."""
        held = held_rewards(self._entries)
        measured = {entry.name: reward.take_metrics() for entry, reward in held}
        return {f"timing/{reward}/{name}": value for reward, each in measured.items() for name, value in each.items()}

    def _form(self, entry: RewardEntry) -> str:
        return self._facts[entry.setting].form

    async def _ask(
        self, entry: RewardEntry, prompt: Prompt, trajectories: Sequence[Trajectory], global_step: int | None = None
    ) -> Sequence[Score | EnvironmentFailed]:
        """Return what the function says of each trajectory, or why it says nothing."""
        num_values = None if self._form(entry) == "each" else len(trajectories)
        messages = [dict(message) for message in prompt.messages]
        row: dict[str, Any] = {**row_columns(prompt), "prompt": messages, "uid": prompt.uid}
        samples = [trajectory_facts(prompt, one) for one in trajectories]
        if self._facts[entry.setting].convention == "trl":
            row |= {"prompt_is_text": prompt.is_text, "global_step": global_step}
            for sample, one in zip(samples, trajectories):
                sample["completion_ids"] = [int(each) for turn in one.turns for each in turn.response_token_ids]
        try:
            if entry.in_trainer:
                values = await call_reward_here(entry.spec, row, samples)
                return check_scores(values, source=entry.name, num_samples=num_values)
            request = {"call": "score", "spec": entry.spec, "prompt": row, "samples": samples, "num_values": num_values}
            handle = self._environments.host(entry.name)
            try:
                answer = read_answer(await handle.ask(request), source=entry.name)
            finally:
                handle.release()
            return check_scores(answer, source=entry.name, num_samples=len(trajectories))
        except EnvironmentFailed as error:
            kind, said = OF_REWARDS.get(error.kind, error.kind), error.message
            broken = EnvironmentFailed(kind, said if said.startswith(entry.name) else f"{entry.name}: {said}")
        except asyncio.TimeoutError as error:
            broken = EnvironmentFailed(FailureKind.REWARD_TIMEOUT, f"{entry.name}: {describe(error)}")
        except Exception as error:
            broken = EnvironmentFailed(FailureKind.REWARD_ERROR, f"{entry.name}: {describe(error)}")
        return [broken] * len(trajectories)


def _failed(trajectory: Trajectory, broken: EnvironmentFailed) -> Trajectory:
    failure = broken.to_failure(turn_index=len(trajectory.turns) - 1)
    return replace(trajectory, outcome=Outcome.FAILED, failure=failure)


def _with_score(
    trajectory: Trajectory, entry: RewardEntry, answer: Score | EnvironmentFailed, facts: RewardFacts
) -> Trajectory:
    """Return the trajectory with one more reward, whose weighted value goes to its last turn; failed where there is none.
    TRL's None leaves the others to score it."""
    if trajectory.failed or (answer is None and facts.convention == "trl"):
        return trajectory
    try:
        if isinstance(answer, EnvironmentFailed):
            raise answer
        if answer is None:
            raise EnvironmentFailed(FailureKind.NOT_SCORED, f"{entry.name} returned None: not scored")
        if facts.convention == "verl" and isinstance(answer, Mapping) and not isinstance(entry.weight, Mapping):
            answer = _of_verl(entry, answer)
            entry = replace(entry, weight={entry.name: entry.weight})
        rewards, value = _components(trajectory, entry, answer, facts)
        last = trajectory.turns[-1]
        last = replace(last, reward=check_reward(last.reward + value, source=entry.name))
    except EnvironmentFailed as broken:
        return _failed(trajectory, broken)
    return replace(trajectory, turns=(*trajectory.turns[:-1], last), rewards={**trajectory.rewards, **rewards})


def _of_verl(entry: RewardEntry, score: Mapping[str, float]) -> dict[str, float]:
    """Return what a mapping of verl's says by the names that its numbers get here: its score is the reward, others are
    reported. Raises EnvironmentFailed where there is no score."""
    if SCORE not in score:
        message = f"{entry.name} returned {', '.join(score)} and no {SCORE!r}, which is the reward in verl's signature"
        raise invalid_reward(message)
    return {entry.name if name == SCORE else f"{entry.name}_{name}": value for name, value in score.items()}


def _components(
    trajectory: Trajectory, entry: RewardEntry, score: float | Mapping[str, float], facts: RewardFacts
) -> tuple[Mapping[str, float], float]:
    """Return a function's rewards by name, and their weighted sum. Raises EnvironmentFailed where names do not fit, or a
    value is outside the range that the function declares."""
    rewards = score if isinstance(score, Mapping) else {entry.name: score}
    counted = {f"{entry.name}_{name}": rewards[name] for name in facts.counts if name in rewards}
    if facts.counts:
        others = {name: value for name, value in rewards.items() if name not in facts.counts}
        if not others:
            raise invalid_reward(f"{entry.name} returned {', '.join(rewards)} alone, which is no reward")
        rewards = others if len(others) > 1 else {entry.name: next(iter(others.values()))}
    if isinstance(entry.weight, Mapping):
        weights: Mapping[str, float] = entry.weight
        if missing := [name for name in weights if name not in rewards]:
            raise invalid_reward(f"{entry.name} returned no {', '.join(missing)}, which {entry.setting}.weight names")
    else:
        weights = dict.fromkeys(rewards, entry.weight)
    low, high = facts.range or (-math.inf, math.inf)
    for name in weights:
        if not low <= rewards[name] <= high:
            said = f"{entry.name} returned {name}={rewards[name]!r}"
            raise invalid_reward(f"{said}, outside the range {low:g} to {high:g} that it declares")
    if twice := [name for name in rewards if name in trajectory.rewards]:
        raise invalid_reward(f"{entry.name} returned {', '.join(twice)}, and another reward has that name")
    return {**rewards, **counted}, sum(weight * rewards[name] for name, weight in weights.items())


def held_rewards(entries: Iterable[RewardEntry]) -> list[tuple[RewardEntry, HeldReward]]:
    """Return the rewards of this process, which are made once. Raises ConfigError where one cannot be made."""
    made: list[tuple[RewardEntry, object]] = []
    for entry in entries:
        try:
            made += [(entry, reward_function(entry.spec))] if entry.in_trainer else []
        except (TypeError, ValueError, AttributeError) as error:  # of arguments of the wrong type
            rule, remedy = (
                f"cannot be made of these arguments ({describe(error)})",
                "docs/rewards.md says what they are",
            )
            raise ConfigError([Violation.of(entry.setting, part_name(entry.spec), rule, remedy)]) from None
    return [(entry, reward) for entry, reward in made if isinstance(reward, HeldReward)]


async def server_problems(environment: EnvironmentConfig) -> list[Violation]:
    """Return which servers of rewards are of no use: one that is down, or has another model."""
    found = [(entry, await held.problem()) for entry, held in held_rewards(reward_entries(environment))]
    remedy = "start it, or correct the setting"
    rule = "must be the address of a server that can be used, http://HOST:PORT"
    return [
        Violation.of(
            f"{entry.setting}.url",
            redact_text(str(split_spec(entry.spec)[1].get("url", ""))),
            f"{rule} ({problem.rstrip('.')})",
            remedy,
        )
        for entry, problem in found
        if problem
    ]


def row_columns(prompt: Prompt) -> dict[str, Any]:
    """Return the columns that reward functions may name: the row's, and its ground truth in the ecosystem's formats."""
    columns = dict(prompt.extras)
    for nested in ("reward_spec", "reward_model"):
        spec = columns.get(nested)
        if isinstance(spec, Mapping) and "ground_truth" in spec:
            columns = {**dict.fromkeys(("answer", "ground_truth"), spec["ground_truth"]), **columns}
    return columns


def trajectory_facts(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """Return what reward functions may name of a trajectory with turns: its texts, messages and lengths."""
    turns = trajectory.turns
    after: list[dict[str, Any]] = []
    for turn in turns:
        after += [{"role": "assistant", "content": turn.response_text}, *map(dict, turn.observations)]
    return {
        "completion": turns[-1].response_text,
        "completion_messages": after,
        "messages": [*map(dict, trajectory.first_messages or prompt.messages), *after],
        "stop_reason": turns[-1].stop_reason.value,
        "response_length": sum(len(turn.response_token_ids) for turn in turns),
        "num_turns": len(turns),
    }


def check_reward_columns(prompts: Sequence[Prompt], environment: EnvironmentConfig) -> None:
    """Raise DataError, in one line, for the first row that lacks what a reward function cannot be called without: place,
    column and how many others there are. ConfigError as `facts_of`."""
    facts = facts_of(environment)
    needed = {entry.name: facts[entry.setting].columns for entry in reward_entries(environment)}
    found: list[tuple[Prompt, str, str]] = []
    held = held_rewards(reward_entries(environment))
    for prompt in prompts if held or any(needed.values()) else ():
        columns = row_columns(prompt)
        named = ((name, column) for name, required in needed.items() for column in required)
        lacking = [(name, column) for name, column in named if columns.get(column) is None]
        lacking += [(entry.name, missing) for entry, reward in held if (missing := reward.missing_column(columns))]
        found += [(prompt, *each) for each in lacking[:1]]
    if found:
        prompt, name, column = found[0]
        columns = row_columns(prompt)
        others = f" ({len(found) - 1} other rows of {len(prompts)} are refused, too)" if len(found) > 1 else ""
        near = "" if column in columns else near_column(column, columns)
        what = "is null" if column in columns else f"there is none: the row's columns are {names_of(columns)}"
        raise DataError(
            f"{prompt.place or 'prompt ' + prompt.uid}: the reward {name} takes the column {column!r}, and {what}{others}. "
            f"{near}data.answer_column names the column with the answer; or rename the parameter, or give it a default."
        )


def reward_problems(environment: EnvironmentConfig) -> list[Violation]:
    """Return what is wrong with the configured rewards, which are imported where they will run."""
    try:
        facts_of(environment)
    except ConfigError as error:
        return list(error.violations)
    return []


def facts_of(environment: EnvironmentConfig) -> Mapping[str, RewardFacts]:
    """Return the facts of each reward, by its setting. Raises ConfigError with all that is wrong with them.

    Functions that run in worker processes are imported in one, so that an import that exits, crashes or hangs harms nothing
    here; the answer is kept.
    """
    apart = uses_processes(environment)
    specs = {entry.setting: entry.spec for entry in reward_entries(environment)}
    elsewhere = {entry.setting: entry.spec for entry in reward_entries(environment) if apart and not entry.in_trainer}
    for setting, spec in elsewhere.items():
        check_arguments(spec, setting)
    found = [
        each for setting, spec in specs.items() if setting not in elsewhere for each in reward_violations(spec, setting)
    ]
    if not found:
        entries = reward_entries(environment)
        found = [each for entry, held in held_rewards(entries) for each in held.violations(entry.setting)]
    if found:
        raise ConfigError(found)
    here = {setting: reward_facts(spec) for setting, spec in specs.items() if setting not in elsewhere}
    return {**here, **(_facts_in_process(json.dumps(elsewhere), environment.variables) if elsewhere else {})}


@functools.cache
def _facts_in_process(specs: str, variables: tuple[str, ...]) -> Mapping[str, RewardFacts]:
    """`specs` is JSON: settings to rewards. Raises ConfigError."""
    rewards: dict[str, PartSpec] = json.loads(specs)
    workers = LocalWorkers((), worker_memory_gb=1.0, reward_specs=rewards, variables=variables)
    found: dict[str, RewardFacts] = {}
    for setting, facts in import_in_process(workers, "rewards").items():
        fields: dict[str, Any] = {  # JSON made lists of tuples
            name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
        }
        found[setting] = RewardFacts(**fields)
    return found
