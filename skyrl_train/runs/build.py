"""The composition root: turns a validated `Config` into parts that know only each other's Protocols.

Nothing outside this file and the entry points constructs a model, an engine, a learner or a trainer. Imports of torch
and everything heavier are inside the functions, so that printing a plan or an error stays quick.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config.generation import ships_adapter
from skyrl_train.errors import DataError, Violation
from skyrl_train.registry import split_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from skyrl_train.cluster.build import Cluster
    from skyrl_train.config.learners import RunModels
    from skyrl_train.config.schema import Config
    from skyrl_train.config.sft import AnyConfig
    from skyrl_train.interfaces import Generator, InferenceEngine, WeightTransport
    from skyrl_train.rollout.replay import ReplayGenerator
    from skyrl_train.runs.build_inline import InlineVLLM
    from skyrl_train.trainers.evaluate import Evaluator
    from skyrl_train.trainers.rollout_sink import RolloutLog
    from skyrl_train.trainers.state import DataFingerprint
    from skyrl_train.trainers.steps import Learners, PromptBatches
    from skyrl_train.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts, after those that are too long were left out."""

    train: PromptBatches
    fingerprint: DataFingerprint
    num_train: int
    validation: tuple[Prompt, ...]
    notes: tuple[str, ...]
    """What was left out, one line each."""
    recording: ReplayGenerator | None = None
    """Recorded rollouts in place of an engine; `train` is then what it answers."""


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What makes rollouts, and how it gets new weights."""

    generator: Generator
    transport: WeightTransport


def prepare_process(config: AnyConfig) -> None:
    """Settles threads and kernels; call before anything computes. Idle OpenMP threads spin on busy cores and make all of it
    several times slower."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.platform.num_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    if config.platform.name == "cpu":
        torch.set_num_threads(config.platform.num_threads)
    from skyrl_train.model.numerics import set_numerics

    set_numerics(deterministic=config.deterministic)


def load_data(config: Config) -> Data:
    """Reads, checks and measures all prompts. Raises DataError, ModelError (the tokenizer), ConfigError."""
    from skyrl_train.data.prompts import PromptSource
    from skyrl_train.trainers.state import DataFingerprint

    if config.generator.backend == "replay":
        return _replayed_data(config)
    notes: list[str] = []
    train = _prompts(config, config.data.train, config.data.max_train_prompts, "train", notes)
    if not train:
        raise DataError(f"data.train={list(config.data.train)} has no prompts")
    validation = _prompts(config, config.data.validation, config.data.max_validation_prompts, "validation", notes)
    return Data(
        train=PromptSource(
            train, config.trainer.train_batch_size, config.data.shuffle, config.seed, order=config.data.order
        ).batch,
        fingerprint=DataFingerprint.of(train),
        num_train=len(train),
        validation=tuple(validation),
        notes=tuple(notes),
    )


def _prompts(config: Config, sources: Sequence[str], limit: int, name: str, notes: list[str]) -> list[Prompt]:
    from skyrl_train.data.prompts import filter_by_length, load_prompts
    from skyrl_train.model.causal_lm import load_tokenizer
    from skyrl_train.rollout.chat_tokens import ChatTokens

    if not sources:
        return []
    chat = ChatTokens(load_tokenizer(config.model))
    result = filter_by_length(
        load_prompts(sources, limit=limit or None, reader=config.data.reader, row_format=config.data.row_format),
        lambda prompt: len(chat.data_prompt(prompt)),
        max_prompt_length=config.data.max_prompt_length,
        over_long=config.data.over_long,
    )
    own = config.environment.env_class
    named = None if own is None else split_spec(own)[0]
    num_others = sum(prompt.env_class not in (None, named) for prompt in result.prompts)
    if named is not None and num_others:
        notes.append(
            f"{num_others} {name} rows name another env_class; environment.env_class={named} judges them all "
            "(environment=by_row takes their own)"
        )
    if result.num_dropped:
        notes.append(
            f"{result.num_dropped} {name} prompts have more than data.max_prompt_length="
            f"{config.data.max_prompt_length} tokens and are left out (the longest has {result.longest})"
        )
    return result.prompts


def _replayed_data(config: Config) -> Data:
    """The recording supplies the prompts of each step. Raises DataError, ConfigError."""
    from skyrl_train.rollout.replay import ReplayGenerator
    from skyrl_train.trainers.state import DataFingerprint

    recording = ReplayGenerator(config.generator.replay_path)
    recording.check(
        train_batch_size=config.trainer.train_batch_size,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        total_steps=config.trainer.total_steps,
    )
    prompts = recording.prompts
    return Data(
        train=recording.batch,
        fingerprint=DataFingerprint.of(prompts),
        num_train=len(prompts),
        validation=(),
        notes=(f"rollouts are replayed from {config.generator.replay_path}; nothing is generated or evaluated",),
        recording=recording,
    )


