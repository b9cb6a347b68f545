"""What a run that Python starts does around itself, and what it returns."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_train.config import RunConfig
from skyrl_train.errors import StopRequested
from skyrl_train.rollout.rewards import forget_rewards
from skyrl_train.runs.drive import open_folder
from skyrl_train.telemetry import RunFolder, read_metrics
from skyrl_train.telemetry.logs import (
    RedactingFormatter,
    RunLogHandler,
    console_streams,
    in_notebook,
    learn_secrets,
    stacks,
)
from skyrl_train.trainers.evaluation import EvaluationResult, read_evaluations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left. At the end of a notebook's cell it shows the learning curve."""

    folder: RunFolder
    """Where everything is: `folder.export`, `folder.checkpoints`, `folder.metrics_file` and the rest."""
    metrics: list[dict[str, Any]] = field(repr=False)
    """The record of each step, as in `metrics.jsonl`; those of a resumed run are all here. Each has all names that any of
    them has, with None where nothing was measured: an evaluation before the first step has no reward of a step."""
    evaluations: list[EvaluationResult] = field(repr=False)
    """Those of reinforcement learning, by step. Supervised runs have theirs in `metrics`, as `eval/loss`."""
    stopped: str = ""
    """Of a run that was interrupted in a notebook: by what, and how it goes on. Empty for one that is done."""

    @property
    def step(self) -> int:
        """Training steps that are done."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def _repr_png_(self) -> bytes | None:
        """What IPython shows."""
        curve = self.folder.learning_curve_file
        return curve.read_bytes() if curve.is_file() else None


def run_logged(config: Any, run: Callable[[Any], object]) -> RunResult:
    """Run with a `run.log` in the run's folder, as commands do; return what the folder then holds.

    In a notebook an interrupt ends the cell with what there is so far; anywhere else it is raised, since a script that goes
    on after Ctrl-C would go on with half a run.
    """
    folder = open_folder(config)
    try:
        with _logged(config, folder):
            run(config)
    except (KeyboardInterrupt, StopRequested) as error:
        line = f"{str(error) or 'interrupted'}. The run is in {folder.root}: "
        line += f'the same load_config with "output_dir={folder.root}" goes on with it'
        error.args = (line,)
        if in_notebook() and read_metrics(folder.metrics_file):
            return _result(folder, stopped=line)
        error.__dict__["_render_traceback_"] = partial(list, [f"{type(error).__name__}: {line}"])  # what IPython shows
        raise error.with_traceback(None) from None  # the whole traceback is in run.log
    return _result(folder)


def _result(folder: RunFolder, *, stopped: str = "") -> RunResult:
    """What the folder holds; why it is not all is said here, where the cell ends without an error."""
    if stopped:
        sys.stdout.write(f"{stopped}\n")
    records = read_metrics(folder.metrics_file)
    names = dict.fromkeys(name for record in records for name in record)
    metrics = [{name: record.get(name) for name in names} for record in records]
    return RunResult(
        folder=folder, metrics=metrics, evaluations=read_evaluations(folder.evaluation_file), stopped=stopped
    )


@contextmanager
def _logged(config: RunConfig, folder: RunFolder) -> Iterator[None]:
    """Keep in `run.log` what the console shows, Python's logging and the traceback of an error, without secrets."""
    learn_secrets(asdict(config))
    forget_rewards()
    stacks.begin("trainer")
    root, ours = logging.getLogger(), logging.getLogger("skyrl_train")
    log = RunLogHandler(folder.root / "run.log")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.setFormatter(RedactingFormatter(plain))
    handlers: list[logging.Handler] = [log]
    if not root.handlers and logging.lastResort is not None:  # which a handler of ours would silence
        handlers.append(logging.lastResort)
    level = ours.level
    ours.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        with console_streams():
            yield
    except BaseException as error:
        logger.info("the run ended", exc_info=error)
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        log.close()
        ours.setLevel(level)


def swept_metric(config: RunConfig) -> float | None:
    """Return the last value of `config.sweep_metric`, of a run that was complete before, too; None, and a line in `run.log`
    that names those there are, where the run measured no such metric."""
    records = read_metrics(RunFolder(Path(config.output_dir)).metrics_file)
    values = [record[config.sweep_metric] for record in records if record.get(config.sweep_metric) is not None]
    if values:
        return float(values[-1])
    known = sorted({name for record in records for name in record if name.startswith(("eval/", "reward/", "train/"))})
    message = "sweep_metric=%s was not measured, so that a sweeper has nothing to compare. Choose one of: %s"
    logger.info(message, config.sweep_metric, ", ".join(known))
    return None
