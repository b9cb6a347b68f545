"""Cases in processes of their own, or in one after others: what becomes of one that passes, fails, crashes or hangs.

    parent --order file--> worker of rank 0, 1, ...   `python -m skyrl_train.selftest --worker FILE`, or - for many
    parent <--answer file-- worker                    a figure, a reason to skip, or a traceback

Workers are below a supervisor (`system/processes`). The parent imports neither torch nor anything else that could break, so
that a broken installation is a row of the report.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from skyrl_train.selftest.cases import Case, Context, SkipCase
from skyrl_train.selftest.machine import PACKAGE, Machine
from skyrl_train.system.processes import ProcessHost, StartedProcess, manner

Outcome = Literal["pass", "fail", "skip"]
_POLL_S = 0.05
_OTHERS_S = 10.0
"""After one rank of a case has failed, the others have this long to say what they saw."""
_TAIL_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """A row of the report."""

    name: str
    outcome: Outcome
    detail: str
    """The figure of a case that passed; else the reason, in one line."""
    seconds: float
    traceback: str = ""
    """Of the rank that failed first."""
    log_tail: str = ""
    """The last characters that the processes of a failed case wrote."""
    value: Any = None
    """What the body returned."""


class SharedProcess:
    """One process for cases that cannot harm each other: torch is imported, and CUDA begun, once. After a case that failed,
    crashed or hung the next one has a new process."""

    def __init__(self) -> None:
        self._host: ProcessHost | None = None
        self._process: StartedProcess | None = None
        self._orders = -1
        descriptor, log = tempfile.mkstemp(prefix="skyrl-selftest-", suffix=".log")
        os.close(descriptor)
        self.log = Path(log)

    def take(self, order: Path, *, hide_cuda: bool) -> StartedProcess:
        """Give it an order; return the process, begun where there is none."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            reader, self._orders = os.pipe()
            try:
                self._host = ProcessHost()
                place = Path(tempfile.gettempdir())
                self._process = _start(self._host, "-", self.log, place, hide_cuda=hide_cuda, orders=reader)
            finally:
                os.close(reader)
        with contextlib.suppress(BrokenPipeError):  # it ended just now, which is seen as the case's crash
            os.write(self._orders, f"{order}\n".encode())
        return self._process

    def end(self) -> None:
        """End the process; the next order begins another. Idempotent."""
        if self._host is not None:
            self._host.close()
            os.close(self._orders)
            self._host = self._process = None

    def close(self) -> None:
        """End it for good. Idempotent."""
        self.end()
        self.log.unlink(missing_ok=True)


def run_case(case: Case, machine: Machine, shared: SharedProcess | None = None) -> CaseResult:
    """Run the case in its processes, or in `shared` where it may, unless it means nothing on this machine."""
    reason = case.reason_to_skip(machine)
    if reason:
        return CaseResult(name=case.name, outcome="skip", detail=reason, seconds=0.0)
    return run_body(
        case.name,
        case.body,
        case.arguments,
        deadline_s=case.deadline_s,
        devices=_devices(case, machine),
        shared=shared if case.shares_process and case.num_processes(machine) == 1 else None,
    )


def _devices(case: Case, machine: Machine) -> list[str]:
    """The device of each process."""
    count = case.num_processes(machine)
    if machine.device == "cpu":
        return ["cpu"] * count
    return [f"cuda:{index if case.processes == 'each_device' else 0}" for index in range(count)]


