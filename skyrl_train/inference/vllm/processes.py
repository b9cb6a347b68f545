"""The processes that vLLM starts for one engine: its core and its workers, where those are apart from the engine's own.

vLLM's core does not notice that the process which started it has ended: it would stay, with the memory of its device. So
each process inherits a mark in its environment, and a supervisor (`system/processes`) kills whatever bears the mark once it
is told to, or this process is gone, however that came about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import InvalidStateError
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from skyrl_train.system.processes import ProcessHost, marked, state

_MARK = "SKYRL_TRAIN_ENGINE"
"""Environment variable that all processes of one engine share."""
_PROC = Path("/proc")
_END_TIMEOUT_S = 10.0
_SHUTDOWN_REQUESTED = 1
"""`EngineShutdownState.REQUESTED` of `vllm/v1/engine/core.py`."""
_SIGNALS_TO_A_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STATUS_TIMEOUT_S = 0.5
_REASON_TIMEOUT_S = 1.0
"""After a failure: how long it may take until it is known that a process ended, and of what."""


class EngineProcesses:
    """All processes of one engine beside this one, from `starting` to `close`, or to the end of this process."""

    def __init__(self) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._closed = threading.Event()
        self._ended = threading.Event()
        """Set once `watch` has told of an end."""
        self._host = ProcessHost({"mark": self._mark})
        self._titles: dict[int, str] = {}
        """By process number, what a process calls itself."""

    @contextlib.contextmanager
    def starting(self, environment: Mapping[str, str]) -> Iterator[None]:
        """What is started inside, by this thread, belongs to the engine and has `environment`.

        It has no ear for Ctrl-C, nor for a SIGTERM, SIGHUP or SIGUSR1 to all processes of a job: whoever uses the engine is
        told as well, may need its answers for the end of a step, and ends it.
        """
        added = {_MARK: self._mark.partition("=")[2], **environment}
        before = {name: os.environ.get(name) for name in added}
        resource_tracker.ensure_running()  # started inside, it would unblock the signals again
        os.environ.update(added)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_TO_A_JOB)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            self._titles = {pid: _title(pid) for pid in marked(self._mark)}
            if self._closed.is_set():  # by another thread, which did not wait: what it could not see yet ends here
                ProcessHost({"mark": self._mark}).close()

    def watch(self, processes: list[Any], on_death: Callable[[str], None]) -> None:
        """Calls `on_death` with a reason, on a thread, once one of `processes` (of multiprocessing) has ended."""

        def wait() -> None:
            ended = connection.wait([process.sentinel for process in processes])
            if not self._closed.is_set():
                on_death("; ".join(_reason(process) for process in processes if process.sentinel in ended))
                self._ended.set()

        if processes:
            threading.Thread(target=wait, name="vllm-processes", daemon=True).start()

    @property
    def suspended(self) -> bool:
        """Whether one of them is stopped by a signal, so that no answer can come."""
        return any(state(pid) in ("T", "t") for pid in self._titles)

    def await_end(self) -> str:
        """Give `watch` a moment to tell of an end. Return which of them are no more where it did not, for a message; empty
        where all are there."""
        if self._ended.wait(_REASON_TIMEOUT_S):
            return ""
        ended = {pid: title for pid, title in self._titles.items() if state(pid) in ("Z", "X", "")}
        return "; ".join(f"vLLM's process {title} (pid {pid}) is gone" for pid, title in ended.items())

    def expect_end(self) -> None:
        """From here on an end is no news."""
        self._closed.set()

    def close(self) -> None:
        """Kills what is left of them. Idempotent."""
        self._closed.set()
        self._host.close()


class CoreClient:
    """What vLLM's engine has of its core, whether that is in this process or in one of its own, where it steps by itself."""

    def __init__(self, client: Any) -> None:
        """`client`: vLLM's `InprocClient` or `SyncMPClient`."""
        self._client = client
        self._is_apart = hasattr(client, "call_utility")

    @property
    def processes(self) -> list[Any]:
        """The core's, as multiprocessing knows them; none where it is in this one."""
        return list(self._client.resources.engine_manager.processes) if self._is_apart else []

    @property
    def has_outputs(self) -> bool:
        """Whether there is something that the core computed and nobody took."""
        return self._is_apart and not self._client.outputs_queue.empty()

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of vLLM's `EngineCore`, between two of its steps."""
        if self._is_apart:
            return self._client.call_utility(method, *arguments)
        return getattr(self._client.engine_core, method)(*arguments)

    def give_up(self, error: Exception) -> None:
        """The core is gone. vLLM tells that to later calls; whoever waits for an answer now would wait for ever."""
        self._client.resources.engine_dead = True
        self._client.outputs_queue.put_nowait(error)
        for waiting in list(self._client.utility_results.values()):
            with contextlib.suppress(InvalidStateError):
                waiting.set_exception(error)

    def close(self) -> None:
        """Ends the core. One that is apart has no ear for SIGTERM, which vLLM would send, so that it is told what that
        signal tells it; vLLM, which would report its end as a crash, knows of it then. One that does not end is killed."""
        with contextlib.suppress(Exception):
            if self._is_apart and not self._client.resources.engine_dead:
                self._client.call_utility("__setattr__", "shutdown_state", _SHUTDOWN_REQUESTED)
                self._client.resources.engine_dead = True
                for process in self.processes:
                    process.join(_END_TIMEOUT_S)
        with contextlib.suppress(Exception):
            self._client.shutdown(timeout=0.0)


def _title(pid: int) -> str:
    """The first word of its command line, which vLLM's processes set: `VLLM::EngineCore`, `VLLM::Worker`."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def _reason(process: Any) -> str:
    """How it ended. vLLM watches it as well, and whichever thread comes second does not know its status at once."""
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while (code := process.exitcode) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"vLLM's process {process.name} (pid {process.pid}) {how}"
