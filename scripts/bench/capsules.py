"""What a step capsule takes: seconds a step, bytes of a state, and how many of these differences between states would save.

    python scripts/bench/capsules.py OUTPUT_DIR      # of a run with trainer.capsules=2 or more

A difference is lossless: the bits of each tensor XOR those of the state before, their bytes sorted by significance, zstd.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import harness
import numpy as np
from safetensors.numpy import load_file

from skyrl_train.telemetry import RunFolder, read_metrics
from skyrl_train.trainers.capsules import STATES, steps_in
from skyrl_train.trainers.checkpoints import checkpoint_name


def compressed(content: np.ndarray) -> int:
    """Bytes of a tensor's bits behind zstd, which finds more in bytes of one significance than in whole numbers."""
    import pyarrow

    rows = content.reshape(-1, 1).view(np.uint8).reshape(content.size, -1)
    return len(pyarrow.compress(np.ascontiguousarray(rows.T).tobytes(), codec="zstd", asbytes=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("run", type=Path, metavar="OUTPUT_DIR")
    folder = RunFolder(parser.parse_args(argv).run)
    records = read_metrics(folder.metrics_file)
    for name in ("timing/capsule", "timing/update", "timing/step"):
        seconds = [record[name] for record in records if name in record]
        print(f"{name:<16}{np.median(seconds):10.3f} s (median of {len(seconds)})" if seconds else f"{name:<16} none")
    states = folder.capsules / STATES
    steps = steps_in(states)
    for name in ("model", "optimizer"):
        raw = plain = difference = 0
        begin = time.perf_counter()
        for before, after in pairwise(steps):
            old, new = (
                load_file(states / checkpoint_name(step) / "policy" / f"{name}.safetensors") for step in (before, after)
            )
            for key, tensor in new.items():
                bits = np.atleast_1d(tensor).view(f"u{tensor.itemsize}")
                raw += tensor.nbytes
                plain += compressed(bits)
                before_it = np.atleast_1d(old.get(key, np.zeros_like(tensor)))  # the first step has no moments before
                difference += compressed(bits ^ before_it.view(bits.dtype))
        took = time.perf_counter() - begin
        print(
            f"{name:<16}{raw:>14,} bytes, {plain / raw:.2f} of them behind zstd, {difference / raw:.2f} as differences"
        )
        print(f"{'':<16}{2 * raw / took / 1e6:>10.0f} MB/s through both")


if __name__ == "__main__":
    harness.run(main)
