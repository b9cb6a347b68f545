"""Executes the step of a capsule again, in this process, whatever placement made it, and compares what comes of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.config import Config, SFTConfig, TrainerConfig
from skyrl_train.config.derived import RunModels, sft_learner_settings
from skyrl_train.config.door import as_now, load_root
from skyrl_train.data.sources import IMAGES
from skyrl_train.errors import DataError
from skyrl_train.images import with_pixels
from skyrl_train.interfaces import Learner, Scorer
from skyrl_train.learner import read_tensors
from skyrl_train.model.files import image_reader
from skyrl_train.runs.cli.composition import read_yaml
from skyrl_train.runs.construction.parts import Host, assembler, build_learners, learners_here, trainer_of
from skyrl_train.runs.resolving import resolve
from skyrl_train.runs.sft import size_policy
from skyrl_train.runs.task import prepare_process
from skyrl_train.telemetry import RunFolder, merge_metrics, to_values
from skyrl_train.telemetry.records import read_facts, read_rollouts
from skyrl_train.trainers import batch_metrics, document_metrics, named_metrics, steps
from skyrl_train.trainers.capsules import (
    BATCH_FILE,
    BFLOAT16,
    CONFIG_FILE,
    EXACT,
    FLOAT32,
    STATES,
    Bounds,
    Capsule,
    Comparison,
    compare_batches,
    compare_metrics,
    compare_tensors,
    find_capsule,
    read_batch,
    write_batch,
)
from skyrl_train.trainers.checkpoints import TrainerState, checkpoint_name, library_versions, verify

MODELS = ("policy", "critic", "reference")
"""Folders that a state may have."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A capsule whose files are whole."""

    run: RunFolder
    folder: Path
    capsule: Capsule
    recorded: Config | SFTConfig
    """As the step was made with: of reinforcement or of supervised learning."""
    config: Config | SFTConfig
    """The same, in this process."""
    before: Path
    """Models and state that it began with; of a refused step, the models as they were then."""
    after: Path | None
    """Of a step that was finished."""

    def batch(self) -> TrainingInputBatch:
        """The training batch as it was recorded. Raises DataError where the step ended before there was one."""
        if not (self.folder / BATCH_FILE).is_file():
            reason = self.capsule.refusal.error if self.capsule.refusal else "its file is missing"
            raise DataError(f"step {self.capsule.step} has no training batch: {reason}")
        batch = read_batch(self.folder / BATCH_FILE)
        if not batch.metadata.images:
            return batch
        try:
            read = image_reader(self.config.model, self.config.data.images)
            images = tuple(with_pixels(spans, read) for spans in batch.metadata.images)
        except ValueError as error:
            raise DataError(f"{self.folder / BATCH_FILE}: {error}") from error
        return replace(batch, metadata=replace(batch.metadata, images=images))

    def closed(self) -> MiniBatch:
        """The one mini-batch of a step of supervised training, as it was recorded. Raises DataError."""
        if self.capsule.denominators is None:
            raise DataError(f"step {self.capsule.step} is none of supervised training")
        return MiniBatch(batch=self.batch(), denominators=self.capsule.denominators)

    def bounds(self) -> Bounds:
        """By how much the step may differ here."""
        recorded, config = self.recorded, self.config
        is_same = (recorded.placement.backend, recorded.strategy.kind, recorded.platform) == (
            "inline",
            "single",
            config.platform,
        ) and dict(self.capsule.versions) == library_versions()
        if is_same and (not config.platform.on_gpu or config.deterministic):
            return EXACT
        return BFLOAT16 if config.model.dtype == "bfloat16" else FLOAT32


def open_capsule(run: Path, step: int) -> Opened:
    """Raises DataError where there is none of that step, CheckpointError where a file of it is not what was written."""
    folder = find_capsule(RunFolder(run).capsules, step)
    verify(folder)
    capsule = Capsule.read(folder)
    IMAGES.recorded.append(RunFolder(run).images)
    before, after = folder, None
    if capsule.refusal is None:
        states = RunFolder(run).capsules / STATES
        before, after = states / checkpoint_name(step - 1), states / checkpoint_name(step)
        verify(before)
        verify(after)
    node, is_supervised = as_now(read_yaml(folder / CONFIG_FILE)).tree, capsule.denominators is not None
    recorded: Config | SFTConfig = load_root(node, SFTConfig) if is_supervised else load_root(node, Config)
    return Opened(
        run=RunFolder(run),
        folder=folder,
        capsule=capsule,
        recorded=recorded,
        config=resolve(recorded, purpose="again").config,
        before=before,
        after=after,
    )


