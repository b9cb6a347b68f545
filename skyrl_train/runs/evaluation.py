"""One evaluation of a model, or of a checkpoint, on held-out prompts; nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from skyrl_train.config import Config
from skyrl_train.config.models import ships_adapter
from skyrl_train.errors import ConfigError, DataError, Violation
from skyrl_train.interfaces import WeightTransport
from skyrl_train.learner import read_model
from skyrl_train.model.lora import adapter_tensors, as_they_are, base_with_adapter, merged_weights
from skyrl_train.runs.construction.parts import build_evaluator, build_host, build_rollouts, open_rollout_log
from skyrl_train.runs.resolve import CheckedRows
from skyrl_train.runs.restarts import OnEnd
from skyrl_train.runs.rl import load_data
from skyrl_train.runs.task import Parts, prepare_process
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers.checkpoints import CheckpointStore, TrainerState
from skyrl_train.trainers.evaluation import evaluation_table, write_evaluation
from skyrl_train.weights import stored_weights


def evaluate_once(
    config: Config, rows: Sequence[CheckedRows], folder: RunFolder, console: RunConsole, on_end: OnEnd
) -> None:
    """Evaluate on the held-out prompts of `rows`, and write what was found. Raises SkyrlTrainError."""
    prepare_process(config)
    data = load_data(config, rows)
    if not data.validation:
        raise DataError("there is nothing to evaluate on: data.validation is empty. Set data.validation=[FILE]")
    with folder.locked(), Parts(console, on_end) as stack:
        host = build_host(config, stack)
        rollouts = build_rollouts(config, data.recording, stack, on_progress=console.on_progress, host=host)
        step = _load_checkpoint_weights(config, folder, rollouts.transport)
        rollout_log = open_rollout_log(config, folder, stack)
        evaluator = build_evaluator(config, data.validation, rollouts.generator, rollout_log)
        if evaluator is None:
            raise ConfigError(
                [
                    Violation(
                        field="generator.backend",
                        rule="must generate, to evaluate",
                        value="'replay'",
                        remedy="Use generator=hf or generator=vllm",
                    )
                ]
            )
        kept = nullcontext() if rollout_log is None else rollout_log.failures_kept(step)
        with console.phase("evaluate"), kept:
            result = evaluator.evaluate(step)
        if rollout_log is not None:
            rollout_log.flush()
        write_evaluation(folder.evaluation_file, result)
    console.note(result.line())
    console.show(evaluation_table(result))
    console.note(f"written: {folder.evaluation_file}, {folder.rollouts}")


def _load_checkpoint_weights(config: Config, folder: RunFolder, transport: WeightTransport) -> int:
    """Gives the engine the policy of the checkpoint `trainer.resume_path` and returns its step; 0 where none is stated.

    Raises CheckpointError where there is no whole checkpoint.
    """
    if config.trainer.resume_mode not in ("from_path", "fork"):
        return 0

    checkpoint = CheckpointStore(folder.checkpoints, keep=1).find(config.trainer.resume_path)
    step = TrainerState.read(checkpoint).global_step
    weights: Mapping[str, Tensor] = read_model(checkpoint / "policy")
    if config.model.lora.rank:
        model = base_with_adapter(config.model, weights)
        adapter = {name: parameter.detach() for name, parameter in adapter_tensors(model).items()}
        merged = merged_weights(model, as_they_are)
        weights = adapter if ships_adapter(config.generator) else dict(merged)
    transport.sync(stored_weights(weights), step)
    return step
