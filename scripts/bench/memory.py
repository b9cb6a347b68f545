"""Memory of passes over micro-batches: predicted against measured; the budget that is found, and what it gives.

    python scripts/bench/memory.py predict                # four models at three numbers of rows, training and scoring
    python scripts/bench/memory.py budget                 # the budget, 1,000 micro-batches under it, throughput
    python scripts/bench/memory.py budget --layout packed --micro-batches 200 --check

Measured is what `learner/memory/meter.py` sees of the real engine's passes on a CPU, tensor by tensor. Predicted is what a
plan makes of the model's config alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import harness
import numpy as np
import torch
from update_work import ModelSize, build_model

import skyrl_train.data.assets
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.planner import MemoryAwareBatchIterator, MicroBatch, make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.derived import ScheduleLength, learner_settings
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import LoraConfig, ModelConfig, OptimizerConfig
from skyrl_train.learner import ModelEngine, PolicyLearner, build_learner
from skyrl_train.learner.memory import (
    CountingMeter,
    Effort,
    Phase,
    Prober,
    SizingLimits,
    SizingReport,
    hold_everything,
    probe_rows,
    size_micro_batches,
)
from skyrl_train.plan import models_of

LONGEST = 256
ROWS_PER_STEP = 128
VOCABULARY = 512
MARGIN = 0.05
_DENSE = {
    "model_type": "qwen2",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1856,
    "vocab_size": 20_000,
    "tie_word_embeddings": True,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 600,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class PredictionCase:
    """A model, how it is trained, and the numbers of rows that are measured."""

    name: str
    architecture: dict[str, Any] = field(default_factory=dict)
    """Empty: the bundled model."""
    longest: int = 64
    rows: tuple[int, ...] = (1, 3, 8)
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of `model`."""
    layout: str = "padded"


CASES = (
    PredictionCase(name="bundled", longest=32, rows=(1, 6, 40)),
    PredictionCase(name="30M dense", architecture=_DENSE),
    PredictionCase(name="tiny mixture of experts", architecture=_EXPERTS),
    PredictionCase(name="30M dense, adapter", architecture=_DENSE, model={"lora": LoraConfig(rank=16)}),
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One pass of one case."""

    phase: Phase
    rows: int
    measured_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Relative, of the whole."""
        return self.predicted_bytes / self.measured_bytes - 1


def predictions(case: PredictionCase, folder: Path) -> Iterator[Prediction]:
    """Training and scoring of the policy at each number of rows; `folder` is filled with the model, weights included."""
    torch.set_num_threads(1)
    config = _config(case, folder)
    predicted = models_of(config, Effort())["policy"]
    learner = build_learner(learner_settings(config, "policy", ScheduleLength(optimizer_steps=10)))
    meter = CountingMeter(1 << 40)
    hold_everything(learner.engine, meter)
    prober = Prober(learner=learner, meter=meter)
    phases: tuple[Phase, ...] = ("training", "scoring")
    for phase in phases:
        for rows in case.rows:
            measured = prober.probe(rows, case.longest, training=phase == "training")
            assert measured is not None
            yield Prediction(
                phase=phase,
                rows=rows,
                measured_bytes=measured.peak_bytes,
                predicted_bytes=predicted.estimate(phase, rows).peak_bytes,
            )


def _config(case: PredictionCase, folder: Path) -> Config:
    base = Config()
    path = "builtin:tiny_qwen2"
    if case.architecture:
        path = str(folder)
        _save_model(case.architecture, folder)
    return replace(
        base,
        platform=replace(base.platform, name="cpu", device="cpu"),
        model=replace(base.model, path=path, **case.model),
        trainer=replace(base.trainer, layout=case.layout),
        generator=replace(base.generator, max_context_length=case.longest),
    )


def _save_model(architecture: dict[str, Any], folder: Path) -> None:
    """A random model, with the bundled model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**architecture)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    bundled = Path(next(iter(skyrl_train.data.assets.__path__))) / "tiny_qwen2"
    for file in bundled.glob("*token*"):
        copyfile(file, folder / file.name)


class BudgetCase:
    """A small random policy under a byte limit."""

    def __init__(self, *, limit_bytes: int, layout: LayoutChoice) -> None:
        model = build_model(ModelSize(96, 2, 4, 2, 192, VOCABULARY))
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

    def peak_shares(self, count: int) -> list[float]:
        """Peak over limit of `count` micro-batches of random steps, cut as in training."""
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
        return shares

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

    def _run(self, planned: Sequence[MicroBatch], step: MiniBatch) -> None:
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("predict", help="predicted against measured peaks")
    budget = commands.add_parser("budget", help="what a byte limit gives")
    budget.add_argument("--limit-mib", type=float, default=32.0)
    budget.add_argument("--layout", choices=("padded", "packed", "prefix_shared"), default="padded")
    budget.add_argument("--micro-batches", type=int, default=1000)
    budget.add_argument("--steps", type=int, default=4, help="steps whose throughput is measured")
    budget.add_argument("--rounds", type=int, default=3)
    budget.add_argument("--check", action="store_true", help="exit with status 1 where a promise is broken")
    args = parser.parse_args(argv)
    if args.command == "budget":
        return run_budget(args)
    run_predict()
    return 0


def run_predict() -> None:
    """A line for each model and number of rows, and the largest and mean error."""
    table = harness.Table("model", "pass", "rows", "measured MB", "predicted MB", "error")
    errors: list[float] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            for found in predictions(case, Path(folder)):
                errors.append(abs(found.error))
                sizes = [f"{each / 1e6:.1f}" for each in (found.measured_bytes, found.predicted_bytes)]
                table.row(case.name, found.phase, found.rows, *sizes, f"{found.error:+.1%}")
    print(f"\n{len(errors)} passes: largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")


def run_budget(args: argparse.Namespace) -> int:
    """Probes, the budget, peaks of random micro-batches under it, and tokens a second against fixed sizes."""
    case = BudgetCase(limit_bytes=int(args.limit_mib * (1 << 20)), layout=args.layout)
    report = case.size()
    assert report.training is not None
    print(report.line(), end="\n\n")
    table = harness.Table("rows", "length", "positions", "peak MiB", "of the limit")
    for probe in report.training.probes:
        peak = (f"{probe.peak_bytes / (1 << 20):.2f}", f"{probe.peak_bytes / case.limit_bytes:.1%}")
        table.row(probe.rows, probe.longest, probe.positions, *peak)
    shares = case.peak_shares(args.micro_batches)
    above, mean = sum(share > 1 for share in shares), sum(shares) / len(shares)
    print(
        f"\n{len(shares)} random micro-batches: {above} above the limit, largest {max(shares):.1%}, mean {mean:.1%} of it"
    )
    steps = [random_step(10_000 + seed) for seed in range(args.steps)]
    fitting = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if case.fits(rows, steps)]
    speeds = case.tokens_per_cpu_s(steps, fitting, args.rounds)
    for rows, speed in speeds.items():
        print(f"{f'{rows} rows' if rows else 'budget':>10}: {speed:8.0f} tokens per CPU second")
    best = max(speeds[rows] for rows in fitting)
    print(f"against the best fixed size that fits: {speeds[0] / best:.2f}; against 1 row: {speeds[0] / speeds[1]:.2f}")
    return int(args.check and bool(above or mean <= 0.8 or speeds[0] < best))


if __name__ == "__main__":
    harness.run(main)
