"""One supervised run from a validated config: data, plan, parts, training, and what the user reads at both ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.config import SFTConfig, SFTTrainerConfig, sft_layout, sft_learner_settings, validate_sft
from skyrl_train.config.derived import RunModels
from skyrl_train.config.rules import data_parallel_size
from skyrl_train.errors import ConfigError, counted, every
from skyrl_train.inference import HFEngine, load_for_engine
from skyrl_train.interfaces import Learner
from skyrl_train.learner.memory import size_run
from skyrl_train.model import load_tokenizer, pinned
from skyrl_train.model.files import vocabulary_size
from skyrl_train.registry import part_name
from skyrl_train.rollout import CheckedEngine
from skyrl_train.runs.cli.memory_settings import settle
from skyrl_train.runs.common import (
    OnEnd,
    Parts,
    begin,
    build_loop,
    first_lines,
    open_checkpoints,
    open_folder,
    prepare_process,
    resume_promise,
    say_goodbye,
    tell_nobody,
)
from skyrl_train.runs.construction.engines import sync_within_process
from skyrl_train.runs.construction.parts import Host, build_learners
from skyrl_train.runs.construction.sft_data import SFTData, SFTPlan, StepSettings, build_loader, load_sft_data, plan_sft
from skyrl_train.runs.prompts import require_exact_images
from skyrl_train.runs.restarts import Restarts, run_with_restarts
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.telemetry.records import draw_timeline
from skyrl_train.telemetry.trackers import draw_loss_curve
from skyrl_train.trainers import SFTResult, SFTSettings, SFTTrainer, sampling_params
from skyrl_train.trainers.checkpoints import CapsuleWriter, CheckpointStore, Start, resume_settings
from skyrl_train.trainers.evaluation import SampleWriter, SFTEvaluator, cut_samples_after

if TYPE_CHECKING:
    from skyrl_train.runs.construction.on_ray import Cluster

_ROWS_BETWEEN_NOTES = 512 * 40


def train_sft(config: SFTConfig, *, on_end: OnEnd = tell_nobody) -> SFTResult | None:
    """Trains, or goes on training, in `config.output_dir`; None where the run there is complete. `on_end` is called before
    parts are closed.

    Raises SkyrlTrainError for whatever the user can fix, before anything expensive where that can be known;
    StopRequested after a signal, with the checkpoint written.
    """
    config = settle(config)
    if violations := validate_sft(config):
        raise ConfigError(violations)
    config = replace(config, model=pinned(config.model))
    prepare_process(config)

    console = RunConsole(step_lines=config.tracker.console.enabled)
    folder = open_folder(config)
    promise = resume_promise(config)
    held_out = f"held out    {', '.join(config.data.held_out) or 'none'}"
    console.header(
        f"skyrl_train: {config.run_name}", first_lines(config, held_out, data=config.data.train, promise=promise)
    )
    checkpoints = open_checkpoints(folder.checkpoints, config.trainer)
    data = load_sft_data(config.data, config.model, on_progress=lambda name, rows: _say_tokenised(console, name, rows))

    if data.has_images:
        require_exact_images(config.model, config.trainer.layout, config.strategy)

    def attempt(config: SFTConfig, restarts: Restarts) -> SFTResult | None:
        plan = plan_sft(step_settings(config), data)
        if not restarts.count:
            console.header("plan", [*_plan_lines(config, plan, data), *data.notes])
        resume = restarts.resume(resume_settings(config))
        start = begin(config, resume, folder, console, checkpoints, data=data.fingerprint, plan=plan, promise=promise)
        if start is None:
            return None
        restarts.begun(start.global_step, policy_num_workers=config.placement.policy_num_workers)
        cut_samples_after(folder.samples, start.global_step)
        with Parts(console, restarts.ends) as stack:
            return _train(config, resume.settings, plan, data, folder, console, start, checkpoints, restarts, stack)

    with folder.locked():
        result = run_with_restarts(config, folder, console, attempt, on_end=on_end)
    if result is None:
        return None
    say_goodbye(
        console,
        folder,
        step=result.global_step,
        is_exported=config.trainer.export != "none",
        best_step=result.history.best_step if config.trainer.keep_best else None,
    )
    return result


def _train(
    config: SFTConfig,
    recorded: Mapping[str, Any],
    plan: SFTPlan,
    data: SFTData,
    folder: RunFolder,
    console: RunConsole,
    start: Start,
    checkpoints: CheckpointStore,
    restarts: Restarts,
    stack: ExitStack,
) -> SFTResult:
    best = open_best(folder, config.trainer, start)
    with console.phase("model"):
        policy = build_policy(config, plan, stack)
    with console.phase("probes"):
        lines = size_policy(config, policy, folder)
    if lines:
        console.header("memory", lines)
    loop = build_loop(
        config,
        config.trainer,
        recorded,
        folder,
        console,
        stack,
        models={"policy": policy},
        data=data.fingerprint,
        start=start,
        total_steps=plan.total_steps,
        checkpoints=checkpoints,
        draw=draw_loss_curve,
        draw_timeline=draw_timeline,
        num_restarts=restarts.count,
    )
    trainer = SFTTrainer(
        loop=loop,
        settings=SFTSettings(
            early_stopping_patience=config.trainer.early_stopping_patience,
            early_stopping_min_delta=config.trainer.early_stopping_min_delta,
            export=config.trainer.export,
        ),
        loader=build_loader(step_settings(config), data, stack),
        policy=policy,
        evaluator=build_sft_evaluator(config, data),
        samples=build_samples(config, data, folder, stack),
        best=best,
        capsules=CapsuleWriter(
            folder,
            keep=config.trainer.capsules,
            seed=config.seed,
            total_steps=plan.total_steps,
            hold_state=loop.hold_state,
            console=console,
        ),
    )
    return trainer.train()


def size_policy(config: SFTConfig, policy: Learner, folder: RunFolder) -> list[str]:
    """Find how large micro-batches may be, where that is asked for; the lines that say so."""
    is_packed = config.trainer.layout == "packed"  # whose rows are filled before the budget is known
    return size_run(
        config.trainer,
        [policy],
        folder.memory_file,
        longest=config.trainer.max_tokens_per_microbatch if is_packed else config.data.max_length,
        max_rows=max(config.trainer.batch_size, config.trainer.eval_batch_size),
    )


def _say_tokenised(console: RunConsole, name: str, rows: int) -> None:
    """Say now and then how many rows are tokenised; a cached source is not tokenised at all."""
    if rows % _ROWS_BETWEEN_NOTES == 0:
        console.note(f"{name}: {counted(rows, 'row')} tokenised")


def _plan_lines(config: SFTConfig, plan: SFTPlan, data: SFTData) -> list[str]:
    trainer = config.trainer
    ahead = "prefetched" if trainer.async_batch_collation else "made in the loop"
    evaluated = every(trainer.eval_interval, "step") if trainer.eval_interval else "before and after"
    mean_length = plan.num_tokens / max(1, plan.num_examples)
    held_out = sum(len(examples) for examples in data.validation.values())
    return [
        f"{counted(plan.total_steps, 'optimizer step')} of {plan.step}; micro-batches: {part_name(trainer.micro_batching)}, "
        f"layout: {trainer.layout}; batches are {ahead}",
        f"{counted(plan.num_examples, 'training example')} of {mean_length:.0f} tokens on average, "
        f"{plan.num_examples_per_epoch} an epoch, loss on {config.data.loss_on} assistant messages",
        f"{counted(held_out, 'held-out example')} in {counted(len(data.validation), 'set')}"
        + (f", evaluated {evaluated}" if held_out else "")
        + f"; {part_name(trainer.optimizer.schedule)} learning rate {trainer.optimizer.lr:g}",
    ]


def step_settings(config: SFTConfig) -> StepSettings:
    """What steps are made of, as `config` says."""
    num_shares = data_parallel_size(config.placement.policy_num_workers, config.strategy.ranks_per_share)
    return StepSettings(data=config.data, trainer=config.trainer, seed=config.seed, num_shares=num_shares)


def open_best(folder: RunFolder, trainer: SFTTrainerConfig, start: Start) -> CheckpointStore | None:
    """Return the checkpoint with the lowest held-out loss, here and at the run's URL; None where none is kept."""
    if not trainer.keep_best and trainer.export != "best":
        return None
    best = open_checkpoints(folder.best, trainer, keep=1)
    best.tidy()
    best.take_over(best.latest() if start.own and start.checkpoint is not None else None)
    return best


