"""`Journal`: what a stream has made, on disk before anything follows from it, so that a killed run makes none of it again.

One file of JSON lines, in the order in which things happened; a line that a kill cut short is the last one, and is removed.

    {"prompts": "5f0e..."}                                   the training prompts, by their fingerprint
    {"chosen": 2, "uids": ["a", "b", "a7"]}                  the prompts at position 2 of the data, of a curriculum
    {"start": 5, "version": 1}                               group 5 began, with engines at version 1
    {"turn": "stream-5-000000-0001-000", "of": "9c1d...",    an answer of the engine to the request `of`
     "tokens": [7, 2], "logprobs": [-0.5, -0.25], "stop": "stop", "versions": [[0, 1]]}
    {"group": 5, "trajectories": [...]}                      all samples of group 5 (see `telemetry/rollout_log.py`)
    {"batch": 1, "groups": [3, 5], "dropped": {"4": "stale"}}  what the learner trained on at version 1

A line is on disk (`fsync`) before the engine's answer goes to the environment, before a group counts as finished, and before
a batch is trained on. Lines that come together are brought to disk together, on a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.errors import DataError, SaveError
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.admission import Closed, Settled
from skyrl_train.telemetry.files import DISK_TIMEOUT_S, bring_to_disk, parse_json, sync_folder
from skyrl_train.telemetry.json_text import json_line
from skyrl_train.telemetry.rollout_log import decode_trajectory, encode_trajectory
from skyrl_train.threads import WorkerThread
from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, StopReason, Trajectory, VersionRun

FILE = "journal.jsonl"
_CLOSE_TIMEOUT_S = 30.0


class Journal:
    """Reads what is in the file, then appends to it. Appended to from one event loop."""

    def __init__(self, path: Path, *, prompts: str) -> None:
        """Makes the file where it is missing. `prompts` tells the training prompts from others.

        Raises DataError for a journal of other prompts, and naming the line that is none of a journal; OSError.
        """
        self.path = path
        self.started: dict[int, int] = {}
        """Versions at which groups began."""
        self.chosen: dict[int, tuple[str, ...]] = {}
        """Uids of the prompts at positions of the data."""
        self.batches: dict[int, Closed] = {}
        """By the version that trained on them."""
        self._turns: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[int, list[Mapping[str, Any]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        length = self._read(prompts)
        self._file = path.open("ab")
        self._file.truncate(length)
        sync_folder(path.parent)
        self._pending: deque[bytes] = deque()
        self._thread = WorkerThread("journal")
        if not length:
            self._append({"prompts": prompts})

    def turn(self, request: GenerationRequest) -> GenerationOutput | None:
        """Return the answer to the same request of a run before; None where there is none, or it was to another prompt."""
        record = self._turns.get(request.request_id)
        if record is None or record["of"] != _digest(request):
            return None
        return GenerationOutput(
            token_ids=tuple(record["tokens"]),
            logprobs=tuple(record["logprobs"]),
            stop_reason=StopReason(record["stop"]),
            weight_versions=tuple(VersionRun(start, version) for start, version in record["versions"]),
        )

    def group(self, ordinal: int) -> tuple[Trajectory, ...] | None:
        """Return the samples of a group that finished in a run before."""
        records = self._groups.get(ordinal)
        return None if records is None else tuple(decode_trajectory(record)[1] for record in records)

    def choose(self, position: int, uids: tuple[str, ...]) -> None:
        """Prompts were chosen. The line is on disk when the first one of their groups' own is."""
        self.chosen[position] = uids
        self._append({"chosen": position, "uids": uids})

    def begin(self, ordinal: int, version: int) -> None:
        """A group begins. The line is on disk when the first one of the group's own is."""
        self.started[ordinal] = version
        self._append({"start": ordinal, "version": version})

    async def keep_turn(self, request: GenerationRequest, output: GenerationOutput) -> None:
        """Bring an answer to disk. Raises SaveError."""
        record = {
            "turn": request.request_id,
            "of": _digest(request),
            "tokens": list(output.token_ids),
            "logprobs": list(output.logprobs),
            "stop": output.stop_reason.value,
            "versions": output.weight_versions,
        }
        await self._on_disk(self._append(record))

    async def keep_group(self, ordinal: int, prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> None:
        """Bring a group that finished to disk. Raises SaveError."""
        records = [encode_trajectory(prompt, trajectory) for trajectory in trajectories]
        await self._on_disk(self._append({"group": ordinal, "trajectories": records}))

    async def keep_batch(self, version: int, closed: Closed) -> None:
        """Bring to disk what the learner is about to train on. Raises SaveError."""
        dropped = {str(ordinal): reason for ordinal, reason in closed.dropped.items()}
        await self._on_disk(self._append({"batch": version, "groups": closed.ordinals, "dropped": dropped}))

    def forget(self, settled: Settled) -> None:
        """Free the memory of groups that are trained on or dropped."""
        self.started = {ordinal: version for ordinal, version in self.started.items() if not settled.holds(ordinal)}
        self._groups = {ordinal: group for ordinal, group in self._groups.items() if not settled.holds(ordinal)}
        self._turns = {name: turn for name, turn in self._turns.items() if not settled.holds(_ordinal_of(name))}

    def close(self) -> None:
        """Write what is pending and close the file. Idempotent. Raises SaveError where the disk does not answer."""
        if not self._thread.close(_CLOSE_TIMEOUT_S):
            raise SaveError(f"{self.path} could not be closed within {_CLOSE_TIMEOUT_S:g} s. Is the disk reachable?")
        self._file.close()

    def _append(self, record: Mapping[str, Any]) -> Future[None]:
        self._pending.append(json_line(record))
        return self._thread.submit(self._write)

    def _write(self) -> None:
        """On the thread: all that is pending by now, of which later calls find nothing left."""
        lines = []
        while self._pending:
            lines.append(self._pending.popleft())
        if lines:
            self._file.write(b"".join(lines))
            self._file.flush()
            bring_to_disk(self._file.fileno(), self.path)

    async def _on_disk(self, written: Future[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(written), 2 * DISK_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise SaveError(f"{self.path} could not be written: {error}. Make room, and start the run again") from error

    def _read(self, prompts: str) -> int:
        """Return the length of the whole lines, all of which are read."""
        if not self.path.exists():
            return 0
        length = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = parse_json(line)
                    if "prompts" not in record:
                        self._take(record)
                    elif record["prompts"] != prompts:
                        raise ValueError("the training prompts were others")
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    raise DataError(
                        f"{self.path}, line {number}: not a line of a journal ({type(error).__name__}: {error}). "
                        "Start over with trainer.resume_mode=none"
                    ) from error
                length += len(line)
        return length

    def _take(self, record: Mapping[str, Any]) -> None:
        if "chosen" in record:
            self.chosen[record["chosen"]] = tuple(map(str, record["uids"]))
        elif "start" in record:
            self.started[record["start"]] = record["version"]
        elif "turn" in record:
            _ordinal_of(record["turn"])
            self._turns[record["turn"]] = record
        elif "group" in record:
            self._groups[record["group"]] = record["trajectories"]
        else:
            dropped = {int(ordinal): str(reason) for ordinal, reason in record["dropped"].items()}
            self.batches[record["batch"]] = Closed(ordinals=tuple(record["groups"]), dropped=dropped)


class JournaledEngine:
    """Implements `InferenceEngine` by another one, whose answers are in the journal before anybody has them."""

    def __init__(self, engine: InferenceEngine, journal: Journal) -> None:
        self._engine, self._journal = engine, journal

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._engine.weight_version

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory."""
        return self._engine.lease()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises as the engine does; SaveError."""
        known = self._journal.turn(request)
        if known is not None:
            return known
        output = await self._engine.generate(request)
        await self._journal.keep_turn(request, output)
        return output

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def _ordinal_of(request_id: str) -> int:
    return int(request_id.split("-")[1])


def _digest(request: GenerationRequest) -> str:
    """Of what the answer depends on beside the weights."""
    digest = hashlib.blake2b(np.asarray(request.prompt_token_ids, dtype=np.int64).tobytes(), digest_size=8)
    digest.update(f"{request.seed} {request.sampling}".encode())
    return digest.hexdigest()
