"""Measures the controller's own work in a training step, without a model.

    python scripts/bench/controller.py
    python scripts/bench/controller.py --prompts 64 --tokens-per-sequence 500        # smaller, quicker

The controller is what happens between generation and update on one CPU: assembling rows, boundaries, advantages,
closing mini-batches, metrics, and the rollout log. It is compared with a step whose time is calculated, not measured:

    generation   response tokens / (GPUs x --generated-tokens-per-s-per-gpu)
    update       (8 or, with a reference model, 10) x parameters x tokens / (GPUs x --peak-tflops x --mfu)

8 is 6 for forward and backward and 2 for scoring old log-probabilities; attention is left out, which makes the step
shorter and the controller's share larger. The rollout log is written by a thread of its own while the update runs: its
share is what is left of it after the update's time, plus what handing over costs. What it takes in all is shown too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import numpy as np
import torch
from harness import T, timed
from synthetic_rollouts import VOCABULARY, make_rollouts

from skyrl_train.batch import TrainingInputBatch, compute_prompt_end_indices, compute_prompt_mini_batch_boundaries
from skyrl_train.batch.steps import mini_batches
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.runs import assembler
from skyrl_train.telemetry import MetricsLog
from skyrl_train.trainers import RolloutLog, batch_metrics, rollout_metrics, steps
from skyrl_train.types import RolloutBatch

TARGET_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class Piece:
    name: str
    seconds: float
    counted_s: float
    """What the step waits for."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--tokens-per-sequence", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--step-wise", action="store_true", help="one row per turn")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is taken")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: on a machine that others use too")
    parser.add_argument("--parameters", type=float, default=1.54e9, help="default: Qwen2.5-1.5B")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--generated-tokens-per-s-per-gpu", type=float, default=10_000.0)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="bfloat16, dense; default: H100 SXM")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that an update reaches")
    parser.add_argument("--reference", action="store_true", help="the step scores a reference model too")
    return parser.parse_args(argv)


