"""Computes again, from a run's checkpoints, what its rollouts say: log-probabilities under the weights that each token
claims, advantages from rewards, and rewards where they are functions.

A step is audited whose rollouts are there, and the checkpoint of the step before. Nothing is written to the run's folder.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config
from skyrl_train.config.door import as_now, load_root
from skyrl_train.config.environment import has_own_reward, reward_entries
from skyrl_train.doctor import Tables, Trajectory
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.rollout.hosts import row_columns, trajectory_facts
from skyrl_train.rollout.rewards import call_reward
from skyrl_train.runs.capsule import learners_here, platform_here
from skyrl_train.runs.cli.composition import read_yaml
from skyrl_train.runs.construction.parts import ppo_settings
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.reading import find_runs, first_line
from skyrl_train.telemetry.records import read_facts, read_rollouts
from skyrl_train.trainers import RolloutLog, steps
from skyrl_train.trainers.checkpoints import TrainerState, checkpoint_name, verify
from skyrl_train.types import RolloutBatch, Turn

FLOAT32_BOUND, BFLOAT16_BOUND = 1e-3, 5e-2
"""Nats that two kernels of a type may differ by in a token's log-probability; parts of an advantage or a reward, too."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One quantity of one step: as it was recorded, and as it is computed again."""

    step: int
    what: str
    compared: int
    """Tokens or trajectories."""
    largest: float
    """Largest difference; NaN where the quantity cannot be computed here."""
    where: str
    """The trajectory and token of it, or why nothing was compared."""
    bound: float

    @property
    def holds(self) -> bool:
        """False where the recorded value is not what the run should have had."""
        return not self.largest > self.bound


def audit(folder: Path, only: Sequence[int] = ()) -> Iterator[Audited]:
    """Yield what differs by how much, step by step.

    Args:
        folder: The run's output folder.
        only: Steps to audit; all that can be, unless some are given.

    Raises DataError where no step can be audited, CheckpointError for a damaged checkpoint.
    """
    run = RunFolder(folder)
    if not run.config_file.is_file():
        raise DataError(f"RUN={folder} has no {run.config_file.name}: give the output_dir of a run of this trainer")
    config = load_root(as_now(read_yaml(run.config_file)).tree, Config)
    steps_there = {
        step: run.checkpoints / checkpoint_name(step - 1)
        for step in sorted(each.step for each in find_runs([folder])[0].rollout_files() if each.purpose == "train")
        if (run.checkpoints / checkpoint_name(step - 1)).is_dir() and (not only or step in only)
    }
    if not steps_there:
        raise DataError(
            f"RUN={folder} has no step whose rollouts are there and the checkpoint before it: trainer.ckpt_interval=1 "
            "trainer.max_ckpts_to_keep=5 keeps those of the last steps"
        )
    tables = Tables(find_runs([folder])[0])
    recorded = {(step, each.uid, each.sample): each for step in steps_there for each in tables.of_step(step)}
    trained = tables.series("batch/trained_tokens").at(np.array(list(steps_there)))
    with ExitStack() as stack:
        scratch = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-audit-"))))
        first = TrainerState.read(next(iter(steps_there.values())))
        learners = learners_here(config, platform_here(config.platform), first, scratch, stack)
        for (step, checkpoint), said in zip(steps_there.items(), trained.tolist()):
            verify(checkpoint)
            models = {"policy": learners.policy, "critic": learners.critic}
            for name, model in models.items():
                if model is not None:
                    model.load(checkpoint / name)
            path = run.rollouts / f"train_step_{step:06d}.parquet"
            yield from _step(config, learners, TrainerState.read(checkpoint), path, recorded, said)


def _step(
    config: Config,
    learners: steps.Learners,
    state: TrainerState,
    path: Path,
    recorded: Mapping[tuple[int, str, int], Trajectory],
    said: float,
) -> Iterator[Audited]:
    settings, step = ppo_settings(config), state.global_step + 1
    rollouts = read_rollouts(path)[step]
    bound = BFLOAT16_BOUND if config.model.dtype == "bfloat16" else FLOAT32_BOUND
    batch = steps.assemble(rollouts, settings.assembly, step=step, weight_version=state.weight_version)
    logprobs = learners.policy.forward(batch)
    again = batch.with_columns(old_logprobs=logprobs)
    whole = replace(again, metadata=replace(again.metadata, first_scored_row=0))
    by_turn = RolloutLog.values_by_turn(rollouts, whole)["policy_logprobs"]
    yield _compared(
        step, "engine's log-probabilities", rollouts, by_turn, recorded, "logprobs", bound, state.weight_version
    )
    yield _compared(step, "trainer's log-probabilities", rollouts, by_turn, recorded, "policy_logprobs", bound, None)
    yield _ages(config, step, rollouts)
    if read_facts(path).sample_fraction < 1:
        yield Audited(
            step=step, what="advantages", compared=0, largest=float("nan"), where="rollouts are a sample", bound=bound
        )
    else:
        scored = steps.score(batch, learners, settings.trainer, rollouts=rollouts)
        estimated = steps.estimate(
            scored, settings.trainer.algorithm, kl_coef=state.kl_controller.coef, seed=settings.seed
        )
        by_turn = RolloutLog.values_by_turn(rollouts, estimated)["advantages"]
        yield _compared(step, "advantages", rollouts, by_turn, recorded, "advantages", bound, None)
        yield _trained(step, estimated, said)
    yield from _rewards(config, step, rollouts)


