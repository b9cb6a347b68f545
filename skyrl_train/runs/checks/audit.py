"""Computes again, from a run's checkpoints, what its rollouts say: log-probabilities under the weights that each token
claims, advantages from rewards, and rewards where they are functions.

A step is audited whose rollouts are there, and the checkpoint of the step before. Nothing is written to the run's folder.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.door import as_now, load_root
from skyrl_train.config.environment import has_own_reward, reward_entries
from skyrl_train.doctor import Tables, Trajectory
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.rollout.hosts import row_columns, trajectory_facts
from skyrl_train.rollout.rewards import call_reward
from skyrl_train.runs.cli.composition import read_yaml
from skyrl_train.runs.construction.parts import assembler, learners_here, trainer_of
from skyrl_train.runs.resolving import resolve
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.reading import find_runs, first_line
from skyrl_train.telemetry.records import read_facts, read_rollouts
from skyrl_train.trainers import batch_metrics, columns_by_turn, steps
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
    """How many tokens, or trajectories, were compared."""
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
    recorded = {(step, each.uid, each.sample): each for step in steps_there for each in tables.rollouts.of_step(step)}
    trainer, assemble = trainer_of(config), assembler(config)
    bound = BFLOAT16_BOUND if config.model.dtype == "bfloat16" else FLOAT32_BOUND
    said = {
        name: dict(zip(series.steps.tolist(), series.values.tolist()))
        for name in ("batch/trained_tokens", "kl/reference")
        for series in (tables.series(name),)
    }
    with ExitStack() as stack:
        scratch = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-audit-"))))
        first = TrainerState.read(next(iter(steps_there.values())))
        learners = learners_here(resolve(config, purpose="again").config, first, scratch, stack)
        for step, checkpoint in steps_there.items():
            verify(checkpoint)
            models = {"policy": learners.policy, "critic": learners.critic}
            for name, model in models.items():
                if model is not None:
                    model.load(checkpoint / name)
            path = run.rollouts / f"train_step_{step:06d}.parquet"
            of_step = {name: values[step] for name, values in said.items() if step in values}
            state, rollouts = TrainerState.read(checkpoint), read_rollouts(path)[step]
            is_whole = read_facts(path).sample_fraction == 1
            batch = assemble(rollouts, step=step, weight_version=state.weight_version)
            yield from _step(
                trainer, learners, state, rollouts, batch, recorded, of_step, bound, is_whole=is_whole, seed=config.seed
            )
            yield from _rewards(config.environment, step, rollouts)


def _step(
    trainer: TrainerConfig,
    learners: steps.Learners,
    state: TrainerState,
    rollouts: RolloutBatch,
    batch: TrainingInputBatch,
    recorded: Mapping[tuple[int, str, int], Trajectory],
    said: Mapping[str, float],
    bound: float,
    *,
    is_whole: bool,
    seed: int,
) -> Iterator[Audited]:
    """Audit all of a step but its rewards. `batch`: the rows of its `rollouts`; `bound`: nats that its kernels may differ
    by; `is_whole`: whether they are all of the step's; of a sample no advantage follows."""
    step = state.global_step + 1
    scored = steps.score(batch, learners, trainer, rollouts=rollouts)
    if is_whole:
        estimated = steps.estimate(scored, trainer.algorithm, kl_coef=state.kl_controller.coef, seed=seed)
        advantages = columns_by_turn(rollouts, estimated)["advantages"]
        measured = batch_metrics(estimated, trainer.algorithm)
        yield _metric(step, "trained tokens", "batch/trained_tokens", measured, said, 0.0)
        yield _compared(step, "trained tokens", rollouts, advantages, recorded, "advantages", 0.5, None, np.sign)
    logprobs = learners.policy.forward(batch)
    again = batch.with_columns(old_logprobs=logprobs)
    whole = replace(again, metadata=replace(again.metadata, first_scored_row=0))
    by_turn = columns_by_turn(rollouts, whole)["policy_logprobs"]
    yield _compared(
        step, "engine's log-probabilities", rollouts, by_turn, recorded, "logprobs", bound, state.weight_version
    )
    yield _compared(step, "trainer's log-probabilities", rollouts, by_turn, recorded, "policy_logprobs", bound, None)
    yield _ages(trainer.max_staleness, step, rollouts)
    if is_whole:
        if "kl/reference" in measured:
            most = bound / 10 + 0.02 * abs(measured["kl/reference"])
            yield _metric(step, "KL to the reference", "kl/reference", measured, said, most)
        yield _compared(step, "advantages", rollouts, advantages, recorded, "advantages", bound, None)
    else:
        nothing, where = float("nan"), "rollouts are a sample"
        yield Audited(step=step, what="advantages", compared=0, largest=nothing, where=where, bound=bound)
    yield from _optimizer(step, learners.policy, state.totals.optimizer_steps)


