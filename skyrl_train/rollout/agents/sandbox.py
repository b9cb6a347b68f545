"""Sandboxes that commands run in: each below a supervisor of its own, started ahead of use, bounded in number, none left.

Without a launcher's words a sandbox is a folder and a session of processes, and nothing else. It is used once. Its name says
which process it belongs to, so that one that was left can be told from one that is in use:
`skyrl-train-BOOT-NAMESPACE-PROCESS-START-NUMBER`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.errors import SandboxError
from skyrl_train.rollout.agents.launchers import NAME_PREFIX, Launcher
from skyrl_train.rollout.boundary import describe
from skyrl_train.rollout.loop_thread import at_close
from skyrl_train.system.processes import ProcessHost, StartedProcess, kill, start_time

GRACE_S = 5.0
"""Between the signals that ask a command to end and that end it."""
SUPERVISOR_WITHIN_S = 30.0
"""Of a supervisor, to answer beyond what its commands may take."""
LAST_WORDS = 600
"""Characters of what was written last, for a message."""


class Sandbox:
    """One sandbox and the supervisor that removes it."""

    def __init__(self, launcher: Launcher, name: str) -> None:
        self.name = name
        self.launcher = launcher
        self._place = Path(tempfile.gettempdir(), name)
        self.folder = self._place / "folder"
        """The command's own, also within the sandbox."""
        self.log = self._place / "output.log"
        """Not within it: what is read of it later is what was written to it."""
        self._host: ProcessHost | None = None
        self._command: StartedProcess | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor is there."""
        if self._host is not None:
            self._host.hear()
        return self._host is not None and not self._host.lost

    async def start(self) -> None:
        """Return once it is up. Raises SandboxError, after which it is to be closed."""
        told: int | str = 0
        try:
            os.mkdir(self._place, 0o700)
            os.mkdir(self.folder, 0o700)
            self._start_supervisor()
            if words := self._words(self.launcher.start):
                told = await self._ran(words, self._place, None, self.launcher.start_within_s)
        except OSError as error:
            raise SandboxError(f"a sandbox could not be started ({describe(error)})") from error
        if told != 0:
            reason = told if isinstance(told, str) else f"exit status {told}"
            raise SandboxError(f"a sandbox could not be started ({reason}): {self.last_words()}")

    async def run(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a command in it, and return its exit status; that of a signal is negative. Raises SandboxError."""
        told = await self._ran(words, self.folder, environment, None)
        if isinstance(told, str):
            is_lost = self._host is not None and self._host.lost
            raise SandboxError(f"the command {told}" if is_lost else f"the command could not be started ({told})")
        return told

    def last_words(self) -> str:
        """What was written to its log last."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS))
                return " ".join(file.read(LAST_WORDS).decode(errors="replace").split()) or "it wrote nothing"
        except OSError:
            return "it wrote nothing"

    async def close(self) -> None:
        """End the command and remove the sandbox. A supervisor that does not do so in time is ended, and another one told
        to."""
        if not await self._ended(self.launcher.cleanup_within_s + GRACE_S + SUPERVISOR_WITHIN_S):
            if self._command is not None and self._command.process:
                kill(self._command.process)
            with contextlib.suppress(OSError):
                self._start_supervisor()
                await self._ended(self.launcher.cleanup_within_s + SUPERVISOR_WITHIN_S)
        for place in {self._place, self.log.parent}:
            shutil.rmtree(place, ignore_errors=True)

    async def remove(self) -> None:
        """Clean up what another process left under this name. Raises OSError."""
        self.log = Path(tempfile.mkdtemp(prefix="skyrl-clean-up-")) / "output.log"  # its folder may be anybody's
        self._start_supervisor()
        await self.close()

    def _start_supervisor(self) -> None:
        """Start what removes the sandbox when this process says so, or is gone. Raises OSError."""
        cleanup = self._words(self.launcher.cleanup)
        settings = {
            "last": {"words": cleanup, "folder": str(self.log.parent), "log": str(self.log)} if cleanup else {},
            "last_within_s": self.launcher.cleanup_within_s,
            "removes": [str(self._place), str(self.log.parent)],
        }
        with open(self.log, "ab") as log:
            self._host = ProcessHost(settings, output=log)

    async def _ran(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None, within_s: float | None
    ) -> int | str:
        """Return the exit status of a command, or why there is none."""
        assert self._host is not None
        place = {"folder": str(folder), "log": str(self.log), "environment": environment}
        command = self._command = self._host.start({"words": words, **place})
        if not await self._host.until(lambda: command.ended is not None, within_s):
            self._host.end(command)
            return f"it did not end within {within_s:g} s"
        assert command.ended is not None
        return command.ended

    async def _ended(self, within_s: float) -> bool:
        """Have the supervisor end, and return whether it did all that it is there for."""
        if (host := self._host) is None:
            return True
        host.quit(GRACE_S)
        await host.until(lambda: host.lost, within_s)
        return host.close(0.0) == 0

    def _words(self, words: Sequence[str]) -> list[str]:
        return [filled(word, {"name": self.name, "folder": str(self.folder)}) for word in words]


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return a word of a command with its placeholders filled; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


logger = logging.getLogger(__name__)

_NAME = re.compile(rf"{NAME_PREFIX}([0-9a-z]+)-([0-9]+)-([0-9]+)-([0-9]+)-[0-9]+")


class SandboxPool:
    """The sandboxes of one launcher. Used from one event loop."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._changed = asyncio.Condition()
        self._warm: deque[Sandbox] = deque()
        self._num_warming = 0
        self._num = 0
        """Sandboxes that there are: those that start, wait, are used and end."""
        self._num_made = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starts_fail = False
        """Whether the last one that was to be started ahead could not be."""
        self._left: asyncio.Task[None] | None = None
        """The removal of what runs before this one left."""
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """Yield a sandbox, which is removed afterwards, though nobody waits for that. Raises SandboxError where none is to
        be had."""
        sandbox = await self._take()
        try:
            yield sandbox
        finally:
            self._begin(self._retire(sandbox))

    async def aclose(self) -> None:
        """End all, and see that none is left."""
        self._is_closed = True
        while self._warm:
            self._begin(self._retire(self._warm.popleft()))
        limit = self.launcher.cleanup_within_s + GRACE_S + 2 * SUPERVISOR_WITHIN_S
        while self._tasks:
            late = (await asyncio.wait(self._tasks, timeout=limit))[1]
            for task in late:
                task.cancel()
            if late:
                break
        if self.launcher.remaining and self._num_made:
            await self._check_none_is_left()

    async def _take(self) -> Sandbox:
        """Return one that is up: one that was started ahead, or a new one."""
        await self._leftovers_removed()
        sandbox = await self._slot()
        self._start_ahead()
        if sandbox is not None:
            return sandbox
        sandbox = self._made()
        try:
            await sandbox.start()
        except BaseException:
            self._begin(self._retire(sandbox))
            raise
        self._starts_fail = False
        return sandbox

    async def _slot(self) -> Sandbox | None:
        """Return one that was started ahead; None where there is room for another one, which is taken."""
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: bool(self._warm) or self._may_start()), self.launcher.wait_s
                )
            except asyncio.TimeoutError:
                limits = f"launcher.wait_s={self.launcher.wait_s:g}; launcher.most={self.launcher.most} are in use"
                raise SandboxError(f"no sandbox was free within {limits}") from None
            while self._warm:
                sandbox = self._warm.popleft()
                if sandbox.is_alive:
                    return sandbox
                self._begin(self._retire(sandbox))
            self._num += 1
            return None

    def _may_start(self) -> bool:
        return self.launcher.most is None or self._num < self.launcher.most

    def _start_ahead(self) -> None:
        """Begin to start as many as are to wait for their use."""
        if self._is_closed or self._starts_fail:
            return
        while len(self._warm) + self._num_warming < self.launcher.warm and self._may_start():
            self._num += 1
            self._num_warming += 1
            self._begin(self._warm_up(self._made()))

    async def _warm_up(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.start()
            if self._is_closed:
                raise asyncio.CancelledError
        except BaseException as error:
            self._begin(self._retire(sandbox))
            if not isinstance(error, SandboxError):
                raise
            self._starts_fail = True  # until one that is needed can be started
            logger.warning("%s", error)
        else:
            async with self._changed:
                self._warm.append(sandbox)
                self._changed.notify_all()
        finally:
            self._num_warming -= 1

    async def _retire(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.close()
        finally:
            self._num -= 1
            async with self._changed:
                self._changed.notify_all()
            self._start_ahead()

    def _made(self) -> Sandbox:
        self._num_made += 1
        return Sandbox(self.launcher, f"{_own_prefix()}{next(_numbers)}")

    def _begin(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leftovers_removed(self) -> None:
        """Wait for the removal of what others left, which the first one begins."""
        if self._left is None:
            self._left = asyncio.ensure_future(self._remove_leftovers())
        limit = self.launcher.start_within_s + self.launcher.cleanup_within_s + SUPERVISOR_WITHIN_S
        await asyncio.wait({self._left}, timeout=limit)

    async def _remove_leftovers(self) -> None:
        """Remove sandboxes and folders whose process is gone. Those of processes that cannot be seen from here stay."""
        folders = Path(tempfile.gettempdir()).glob(f"{NAME_PREFIX}*")
        names = {path.name for path in folders if path.lstat().st_uid == os.getuid()}
        try:
            names |= await self._remaining()
        except SandboxError as error:
            logger.warning("sandboxes that earlier runs may have left were not looked for: %s", error)
        left = [name for name in names if _is_left(name)]
        with contextlib.suppress(OSError):
            await asyncio.gather(*(Sandbox(self.launcher, name).remove() for name in left))
        if left:
            logger.warning("removed %d sandboxes that ended runs had left", len(left))
        if unknown := sorted(name for name in names if _is_left(name) is None):
            logger.warning(
                "%d sandboxes belong to processes that cannot be seen from here, and stay: %s",
                len(unknown),
                ", ".join(unknown[:5]),
            )

    async def _check_none_is_left(self) -> None:
        """Remove what `cleanup` did not. Raises SandboxError naming what is left all the same."""
        own = {name for name in await self._remaining() if name.startswith(_own_prefix())}
        await asyncio.gather(*(Sandbox(self.launcher, name).remove() for name in own))
        if own and (own := own & await self._remaining()):
            words = " ".join(self.launcher.cleanup).replace("{name}", "NAME")
            raise SandboxError(f"sandboxes are left: {', '.join(sorted(own))}. Remove them by hand: {words}")

    async def _remaining(self) -> set[str]:
        """Return the names of sandboxes that there are, whoever started them. Raises SandboxError."""
        words = self.launcher.remaining
        if not words:
            return set()
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            try:
                output, errors = await asyncio.wait_for(process.communicate(), self.launcher.start_within_s)
            except BaseException:
                process.kill()
                raise
        except (OSError, asyncio.TimeoutError) as error:
            raise SandboxError(f"{' '.join(words)}: {describe(error)}") from error
        if process.returncode != 0:
            said = " ".join(errors.decode(errors="replace").split())[-LAST_WORDS:]
            raise SandboxError(f"{' '.join(words)}: exit status {process.returncode}: {said}")
        return {line for line in output.decode(errors="replace").split() if _NAME.fullmatch(line)}


_POOLS: dict[tuple[asyncio.AbstractEventLoop, Launcher], SandboxPool] = {}
_numbers = itertools.count(1)


def pool_of(launcher: Launcher) -> SandboxPool:
    """Return the pool of the running event loop, which is closed with it where it is that of a `LoopThread`."""
    place = (asyncio.get_running_loop(), launcher)
    if place not in _POOLS:
        pool = _POOLS[place] = SandboxPool(launcher)

        async def close() -> None:
            del _POOLS[place]
            await pool.aclose()

        at_close(close)
    return _POOLS[place]


def _machine() -> tuple[str, str]:
    """Return what tells this boot of this machine, and this namespace of processes, from others; nothing where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
        return boot, re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return "", ""


def _own_prefix() -> str:
    boot, namespace = _machine()
    process = os.getpid()
    return f"{NAME_PREFIX}{boot or 'unknown'}-{namespace or 0}-{process}-{start_time(process) or 0}-"


def _is_left(name: str) -> bool | None:
    """Whether the process that a sandbox belongs to is gone; None where that cannot be known, or it is no sandbox."""
    found = _NAME.fullmatch(name)
    if found is None:
        return False
    boot, namespace, process, started = found.groups()
    if (boot, namespace) != _machine():
        return None
    return start_time(int(process)) != started