def build_rollouts(
    config: Config,
    data: Data,
    stack: ExitStack,
    *,
    on_progress: Callable[[int, int], None],
    host: Cluster | InlineVLLM | None = None,
) -> RolloutParts:
    """The engine that `generator.backend` names, and the transport that feeds it. `stack` closes them."""
    if data.recording is not None:
        from skyrl_train.weight_sync.transport import NoTransport

        return RolloutParts(generator=data.recording, transport=NoTransport())
    from skyrl_train.model.causal_lm import load_tokenizer
    from skyrl_train.rollout.generator import RolloutGenerator

    tokenizer = load_tokenizer(config.model)
    engine, transport = _build_engine(config, tokenizer, stack, host)
    generator = RolloutGenerator(
        engine, tokenizer, config.generator, config.environment, config.seed, on_progress=on_progress
    )
    stack.callback(generator.close)
    return RolloutParts(generator=generator, transport=transport)


def _build_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, stack: ExitStack, host: Cluster | InlineVLLM | None
) -> tuple[InferenceEngine, WeightTransport]:
    """Where tokens come from, and how it gets new weights."""
    if config.generator.backend == "vllm" and host is not None:
        return host.build_engine(config, stack)
    if config.generator.backend == "http":
        return _build_http_engine(config, stack)
    from skyrl_train.config.parts import ENGINES
    from skyrl_train.inference.hf import EngineSettings
    from skyrl_train.weight_sync.transport import InlineTransport

    settings = EngineSettings(
        model=config.model, device=config.platform.device, max_batch_size=config.generator.max_batch_size
    )
    engine = ENGINES.resolve(config.generator.backend)(settings, tokenizer)
    stack.callback(engine.close)
    return engine, InlineTransport(engine)


def _build_http_engine(config: Config, stack: ExitStack) -> tuple[InferenceEngine, WeightTransport]:
    from skyrl_train.inference.http import HTTPEngine
    from skyrl_train.inference.stop_tokens import stop_token_ids
    from skyrl_train.weight_sync.files import FileTransport

    engine = HTTPEngine(
        config.generator.http,
        stop_token_ids=stop_token_ids(config.model),
        timeout_s=config.generator.request_timeout_s,
        send_seeds=config.generator.seeds == "request",
    )
    stack.callback(engine.close)
    return engine, FileTransport(engine, Path(config.output_dir) / "weights")


def build_host(config: Config, stack: ExitStack) -> Cluster | InlineVLLM | None:
    """What owns processes beside this one: Ray, where `placement.backend=ray`, or vLLM's without it; None where there are
    none. `stack` ends them."""
    if config.placement.backend == "ray":
        from skyrl_train.cluster.build import Cluster, cluster_settings

        return Cluster(cluster_settings(config), stack)
    if config.generator.backend == "vllm":
        from skyrl_train.runs.build_inline import InlineVLLM

        return InlineVLLM()
    return None


def build_learners(models: RunModels, stack: ExitStack, host: Cluster | InlineVLLM | None = None) -> Learners:
    """The models of a run, where `host` has its processes. `stack` closes them."""
    if host is not None:
        return host.build_learners(models, stack)
    from skyrl_train.runs.build_inline import build_inline_learners

    return build_inline_learners(models, stack)


def build_evaluator(
    config: Config, data: Data, generator: Generator, rollout_log: RolloutLog | None
) -> Evaluator | None:
    """None where there are no held-out prompts, or where rollouts are replayed and nothing new can be generated."""
    from skyrl_train.trainers.evaluate import Evaluator
    from skyrl_train.trainers.steps import sampling_params

    if not data.validation or data.recording is not None:
        return None

    return Evaluator(
        generator,
        data.validation,
        sampling=sampling_params(config.generator.eval_sampling),
        n_samples_per_prompt=config.generator.eval_n_samples_per_prompt,
        batch_size=config.trainer.eval_batch_size,
        env_class=None if config.environment.env_class is None else split_spec(config.environment.env_class)[0],
        on_rollouts=rollout_log.write_evaluation if rollout_log is not None else None,
    )


def load_checkpoint_weights(config: Config, transport: WeightTransport) -> int:
    """Gives the engine the policy of the checkpoint `trainer.resume_path` and returns its step; 0 where none is stated.

    Raises CheckpointError where there is no whole checkpoint.
    """
    if config.trainer.resume_mode not in ("from_path", "fork"):
        return 0
    from skyrl_train.distributed.checkpoint import checkpoint_step
    from skyrl_train.distributed.checkpoint_store import FolderCheckpointStore
    from skyrl_train.learner.state import read_model

    checkpoint = FolderCheckpointStore(Path(config.trainer.resume_path), keep=1).find(Path(config.trainer.resume_path))
    step = checkpoint_step(checkpoint)
    weights = iter(read_model(checkpoint / "policy").items())
    if config.model.lora.rank:
        from skyrl_train.model.lora import adapter_tensors, base_with_adapter, merged_weights

        model = base_with_adapter(config.model, dict(weights))
        adapter = ((name, parameter.detach()) for name, parameter in adapter_tensors(model).items())
        weights = adapter if ships_adapter(config.generator) else merged_weights(model, lambda tensor: tensor)
    transport.sync(weights, step)
    return step


def replay_violation() -> Violation:
    """Evaluation asked for where nothing can be generated."""
    return Violation(
        field="generator.backend",
        rule="must generate, to evaluate",
        value="'replay'",
        remedy="Use generator=hf or generator=vllm",
    )
