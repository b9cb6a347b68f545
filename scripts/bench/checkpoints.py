"""What a checkpoint costs the loop: models of several sizes with random weights, trained in one process and on Ray ranks.

    python scripts/bench/checkpoints.py                            # 4, 25 and 100 MB of weights; one process, two Ray ranks
    python scripts/bench/checkpoints.py --megabytes 100 --ranks 0 --rounds 5

A checkpoint holds three times the weights: AdamW's averages are in it. Each is measured in three ways, which take turns:

    read again   the loop waits; files are read once more for their sums, as before their writers hashed them
    waits        trainer.background_checkpoints=false: the loop waits; sums are taken while files are written
    background   the loop waits for the copies alone, then makes optimizer steps until the checkpoint is sealed

Printed are medians: the seconds that the loop waits, those until the checkpoint is sealed, and those of an optimizer step
with nothing beside it and with a checkpoint that is being written. Each checkpoint is verified by its sums.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import harness
import torch
from weight_sync import save_model

from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.derived import LearnerSettings, learner_settings
from skyrl_train.config.models import ModelConfig, PlacementConfig, StrategyConfig
from skyrl_train.interfaces import HeldState, Learner
from skyrl_train.learner import build_learner
from skyrl_train.plan import plan_batches
from skyrl_train.trainers.checkpoints import CheckpointStore, CheckpointWriter, verify
from tests.support.learner_cases import make_batch

MODES = ("read again", "waits", "background")
ROWS, TOKENS = 4, 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 25, 100], help="of weights in float32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 2], help="FSDP2 ranks on Ray; 0: this process")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints of each mode behind a first one")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder unless given")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = harness.Table("ranks", "checkpoint, MB", "mode", "loop waits, s", "sealed, s", "a step, s", "beside, s")
    for num_ranks in options.ranks:
        for megabytes in options.megabytes:
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                num_bytes = save_model(Path(scratch) / "model", megabytes)
                settings = settings_of(Path(scratch) / "model", num_ranks)
                with learner_of(settings, num_ranks) as learner:
                    for cells in measure(learner, Path(scratch), options.rounds):
                        table.row(num_ranks or 1, f"{3 * num_bytes / 1e6:.0f}", *cells)


def settings_of(model: Path, num_ranks: int) -> LearnerSettings:
    """What a run with this model builds its policy from."""
    placement = PlacementConfig(backend="ray" if num_ranks else "inline", start_timeout_s=600.0)
    config = Config(
        model=ModelConfig(path=str(model)),
        trainer=TrainerConfig(total_steps=100, micro_train_batch_size_per_gpu=2),
        strategy=StrategyConfig(name="fsdp2" if num_ranks else "single"),
        placement=placement,
    )
    return learner_settings(config, "policy", plan_batches(config, num_train_prompts=64).schedule("policy"))


@contextmanager
def learner_of(settings: LearnerSettings, num_ranks: int) -> Iterator[Learner]:
    """The policy in this process, or on ranks."""
    if not num_ranks:
        yield build_learner(settings)
        return
    from skyrl_train.cluster import RaySession, Slot, start_learner

    placement = PlacementConfig(backend="ray", start_timeout_s=600.0, call_timeout_s=600.0)
    session = RaySession(placement, num_cpus=num_ranks, name="bench")
    try:
        learner = start_learner(settings, placement, session, [Slot(options={"num_cpus": 1})] * num_ranks)()
        try:
            yield learner
        finally:
            learner.close()
    finally:
        session.close()


def mini_batch(seed: int) -> MiniBatch:
    """Rows of random tokens."""
    rows = make_batch([TOKENS] * ROWS, seed=seed, dtype=torch.float32)
    return close_mini_batch(rows, loss_reduction="token_mean", max_sequence_length_for_norm=TOKENS)


def optimizer_step(learner: Learner) -> float:
    """Take one, and return its seconds."""
    began = time.perf_counter()
    learner.forward_backward(mini_batch(0))
    learner.optim_step()
    return time.perf_counter() - began


def checkpoint(learner: Learner, store: CheckpointStore, step: int, mode: str) -> tuple[float, float, list[float]]:
    """Seconds that the loop waits, those until the checkpoint is sealed, and those of the steps made meanwhile."""
    writer, beside = CheckpointWriter(), []

    def keeping_sums(folder: Path) -> None:
        """Whoever seals the checkpoint reads all files then."""
        held.write(folder)

    began = time.perf_counter()
    held = learner.hold_state(copies=mode == "background")
    if mode == "read again":
        store.write(step, keeping_sums)
    else:
        writer.begin(step, HeldState(is_copied=held.is_copied, write=lambda folder: in_policy(held, folder)), [store])
    waited = time.perf_counter() - began
    while writer.is_busy:
        beside.append(optimizer_step(learner))
    written = writer.collect(waits=True)
    sealed = waited if written is None else waited + written.seconds
    for error in () if written is None else written.errors:
        raise error
    writer.close()
    return waited, sealed, beside


def in_policy(held: HeldState, folder: Path) -> dict[str, tuple[int, str]]:
    """Write a model where a run's checkpoints have it."""
    return {f"policy/{name}": each for name, each in held.write(folder / "policy").items()}


def measure(learner: Learner, scratch: Path, rounds: int) -> Iterator[list[str]]:
    """Cells of a row for each mode."""
    store = CheckpointStore(scratch / "checkpoints", keep=1)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    step = 0
    for turn in range(rounds + 1):
        for mode in MODES:
            alone = [optimizer_step(learner) for _ in range(2)]
            step += 1
            with_thread = checkpoint(learner, store, step, mode)
            verify(scratch / "checkpoints" / f"step_{step:06d}")
            if turn:  # the first one finds files, code and memory cold
                found[mode].append(with_thread[:2])
                steps["alone"] += alone
                steps[mode] += with_thread[2]
    for mode in MODES:
        waits, sealed = (statistics.median(each) for each in zip(*found[mode], strict=True))
        alone_s, beside = statistics.median(steps["alone"]), steps[mode]
        seconds = [f"{each:.3f}" for each in (waits, sealed, alone_s)]
        yield [mode, *seconds, f"{statistics.median(beside):.3f}" if beside else "-"]


if __name__ == "__main__":
    harness.run(main)
