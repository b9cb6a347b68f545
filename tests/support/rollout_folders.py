"""Steps whose rollouts lie in a folder of parts, as several nodes write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from skyrl_train.batch.plane import DataPlane
from skyrl_train.telemetry.records import rollouts_sum, write_parts
from skyrl_train.types import RolloutBatch


class TwoPlaces(DataPlane):
    """Prompts 0, 2, 3, 5, ... lie in one place, and 1, 4, 7, ... in another; one writes after the other."""

    def shares(self, rollouts: RolloutBatch) -> Mapping[str, Sequence[int]]:
        numbers = range(len(rollouts.prompts))
        return {"here": [each for each in numbers if each % 3 != 1], "there": numbers[1::3]}


def in_parts(path: Path) -> Path:
    """Put a folder of two parts, each with every other trajectory, in the place of a step's file."""
    table = pq.read_table(path)
    of_row = np.cumsum([turn in (None, 0) for turn in table["turn"].to_pylist()]) - 1
    (step,) = map(int, re.findall(r"\d+", path.name))
    places = [range(first, int(of_row[-1]) + 1, 2) for first in (0, 1)]

    def write() -> list[tuple[int, str]]:
        sums = []
        for number in range(len(places)):
            file = path.with_name(f".{path.name}.tmp") / f"part-{number:05d}.parquet"
            pq.write_table(table.filter(of_row % 2 == number), file)
            sums.append(rollouts_sum(file))
        return sums

    path.unlink()
    write_parts(path.parent, step, places, write)
    return path
