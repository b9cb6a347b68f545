"""Memory and time of one long row over ranks that compute it together: python scripts/bench/long_rows.py

For each size of a group, so many processes on gloo (FSDP2, float32, one thread each) take one update on one packed row,
half of whose tokens carry loss. Reported of the fullest rank: the most bytes of tensors that the pass held beyond what was
there before it, counted tensor by tensor (`learner/memory/meter.py`); and seconds of CPU time. Gradient norms must agree.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import harness
import torch
from update_work import ModelSize, save_model

from skyrl_train.batch import batch_of_lengths
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import SequenceGroup, Sharded, join, leave
from skyrl_train.endpoints import Rendezvous
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.learner.memory import CountingMeter
from skyrl_train.model import load_causal_lm

MIB = 1 << 20
MAX_DIFFERENCE = 1e-5
TIMEOUT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--groups", default="1,2,4")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args(argv)
    norms = []
    # Heads of 64 features, four to each key and value head.
    heads = (args.hidden // 64, max(1, args.hidden // 256))
    size = ModelSize(args.hidden, args.layers, *heads, 3 * args.hidden, args.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, size, max_position_embeddings=args.positions, tie_word_embeddings=False)
        for ranks in (int(text) for text in args.groups.split(",")):
            found = measure(Path(folder), ranks, args)
            peak, seconds = (max(each[name] for each in found) for name in ("peak_bytes", "cpu_s"))
            norms.append(found[0]["norm"])
            print(
                f"{ranks} ranks: {peak / MIB:.0f} MiB, {seconds:.1f} s CPU, gradient norm {norms[-1]:.6f}", flush=True
            )
    if max(norms) - min(norms) > MAX_DIFFERENCE * max(norms):
        raise SystemExit(f"gradient norms differ: {norms}")


def measure(folder: Path, size: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Of each rank."""
    torch.multiprocessing.start_processes(run_rank, args=(folder, size, args), nprocs=size, start_method="spawn")
    return [torch.load(folder / f"{size}_{rank}.pt") for rank in range(size)]


def run_rank(rank: int, folder: Path, size: int, args: argparse.Namespace) -> None:
    """One update, after a small one that has everything imported and gathered once."""
    place = f"file://{folder}/store_{size}"
    join(Rendezvous(rank=rank, num_ranks=size, init_method=place, timeout_s=TIMEOUT_S), torch.device("cpu"))
    torch.set_num_threads(1)
    learner = make_learner(folder, size, args)
    update(learner, 64, args.vocabulary)
    meter = CountingMeter(1 << 50)
    meter.adopt(learner.engine.held_tensors())
    before, started = meter.in_use_bytes(), time.process_time()
    with meter.counting():
        norm = update(learner, args.positions, args.vocabulary)
    found = {"peak_bytes": meter.peak_bytes() - before, "cpu_s": time.process_time() - started, "norm": norm}
    torch.save(found, folder / f"{size}_{rank}.pt")
    leave()


def make_learner(folder: Path, size: int, args: argparse.Namespace) -> PolicyLearner:
    config = ModelConfig(path=str(folder), gradient_checkpointing=args.checkpointing)
    group = SequenceGroup(size, timeout_s=TIMEOUT_S) if size > 1 else None
    trainer = TrainerConfig(layout="packed")
    engine = ModelEngine(
        load_causal_lm(config, "cpu"),
        name="policy",
        micro_batching=make_micro_batch_strategy(trainer),
        optimizer=OptimizerConfig(lr=0.0),
        total_optimizer_steps=10,
        strategy=Sharded(device=torch.device("cpu"), dtype=torch.float32, cpu_offload=False, group=group),
    )
    return PolicyLearner(engine, model=config, algorithm=AlgorithmConfig(), temperature=1.0)


def update(learner: PolicyLearner, num_tokens: int, vocabulary: int) -> float:
    """On one row; the norm of the gradient, of which nothing is left."""
    generator = torch.Generator().manual_seed(1)
    batch = batch_of_lengths([num_tokens]).with_columns(
        input_ids=torch.randint(0, vocabulary, (num_tokens,), generator=generator).int(),
        loss_mask=torch.arange(num_tokens) % 2 == 1,
        old_logprobs=torch.full((num_tokens,), -9.0),
        advantages=torch.randn(num_tokens, generator=generator),
    )
    learner.forward_backward(
        close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=num_tokens)
    )
    return float(learner.optim_step()["policy/grad_norm"].value)


if __name__ == "__main__":
    harness.run(main)
