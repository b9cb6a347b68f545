"""Memory and time of one long row over ranks that compute it together: python scripts/bench/long_rows.py

For each size of a group, so many processes on gloo (FSDP2, float32, one thread each) take one update on one packed row,
half of whose tokens carry loss. Reported of the fullest rank: the most bytes of tensors that the pass held beyond what was
there before it, counted tensor by tensor (`learner/memory/meter.py`); and seconds of CPU time. Gradient norms must agree.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
MIB = 1 << 20
MAX_DIFFERENCE = 1e-5
TIMEOUT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--groups", default="1,2,4")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    norms = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args)
        for size in (int(text) for text in args.groups.split(",")):
            found = measure(Path(folder), size, args)
            peak, seconds = (max(each[name] for each in found) for name in ("peak_bytes", "cpu_s"))
            norms.append(found[0]["norm"])
            print(f"{size} ranks: {peak / MIB:.0f} MiB, {seconds:.1f} s CPU, gradient norm {norms[-1]:.6f}", flush=True)
    if max(norms) - min(norms) > MAX_DIFFERENCE * max(norms):
        raise SystemExit(f"gradient norms differ: {norms}")


def save_model(folder: Path, args: argparse.Namespace) -> None:
    """A random Qwen2 with heads of 64 features, four to each key and value head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        max_position_embeddings=args.positions,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def measure(folder: Path, size: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Of each rank."""
    import torch

    torch.multiprocessing.start_processes(run_rank, args=(folder, size, args), nprocs=size, start_method="spawn")
    return [torch.load(folder / f"{size}_{rank}.pt") for rank in range(size)]


def run_rank(rank: int, folder: Path, size: int, args: argparse.Namespace) -> None:
    """One update, after a small one that has everything imported and gathered once."""
    import torch

    from skyrl_train.distributed import join, leave
    from skyrl_train.endpoints import Rendezvous
    from skyrl_train.learner.memory import CountingMeter

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


def make_learner(folder: Path, size: int, args: argparse.Namespace) -> Any:
    import torch

    from skyrl_train.batch.planner import make_micro_batch_strategy
    from skyrl_train.config import TrainerConfig
    from skyrl_train.config.algorithm import AlgorithmConfig
    from skyrl_train.config.models import ModelConfig, OptimizerConfig
    from skyrl_train.distributed import SequenceGroup, Sharded
    from skyrl_train.learner import ModelEngine, PolicyLearner
    from skyrl_train.model import load_causal_lm

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


def update(learner: Any, num_tokens: int, vocabulary: int) -> float:
    """On one row; the norm of the gradient, of which nothing is left."""
    import torch

    from skyrl_train.batch import batch_of_lengths
    from skyrl_train.batch.steps import close_mini_batch

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
    main()
