"""One sandbox that a command runs in, below a supervisor of its own.

Without a launcher's words a sandbox is a folder and a session of processes, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl_train.errors import SandboxError
from skyrl_train.rollout.agents.launchers import Launcher
from skyrl_train.rollout.boundary.session import describe
from skyrl_train.system.processes import ProcessHost, StartedProcess, kill

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
