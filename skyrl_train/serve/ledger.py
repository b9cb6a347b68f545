"""The journal and what it says.

    accept --journal--> promise      settle --journal--> outcome, which whoever waits for it is told
    note   --journal--> records      outcome <--memory, or the journal's line

A request is on disk before it is promised, and its outcome before it is told. The journal is written anew, without what is
over, where it has become twice as long as that.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.serve.records import Outcome, Promise, Records, Request
from skyrl_train.serve.refusals import Refused, not_there
from skyrl_train.system.files import AppendLog, DamagedLine, log_lines, parse_strict_json

_MAX_WAITING_BYTES = 512 << 20
"""Of bodies that wait to be executed, of all tenants together."""
_KEPT_OUTCOME_BYTES = 64 << 20
_LEAST_TO_COMPACT = 64 << 20
"""Bytes of a journal that is left as it is; beyond them it is written anew when it is twice as long as it was then."""


class Ledger:
    """What was accepted, what came of it, and the records made of both. Lives on one event loop."""

    def __init__(self, path: Path) -> None:
        """Read the journal, if there is one. Raises DataError for a damaged one."""
        self.records = Records()
        self._outcomes: OrderedDict[str, tuple[Outcome, int]] = OrderedDict()
        """The last ones, with their size, in case they are asked for soon."""
        self._num_outcome_bytes = self._num_waiting_bytes = 0
        length, num_writes = 0, 0
        try:
            for end, line in log_lines(path):
                self.records.take(line, length)
                length, num_writes = end, max(num_writes, line.get("write", 0))
        except DamagedLine as error:
            raise DataError(f"{path}, line {error.number}: {error}. Choose another --folder to begin anew") from error
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: not a journal of skyrl-serve ({type(error).__name__}: {error})") from error
        self._log = AppendLog(path, length=length, num_writes=num_writes)
        self._num_compacted_bytes = 0
        """Of the journal when it was last written anew."""
        self._gate = _Gate()
        self.stopped: BaseException | None = None
        """Why nothing that was accepted is executed any more, until the server is started again."""
        self.on_settled: Callable[[Request, Outcome], None] | None = None
        """Called with each outcome once it can be told. Must not raise, nor take time."""

    def close(self) -> None:
        """Raises SaveError for what is not on disk."""
        self._log.close()

    async def note(self, line: Mapping[str, Any]) -> None:
        """Bring a line to disk and take it."""
        async with self._gate.open():
            place = await self._log.on_disk(self._log.append(line))
            self.records.take(line, place)

    async def compact(self, *, older_than: float) -> None:
        """Where the journal has become too long, write it without the requests that nothing needs and that were accepted
        before this time, and forget these; nothing else is written or read meanwhile."""
        path = self._log.path
        if self._gate.is_closed or path.stat().st_size < max(_LEAST_TO_COMPACT, 2 * self._num_compacted_bytes):
            return
        async with self._gate.alone():
            records = self.records
            gone = {
                request_id
                for request_id, promise in records.promises.items()
                if promise.at < older_than and not records.is_needed(request_id)
            }

            def keeps(line: bytes) -> bool:
                found = parse_strict_json(line)
                if "anchor" in found:
                    return bool(found["seq"] == records.models[found["anchor"]].anchor)
                return "compacted" not in found and found.get("accept", found.get("outcome")) not in gone

            self._log.rewrite({"compacted": time.time()}, keeps)
            await self._log.on_disk(self._log.append({"compacted": time.time()}))  # behind the rewriting
            for request_id in gone:
                del records.promises[request_id]
                self._num_outcome_bytes -= self._outcomes.pop(request_id, ({}, 0))[1]
            for place, line in await asyncio.to_thread(lambda: list(_places(path))):
                promise = records.promises.get(line)
                if promise is not None:
                    promise.place, promise.outcome_place = place
            self._num_compacted_bytes = path.stat().st_size

    def require_room(self, num_bytes: int) -> None:
        """Raises Refused where that much more may not wait to be executed."""
        if self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            raise Refused("too much waits to be computed; send it again later", status=429, category="server")

    async def accept(
        self, tenant: str, verb: str, owner: str, seq: int, content: Mapping[str, Any], body: bytes = b""
    ) -> tuple[str, Request | None]:
        """Promise a request of a model or a sampler once, however often it comes: it is on disk when this returns.

        Returns its id, and the request to execute where it is a new one. Raises Refused for another request under the
        number of an earlier one.
        """
        async with self._gate.open():
            return await self._accept(tenant, verb, owner, seq, content, body)

    async def _accept(
        self, tenant: str, verb: str, owner: str, seq: int, content: Mapping[str, Any], body: bytes
    ) -> tuple[str, Request | None]:
        request_id = f"{owner}:{seq}"
        digest = hashlib.blake2b(
            json.dumps([verb, content], sort_keys=True).encode() + body, digest_size=16
        ).hexdigest()
        promise = self.records.promises.get(request_id)
        if promise is not None:
            if promise.digest != digest:
                raise Refused(f"{request_id} was another request: a retry must be the same, byte for byte", status=422)
            if promise.accepted is not None:
                await self._log.on_disk(promise.accepted)
            return request_id, None
        line: dict[str, Any] = {
            "accept": request_id,
            "tenant": tenant,
            "verb": verb,
            "owner": owner,
            "seq": seq,
            "at": time.time(),
            "digest": digest,
            "content": content,
        }
        if body:
            line["body"] = base64.b64encode(body).decode()
        written = self._log.append(line)
        self.records.take(line, 0)
        promise = self.records.promises[request_id]
        promise.accepted = written
        request = _request_of(line)
        self._num_waiting_bytes += request.num_bytes
        if owner in self.records.models:
            self.records.models[owner].waiting[seq] = request
        promise.place = await self._log.on_disk(written)
        promise.accepted = None
        return request_id, request

    def request(self, request_id: str) -> Request:
        """Read an accepted request from the journal."""
        place = self.records.promises[request_id].place
        if place is None:
            raise not_there("request", request_id)
        return _request_of(self._log.read(place))

    async def settle(self, request: Request, line: Mapping[str, Any]) -> None:
        """Journal an outcome, and tell whoever waits for it when it is on disk."""
        whole = {"outcome": request.request_id, **line}
        async with self._gate.open():
            place = await self._log.on_disk(self._log.append(whole))
            self.records.settle(whole, place)
        self._num_waiting_bytes -= request.num_bytes
        size = len(line.get("data", "")) + 200
        self._outcomes[request.request_id] = (whole, size)
        self._num_outcome_bytes += size
        while self._num_outcome_bytes > _KEPT_OUTCOME_BYTES:
            self._num_outcome_bytes -= self._outcomes.popitem(last=False)[1][1]
        if self.on_settled is not None:
            self.on_settled(request, line)

    async def outcome(self, request_id: str, promise: Promise, *, timeout_s: float) -> Outcome | None:
        """Return what came of a promise; None where nothing did in time. Raises Refused where the disk has failed, and where
        nothing is executed any more."""
        if self._log.failed is not None:
            raise Refused(f"nothing can be written any more: {self._log.failed}", status=503, category="server")
        if self.stopped is not None:
            message = "nothing is executed any more, for an error that the server's log has; started again it goes on"
            raise Refused(message, status=503, category="server")
        try:
            await asyncio.wait_for(promise.done.wait(), timeout_s)
        except asyncio.TimeoutError:
            return None
        kept = self._outcomes.get(request_id)
        if kept is not None:
            return kept[0]
        async with self._gate.open():
            assert promise.outcome_place is not None, "it has an outcome"
            return await asyncio.to_thread(self._log.read, promise.outcome_place)


class _Gate:
    """Lets many in, or one alone."""

    def __init__(self) -> None:
        self._num_inside, self.is_closed = 0, False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Inside, nobody is alone."""
        if self.is_closed:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.is_closed)
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if self.is_closed:
                async with self._changed:
                    self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Inside, nobody else is."""
        self.is_closed = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._num_inside)
            yield
        finally:
            self.is_closed = False
            async with self._changed:
                self._changed.notify_all()


def _places(path: Path) -> Iterator[tuple[tuple[int | None, int | None], str]]:
    """Where requests and their outcomes lie in a journal, by the request's id."""
    found: dict[str, list[int | None]] = {}
    begin = 0
    for end, line in log_lines(path):
        for part, kind in enumerate(("accept", "outcome")):
            if kind in line:
                found.setdefault(line[kind], [None, None])[part] = begin
        begin = end
    for request_id, (accepted, settled) in found.items():
        yield (accepted, settled), request_id


def _request_of(line: Mapping[str, Any]) -> Request:
    return Request(
        request_id=line["accept"],
        tenant=line["tenant"],
        verb=line["verb"],
        owner=line["owner"],
        seq=line["seq"],
        at=line["at"],
        content=line["content"],
        body=base64.b64decode(line.get("body", "")),
    )
