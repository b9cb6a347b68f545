"""The parts that every kind of run is built of: engines, what makes rollouts, models, where their processes are.

They know only each other's Protocols. Nothing outside `runs/` constructs a trainer, an engine or a transport; a learner is
constructed by `learner/build.py`, in whichever process it runs. Everything heavy is imported inside the functions.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.registry import split_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from skyrl_train.cluster.build import Cluster
    from skyrl_train.config.learners import RunModels
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import Generator, InferenceEngine, WeightTransport
    from skyrl_train.rollout.replay import ReplayGenerator
    from skyrl_train.runs.build_inline import InlineVLLM
    from skyrl_train.trainers.evaluate import Evaluator
    from skyrl_train.trainers.rollout_sink import RolloutLog
    from skyrl_train.trainers.steps import Learners
    from skyrl_train.types import Prompt


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What makes rollouts, and how it gets new weights."""

    generator: Generator
    transport: WeightTransport


def build_rollouts(
    config: Config,
    recording: ReplayGenerator | None,
    stack: ExitStack,
    *,
    on_progress: Callable[[int, int], None],
    host: Cluster | InlineVLLM | None = None,
) -> RolloutParts:
    """The engine that `generator.backend` names, and the transport that feeds it. `stack` closes them."""
    if recording is not None:
        from skyrl_train.weight_sync.transport import NoTransport

        return RolloutParts(generator=recording, transport=NoTransport())
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
    config: Config, prompts: Sequence[Prompt], generator: Generator, rollout_log: RolloutLog | None
) -> Evaluator | None:
    """None where there are no held-out prompts, or where rollouts are replayed and nothing new can be generated."""
    from skyrl_train.trainers.evaluate import Evaluator
    from skyrl_train.trainers.steps import sampling_params

    if not prompts or generator.is_recorded:
        return None

    return Evaluator(
        generator,
        prompts,
        sampling=sampling_params(config.generator.eval_sampling),
        n_samples_per_prompt=config.generator.eval_n_samples_per_prompt,
        batch_size=config.trainer.eval_batch_size,
        env_class=None if config.environment.env_class is None else split_spec(config.environment.env_class)[0],
        on_rollouts=rollout_log.write_evaluation if rollout_log is not None else None,
    )
