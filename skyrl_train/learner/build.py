"""The engine of one model of a run: loaded or awaited, adapted, compiled, and spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from skyrl_train.batch.microbatch import make_micro_batch_strategy
from skyrl_train.config.schema import ModelConfig, OptimizerConfig
from skyrl_train.distributed.strategy import SingleProcess
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.model.compiled import compile_layers
from skyrl_train.model.layouts import supported_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config
    from skyrl_train.distributed.strategy import ModelStrategy


def build_engine(
    config: Config,
    plan: BatchPlan,
    *,
    name: str,
    model: ModelConfig,
    load: Callable[[ModelConfig, str], PreTrainedModel],
    empty: Callable[[ModelConfig], PreTrainedModel],
    adapt: Callable[[PreTrainedModel], None] | None,
    optimizer: OptimizerConfig | None,
    total_optimizer_steps: int,
    total_documents: int,
    strategy: ModelStrategy | None,
) -> ModelEngine:
    """The engine for this process, or this process's part of it where a `strategy` is given.

    `load` reads weights to a device; `empty` makes the model without memory, for ranks that receive their shards from
    rank 0; `adapt` adds an adapter; `total_documents` count where steps are closed by documents.
    Raises ModelError, ConfigError.
    """
    spread = strategy or SingleProcess()
    if spread.rank and spread.sharded:
        loaded, layout = empty(model), config.trainer.layout
    else:
        loaded = load(model, "cpu" if spread.sharded else config.platform.device)
        layout = supported_layout(
            loaded,
            config.trainer.layout,
            name=model.path,
            sequence_parallel_size=config.strategy.sequence_parallel_size,
        )
    if adapt is not None:
        adapt(loaded)
    if model.compile:
        compile_layers(loaded, name=model.path)
    trainer = replace(config.trainer, layout=spread.of_rank_0(layout))
    merge_turns = config.generator.merge_stepwise == "auto"
    return ModelEngine(
        loaded,
        strategy=spread,
        name=name,
        micro_batching=make_micro_batch_strategy(trainer, merge_turns=merge_turns),
        layout=trainer.layout,
        merge_turns=merge_turns,
        dtype=torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32,
        optimizer=optimizer,
        total_optimizer_steps=total_documents / plan.docs_per_step if plan.docs_per_step else total_optimizer_steps,
        total_documents=total_documents if plan.docs_per_step else 0,
    )
