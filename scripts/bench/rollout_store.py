"""Measures rollouts at rest and in memory: bytes a token on disk, CPU time of writing, memory of the controller.

    python scripts/bench/rollout_store.py
    python scripts/bench/rollout_store.py --prompts 16 --ids uniform     # smaller; token ids as hard to compress as can be

The rollouts are made up: conversations of two turns, whose token ids are distributed as words are (Zipf's law; `--ids
uniform` draws each of 150,000 equally often), with a text of as many words, and log-probabilities whose digits are
random. What is compared is the writer of JSON lines that there was before Parquet, which is in this script for that.

    disk       the columns of a file by themselves, as its metadata states their sizes; per token that a turn adds, prompts
               and observations included. Columns of sampled tokens alone are counted per sampled token.
    CPU        of the process, the best of `--repeats`, with `fsync`. What is compared has the same to write.
    memory     what the rollouts take, and the most that they and the writer take together, Arrow's pool included
"""

from __future__ import annotations

import gc
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from synthetic_rollouts import VOCABULARY, make_rollouts

from skyrl_train.system.files import json_line
from skyrl_train.telemetry.records import encode_trajectory, pairs_of, read_rollouts, write_rollouts
from skyrl_train.types import RolloutBatch

TARGETS = {"core": 8.0, "column": 4.0, "speed": 5.0, "held": 35.0, "peak": 50.0}
"""Bytes a token on disk, bytes of a further column, times the tokens per CPU second, bytes a token in memory."""
CORE = ("added_token_ids", "response_token_ids", "loss_mask", "versions", "logprobs")
FURTHER = ("advantages", "policy_logprobs", "reference_logprobs")


@dataclass(frozen=True, kw_only=True)
class Line:
    what: str
    found: float
    target: float = 0.0
    at_least: bool = False
    """Whether the target is a lower bound."""

    @property
    def is_met(self) -> bool:
        return not self.target or (self.found >= self.target if self.at_least else self.found <= self.target)


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens-per-sequence", type=int, default=2000)
    parser.add_argument("--ids", choices=("words", "uniform"), default="words")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is taken")
    parser.add_argument("--folder", default=None, help="where files are written; the system's temporary folder")
    args = parser.parse_args(argv)
    tracemalloc.start()
    maker = Maker(args.ids)
    before = tracemalloc.get_traced_memory()[0]
    rollouts = make_rollouts(
        *(args.prompts, args.samples, 2, args.tokens_per_sequence),
        ids=maker.ids,
        text=maker.text,
        logprobs=maker.logprobs,
    )
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    columns = maker.columns(rollouts)
    turns = [turn for trajectory in rollouts.trajectories for turn in trajectory.turns]
    sampled = sum(len(turn.response_token_ids) for turn in turns)
    tokens = sampled + sum(len(turn.added_token_ids) for turn in turns)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        peak = held + peak_of_writing(folder, rollouts, columns)
        tracemalloc.stop()
        advantages = {"advantages": columns["advantages"]}
        lines_s = best(lambda: write_json_lines(folder / "old.jsonl", rollouts, columns["advantages"]), args.repeats)
        same_s = best(
            lambda: write_rollouts(folder, rollouts, purpose="same", global_step=1, columns=advantages), args.repeats
        )
        all_s = best(
            lambda: write_rollouts(folder, rollouts, purpose="train", global_step=1, columns=columns), args.repeats
        )
        read_s = best(lambda: read_rollouts(folder / "train_step_000001.parquet"), 1)
        rounded = write_rollouts(folder, rollouts, purpose="b", global_step=1, columns=columns, to_bfloat16=True)
        sizes, narrow = column_sizes(folder / "train_step_000001.parquet"), column_sizes(rounded)
        whole, core = sum(sizes.values()), sum(map(sizes.__getitem__, CORE))
        old = (folder / "old.jsonl").stat().st_size
    lines = [
        Line(
            what="disk: ids, mask, version, engine's log-probability",
            found=core / tokens,
            target=TARGETS["core"],
        ),
        Line(what="disk: the same, per sampled token", found=core / sampled, target=TARGETS["core"]),
        *(Line(what=f"disk: {name}", found=sizes[name] / sampled, target=TARGETS["column"]) for name in FURTHER),
        *(Line(what=f"disk: {name}, bfloat16", found=narrow[name] / sampled) for name in FURTHER[1:]),
        Line(what="disk: texts and all else", found=(whole - sum(map(sizes.__getitem__, CORE + FURTHER))) / tokens),
        Line(what="disk: the whole file", found=whole / tokens),
        Line(what="disk: JSON lines, with advantages alone", found=old / tokens),
        Line(what="CPU: tokens a second, JSON lines", found=tokens / lines_s),
        Line(what="CPU: tokens a second, the same as Parquet", found=tokens / same_s),
        Line(what="CPU: times as fast", found=lines_s / same_s, target=TARGETS["speed"], at_least=True),
        Line(what="CPU: tokens a second, all columns", found=tokens / all_s),
        Line(what="CPU: tokens a second, read back", found=tokens / read_s),
        Line(what="memory: bytes a token, held", found=held / tokens, target=TARGETS["held"]),
        Line(what="memory: bytes a token, peak of writing", found=peak / tokens, target=TARGETS["peak"]),
    ]
    report(
        lines,
        f"{len(rollouts.trajectories)} trajectories, {tokens:,} tokens, {sampled:,} of them sampled; ids {args.ids}",
    )
    return 0 if all(line.is_met for line in lines) else 1


