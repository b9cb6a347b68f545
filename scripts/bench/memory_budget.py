"""The budget that a model finds under a byte limit on a CPU, and what it gives on long-tailed lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.planner import MemoryAwareBatchIterator, make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import ModelEngine, Planned, PolicyLearner
from skyrl_train.learner.memory import CountingMeter, SizingLimits, SizingReport, probe_rows, size_micro_batches

LONGEST = 256
ROWS_PER_STEP = 128
VOCABULARY = 512
MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Of micro-batches under the budget."""

    shares: tuple[float, ...]
    """Peak over limit."""

    @property
    def largest(self) -> float:
        return max(self.shares)

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)


class BudgetCase:
    """A small random policy under a byte limit."""

    def __init__(self, *, limit_bytes: int, layout: LayoutChoice) -> None:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=96,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        )
        self.limit_bytes = limit_bytes
        self.meter = CountingMeter(limit_bytes)
        engine = ModelEngine(
            model,
            name="policy",
            micro_batching=_fixed(1, layout),
            optimizer=OptimizerConfig(),
            total_optimizer_steps=1,
        )
        algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.01)
        self.learner = PolicyLearner(engine, model=ModelConfig(), algorithm=algorithm, temperature=1.0)
        self.layout = layout

    def size(self) -> SizingReport:
        """Probes and fits."""
        limits = SizingLimits(
            longest=LONGEST, max_rows=2 * ROWS_PER_STEP, limit_bytes=self.limit_bytes, margin=MARGIN, retries=3
        )
        return size_micro_batches(self.learner, self.meter, limits)

    def peaks(self, count: int) -> Peaks:
        """Of `count` micro-batches of random steps, cut as in training."""
        passes, shares, seed = self.learner.engine.passes, list[float](), 0
        while len(shares) < count:
            step = random_step(seed)
            for part in passes.plan(step.batch, training=True)[: count - len(shares)]:
                self.meter.adopt(self.learner.engine.held_tensors())
                self.meter.reset_peak()
                self._run([part], step)
                shares.append(self.meter.peak_bytes() / self.limit_bytes)
            seed += 1
        self.learner.engine.zero_grad()
        return Peaks(shares=tuple(shares))

    def fits(self, rows: int, steps: Sequence[MiniBatch]) -> bool:
        """Whether so many rows in each micro-batch stay within the limit in all of these steps."""
        retry, own = self.learner.engine.oom_retry, self.learner.engine.passes.micro_batching
        retry.use(micro_batching=_fixed(rows, self.layout))
        try:
            for step in steps:
                self._run(retry.passes.plan(step.batch, training=True), step)
        except torch.OutOfMemoryError:
            return False
        finally:
            retry.use(micro_batching=own)
            self.learner.engine.zero_grad()
        return True

    def tokens_per_cpu_s(self, steps: Sequence[MiniBatch], rows: Sequence[int], rounds: int) -> dict[int, float]:
        """Real tokens, for each fixed number of rows and, as 0, for the budget that was found; uncounted, in turns, the
        best of the rounds."""
        retry = self.learner.engine.oom_retry
        strategies: dict[int, MemoryAwareBatchIterator] = {
            0: retry.passes.micro_batching,
            **{n: _fixed(n, self.layout) for n in rows},
        }
        tokens = sum(step.batch.num_tokens for step in steps)
        best = dict.fromkeys(strategies, 0.0)
        for _ in range(rounds):
            for rows_or_0, strategy in strategies.items():
                retry.use(meter=None, micro_batching=strategy)
                began = time.process_time()
                for step in steps:
                    self._run(retry.passes.plan(step.batch, training=True), step)
                best[rows_or_0] = max(best[rows_or_0], tokens / (time.process_time() - began))
                self.learner.engine.zero_grad()
        retry.use(meter=self.meter, micro_batching=strategies[0])
        return best

    def _run(self, planned: Sequence[Planned], step: MiniBatch) -> None:
        learner = self.learner
        learner.engine.passes.accumulate(
            planned, lambda hidden, rows, layout: learner._loss(hidden, rows, layout, step.denominators, ()), step=0
        )


def random_step(seed: int) -> MiniBatch:
    """Rows with log-normal lengths: median 40, sigma 0.9, 8 to 256."""
    drawn = np.random.default_rng(seed).lognormal(np.log(40), 0.9, ROWS_PER_STEP)
    lengths = np.clip(drawn, 8, LONGEST).astype(np.int64)
    wide = probe_rows([LONGEST] * ROWS_PER_STEP, vocabulary=VOCABULARY)
    places = np.concatenate([np.arange(length) + row * LONGEST for row, length in enumerate(lengths)])
    taken = torch.from_numpy(places)
    batch = TrainingInputBatch(
        token_columns={name: column[taken] for name, column in wide.token_columns.items()},
        row_columns=wide.row_columns,
        row_offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        metadata=wide.metadata,
    )
    return close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=LONGEST)


def _fixed(rows: int, layout: LayoutChoice) -> MemoryAwareBatchIterator:
    return make_micro_batch_strategy(
        TrainerConfig(layout=layout, micro_train_batch_size_per_gpu=rows, micro_forward_batch_size_per_gpu=rows)
    )