def build_policy(config: SFTConfig, plan: SFTPlan, stack: ExitStack) -> Learner:
    """The model that learns, in this process or on Ray. `stack` closes it."""
    models = RunModels(learners=(sft_learner_settings(config, total_steps=plan.total_steps),))
    return build_learners(models, stack, Host(cluster=_cluster(config, stack))).policy


def _cluster(config: SFTConfig, stack: ExitStack) -> Cluster | None:
    """Return the session on Ray, or None without it."""
    if config.placement.backend != "ray":
        return None
    from skyrl_train.runs.construction.on_ray import Cluster, ClusterSettings, with_time_to_load

    settings = ClusterSettings(
        run_name=config.run_name,
        output_dir=Path(config.output_dir),
        placement=with_time_to_load(config.placement, [config.model]),
        layout=sft_layout(config),
        model=config.model,
    )
    return Cluster(settings, stack)


def build_sft_evaluator(config: SFTConfig, data: SFTData) -> SFTEvaluator | None:
    """Return what evaluates, or None if there are no held-out examples."""
    if not data.validation:
        return None
    return SFTEvaluator(
        data.validation, batch_size=config.trainer.eval_batch_size, is_async=config.trainer.async_batch_collation
    )


def build_samples(config: SFTConfig, data: SFTData, folder: RunFolder, stack: ExitStack) -> SampleWriter | None:
    """An engine of its own with a second copy of the model; None where no samples are asked for."""
    trainer = config.trainer
    if not trainer.eval_samples or not data.validation:
        return None

    tokenizer = load_tokenizer(config.model)
    model = load_for_engine(config.model, config.platform.device)
    engine = HFEngine(model, tokenizer, max_batch_size=trainer.eval_batch_size)
    stack.callback(engine.close)
    return SampleWriter(
        data.validation,
        engine=CheckedEngine(engine, vocabulary_size=vocabulary_size(config.model)),
        transport=sync_within_process(engine, folder.root),
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False)),
        sampling=sampling_params(trainer.eval_sampling),
        num_samples=trainer.eval_samples,
        seed=config.seed,
        timeout_s=trainer.eval_sample_timeout_s,
        folder=folder.samples,
    )