class Maker:
    """Of ids, and of what goes with them. `ids` is "words" or "uniform"."""

    def __init__(self, ids: str) -> None:
        self._kind, self._numbers = ids, np.random.default_rng(0)
        self._order = self._numbers.permutation(VOCABULARY).astype(np.int32)
        shares = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
        self._shares = shares / shares[-1]
        lengths = self._numbers.integers(2, 8, VOCABULARY)
        letters = self._numbers.integers(97, 123, int(lengths.sum()), dtype=np.uint8).tobytes().decode()
        ends = np.cumsum(lengths).tolist()
        self._words = [letters[start:stop] for start, stop in zip([0, *ends], ends)]

    def columns(self, rollouts: RolloutBatch) -> dict[str, list[list[Any]]]:
        """Advantages are equal within a trajectory, as those of GRPO are; log-probabilities are near the engine's."""
        found: dict[str, list[list[Any]]] = {name: [] for name in FURTHER}
        for trajectory in rollouts.trajectories:
            advantage = np.float32(self._numbers.normal())
            scored = [turn.response_logprobs for turn in trajectory.turns]
            found["advantages"].append([np.full(len(each), advantage, np.float32) for each in scored])
            for name, scale in (("policy_logprobs", 1e-3), ("reference_logprobs", 0.1)):
                noise = [self._numbers.normal(0, scale, len(each)) for each in scored]
                found[name].append([(each * (1 + more)).astype(np.float32) for each, more in zip(scored, noise)])
        return found

    def ids(self, count: int) -> np.ndarray:
        if self._kind == "uniform":
            return self._numbers.integers(0, VOCABULARY, count, dtype=np.int32)
        return self._order[np.searchsorted(self._shares, self._numbers.random(count))]

    def text(self, ids: np.ndarray) -> str:
        return " ".join([self._words[each] for each in ids.tolist()])

    def logprobs(self, count: int) -> np.ndarray:
        return -self._numbers.exponential(0.5, count).astype(np.float32)


def write_json_lines(path: Path, rollouts: RolloutBatch, advantages: Sequence[Sequence[np.ndarray]]) -> None:
    """The writer that there was: a line a trajectory, each number as a text."""
    with open(path, "wb") as file:
        for (prompt, trajectory), of_turns in zip(pairs_of(rollouts), advantages):
            record = {"global_step": 1, "purpose": "train", **encode_trajectory(prompt, trajectory)}
            for turn, values in zip(record["turns"], of_turns):
                turn["advantages"] = values.tolist()
            file.write(json_line(record))
        file.flush()
        os.fsync(file.fileno())


def best(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the process."""
    return harness.timed(work, repeats)[0]


def peak_of_writing(folder: Path, rollouts: RolloutBatch, columns: dict[str, list[list[Any]]]) -> int:
    """The most bytes that writing takes beside the rollouts and the training batch, whose columns are written."""
    import pyarrow as pa

    write_rollouts(folder, rollouts, purpose="warm", global_step=1)  # imports
    gc.collect()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    pool = pa.total_allocated_bytes()
    write_rollouts(folder, rollouts, purpose="peak", global_step=1, columns=columns)
    peak = tracemalloc.get_traced_memory()[1] - before
    return peak + (pa.default_memory_pool().max_memory() or 0) - pool


def column_sizes(path: Path) -> dict[str, int]:
    """Compressed bytes of each column of a file."""
    from pyarrow.parquet import ParquetFile

    found: dict[str, int] = {}
    with ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            row_group = file.metadata.row_group(group)
            for index in range(row_group.num_columns):
                column = row_group.column(index)
                name = column.path_in_schema.partition(".")[0]
                found[name] = found.get(name, 0) + column.total_compressed_size
    return found


def report(lines: Sequence[Line], title: str) -> None:
    table = harness.Table("what", "found", "aimed", title=title)
    for line in lines:
        bound = f"{'>=' if line.at_least else '<='} {line.target:g}{'' if line.is_met else ' MISSED'}"
        found = f"{line.found:,.2f}" if line.found < 1000 else f"{line.found:,.0f}"
        table.row(line.what, found, bound if line.target else "")


if __name__ == "__main__":
    harness.run(main)