@contextmanager
def models_of(opened: Opened) -> Iterator[tuple[steps.Learners, TrainerState]]:
    """The models as the step began with them, in this process, and the state of the loop."""
    state = TrainerState.read(opened.before)
    with ExitStack() as stack:
        scratch = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-capsule-"))))
        if opened.run.memory_file.is_file():
            shutil.copyfile(opened.run.memory_file, scratch.memory_file)
        learners = _built(opened, state, scratch, stack)
        for name, model in _named(learners).items():
            if (opened.before / name).is_dir():
                model.load(opened.before / name)
        yield learners, state


def _built(opened: Opened, state: TrainerState, scratch: RunFolder, stack: ExitStack) -> steps.Learners:
    """The models, with nothing that is written to the run's folder."""
    config = opened.config
    if isinstance(config, SFTConfig):
        prepare_process(config)
        policy = sft_learner_settings(config, total_steps=opened.capsule.total_steps)
        learners = build_learners(RunModels(learners=(policy,)), stack, Host())
        size_policy(config, learners.policy, scratch)
        return learners
    return learners_here(config, state, scratch, stack)


def _named(learners: steps.Learners) -> dict[str, Learner | Scorer]:
    found = {"policy": learners.policy, "critic": learners.critic, "reference": learners.reference}
    return {name: model for name, model in found.items() if model is not None}


def run_again(opened: Opened, output: Path) -> list[Comparison]:
    """Execute the step, write its batch and models to `output`, and compare both, and the metrics, with those recorded.

    Raises DataError for a step that was refused.
    """
    if opened.after is None:
        raise DataError(f"step {opened.capsule.step} was refused: there is nothing to compare with")
    bounds, recorded = opened.bounds(), opened.batch()
    with models_of(opened) as (learners, state):
        if isinstance(opened.config, SFTConfig):
            policy, closed = learners.policy, opened.closed()
            metrics = named_metrics(merge_metrics([policy.forward_backward(closed), policy.optim_step()]))
            batch = closed.batch
        else:
            batch, metrics = _trained_again(
                opened, trainer_of(opened.config), assembler(opened.config), learners, state
            )
        write_batch(output / BATCH_FILE, batch)
        for name, model in _named(learners).items():
            if name != "reference":
                model.hold_state(copies=False).write(output / name)
    made_again = not isinstance(opened.config, SFTConfig)
    lines = compare_batches(batch, recorded, bounds) if made_again else []
    lines += compare_metrics(metrics, opened.capsule.metrics, bounds)
    for name in MODELS:
        if not (output / name).is_dir():
            continue
        found, expected, before = (read_tensors(each / name, "model") for each in (output, opened.after, opened.before))
        lines.append(compare_tensors(f"{name} weights", found, expected, bounds.change, before=before))
        moments, expected = (read_tensors(each / name, "optimizer") for each in (output, opened.after))
        lines.append(compare_tensors(f"{name} optimizer", moments, expected, bounds.moment))
    return lines


def _trained_again(
    opened: Opened, trainer: TrainerConfig, assemble: steps.Assemble, learners: steps.Learners, state: TrainerState
) -> tuple[TrainingInputBatch, dict[str, float]]:
    """Score, estimate and update; the batch, and metrics of what was computed."""
    batch = _batch_again(opened, trainer, assemble, learners, state)
    update = steps.update(
        batch,
        learners,
        trainer,
        on_progress=lambda done, total: None,  # noqa: ARG005
        entropy=state.entropy_controller,
    )
    return batch, {
        **batch_metrics(batch, trainer.algorithm),
        **document_metrics(batch, trainer.docs_per_step),
        **to_values(update.metrics),
    }


def _batch_again(
    opened: Opened, trainer: TrainerConfig, assemble: steps.Assemble, learners: steps.Learners, state: TrainerState
) -> TrainingInputBatch:
    """The training batch, from the rollouts on; as it was recorded where the run kept none, or a sample of them."""
    capsule = opened.capsule
    if not capsule.rollouts or read_facts(opened.folder / capsule.rollouts).sample_fraction < 1:
        return opened.batch()
    rollouts = read_rollouts(opened.folder / capsule.rollouts)[capsule.step]
    batch = assemble(rollouts, step=capsule.step, weight_version=state.weight_version)
    batch = steps.score(batch, learners, trainer, rollouts=rollouts)
    return steps.estimate(batch, trainer.algorithm, kl_coef=state.kl_controller.coef, seed=opened.config.seed)