def _metric(
    step: int, what: str, name: str, measured: Mapping[str, float], said: Mapping[str, float], bound: float
) -> Audited:
    """Compare a metric of the step with what the batch gives now."""
    there, now = said.get(name, math.nan), measured.get(name, math.nan)
    where = f"{now:.6g} is computed, the record says {there:.6g}" if there == there else "not recorded"
    return Audited(step=step, what=what, compared=1, largest=abs(there - now), where=where, bound=bound)


def _optimizer(step: int, policy: Any, made: int) -> Iterator[Audited]:
    """Compare how many steps the optimizer's averages say to be of with how many the run has made."""
    optimizer = getattr(getattr(policy, "engine", None), "optimizer", None)
    counts = [float(each["step"]) for each in optimizer.state.values() if "step" in each] if optimizer else []
    if counts:
        where = f"averages of {min(counts):.0f} steps, and the run has made {made}"
        off = max(abs(each - made) for each in counts)
        yield Audited(step=step, what="optimizer's state", compared=len(counts), largest=off, where=where, bound=0.0)


def _compared(
    step: int,
    what: str,
    rollouts: RolloutBatch,
    by_turn: Sequence[Any],
    recorded: Mapping[tuple[int, str, int], Trajectory],
    column: str,
    bound: float,
    version: int | None,
    shown: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray,
) -> Audited:
    """Compare a column of tokens, or what `shown` makes of it; with a version only the tokens that say they are of it."""
    worst, where, compared = 0.0, "", 0
    for trajectory, turns in zip(rollouts.trajectories, by_turn):
        own = recorded.get((step, trajectory.prompt_uid, trajectory.sample_index))
        if turns is None or own is None or trajectory.failed:
            continue
        for index, (values, turn) in enumerate(zip(turns, own.turns)):
            said = getattr(turn, column)
            if said is None or len(said) != len(values):
                continue
            differences = np.abs(shown(np.asarray(values, np.float64)) - shown(said))
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


def _ages(max_staleness: int, step: int, rollouts: RolloutBatch) -> Audited:
    """Compare how old tokens say to be with how old they may be, in steps."""
    ages = [step - 1 - _versions(turn) for each in rollouts.trajectories if not each.failed for turn in each.turns]
    every = np.concatenate(ages) if ages else np.zeros(1, np.int64)
    off = float(max(every.max() - max_staleness, -every.min(), 0))
    where = f"weights of steps {step - 1 - every.max()} to {step - 1 - every.min()}"
    return Audited(step=step, what="weight versions", compared=len(every), largest=off, where=where, bound=0.0)


def _rewards(environment: EnvironmentConfig, step: int, rollouts: RolloutBatch) -> Iterator[Audited]:
    """Call each reward that is a function on what was sampled."""
    prompts = {prompt.uid: prompt for prompt in rollouts.prompts}
    entries = [entry for entry in reward_entries(environment) if not entry.in_trainer]
    alone = len(entries) == 1 and not has_own_reward(environment)
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
