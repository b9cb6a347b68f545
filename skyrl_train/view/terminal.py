"""`skyrl-view --terminal RUN`: tables of samples in the terminal, of the last step and the last evaluation, or of a step.

What a model wrote may hold anything: control characters, which could write over the terminal, are shown as `\\x1b` and the
like, and nothing of it is taken for markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyrl_train.errors import SkyrlTrainError, counted
from skyrl_train.telemetry.reading import RolloutFile, Run, find_runs
from skyrl_train.telemetry.records import pairs_of, read_failed_rollouts, read_rollouts
from skyrl_train.telemetry.trackers import SampleRow, sample_row

LONGEST_TEXT = 600
"""Characters of a prompt or a response; the middle of a longer one is left out."""
_PLAIN_WIDTH = 120
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def show(folders: Sequence[Path], *, step: int | None = None, limit: int = 10, file: TextIO | None = None) -> None:
    """Print a table of samples for each run and purpose: of `step`, or the last one that there is.

    At most `limit` rows each, those of the prompts whose samples' rewards differ most coming first, each prompt's best above
    its worst. Raises SkyrlTrainError where a folder holds no run or a run no such rollouts, DataError for a damaged file.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH)
    for run in find_runs(folders):
        shown = _chosen(run, step)
        if not shown:
            at = "" if step is None else f" of step {step}"
            raise SkyrlTrainError(f"RUN={run.root} has no rollouts{at}. Was trainer.dump_rollouts on?")
        for each in shown:
            console.print(_table(run, each, limit))


def _chosen(run: Run, step: int | None) -> list[RolloutFile]:
    """Of each purpose the file of the step, or the last one."""
    files = [each for each in run.rollout_files() if each.kind == "parquet"]
    wanted = [each for each in files if step is None or each.step == step]
    return list({each.purpose: each for each in wanted}.values())


def _table(run: Run, file: RolloutFile, limit: int) -> Table:
    if file.purpose == "failed":
        pairs = read_failed_rollouts(file.path)
    else:
        pairs = [pair for batch in read_rollouts(file.path).values() for pair in pairs_of(batch)]
    rows = [sample_row(prompt.messages, trajectory) for prompt, trajectory in pairs]
    failed = sum(math.isnan(float(row["reward"])) for row in rows)
    title = f"{run.root.name}: {file.purpose}, step {file.step}, {counted(len(rows), 'sample')}, {failed} failed"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", show_lines=True, expand=True)
    for name, ratio in (("prompt", 3), ("response", 5)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for name in ("reward", "tokens", "outcome"):
        table.add_column(name, justify="right" if name != "outcome" else "left", overflow="fold")
    for row in _by_spread(rows)[:limit]:
        reward = float(row["reward"])
        table.add_row(
            _shown(f"{row['uid']}\n{row['prompt']}"),
            _shown(str(row["response"])),
            Text("-" if math.isnan(reward) else f"{reward:.3g}", style="red" if math.isnan(reward) else ""),
            Text(str(row["tokens"])),
            _shown(str(row["outcome"])),
        )
    return table


def _by_spread(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Groups of which samples differ in reward first; within a group the best first, what failed last."""
    groups: dict[str, list[SampleRow]] = {}
    for row in rows:
        groups.setdefault(str(row["uid"]), []).append(row)

    def spread(group: Sequence[SampleRow]) -> float:
        rewards = [float(row["reward"]) for row in group if not math.isnan(float(row["reward"]))]
        return max(rewards, default=0.0) - min(rewards, default=0.0)

    def place(row: SampleRow) -> float:
        return math.inf if math.isnan(float(row["reward"])) else -float(row["reward"])

    return [row for group in sorted(groups.values(), key=spread, reverse=True) for row in sorted(group, key=place)]


def _shown(text: str) -> Text:
    if len(text) > LONGEST_TEXT:
        text = (
            f"{text[: LONGEST_TEXT // 2]} [... {len(text) - LONGEST_TEXT} characters ...] {text[-LONGEST_TEXT // 2 :]}"
        )
    return Text(_CONTROL.sub(lambda found: ascii(found.group())[1:-1], text))
