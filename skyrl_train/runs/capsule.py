"""Executes the step of a capsule again, in this process, whatever placement made it, and compares what comes of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyrl_train.capsules.compare import (
    BFLOAT16,
    EXACT,
    FLOAT32,
    Bounds,
    Comparison,
    compare_batches,
    compare_metrics,
    compare_moments,
    compare_weights,
)
from skyrl_train.capsules.record import (
    BATCH_FILE,
    CONFIG_FILE,
    STATES,
    Capsule,
    find_capsule,
    read_batch,
    step_name,
    write_batch,
)
from skyrl_train.cli.composition import read_yaml
from skyrl_train.config.learners import run_models
from skyrl_train.config.load import load_root
from skyrl_train.config.placement import PlacementConfig, StrategyConfig
from skyrl_train.config.schema import Config
from skyrl_train.errors import DataError
from skyrl_train.learner.state import read_tensors
from skyrl_train.plan.dry_run import plan_batches
from skyrl_train.runs.build import Host, build_learners, size_micro_batches
from skyrl_train.runs.common import prepare_process
from skyrl_train.runs.rl import ppo_settings
from skyrl_train.telemetry.console import RunConsole
from skyrl_train.telemetry.metrics import to_values
from skyrl_train.telemetry.rollout_store import read_facts, read_rollouts
from skyrl_train.telemetry.run_folder import RunFolder
from skyrl_train.trainers import steps
from skyrl_train.trainers.manifest import verify
from skyrl_train.trainers.state import TrainerState, library_versions
from skyrl_train.trainers.step_metrics import batch_metrics, document_metrics

if TYPE_CHECKING:
    from skyrl_train.batch.training_batch import TrainingInputBatch
    from skyrl_train.interfaces import Learner, Scorer

MODELS = ("policy", "critic", "reference")
"""Folders that a state may have."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A capsule whose files are whole."""

    run: RunFolder
    folder: Path
    capsule: Capsule
    config: Config
    """As the step was made with."""
    before: Path
    """Models and state that it began with; of a refused step, the models as they were then."""
    after: Path | None
    """Of a step that was finished."""

    @property
    def inline(self) -> Config:
        """The configuration of this process: no Ray, one rank, and the CPU where there is no GPU."""
        platform = self.config.platform
        if platform.on_gpu and not torch.cuda.is_available():
            platform = replace(platform, name="cpu", device="cpu")
        return replace(self.config, platform=platform, placement=PlacementConfig(), strategy=StrategyConfig())

    def batch(self) -> TrainingInputBatch:
        """The training batch as it was recorded. Raises DataError where the step ended before there was one."""
        if not (self.folder / BATCH_FILE).is_file():
            reason = self.capsule.refusal.error if self.capsule.refusal else "its file is missing"
            raise DataError(f"step {self.capsule.step} has no training batch: {reason}")
        return read_batch(self.folder / BATCH_FILE)

    def bounds(self) -> Bounds:
        """By how much the step may differ here."""
        config, inline = self.config, self.inline
        is_same = (config.placement.backend, config.strategy.kind, config.platform) == (
            "inline",
            "single",
            inline.platform,
        ) and dict(self.capsule.versions) == library_versions()
        if is_same and (not inline.platform.on_gpu or config.deterministic):
            return EXACT
        return BFLOAT16 if config.model.dtype == "bfloat16" else FLOAT32


def open_capsule(run: Path, step: int) -> Opened:
    """Raises DataError where there is none of that step, CheckpointError where a file of it is not what was written."""
    folder = find_capsule(RunFolder(run).capsules, step)
    verify(folder)
    capsule = Capsule.read(folder)
    before, after = folder, None
    if capsule.refusal is None:
        states = RunFolder(run).capsules / STATES
        before, after = states / step_name(step - 1), states / step_name(step)
        verify(before)
        verify(after)
    config = load_root(read_yaml(folder / CONFIG_FILE), Config)
    return Opened(run=RunFolder(run), folder=folder, capsule=capsule, config=config, before=before, after=after)


@contextmanager
def models_of(opened: Opened) -> Iterator[tuple[steps.Learners, TrainerState]]:
    """The models as the step began with them, in this process, and the state of the loop."""
    inline = opened.inline
    prepare_process(inline)
    state = TrainerState.read(opened.before)
    plan = plan_batches(opened.config, num_train_prompts=state.data.num_prompts)
    with ExitStack() as stack:
        learners = build_learners(run_models(inline, plan.schedule), stack, Host())
        scratch = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-capsule-"))))
        if opened.run.memory_file.is_file():
            shutil.copyfile(opened.run.memory_file, scratch.memory_file)
        size_micro_batches(inline, plan, learners, scratch, RunConsole(step_lines=False))
        for name, model in _named(learners).items():
            if (opened.before / name).is_dir():
                model.load(opened.before / name)
        yield learners, state


def _named(learners: steps.Learners) -> dict[str, Learner | Scorer]:
    found = {"policy": learners.policy, "critic": learners.critic, "reference": learners.reference}
    return {name: model for name, model in found.items() if model is not None}


def run_again(opened: Opened, output: Path) -> list[Comparison]:
    """Execute the step, write its batch and models to `output`, and compare both, and the metrics, with those recorded.

    Raises DataError for a step that was refused.
    """
    if opened.after is None:
        raise DataError(f"step {opened.capsule.step} was refused: there is nothing to compare with")
    settings, bounds, recorded = ppo_settings(opened.config), opened.bounds(), opened.batch()
    with models_of(opened) as (learners, state):
        batch = _batch_again(opened, learners, state, settings)
        update = steps.update(
            batch,
            learners,
            settings.trainer,
            on_progress=lambda done, total: None,  # noqa: ARG005
            entropy=state.entropy_controller,
        )
        write_batch(output / BATCH_FILE, batch)
        for name, model in _named(learners).items():
            if name != "reference":
                model.save(output / name)
    metrics = {
        **batch_metrics(batch, settings.trainer.algorithm),
        **document_metrics(batch, settings.trainer.docs_per_step),
        **to_values(update.metrics),
    }
    lines = [*compare_batches(batch, recorded, bounds), *compare_metrics(metrics, opened.capsule.metrics, bounds)]
    for name in MODELS:
        if not (output / name).is_dir():
            continue
        found, expected, before = (read_tensors(each / name, "model") for each in (output, opened.after, opened.before))
        lines.append(compare_weights(name, found, expected, before, bounds))
        moments, expected = (read_tensors(each / name, "optimizer") for each in (output, opened.after))
        lines.append(compare_moments(name, moments, expected, bounds))
    return lines


def _batch_again(
    opened: Opened, learners: steps.Learners, state: TrainerState, settings: steps.PPOSettings
) -> TrainingInputBatch:
    """The training batch, from the rollouts on; as it was recorded where the run kept none, or a sample of them."""
    capsule = opened.capsule
    if not capsule.rollouts or read_facts(opened.folder / capsule.rollouts).sample_fraction < 1:
        return opened.batch()
    rollouts = read_rollouts(opened.folder / capsule.rollouts)[capsule.step]
    batch = steps.assemble(rollouts, settings.assembly, step=capsule.step, weight_version=state.weight_version)
    batch = steps.score(batch, learners, settings.trainer, rollouts=rollouts)
    return steps.estimate(batch, settings.trainer.algorithm, kl_coef=state.kl_controller.coef, seed=opened.config.seed)
