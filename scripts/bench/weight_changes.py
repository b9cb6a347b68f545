"""How much of a model's weights an optimizer step changes, as engines keep them: python scripts/bench/weight_changes.py

    python scripts/bench/weight_changes.py --rates 1e-6 --tolerances 0 1e-6 3e-6      # generator.weight_change_tolerance

AdamW on the bundled model, next-token loss on random tokens, constant learning rates. After each step the weights are cut
as a rank would send them; what differs from the last ones is counted, and the bytes of a sync of changes are compared with
those of all weights in the same type (`weight_sync/parts.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.0])
    args = parser.parse_args()
    print(
        "| learning rate | type | tolerance | values sent, last step | bytes of the sync, of all |\n|---|---|---|---|---|"
    )
    for rate in args.rates:
        for dtype in ("bfloat16", "float32"):
            for tolerance in args.tolerances:
                share, share_of_bytes = measure(rate, dtype, args.steps, tolerance)
                print(f"| {rate:g} | {dtype} | {tolerance:g} | {share:.2%} | {share_of_bytes:.2%} |", flush=True)


def measure(rate: float, dtype: str, steps: int, tolerance: float) -> tuple[float, float]:
    """The share of values that are sent after the last step, and of bytes."""
    import torch

    from skyrl_train.config.schema import ModelConfig
    from skyrl_train.model.causal_lm import load_causal_lm
    from skyrl_train.weight_sync.parts import SentWeights, pack_part
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


if __name__ == "__main__":
    main()