def rollouts_of(args: argparse.Namespace) -> RolloutBatch:
    """Return made-up rollouts of the stated sizes."""
    draw = np.random.default_rng(0)
    return make_rollouts(
        *(args.prompts, args.samples, args.turns, args.tokens_per_sequence),
        ids=lambda count: draw.integers(0, VOCABULARY, count, dtype=np.int32),
        text=lambda ids: "word " * len(ids),
        logprobs=lambda count: -draw.random(count, dtype=np.float32),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    rollouts = rollouts_of(args)
    generation_s, update_s = step_seconds(args, rollouts)
    clock = time.process_time if args.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        pieces = measure(
            rollouts, make_config(args), Path(folder), update_s=update_s, repeats=args.repeats, clock=clock
        )
    share = report(args, rollouts, pieces, generation_s, update_s)
    return 0 if share <= TARGET_SHARE else 1


def make_config(args: argparse.Namespace) -> Config:
    config = Config()
    mini_batch = args.prompts // 4 if args.prompts % 4 == 0 else args.prompts
    return replace(
        config,
        trainer=replace(config.trainer, train_batch_size=args.prompts, policy_mini_batch_size=mini_batch),
        generator=replace(config.generator, n_samples_per_prompt=args.samples, step_wise_trajectories=args.step_wise),
    )


def step_seconds(args: argparse.Namespace, rollouts: RolloutBatch) -> tuple[float, float]:
    """Generation and update of the step that the controller is compared with, in seconds."""
    turns = [turn for trajectory in rollouts.trajectories for turn in trajectory.turns]
    generated = sum(len(turn.response_token_ids) for turn in turns)
    trained = num_tokens(rollouts, step_wise=args.step_wise)
    flops = (10 if args.reference else 8) * args.parameters * trained
    return (
        generated / (args.gpus * args.generated_tokens_per_s_per_gpu),
        flops / (args.gpus * args.peak_tflops * 1e12 * args.mfu),
    )


def num_tokens(rollouts: RolloutBatch, *, step_wise: bool) -> int:
    """Of all rows: with one row per turn, a turn's context is in each row that follows."""
    contexts = [trajectory.contexts() for trajectory in rollouts.trajectories]
    return sum(len(context) for each in contexts for context in each[0 if step_wise else -1 :])


def measure(
    rollouts: RolloutBatch,
    config: Config,
    folder: Path,
    *,
    update_s: float,
    repeats: int,
    clock: Callable[[], float],
) -> list[Piece]:
    pieces: list[Piece] = []

    def piece(name: str, work: Callable[[], T]) -> T:
        seconds, result = timed(work, repeats, clock)
        pieces.append(Piece(name=name, seconds=seconds, counted_s=seconds))
        return result

    batch = piece(
        "assemble rows and boundaries",
        lambda: assembler(config)(rollouts, step=1, weight_version=0),
    )
    seconds, _ = timed(lambda: boundaries_alone(batch, config), 1, clock)
    pieces.append(Piece(name="  of which boundaries", seconds=seconds, counted_s=0.0))
    scored = batch.with_columns(old_logprobs=batch["rollout_logprobs"], ref_logprobs=batch["rollout_logprobs"])
    estimated = piece(
        "estimate advantages", lambda: steps.estimate(scored, config.trainer.algorithm, kl_coef=0.0, seed=config.seed)
    )
    piece("close mini-batches", lambda: close_all(estimated, config))
    metrics = piece(
        "metrics of rollouts and batch",
        lambda: {**rollout_metrics(rollouts), **batch_metrics(estimated, AlgorithmConfig())},
    )
    piece("metrics.jsonl, synced", lambda: MetricsLog(folder / "metrics.jsonl").log(metrics, step=1))
    pieces.append(rollout_log_piece(rollouts, estimated, folder, update_s, clock))
    return pieces


def boundaries_alone(batch: TrainingInputBatch, config: Config) -> None:
    uids = batch.metadata.uids
    compute_prompt_end_indices(uids)
    compute_prompt_mini_batch_boundaries(uids, config.trainer.policy_mini_batch_size)


def close_all(batch: TrainingInputBatch, config: Config) -> None:
    algorithm = config.trainer.algorithm
    for _ in mini_batches(
        batch,
        batch.metadata.policy_mini_batch_boundaries or (),
        loss_reduction=algorithm.loss_reduction,
        max_sequence_length_for_norm=algorithm.max_sequence_length_for_norm,
        normalize_advantages=algorithm.normalize_advantages,
    ):
        pass


def rollout_log_piece(
    rollouts: RolloutBatch, batch: TrainingInputBatch, folder: Path, update_s: float, clock: Callable[[], float]
) -> Piece:
    log = RolloutLog(folder / "rollouts")
    size = rollouts.n_samples_per_prompt
    first = replace(rollouts, prompts=rollouts.prompts[:1], trajectories=rollouts.trajectories[:size])
    log.write_evaluation(0, first)
    log.flush()  # with it what is imported once, in a run's first step
    handing_over_s, _ = timed(lambda: log.write(rollouts, batch, step=1), 1, clock)
    writing_s, _ = timed(log.flush, 1, clock)
    log.close()
    size = sum(path.stat().st_size for path in (folder / "rollouts").iterdir())
    waited_s = max(0.0, writing_s - update_s)
    name = f"rollout log, {size / 1e6:.0f} MB (beside the update)"
    return Piece(name=name, seconds=handing_over_s + writing_s, counted_s=handing_over_s + waited_s)


def report(
    args: argparse.Namespace, rollouts: RolloutBatch, pieces: Sequence[Piece], generation_s: float, update_s: float
) -> float:
    """Prints the table; returns the controller's share of the step."""
    counted_s = sum(piece.counted_s for piece in pieces)
    step_s = generation_s + update_s + counted_s
    table = harness.Table(
        *("controller", "seconds", "step waits", "share of step"),
        title=f"{len(rollouts.trajectories)} trajectories, {num_tokens(rollouts, step_wise=args.step_wise):,} tokens",
    )
    in_all = Piece(name="in all", seconds=sum(piece.seconds for piece in pieces), counted_s=counted_s)
    for piece in (*pieces, in_all):
        table.row(piece.name, f"{piece.seconds:.3f}", f"{piece.counted_s:.3f}", f"{piece.counted_s / step_s:.2%}")
    print(
        f"step: generation {generation_s:.1f} s + update {update_s:.1f} s + controller {counted_s:.1f} s, calculated "
        f"for {args.parameters / 1e9:.2f}B parameters on {args.gpus} GPUs, "
        f"{args.generated_tokens_per_s_per_gpu:.0f} tokens/s each, {args.mfu:.0%} of {args.peak_tflops:.0f} TFLOP/s"
    )
    share = counted_s / step_s
    verdict = "within" if share <= TARGET_SHARE else "OVER"
    print(f"controller's share: {share:.2%}, {verdict} the target of {TARGET_SHARE:.0%}")
    return share


if __name__ == "__main__":
    harness.run(main)
