"""Worker processes of this machine: `worker.py` from the outside.

What a worker sends is read as the answer to a request that it was asked, and as nothing else: anything that does not fit
ends it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import reward_entries
from skyrl_train.errors import ConfigError, SkyrlTrainError, Violation
from skyrl_train.registry import TARGET, PartSpec
from skyrl_train.rollout.boundary import Request, plain
from skyrl_train.rollout.envs.environments import variables_of
from skyrl_train.rollout.hosts.processes import Imported, WorkerEnded
from skyrl_train.rollout.tools.variables import given
from skyrl_train.system import in_time
from skyrl_train.system.processes import PACKAGE_PARENT, Frames, ProcessHost, StartedProcess, frame, manner
from skyrl_train.telemetry.logs import copy_redacted, innermost

T = TypeVar("T")
_REPORT_WITHIN_S = 2.0
"""How long the supervisor may take to say how a worker ended whose connection is closed."""
_WHERE_S = 0.3
"""How long a worker that exceeded a deadline may take to say where it is: nobody else is heard meanwhile."""
_CHUNK = 1 << 18
_PERHAPS_MEMORY = {-signal.SIGKILL: ", as the kernel does where memory runs out"}


class LocalWorker:
    """Implements `WorkerProcess` over a connection of its own."""

    def __init__(self, host: ProcessHost) -> None:
        """Start one below the supervisor of `host`."""
        self.ended: str | None = None
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._frames = Frames()
        self._num_asked = 0
        self._answers: dict[int, asyncio.Future[object]] = {}
        """Of the requests that wait for one, by their numbers."""
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._hear)
        self._host = host
        with theirs:
            self._started: StartedProcess = host.start({}, descriptor=theirs.fileno(), on_end=self._told)

    async def ask(self, request: Request, timeout_s: float) -> object:
        if self.ended is not None:
            raise WorkerEnded(self.ended)
        self._num_asked += 1
        number, answer = self._num_asked, self._loop.create_future()
        self._answers[number] = answer
        deadline = self._loop.call_later(timeout_s, self._late, answer)
        try:
            await self._send(frame({**request, "number": number}), timeout_s)
            return await answer
        except asyncio.CancelledError:
            self.end("was ended in a call that nobody waits for any more")
            raise
        finally:
            deadline.cancel()
            del self._answers[number]

    def end(self, reason: str) -> None:
        if self.ended is None:
            self._host.end(self._started)
            self._ended_with(reason)

    def _told(self, ended: int | str) -> None:
        if isinstance(ended, int):
            self._ended_with(manner(ended) + _PERHAPS_MEMORY.get(ended, ""))
        else:
            self._ended_with(ended if self._host.lost else f"could not be started: {ended}")

    def _ended_with(self, reason: str) -> None:
        """Take note that the process is no more, or will not be in a moment."""
        if self.ended is None:
            self.ended = reason
            self._loop.remove_reader(self._connection)
            self._connection.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(WorkerEnded(reason))

    async def _send(self, data: bytes, timeout_s: float) -> None:
        try:
            async with self._sending:
                sent = self._connection.send(data)
                if sent < len(data):
                    await asyncio.wait_for(self._loop.sock_sendall(self._connection, data[sent:]), timeout_s)
        except OSError:
            # How it ended is told by the supervisor in a moment.
            self._loop.call_later(_REPORT_WITHIN_S, self.end, "closed its connection")

    def _late(self, answer: asyncio.Future[object]) -> None:
        if not answer.done():
            where = (
                innermost(process, timeout_s=_WHERE_S) if (process := self._started.process) and not self.ended else ""
            )
            answer.set_exception(asyncio.TimeoutError(where and f"; it was at {where}"))
        self.end("was ended: it exceeded the deadline of a call")

    def _hear(self) -> None:
        try:
            data = self._connection.recv(_CHUNK)
            for message in self._frames.feed(data):
                waiting = any(not answer.done() for answer in self._answers.values())
                if not waiting or not isinstance(message, dict) or set(message) != {"number", "answer"}:
                    raise ValueError("it spoke unasked")
                number = message["number"]
                if type(number) is not int or number not in self._answers or self._answers[number].done():
                    raise ValueError("it answered another request")
                self._answers[number].set_result(message["answer"])
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except ValueError as error:
            self.end(f"was ended: what it sent is no answer ({error})")
            return
        if not data:
            self._loop.remove_reader(self._connection)
            self._loop.call_later(_REPORT_WITHIN_S, self.end, "closed its connection")


_IMPORT_TIMEOUT_S = 120.0
IMPORT_DEADLINE_S = 3 * _IMPORT_TIMEOUT_S
"""Of all that an import in a process of its own may take: with a second start, and its end."""
_DRAIN_TIMEOUT_S = 2.0
_MAX_LOG_BYTES = 16 << 20
_BOOT = """
import importlib.util, runpy, sys
folder = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("skyrl_train", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["skyrl_train"] = importlib.util.module_from_spec(spec)
runpy.run_module("skyrl_train.rollout.hosts.worker", run_name="__main__", alter_sys=True)
"""


def check_arguments(spec: PartSpec, setting: str = "environment.env_class") -> None:
    """Raise ConfigError for keyword arguments of an environment, or a reward, that cannot be sent to a worker process."""
    found = []
    for name, value in {} if isinstance(spec, str) else spec.items():
        field = f"{setting}.{name}"
        try:
            plain(value, field)
        except ValueError as error:
            rule = "must be plain data, which worker processes can be sent"
            remedy = f"{error}; environment.isolation=thread takes any object"
            found.append(Violation(field=field, rule=rule, value=type(value).__name__, remedy=remedy))
    if found:
        raise ConfigError(found)


class LocalWorkers:
    """Implements `WorkerHost` with a supervisor process on this machine. Used from one event loop."""

    def __init__(
        self,
        specs: Sequence[PartSpec],
        *,
        worker_memory_gb: float,
        registry: bool = False,
        log: Path | None = None,
        tools: Sequence[PartSpec] = (),
        reward_specs: Mapping[str, PartSpec] | None = None,
        python: str | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        """Nothing is started yet.

        Args:
            specs: Environments to import before the first call: the configured one, or those that rows may name.
            worker_memory_gb: What one worker may take beyond what it has when it starts.
            registry: Whether rows may name environments of skyrl-gym's registry.
            log: Where their standard output and error go; None is a temporary file.
            tools: Entries of `environment.tools`, imported with the environments.
            reward_specs: Reward functions that are called there, by the setting that names each.
            python: Interpreter that they run under, if not this one: what is installed for it is what environments import.
            variables: Names in `environment.variables`: what workers get of the trainer's.

        Raises ConfigError where an argument of an environment cannot be sent.
        """
        self.specs, self.reward_specs = tuple(specs), reward_specs or {}
        for spec in self.specs:
            check_arguments(spec)
        for setting, spec in self.reward_specs.items():
            check_arguments(spec, setting)
        self._memory_gb, self._registry, self._log_path = worker_memory_gb, registry, log
        self._tools, self._python, self._variables = tools, python, variables
        self.rewards: Mapping[str, Any] = {}
        """Of each reward function without violations, by its setting, the fields of its `RewardFacts`; known when ready."""
        self._host: ProcessHost | None = None
        self._loaded: asyncio.Future[Mapping[str, Any]] | None = None
        self._preload = True
        self._imported = Imported()
        self._starting = asyncio.Lock()
        self._log: IO[bytes] | None = None
        self._copier: threading.Thread | None = None
        """Copies what workers print to the log, without the secrets that this process knows."""

    @classmethod
    def of(cls, environment: EnvironmentConfig, log: Path | None = None) -> LocalWorkers:
        """Return the workers that a configuration asks for."""
        chosen = environment.env_class
        return cls(
            environment.allowed if chosen is None else (chosen,),
            worker_memory_gb=environment.worker_memory_gb,
            registry=chosen is None,
            log=log,
            tools=environment.tools,
            reward_specs={each.setting: each.spec for each in reward_entries(environment) if not each.in_trainer},
            python=environment.python,
            variables=environment.variables,
        )

    @property
    def named(self) -> frozenset[str]:
        """The variables that these workers get beside the listed ones: those of the setting, and what adapters need."""
        return frozenset(self._variables).union(*(variables_of(spec) for spec in self.specs))

    async def ready(self) -> Imported:
        if self._host is not None and self._host.lost:
            self._host = None
        if self._host is not None and self._loaded is not None and self._loaded.done():
            return self._imported
        async with self._starting:
            if self._host is not None:
                return self._imported
            loaded = await self._start_supervisor()
            violations = [Violation(**each) for each in loaded["violations"]]
            if violations or not loaded["forkable"]:
                await self._end_supervisor()
            if violations:
                raise ConfigError(violations)
            if self._preload:
                asynchronous = frozenset(loaded["asynchronous"])
                self._imported = Imported(asynchronous=asynchronous, forkable=loaded["forkable"])
                self.rewards = loaded["rewards"]
            if not loaded["forkable"]:
                self._preload = False
                await self._start_supervisor()
            return self._imported

    def start(self) -> LocalWorker:
        assert self._host is not None, "ready() comes first"
        return LocalWorker(self._host)

    async def aclose(self) -> None:
        await self._end_supervisor()
        if self._log is not None:
            await asyncio.to_thread(self._drain)
            self._log.close()
            self._log = None

    async def _start_supervisor(self) -> Mapping[str, Any]:
        """Return what it says of the environments that it imported."""
        variables = given(os.environ, self.named)
        reader, writer = os.pipe()
        write = partial(_append, self._log_file())
        self._copier = threading.Thread(target=copy_redacted, args=(reader, write), daemon=True)
        self._copier.start()
        content = {
            "sys_path": _own_path() if self._python else sys.path,
            "apart": bool(self._python),
            "memory_bytes": int(self._memory_gb * 1e9),
            "specs": [plain(spec, TARGET) for spec in self.specs],
            "tools": [plain(spec, TARGET) for spec in self._tools],
            "rewards": {setting: plain(spec, TARGET) for setting, spec in self.reward_specs.items()},
            "registry": self._registry,
            "preload": self._preload,
            "withheld": [name for name in os.environ if name not in variables],
        }
        environment = _environment(variables, apart=bool(self._python))
        with open(writer, "wb") as output:
            self._host = ProcessHost(content, words=self._interpreter(), environment=environment, output=output)
        self._loaded = asyncio.get_running_loop().create_future()
        self._host.listen(self._hear)
        try:
            return await asyncio.wait_for(self._loaded, _IMPORT_TIMEOUT_S)
        except BaseException as error:
            await self._end_supervisor()
            if not isinstance(error, (WorkerEnded, asyncio.TimeoutError)):
                raise
            late = isinstance(error, asyncio.TimeoutError)
            specs = [*self.specs, *self.reward_specs.values()]
            names = ", ".join(str(each if isinstance(each, str) else each[TARGET]) for each in specs)
            reason = f"did not end within {_IMPORT_TIMEOUT_S:g} s" if late else f"ended its process, which {error}"
            raise SkyrlTrainError(
                f"environment: the import of {names or 'environments'} {reason}. {self._last_words()}"
            ) from None

    def _hear(self) -> None:
        """Take in what the supervisor says: what it imported, and how workers ended. Where it is gone, the next call starts
        another."""
        assert self._host is not None
        assert self._loaded is not None
        for message in self._host.hear():
            if "ready" in message and not self._loaded.done():
                self._loaded.set_result(message)
        if lost := self._host.lost:
            self._host = None
            if not self._loaded.done():
                self._loaded.set_exception(WorkerEnded(lost))

    async def _end_supervisor(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.forget()
            await asyncio.to_thread(host.close)

    def _interpreter(self) -> list[str]:
        """Return the command of the supervisor, but for its last argument. Under another interpreter this package alone is
        found where it is, since the folder may hold others that are not meant for it."""
        if python := self._python:
            found = shutil.which(os.path.expanduser(python))
            if found is None:
                rule, remedy = "must be an interpreter that can be run", "name one as in /path/to/venv/bin/python"
                raise ConfigError([Violation.of("environment.python", python, rule, remedy)])
            return [found, "-c", _BOOT, str(Path(PACKAGE_PARENT, "skyrl_train"))]
        return [sys.executable, "-m", "skyrl_train.rollout.hosts.worker"]

    def _log_file(self) -> IO[bytes]:
        if self._log is None:
            place = self._log_path
            self._log = tempfile.TemporaryFile("a+b") if place is None else place.open("ab")  # noqa: SIM115 - until aclose
        return self._log

    def _drain(self) -> None:
        """Wait for what workers have written; not for those that a process of theirs which is left may write."""
        if self._copier is not None:
            self._copier.join(_DRAIN_TIMEOUT_S)

    def _last_words(self) -> str:
        """Return the last lines of the log, for an error message."""
        self._drain()
        try:
            log = self._log_file()
            with open(f"/proc/self/fd/{log.fileno()}", "rb") as stream:
                stream.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
                lines = stream.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return "Its last words:\n" + "\n".join(lines[-12:])


def _append(log: IO[bytes], text: bytes) -> None:
    """Write to a log, which is emptied before where it has grown large. Raises OSError, ValueError once it is closed."""
    if os.fstat(log.fileno()).st_size > _MAX_LOG_BYTES:
        log.truncate(0)
    log.write(text)
    log.flush()


def _own_path() -> list[str]:
    """Return where this process finds modules, without what is installed for its interpreter."""
    standard = sysconfig.get_path("stdlib")
    installed = ("site-packages", "dist-packages")
    apart = (each for each in sys.path if not each.startswith(standard) and not each.endswith(".zip"))
    return [each for each in apart if not any(name in each for name in installed)]


def _environment(variables: Mapping[str, str], *, apart: bool) -> dict[str, str]:
    """These, with one thread for each of a worker's numerical libraries: there are many workers."""
    path = os.pathsep.join(filter(None, ["" if apart else PACKAGE_PARENT, variables.get("PYTHONPATH", "")]))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**threads, **variables, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}


