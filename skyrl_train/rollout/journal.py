"""`Journal`: what a stream has made, on disk before anything follows from it, so that a killed run makes none of it again.

One file of JSON lines, in the order in which things happened:

    {"prompts": "5f0e...", "from": 0}                        the training prompts, by their fingerprint; see "Compaction"
    {"chosen": 2, "uids": ["a", "b", "a7"]}                  the prompts at position 2 of the data, of a curriculum
    {"start": 5, "version": 1}                               group 5 began, with engines at version 1
    {"turn": "stream-5-000000-0001-000", "of": "9c1d...",    an answer of the engine to the request `of`
     "tokens": [7, 2], "logprobs": [-0.5, -0.25], "stop": "stop", "versions": [[0, 1]]}
    {"call": "stream-5-000000-0001", "of": "77ab...",        an answer of an environment to the call `of`, and how it may be
     "value": {...}, "resume": {"state": {"turns": 1}}}      brought back to where it is then (`boundary/session.py`)
    {"restart": "stream-5-000000-0001", "reason": "..."}     it could not be: the calls before are of no use
    {"group": 5, "trajectories": [...]}                      all samples of group 5 (see `telemetry/records/log.py`)
    {"batch": 1, "groups": [3, 5], "dropped": {"4": "stale"}}  what the learner trained on at version 1

A line is on disk (`fsync`) before the engine's answer goes to the environment, before a group counts as finished, and before
a batch is trained on; an environment's answer before the next one of the engine is. Lines that come together are one write,
on a thread, and each has its number, `"write": 17`.

One file has both what was made and the schedule (which version sampled which tokens, which groups made which batch), because
their order is what a resumed run relies on: a batch stands behind its groups, a group behind its turns. In two files that
would take two `fsync` for one, and a loss of power between them would leave a schedule of groups that are not there.

**What a crash leaves** is what `system/files/append_log.py` says: at most the last write is torn, and removed.

**Compaction.** Groups in batches that are older than the oldest checkpoint are never asked for again. Their lines, and those
of the batches, are left out of a new file, which takes the old one's name when it is on disk; `from` is the first batch that
is left. It is done where rollouts are recorded elsewhere (`trainer.dump_rollouts`), as the whole run is then replayed from
there; a journal that is the only record stays whole.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.errors import DataError
from skyrl_train.rollout.admission import Closed, ConsumedPrompts
from skyrl_train.system.files import AppendLog, DamagedLine, log_lines, parse_strict_json
from skyrl_train.telemetry.records import decode_answer, decode_trajectory, encode_trajectory
from skyrl_train.types import (
    GenerationOutput,
    GenerationRequest,
    Prompt,
    Trajectory,
    encode_routing,
)

DECLARED_METRICS = """
stream/resumed_{whole,state,replay} | count | Environments that came back so. | after a resumed stream
stream/restarted_<reason> | count | Those that did not: their trajectory restarted. | after a resumed stream
"""

FILE = "journal.jsonl"
_HEAD = re.compile(rb'\{"(\w+)": "?([^",]*)')
"""What a line is, and of which group, trajectory or batch."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What an environment answered in a run before."""

    of: str
    """Digest of the call and its arguments."""
    value: Any
    resume: Mapping[str, Any]
    """How the environment comes back to where it was then, as in `boundary.Answer`."""


