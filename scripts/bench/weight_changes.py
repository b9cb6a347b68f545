"""How much of a model's weights an optimizer step changes, as engines keep them: python scripts/bench/weight_changes.py

    python scripts/bench/weight_changes.py --rates 1e-6 --tolerances 0 1e-6 3e-6      # generator.weight_change_tolerance
    python scripts/bench/weight_changes.py --learn outputs/changes --tolerances 0 1e-4 5e-4

AdamW on the bundled model, next-token loss on random tokens, constant learning rates. After each step the weights are cut
as a rank would send them; what differs from the last ones is counted, and the bytes of a sync of changes are compared with
those of all weights in the same type (`weight_sync/parts.py`).

`--learn` trains with each tolerance instead: the bundled experiment in one process, whose engine gets what ranks on Ray
would send theirs, all of it in one sync of twenty. It prints the accuracy on held-out problems after the last step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import harness

if TYPE_CHECKING:
    from skyrl_train.weight_sync import Route
    from skyrl_train.weights import Bucket

FULL_SYNC_EVERY = 20


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--learn", type=Path, metavar="FOLDER", help="train, with the runs in this folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.0])
    args = parser.parse_args(argv)
    if args.learn:
        table = harness.Table("tolerance", "held-out accuracy, first turn")
        for tolerance in args.tolerances:
            table.row(f"{tolerance:g}", f"{learn(args.learn / f'{tolerance:g}', args.steps, tolerance):.3f}")
        return
    table = harness.Table("learning rate", "type", "tolerance", "values sent, last step", "bytes of the sync, of all")
    for rate in args.rates:
        for dtype in ("bfloat16", "float32"):
            for tolerance in args.tolerances:
                share, share_of_bytes = measure(rate, dtype, args.steps, tolerance)
                table.row(f"{rate:g}", dtype, f"{tolerance:g}", f"{share:.2%}", f"{share_of_bytes:.2%}")


def measure(rate: float, dtype: str, steps: int, tolerance: float) -> tuple[float, float]:
    """The share of values that are sent after the last step, and of bytes."""
    import torch

    from skyrl_train.config.models import ModelConfig
    from skyrl_train.model import load_causal_lm
    from skyrl_train.weight_sync import SentWeights, pack_part
    from skyrl_train.weights import Bucket, Piece

    torch.manual_seed(0)
    model = load_causal_lm(ModelConfig(), "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    sent, planned, num_whole = SentWeights(), Bucket(names=(), dtypes=(), shapes=()), 0
    for step in range(steps + 1):
        entries = []
        for name, parameter in model.named_parameters():
            type_ = getattr(torch, dtype) if parameter.ndim > 1 else torch.float32
            box, piece = parameter.detach().to(type_), Piece((0,) * parameter.ndim, tuple(parameter.shape))
            entries.append(sent.entry(name, box, piece, changes=step > 0, tolerance=tolerance))
        num_bytes = pack_part(entries, planned, torch.device("cpu"))[0].num_bytes
        num_whole = num_whole or num_bytes
        if step == steps:
            break
        tokens = torch.randint(model.config.vocab_size, (8, 64))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = [len(entry.changed) if entry.changed is not None else entry.box.numel() for entry in entries]
    return sum(counts) / sum(entry.box.numel() for entry in entries), num_bytes / num_whole


def learn(folder: Path, steps: int, tolerance: float) -> float:
    """Trains where no run is yet; the accuracy after the last step."""
    records = harness.trained(
        folder,
        *("platform=cpu", "trainer.ckpt_interval=0", "trainer.export_hf=false"),
        f"trainer.total_steps={steps}",
        f"trainer.eval_interval={steps}",
        f"generator.weight_transport={Path(__file__).stem}:send_changes",
        packages=[str(harness.FOLDER)],
        WEIGHT_CHANGE_TOLERANCE=str(tolerance),
    )
    return float(records[-1]["eval/accuracy_first_turn"])


def send_changes(route: Route, buckets: Sequence[Bucket]) -> int:
    """A transport that brings an engine of this process what changed by more than the tolerance."""
    from skyrl_train.weight_sync import UpdatableEngine
    from skyrl_train.weights import WeightSender

    senders = route.kept.setdefault("senders", route.senders)  # which know what was sent last
    number = route.kept["number"] = route.kept.get("number", -1) + 1
    num_bytes = 0
    for bucket in buckets:
        planned = replace(
            bucket,
            update="changes" if number % FULL_SYNC_EVERY else "keep",
            tolerance=float(os.environ["WEIGHT_CHANGE_TOLERANCE"]),
        )
        (part,) = senders.call(WeightSender.carry_part, "sync", planned)
        route.engines.call(UpdatableEngine.update_parts, "sync", planned, part)
        num_bytes += part.num_bytes
    return num_bytes


if __name__ == "__main__":
    harness.run(main)
