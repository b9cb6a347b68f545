"""One sandbox that a command runs in, and the process that keeps it (`keeper.py`), as seen from the trainer.

Without a launcher's words a sandbox is a folder and a session of processes, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.errors import SandboxError
from skyrl_train.rollout.agents.launchers import Launcher
from skyrl_train.rollout.boundary.session import describe
from skyrl_train.system.processes import kill

GRACE_S = 5.0
"""Between the signals that ask a command to end and that end it."""
KEEPER_WITHIN_S = 30.0
"""Of a keeper, to answer beyond what its commands may take."""
LAST_WORDS = 600
"""Characters of what was written last, for a message."""
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


class Sandbox:
    """One sandbox and the process that keeps it."""

    def __init__(self, launcher: Launcher, name: str) -> None:
        self.name = name
        self.launcher = launcher
        self._place = Path(tempfile.gettempdir(), name)
        self.folder = self._place / "folder"
        """The command's own, also within the sandbox."""
        self.log = self._place / "output.log"
        """Not within it: what is read of it later is what was written to it."""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._command = 0

    @property
    def is_alive(self) -> bool:
        """Whether its keeper is there."""
        reader, process = self._reader, self._process
        return process is not None and process.returncode is None and reader is not None and not reader.at_eof()

    async def start(self) -> None:
        """Return once it is up. Raises SandboxError, after which it is to be closed."""
        try:
            os.mkdir(self._place, 0o700)
            os.mkdir(self.folder, 0o700)
            await self._start_keeper(self._words(self.launcher.start))
            told = await self._hear("started", self.launcher.start_within_s + KEEPER_WITHIN_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise SandboxError(f"a sandbox could not be started ({describe(error)})") from error
        if told != 0:
            manner = told if isinstance(told, str) else f"exit status {told}"
            raise SandboxError(f"a sandbox could not be started ({manner}): {self.last_words()}")

    async def run(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a command in it, and return its exit status; that of a signal is negative. Raises SandboxError."""
        try:
            await self._send({"run": list(words), "environment": dict(environment)})
            told = await self._hear("ended", None)
        except OSError as error:
            raise SandboxError(f"the keeper of the command was lost ({describe(error)})") from error
        if isinstance(told, str):
            raise SandboxError(f"the command could not be started ({told})")
        return int(told)

    def last_words(self) -> str:
        """What was written to its log last."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS))
                return " ".join(file.read(LAST_WORDS).decode(errors="replace").split()) or "it wrote nothing"
        except OSError:
            return "it wrote nothing"

    async def close(self) -> None:
        """End the command and remove the sandbox. A keeper that does not do so in time is ended, and another one told to."""
        if not await self._ended(self.launcher.cleanup_within_s + GRACE_S + KEEPER_WITHIN_S):
            if self._command:
                kill(self._command)
            with contextlib.suppress(OSError):
                await self._start_keeper(())
                await self._ended(self.launcher.cleanup_within_s + KEEPER_WITHIN_S)
        for place in {self._place, self.log.parent}:
            shutil.rmtree(place, ignore_errors=True)

    async def remove(self) -> None:
        """Clean up what another process left under this name. Raises OSError."""
        self.log = Path(tempfile.mkdtemp(prefix="skyrl-clean-up-")) / "output.log"  # its folder may be anybody's
        await self._start_keeper(())
        await self.close()

    async def _start_keeper(self, start: Sequence[str]) -> None:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(self.log, "ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-S", "-m", "skyrl_train.rollout.agents.keeper", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": _PACKAGE_PARENT},
                )
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        await self._send(
            {
                "folder": str(self.folder),
                "log": str(self.log),
                "removes": [str(self._place), str(self.log.parent)],
                "start": list(start),
                "cleanup": self._words(self.launcher.cleanup),
                "start_within_s": self.launcher.start_within_s,
                "cleanup_within_s": self.launcher.cleanup_within_s,
            }
        )

    async def _send(self, message: Mapping[str, object]) -> None:
        """Raises OSError."""
        if self._writer is None:
            raise ConnectionError("it was not started")
        self._writer.write(json.dumps(message).encode() + b"\n")
        await asyncio.wait_for(self._writer.drain(), KEEPER_WITHIN_S)

    async def _hear(self, name: str, within_s: float | None) -> Any:
        """Return what the keeper tells under a name. Raises OSError where it is gone, asyncio.TimeoutError."""
        assert self._reader is not None
        while True:
            line = await asyncio.wait_for(self._reader.readline(), within_s)
            if not line:
                raise ConnectionError("it ended")
            message = json.loads(line)
            self._command = message.get("process", self._command)
            if "ended" in message:
                self._command = 0
            if name in message:
                return message[name]

    async def _ended(self, within_s: float) -> bool:
        """Have the keeper end, and return whether it did all that it is there for."""
        process, writer = self._process, self._writer
        if process is None or writer is None:
            return process is None
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await self._send({"end": GRACE_S})
        try:
            status = await asyncio.wait_for(process.wait(), within_s)
        except asyncio.TimeoutError:
            kill(process.pid)
            status = 1
        writer.close()
        return status == 0

    def _words(self, words: Sequence[str]) -> list[str]:
        return [filled(word, {"name": self.name, "folder": str(self.folder)}) for word in words]


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return a word of a command with its placeholders filled; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