class Journal:
    """Reads what is in the file, then appends to it. Appended to from one event loop."""

    def __init__(self, path: Path, *, prompts: str, oldest_checkpoint: Callable[[], int | None] = lambda: None) -> None:
        """Makes the file where it is missing. `prompts` tells the training prompts from others. `oldest_checkpoint` returns
        the version of the oldest one that the run may go on from, behind which the journal is compacted; None is nowhere.

        Raises DataError for a journal of other prompts, and naming the line that is none of a journal; OSError.
        """
        self.path = path
        self.started: dict[int, int] = {}
        """Versions at which groups began."""
        self.chosen: dict[int, tuple[str, ...]] = {}
        """Uids of the prompts at positions of the data."""
        self.batches: dict[int, Closed] = {}
        """By the version that trained on them."""
        self._prompts, self._oldest_checkpoint = prompts, oldest_checkpoint
        self._from = 0
        self._turns: dict[str, Mapping[str, Any]] = {}
        self._calls: dict[str, list[Call]] = {}
        self._groups: dict[int, list[Mapping[str, Any]]] = {}
        self._closed: dict[int, frozenset[int]] = {}
        """By version, the groups that each batch in the file settled."""
        self._counts: Counter[str] = Counter()
        length, num_writes = self._read()
        self._log = AppendLog(path, length=length, num_writes=num_writes)
        if not length:
            self._append({"prompts": prompts, "from": 0})

    def resume(self, version: int, settled: ConsumedPrompts) -> None:
        """Free the memory of groups that are trained on or dropped where the run goes on. Raises DataError where the journal
        has been compacted past that."""
        if version < self._from:
            raise DataError(
                f"{self.path} begins at version {self._from}, and the run goes on from version {version}: what lies "
                f"between was dropped behind checkpoints that are gone. Put one of step {self._from} or later back, or "
                "start over with trainer.resume_mode=none"
            )
        self.started = {ordinal: version for ordinal, version in self.started.items() if not settled.holds(ordinal)}
        self._groups = {ordinal: group for ordinal, group in self._groups.items() if not settled.holds(ordinal)}
        self._turns = {name: turn for name, turn in self._turns.items() if not settled.holds(_ordinal_of(name))}
        self._calls = {name: calls for name, calls in self._calls.items() if not settled.holds(_ordinal_of(name))}

    def turn(self, request: GenerationRequest) -> GenerationOutput | None:
        """Return the answer to the same request of a run before; None where there is none, or it was to another prompt.
        Raises DataError."""
        record = self._turns.get(request.request_id)
        if record is None or record["of"] != _digest(request):
            return None
        try:
            return decode_answer(record)
        except ValueError as error:
            raise _unreadable(self.path, f"turn {request.request_id}", error) from error

    def calls(self, trajectory: str) -> tuple[Call, ...]:
        """Return what the environment of a trajectory answered in a run before, in order."""
        return tuple(self._calls.get(trajectory, ()))

    def group(self, ordinal: int) -> tuple[Trajectory, ...] | None:
        """Return the samples of a group that finished in a run before. Raises DataError."""
        records = self._groups.get(ordinal)
        try:
            return None if records is None else tuple(decode_trajectory(record)[1] for record in records)
        except ValueError as error:
            raise _unreadable(self.path, f"group {ordinal}", error) from error

    def take_counts(self) -> dict[str, float]:
        """Return what became of environments of a run before since the last time: `stream/resumed_WAY` and
        `stream/restarted_REASON`."""
        counts, self._counts = self._counts, Counter()
        return {f"stream/{name}": float(count) for name, count in sorted(counts.items())}

    def choose(self, position: int, uids: tuple[str, ...]) -> None:
        """Prompts were chosen. The line is on disk when the first one of their groups' own is."""
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
            **({"experts": encode_routing(output.routed_experts)} if len(output.routed_experts) else {}),
        }
        await self._on_disk(self._append(record))

    def keep_call(self, trajectory: str, call: Call) -> None:
        """Write what an environment answered. The line is on disk when the next one of the trajectory's turns is."""
        self._append({"call": trajectory, "of": call.of, "value": call.value, "resume": call.resume})

    def resumed(self, way: str) -> None:
        """Count an environment of a run before that is where it was."""
        self._counts[f"resumed_{way}"] += 1

    def restart(self, trajectory: str, reason: str) -> None:
        """Forget what the environment of a trajectory answered. `reason` is counted, unless it had not seen any response."""
        del self._calls[trajectory]
        self._append({"restart": trajectory, "reason": reason})
        self._counts.update([f"restarted_{reason}"] if reason else [])

    async def keep_group(self, ordinal: int, prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> None:
        """Bring a group that finished to disk. Raises SaveError."""
        records = [encode_trajectory(prompt, trajectory) for trajectory in trajectories]
        await self._on_disk(self._append({"group": ordinal, "trajectories": records}))

    async def keep_batch(self, version: int, closed: Closed) -> None:
        """Bring to disk what the learner is about to train on. Raises SaveError."""
        dropped = {str(ordinal): reason for ordinal, reason in closed.dropped.items()}
        await self._on_disk(self._append({"batch": version, "groups": closed.ordinals, "dropped": dropped}))
        self._closed[version] = frozenset((*closed.ordinals, *closed.dropped))
        oldest = self._oldest_checkpoint()
        if oldest is not None and any(number < oldest for number in self._closed):
            doomed: set[int] = set()
            for number in [each for each in self._closed if each < oldest]:
                doomed |= self._closed.pop(number)
            self._compact(oldest, frozenset(doomed))

    def close(self) -> None:
        """Write what is pending and close the file. Idempotent. Raises SaveError where the disk does not answer."""
        self._log.close()

    def _append(self, record: Mapping[str, Any]) -> Future[int]:
        return self._log.append(record)

    def _compact(self, version: int, settled: frozenset[int]) -> None:
        """Leave out the batches before `version` and what the groups are made of that they `settled`."""
        head = {"prompts": self._prompts, "from": version}
        self._log.rewrite(head, lambda line: not _is_left_out(line, version, settled))

    async def _on_disk(self, written: Future[int]) -> None:
        await self._log.on_disk(written)

    def _read(self) -> tuple[int, int]:
        """Return the length of the whole lines, all of which are read, and the number of the last write."""
        length, num_writes = 0, 0
        for number, (end, record) in enumerate(journal_lines(self.path), start=1):
            try:
                if record.get("prompts", self._prompts) != self._prompts:
                    raise ValueError("the training prompts were others")
                self._take(record)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise _no_line(self.path, number, f"{type(error).__name__}: {error}") from error
            length, num_writes = end, max(num_writes, record.get("write", 0))
        return length, num_writes

    def _take(self, record: Mapping[str, Any]) -> None:
        if "prompts" in record:
            self._from = record.get("from", 0)
        elif "chosen" in record:
            self.chosen[record["chosen"]] = tuple(map(str, record["uids"]))
        elif "start" in record:
            self.started[record["start"]] = record["version"]
        elif "turn" in record:
            _ordinal_of(record["turn"])
            self._turns[record["turn"]] = record
        elif "call" in record:
            _ordinal_of(record["call"])
            call = Call(of=record["of"], value=record["value"], resume=record["resume"])
            self._calls.setdefault(record["call"], []).append(call)
        elif "restart" in record:
            self._calls.pop(record["restart"], None)
        elif "group" in record:
            self._groups[record["group"]] = record["trajectories"]
            # What failed is run again, in an environment of which nothing is known.
            failed = {each["sample"] for each in record["trajectories"] if "failure" in each}
            for name in [each for each in self._calls if failed and _ordinal_of(each) == record["group"]]:
                if int(name.rpartition("-")[2]) in failed:
                    del self._calls[name]
        else:
            dropped = {int(ordinal): str(reason) for ordinal, reason in record["dropped"].items()}
            closed = Closed(ordinals=tuple(record["groups"]), dropped=dropped)
            self.batches[record["batch"]] = closed
            self._closed[record["batch"]] = frozenset((*closed.ordinals, *dropped))


def journal_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield where each line ends, in bytes, and what it holds, up to what a crash has torn; nothing of a file that is not
    there. Raises DataError naming a line that no crash explains."""
    try:
        yield from log_lines(path)
    except DamagedLine as error:
        raise _no_line(path, error.number, str(error)) from error


def batch_places(path: Path) -> list[tuple[int, ...]]:
    """Return where in the file the lines of each batch's groups begin, in bytes, from the first batch on. Raises DataError
    where the journal has no batch, begins with a later one, or lacks a group."""
    groups: dict[int, int] = {}
    batches: dict[int, tuple[int, ...]] = {}
    begin = 0
    for number, (end, record) in enumerate(journal_lines(path), start=1):
        try:
            if "group" in record:
                groups[record["group"]] = begin
            elif "batch" in record:
                batches[record["batch"]] = tuple(groups[ordinal] for ordinal in record["groups"])
            elif first := record.get("from", 0):
                raise DataError(
                    f"generator.replay_path: {path} begins at step {first + 1}: what is older was dropped behind "
                    f"checkpoints. Set generator.replay_path={path.parent.parent / 'rollouts'}, which has all steps"
                )
        except (LookupError, TypeError) as error:
            raise _no_line(path, number, f"{type(error).__name__}: {error}") from error
        begin = end
    if sorted(batches) != list(range(len(batches))) or not batches:
        has = ", ".join(str(version + 1) for version in sorted(batches)) or "none"
        raise DataError(f"generator.replay_path: {path} must have the batch of each step from 1 on; it has {has}")
    return [batches[version] for version in sorted(batches)]


def read_group(path: Path, place: int) -> list[tuple[Prompt, Trajectory]]:
    """Return the samples of the group whose line begins at `place`. Raises DataError."""
    with open(path, "rb") as file:
        file.seek(place)
        line = file.readline()
    try:
        return [decode_trajectory(record) for record in parse_strict_json(line)["trajectories"]]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path}: the group at byte {place} cannot be read ({type(error).__name__}: {error})"
        ) from error


def _no_line(path: Path, number: int, reason: str) -> DataError:
    return DataError(
        f"{path}, line {number}: not a line of a journal ({reason}). Start over with trainer.resume_mode=none"
    )


def _unreadable(path: Path, what: str, error: ValueError) -> DataError:
    return DataError(f"{path}: {what} cannot be read ({error}). Start over with trainer.resume_mode=none")


def _is_left_out(line: bytes, version: int, settled: frozenset[int]) -> bool:
    head = _HEAD.match(line)
    if head is None:
        return False
    kind, name = head[1].decode(), head[2].decode()
    if kind in ("start", "group"):
        return int(name) in settled
    if kind == "batch":
        return int(name) < version
    return kind == "prompts" or (kind in ("turn", "call", "restart") and _ordinal_of(name) in settled)


def _ordinal_of(name: str) -> int:
    """Return the group of a trajectory or of a request, by its name."""
    return int(name.split("-")[1])


def _digest(request: GenerationRequest) -> str:
    """Of what the answer depends on beside the weights."""
    digest = hashlib.blake2b(np.asarray(request.prompt_token_ids, dtype=np.int64).tobytes(), digest_size=8)
    digest.update(f"{request.seed} {request.sampling}".encode())
    return digest.hexdigest()
