"""What keeps the measurements of `update.py` honest: gradients are compared.

Each trainer rounds sums in another order, and their gradients are further apart the larger the model. So how far is too far
is not stated, but follows from the two trainers of other makers whose gradients are nearest to each other: a gradient
differs where it is more than `FACTOR` times as far from the nearer of the two as they are from each other, and more than
`MAX_DISTANCE`. Where there are fewer than two, it is the latter alone, from the one that is there or else from the first.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

from update_peers import PEERS

MAX_DISTANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Relative L2 between gradients that is never too far."""
FACTOR = 3.0


def compare_gradients(files: dict[str, Path], dtype: str) -> tuple[dict[str, float], set[str]]:
    """Relative L2 between each variant's gradient and the first one's, and which differ, by the rule at the head of this
    file. Two gradients are in memory at a time."""
    distances: dict[frozenset[str], float] = {}

    def apart(one: str, other: str) -> float:
        pair = frozenset((one, other))
        if pair not in distances:
            found = 0.0 if one == other else _distance(files[one], files[other])
            distances[pair] = found if math.isfinite(found) else math.inf
        return distances[pair]

    peers = [name for name in files if name in PEERS]
    pairs = [pair for pair in combinations(peers, 2) if PEERS[pair[0]][0] != PEERS[pair[1]][0]]
    pairs = [pair for pair in pairs if apart(*pair) < math.inf]
    first = next(iter(files))
    agreed = min(pairs, key=lambda pair: apart(*pair), default=(peers[0] if peers else first,) * 2)
    limit = max(MAX_DISTANCE[dtype], FACTOR * apart(*agreed))
    differing = {name for name in files if min(apart(name, each) for each in agreed) > limit}
    return {name: apart(first, name) for name in files}, differing


def _distance(one: Path, other: Path) -> float:
    import torch

    left, right = (torch.load(file, mmap=True, weights_only=True) for file in (one, other))
    norm = sum(float(tensor.double().square().sum()) for tensor in left.values()) ** 0.5
    return sum(float((right[name] - left[name]).double().square().sum()) for name in left) ** 0.5 / norm