def run_in_workers(
    workers: LocalWorkers, use: Callable[[LocalWorkers], Awaitable[T]], *, what: str, timeout_s: float
) -> T:
    """Return what `use` makes of workers that are started for it and end with it: an import that exits, crashes or hangs
    harms nothing here. Raises ConfigError and SkyrlTrainError as `ready`."""

    async def run() -> T:
        try:
            await workers.ready()
            return await use(workers)
        finally:
            await workers.aclose()

    # On a thread: whoever asks may be running an event loop.
    return in_time(lambda: asyncio.run(run()), what=what, timeout_s=timeout_s)


def import_in_process(workers: LocalWorkers, what: str) -> Mapping[str, Any]:
    """Import `what`, environments or rewards, in a process of its own. Return the facts of the rewards. Raises
    ConfigError."""

    async def facts(workers: LocalWorkers) -> Mapping[str, Any]:
        return workers.rewards

    try:
        return run_in_workers(workers, facts, what=f"the import of {what}", timeout_s=IMPORT_DEADLINE_S)
    except ConfigError:
        raise
    except SkyrlTrainError as error:
        field = "environment.rewards" if workers.reward_specs else "environment.env_class"
        value = ", ".join(map(str, [*workers.specs, *workers.reward_specs.values()]))
        violation = Violation(field=field, rule="must be importable", value=value, remedy=str(error))
        raise ConfigError([violation]) from error


def violations_in_process(
    specs: Sequence[PartSpec], python: str = "", variables: tuple[str, ...] = ()
) -> list[Violation]:
    """Return what is wrong with environments, which are imported in a process of their own."""
    try:
        workers = LocalWorkers(specs, worker_memory_gb=1.0, python=python, variables=variables)
        import_in_process(workers, "environments")
    except ConfigError as error:
        return list(error.violations)
    return []