def run_body(
    name: str,
    body: str,
    arguments: Mapping[str, Any],
    *,
    deadline_s: float,
    devices: Sequence[str],
    hide_cuda: bool | None = None,
    shared: SharedProcess | None = None,
) -> CaseResult:
    """Run `body` with a rank on each of `devices` and wait for all, or for `deadline_s`; in `shared` where that is given."""
    started = time.monotonic()
    hidden = devices[0] == "cpu" if hide_cuda is None else hide_cuda
    with tempfile.TemporaryDirectory(prefix="skyrl-selftest-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        folder = root / "shared"
        folder.mkdir()
        ranks = []
        place = shared or ProcessHost()
        try:
            for rank, device in enumerate(devices):
                context = Context(device=device, rank=rank, num_ranks=len(devices), folder=folder)
                ranks.append(_Worker(root, body, arguments, context, hide_cuda=hidden, place=place))
            late = _wait(ranks, deadline_s)
        finally:
            if isinstance(place, ProcessHost):
                place.close()
            elif not all(worker.did_well for worker in ranks):
                place.end()
        answers = [worker.answer(is_late=late) for worker in ranks]
        outcome, chosen = _joined(answers, deadline_s)
        log_tail = "\n".join(worker.log_tail() for worker in ranks) if outcome == "fail" else ""
    return CaseResult(
        name=name,
        outcome=outcome,
        detail=str(chosen["detail"]),
        seconds=time.monotonic() - started,
        traceback=str(chosen.get("traceback", "")),
        log_tail=log_tail,
        value=chosen.get("value"),
    )


class _Worker:
    """One process of a case, or the one that it shares with others."""

    def __init__(
        self,
        root: Path,
        body: str,
        arguments: Mapping[str, Any],
        context: Context,
        *,
        hide_cuda: bool,
        place: ProcessHost | SharedProcess,
    ) -> None:
        order = root / f"order-{context.rank}.json"
        self._answer = order.with_suffix(".answer")
        self._is_shared = isinstance(place, SharedProcess)
        self._log = place.log if isinstance(place, SharedProcess) else order.with_suffix(".log")
        content = {"body": body, "arguments": arguments, "context": {**asdict(context), "folder": str(context.folder)}}
        order.write_text(json.dumps(content), encoding="utf-8")
        self._log_begins = self._log.stat().st_size if self._is_shared else 0
        if isinstance(place, SharedProcess):
            self._process = place.take(order, hide_cuda=hide_cuda)
        else:
            self._process = _start(place, str(order), self._log, context.folder, hide_cuda=hide_cuda)

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self._process.poll() is not None or (self._is_shared and self._answer.is_file())

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self._process.poll() not in (None, 0)

    @property
    def did_well(self) -> bool:
        """Whether it answered, and not that it failed."""
        return self._answer.is_file() and json.loads(self._answer.read_text(encoding="utf-8"))["outcome"] != "fail"

    def answer(self, *, is_late: bool) -> dict[str, Any]:
        """What it wrote before it ended; else what can be said of its end."""
        if self._answer.is_file():
            found: dict[str, Any] = json.loads(self._answer.read_text(encoding="utf-8"))
            return found
        status = self._process.ended
        if is_late and not (isinstance(status, int) and status != -signal.SIGKILL):
            return {"outcome": "fail", "detail": "", "is_late": True}
        ended = manner(status) if isinstance(status, int) else status
        return {"outcome": "fail", "detail": f"the process {ended} and left no answer"}

    def log_tail(self) -> str:
        """The last of what it wrote to stdout and stderr."""
        with self._log.open("rb") as log:
            log.seek(max(self._log_begins, self._log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")


def _start(
    host: ProcessHost, order: str, log: Path, folder: Path, *, hide_cuda: bool, orders: int | None = None
) -> StartedProcess:
    words = [sys.executable, "-m", "skyrl_train.selftest", "--worker", order]
    place = {"folder": str(folder), "log": str(log), "environment": _environment(hide_cuda=hide_cuda)}
    return host.start({"words": words, **place}, descriptor=orders)


def _environment(*, hide_cuda: bool) -> dict[str, str]:
    """Return the environment of a worker: nothing is fetched or reported, and idle threads do not spin on busy cores."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        **({"CUDA_VISIBLE_DEVICES": ""} if hide_cuda else {}),
    }


def _wait(workers: Sequence[_Worker], deadline_s: float) -> bool:
    """Until all have ended, or one failed and the others had their time; whether the deadline passed before."""
    ends = time.monotonic() + deadline_s
    is_cut_short = False
    while not all(worker.is_done for worker in workers):
        if not is_cut_short and any(worker.failed for worker in workers):
            is_cut_short, ends = True, min(ends, time.monotonic() + _OTHERS_S)
        if time.monotonic() > ends:
            return True
        time.sleep(_POLL_S)
    return False


def _joined(answers: Sequence[dict[str, Any]], deadline_s: float) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of the case and the answer that says it best: a failure with a reason before one without."""
    failed = [answer for answer in answers if answer["outcome"] == "fail"]
    if failed:
        told = [answer for answer in failed if not answer.get("is_late")]
        if not told:
            return "fail", {"detail": f"still running after {deadline_s:g} s, and killed"}
        # Whoever fails first has the reason: the others see a connection that is closed.
        return "fail", min(told, key=lambda answer: answer.get("ended_at", 0.0))
    skipped = [answer for answer in answers if answer["outcome"] == "skip"]
    return ("skip", skipped[0]) if skipped else ("pass", answers[0])


def work_on(orders: Iterable[str]) -> int:
    """The side of a worker that cases share: one order after the other, each in its own folder, until there are no more."""
    for line in orders:
        order = Path(line.strip())
        os.chdir(json.loads(order.read_text(encoding="utf-8"))["context"]["folder"])
        status = work(order)
        gc.collect()
        if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.empty_cache()
        if status:
            return status
    return 0


def work(order: Path) -> int:
    """The worker's side: run the body that the order names and write the answer; 0 unless it failed."""
    content = json.loads(order.read_text(encoding="utf-8"))
    context = Context(**{**content["context"], "folder": Path(content["context"]["folder"])})
    answer: dict[str, Any]
    try:
        value = _resolved(content["body"])(context, **content["arguments"])
        detail = value if isinstance(value, str) else value.get("figure", "")
        answer = {"outcome": "pass", "detail": detail, "value": value}
    except SkipCase as skip:
        answer = {"outcome": "skip", "detail": str(skip)}
    except ModuleNotFoundError as error:
        answer = {"outcome": "skip", "detail": f"{error.name} not installed", "traceback": traceback.format_exc()}
        if (error.name or "").split(".")[0] in ("skyrl_train", "torch", "transformers"):
            answer |= {"outcome": "fail", "detail": str(error)}
    except BaseException as error:
        detail = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        answer = {"outcome": "fail", "detail": detail, "traceback": traceback.format_exc()}
    answer["ended_at"] = time.monotonic()
    temporary = order.with_suffix(".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(order.with_suffix(".answer"))
    return 1 if answer["outcome"] == "fail" else 0


def _resolved(body: str) -> Callable[..., Any]:
    module, _, name = body.partition(":")
    full = module if "." in module else f"skyrl_train.selftest.{module}"
    function: Callable[..., Any] = getattr(importlib.import_module(full), name)
    return function