def _compared(
    step: int,
    what: str,
    rollouts: RolloutBatch,
    by_turn: Sequence[Any],
    recorded: Mapping[tuple[int, str, int], Trajectory],
    column: str,
    bound: float,
    version: int | None,
) -> Audited:
    """Compare a column of tokens; with a version only the tokens that say they are of it."""
    worst, where, compared = 0.0, "", 0
    for trajectory, turns in zip(rollouts.trajectories, by_turn):
        own = recorded.get((step, trajectory.prompt_uid, trajectory.sample_index))
        if turns is None or own is None or trajectory.failed:
            continue
        for index, (values, turn) in enumerate(zip(turns, own.turns)):
            said = getattr(turn, column)
            if said is None or len(said) != len(values):
                continue
            differences = np.abs(np.asarray(values, np.float64) - said)
            if version is not None:
                differences = np.where(_versions(trajectory.turns[index]) == version, differences, np.nan)
            compared += int(np.isfinite(differences).sum())
            if np.isfinite(differences).any() and np.nanmax(differences) >= worst:
                token = int(np.nanargmax(differences))
                worst = float(differences[token])
                where = f"{trajectory.prompt_uid}/{trajectory.sample_index} turn {index} token {token}"
    nothing = "not recorded" if not compared else ""
    return Audited(
        step=step,
        what=what,
        compared=compared,
        largest=worst if compared else float("nan"),
        where=where or nothing,
        bound=bound,
    )


def _versions(turn: Turn) -> NDArray[np.int64]:
    """Return the weights that each token of a turn says to be sampled by, `[tokens]`."""
    found = np.zeros(len(turn.response_token_ids), np.int64)
    for start, version in turn.weight_versions:
        found[start:] = version
    return found


def _ages(config: Config, step: int, rollouts: RolloutBatch) -> Audited:
    """Compare how old tokens say to be with how old they may be."""
    ages = [step - 1 - _versions(turn) for each in rollouts.trajectories if not each.failed for turn in each.turns]
    every = np.concatenate(ages) if ages else np.zeros(1, np.int64)
    off = float(max(every.max() - config.trainer.max_staleness, -every.min(), 0))
    where = f"weights of steps {step - 1 - every.max()} to {step - 1 - every.min()}"
    return Audited(step=step, what="weight versions", compared=len(every), largest=off, where=where, bound=0.0)


def _trained(step: int, batch: TrainingInputBatch, said: float) -> Audited:
    """Compare how many tokens have a loss with how many the step says to have trained on."""
    trained = int(batch["loss_mask"].sum())
    where = f"{trained} tokens have a loss" + ("" if math.isnan(said) else f", the record says {said:.0f}")
    return Audited(
        step=step, what="trained tokens", compared=trained, largest=abs(trained - said), where=where, bound=0.0
    )


def _rewards(config: Config, step: int, rollouts: RolloutBatch) -> Iterator[Audited]:
    """Call each reward that is a function on what was sampled."""
    prompts = {prompt.uid: prompt for prompt in rollouts.prompts}
    entries = [entry for entry in reward_entries(config.environment) if not entry.in_trainer]
    alone = len(entries) == 1 and not has_own_reward(config.environment)
    for entry in entries:
        worst, where, compared = 0.0, "", 0
        try:
            for each in rollouts.trajectories:
                if each.failed or not each.turns:
                    continue
                prompt = prompts[each.prompt_uid]
                row = {"prompt": list(map(dict, prompt.messages)), "uid": prompt.uid, **row_columns(prompt)}
                answer = call_reward(entry.spec, row, [trajectory_facts(prompt, each)])
                said = each.rewards.get(entry.name, each.reward if alone else None)
                if not isinstance(answer, (int, float)) or said is None:
                    continue
                compared += 1
                if abs(answer - said) >= worst:
                    worst, where = abs(float(answer) - said), f"{each.prompt_uid}/{each.sample_index}"
        except (SkyrlTrainError, ImportError, TypeError, ValueError) as error:
            where, compared = f"cannot be called here: {first_line(error)}", 0
        largest = worst if compared else float("nan")
        where = where or "it returns no number that was recorded"
        yield Audited(
            step=step, what=f"reward {entry.name}", compared=compared, largest=largest, where=where, bound=1e-6
        )


def table(lines: Sequence[Audited]) -> str:
    """Return the differences as text, a line each."""
    rows = []
    for each in lines:
        state = "ok  " if each.holds else "DIFF"
        size = "not compared" if each.largest != each.largest else f"largest difference {each.largest:.3g}"
        rows.append(f"{state} step {each.step}: {each.what}: {each.compared} compared, {size} ({each.where})")
    return "\n".join(rows)
