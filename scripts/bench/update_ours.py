"""One update by this package on the rollouts of `update_work.py`, under one layout."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from update_work import Conversation, ModelSize, build_model

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import ModelStrategy
from skyrl_train.learner import ModelEngine, PolicyLearner, compile_layers
from skyrl_train.model import decoder_layers, disable_dropout
from skyrl_train.model.layers import leave_uncompiled
from skyrl_train.telemetry import to_values

FORMS = ("eager", "compiled", "graphs")
"""Layers as they are; `model.compile`; compiled for each size, and replayed as CUDA graphs (a device alone)."""
LAYOUTS: dict[str, tuple[Any, bool]] = {
    "padded": ("padded", False),
    "packed": ("packed", False),
    "merged": ("packed", True),
    "shared": ("prefix_shared", True),
    "auto": ("auto", True),
}
"""Name in the tables to (layout, whether turns are merged)."""


def batch_of(conversations: list[Conversation]) -> TrainingInputBatch:
    """One row per turn."""
    ids: list[int] = []
    lengths: list[int] = []
    facts: list[tuple[int, int, int, bool]] = []
    mask: list[bool] = []
    advantages: list[float] = []
    for number, conversation in enumerate(conversations):
        rows = conversation.rows()
        for step, (context, response) in enumerate(rows):
            ids += context + response
            mask += [False] * len(context) + [True] * len(response)
            advantages += [conversation.advantage] * (len(context) + len(response))
            lengths.append(len(context) + len(response))
            facts.append((conversation.prompt, number, step, step == len(rows) - 1))
    prompt, trajectory, step, last = zip(*facts)
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            "loss_mask": torch.tensor(mask),
            "rewards": torch.zeros(len(ids)),
            "advantages": torch.tensor(advantages),
        },
        row_columns={
            "prompt_index": torch.tensor(prompt, dtype=torch.int32),
            "trajectory_index": torch.tensor(trajectory, dtype=torch.int32),
            "step_index": torch.tensor(step, dtype=torch.int32),
            "is_last_step": torch.tensor(last),
            "is_padding": torch.zeros(len(lengths), dtype=torch.bool),
        },
        row_offsets=offsets_of(torch.tensor(lengths)),
        metadata=BatchMetadata(uids=tuple(f"p{index}" for index in prompt), global_step=1, weight_version=1),
    )


class Ours:
    """A learner and the closed mini-batch that it updates on."""

    def __init__(
        self,
        size: ModelSize,
        conversations: list[Conversation],
        *,
        variant: str,
        tokens: int,
        bf16: bool = False,
        checkpointing: bool = False,
        device: str = "cpu",
        form: str = "eager",
        strategy: ModelStrategy | None = None,
        experts: int = 0,
    ):
        layout, merge = LAYOUTS[variant]
        trainer = TrainerConfig(
            layout=layout,
            micro_batching="token_budget",
            max_tokens_per_microbatch=tokens,
            max_tokens_per_forward_microbatch=tokens,
        )
        model = build_model(size, experts=experts).to(device)
        disable_dropout(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        _compile(model, form)
        self.engine = ModelEngine(
            model,
            name="policy",
            micro_batching=make_micro_batch_strategy(trainer, merge_turns=merge),
            dtype=torch.bfloat16 if bf16 else torch.float32,
            optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0),
            total_optimizer_steps=100,
            strategy=strategy,
        )
        self.learner = PolicyLearner(self.engine, model=ModelConfig(), algorithm=AlgorithmConfig(), temperature=1.0)
        self.batch = batch_of(conversations)
        self.metrics: dict[str, float] = {}

    def close(self) -> MiniBatch:
        return close_mini_batch(self.batch, loss_reduction="token_mean", max_sequence_length_for_norm=1)

    def score(self) -> None:
        """Adds `old_logprobs` of the model as it is."""
        self.batch = self.batch.with_columns(old_logprobs=self.learner.forward(self.batch))

    def accumulate(self) -> None:
        """Forward and backward of the whole mini-batch."""
        self.metrics = to_values(self.learner.forward_backward(self.close()))

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.detach().clone() for name, p in self.engine.parameters.items() if p.grad is not None}

    def update(self) -> None:
        """What is timed: forward, backward, clipping, optimizer."""
        self.accumulate()
        self.learner.optim_step()

    def timed(self, steps: int) -> float:
        """Seconds of an update: of this process on a CPU, which others may be busy with, and on the wall clock elsewhere."""
        on_gpu = self.engine.passes.device.type == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        if on_gpu:
            torch.cuda.synchronize()
        start = clock()
        for _ in range(steps):
            self.update()
        if on_gpu:
            torch.cuda.synchronize()
        return (clock() - start) / steps

    @property
    def positions(self) -> int:
        return int(self.metrics["layout/policy_positions"])


def _compile(model: Any, form: str) -> None:
    if form == "compiled":
        compile_layers(model, name="the benchmark's")
    elif form == "graphs":
        leave_uncompiled()
        for layer in decoder_layers(model):
            layer.compile(mode="reduce-overhead", dynamic=False)
