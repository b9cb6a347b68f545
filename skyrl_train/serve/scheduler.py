"""When what was accepted is executed: a model's requests by `seq`, whatever order they come in, the models in turn; samples
beside them, a task each.

Started again, it goes on with what was accepted and has no outcome. A model comes back when it is asked for something: its
last anchor is loaded, and the verbs behind it that change the model are executed once more. What a request does depends on
the model's state and the request alone, so that it comes to the same.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_train.errors import ActorLostError
from skyrl_train.serve.ledger import Ledger
from skyrl_train.serve.records import Model, Promise, Request
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.sampling import Sampling
from skyrl_train.serve.upkeep import Upkeep
from skyrl_train.serve.verbs import CHANGES_MODEL, PASSES, Line, Verbs, failed

_MAX_SAMPLES = 4096
"""Requests for samples that are on their way, of all tenants together."""
_TOGETHER_BYTES = 256 << 10
"""Of the bodies of passes that are computed together: more of them leave no time between tokens to save."""
_GAP_TIMEOUT_S = 600.0
"""How long a request waits for one with a lower sequence number that never comes."""

_MAX_LOST = 5
"""Turns in a row that may be lost with their workers, before the server says that it executes nothing any more."""
_Promises = list[tuple[int, str, Promise]]

logger = logging.getLogger(__name__)


class Scheduler:
    """Executes requests, and has the ledger write what came of them. Lives on one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        verbs: Verbs,
        sampling: Sampling,
        folder: Path,
        *,
        anchor_every: int,
        models_in_memory: int,
        packs: bool,
    ) -> None:
        """`anchor_every`, `models_in_memory`: as of `Upkeep`; `packs`: whether passes of several models that wait at the
        same time are computed as one."""
        self._ledger, self._records, self._verbs, self._sampling = ledger, ledger.records, verbs, sampling
        self._packs = packs
        self._upkeep = Upkeep(
            ledger,
            verbs,
            folder,
            anchor_every=anchor_every,
            models_in_memory=models_in_memory,
            is_sampled=lambda sampler: any(each.rpartition(":")[0] == sampler for each in self._samples),
        )
        self._is_closing = False
        self._num_lost = 0
        """Turns in a row."""
        self._wake = asyncio.Event()
        self._turns: asyncio.Task[None] | None = None
        self._samples: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> int:
        """Go on with what was accepted; returns how many verbs are executed once more, those of each model when it is next
        asked for something. Raises SkyrlTrainError."""
        promises = self._promises()
        # Those of a base that is not served now wait until it is.
        loaded = [each for each in self._records.models.values() if each.is_loaded and self._verbs.can_execute(each)]
        for model in loaded:
            model.next_seq = max(1, model.anchor + 1)
            own = promises.pop(model.model_id, [])
            for seq, request_id, promise in own:
                if not promise.done.is_set():
                    model.waiting[seq] = self._ledger.request(request_id)
                    model.next_seq = min(model.next_seq, seq) if seq == model.anchor else model.next_seq
                else:
                    model.next_seq = max(model.next_seq, seq + 1)
            model.behind_anchor.extend(_behind(model.anchor, own))
            for seq in model.waiting:
                self._limit_wait(model, seq)
        for owner, of_owner in promises.items():
            for _, request_id, promise in of_owner if owner in self._records.samplers else ():
                if not promise.done.is_set():
                    self._begin_sample(self._ledger.request(request_id))
        self._turns = asyncio.create_task(self._take_turns())
        self._turns.add_done_callback(self._tell_end)
        self._wake.set()
        return sum(len(model.behind_anchor) for model in loaded)

    async def close(self) -> None:
        """Stop; what was accepted goes on when the server is started again."""
        self._is_closing = True
        tasks = [*self._samples.values(), *([self._turns] if self._turns else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def require_room(self) -> None:
        """Raises Refused where no more samples may be on their way."""
        if len(self._samples) >= _MAX_SAMPLES:
            raise Refused("too many samples are on their way; ask again later", status=429, category="server")

    def begin(self, request: Request) -> None:
        """Execute an accepted request when its turn comes."""
        if request.verb == "sample":
            self._begin_sample(request)
            return
        self._limit_wait(self._records.models[request.owner], request.seq)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Give samples up, if they are not there yet. Other verbs are not stopped."""
        if (task := self._samples.get(request_id)) is not None:
            task.cancel()

    def _tell_end(self, turns: asyncio.Task[None]) -> None:
        """Have whoever waits be told that turns have ended by an error, which nothing expects: what was under way may have
        changed a model, so that it must not be executed once more in this process."""
        if not turns.cancelled() and (error := turns.exception()) is not None:
            logger.critical("no request is executed any more; start the server again", exc_info=error)
            self._ledger.stopped = error

    async def _take_turns(self) -> None:
        """Execute what is next of each model, one after the other, the models in turn."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for model in list(self._records.models.values()):
                request = self._next(model)
                if request is None:
                    continue
                self._wake.set()
                together = self._together_with(model, request)
                done = [(*each, line) for each, line in zip(together, await self._execute(together)) if line]
                await asyncio.gather(*(self._conclude(*each) for each in done))
                self._num_lost = 0 if done else self._num_lost + 1
                self._take_lost()

    async def _execute(self, together: list[tuple[Model, Request]]) -> Sequence[Line | None]:
        """The outcomes of these requests, whose models are brought to memory first. Of a model that is lost with its worker
        there is none, and its turn comes again. Raises ActorLostError where that goes on."""
        try:
            try:
                await self._upkeep.bring([model for model, request in together])
            except ActorLostError:
                raise
            except Exception as error:  # of the first, as the others are in memory: their turns come again
                return [failed(error, together[0][1]), *[None] * (len(together) - 1)]
            if len(together) > 1:
                return await self._verbs.execute_passes(together)
            return [await self._verbs.execute(*together[0])]
        except ActorLostError as error:
            if self._num_lost == _MAX_LOST:
                raise
            logger.warning("%d requests are executed once more: %s", len(together), error)
            return [None] * len(together)

    def _take_lost(self) -> None:
        """Have models that were lost with their worker come back from their anchors when they are asked for something."""
        if lost := self._verbs.take_lost():
            promises = self._promises()
            for model in self._records.models.values():
                if model.name in lost:
                    model.is_in_memory = False
                    model.behind_anchor[:] = _behind(model.anchor, promises.get(model.model_id, []))

    def _promises(self) -> dict[str, _Promises]:
        """What was accepted, by its owner, in the order of sequence numbers."""
        found: dict[str, _Promises] = {}
        for request_id, promise in self._records.promises.items():
            found.setdefault(promise.owner, []).append((promise.seq, request_id, promise))
        return {owner: sorted(each, key=lambda one: one[0]) for owner, each in found.items()}

    def _next(self, model: Model) -> Request | None:
        """The request of a model whose turn it is, if it is on disk."""
        request = model.waiting.get(0 if 0 in model.waiting else model.next_seq)
        if request is None or self._records.promises[request.request_id].accepted is not None:
            return None
        return request

    def _together_with(self, model: Model, request: Request) -> list[tuple[Model, Request]]:
        """A request, and with a pass of an adapter those of others on its base whose turn it is as well, as long as they are
        short."""
        found, num_bytes = [(model, request)], len(request.body)
        if not self._packs or request.verb not in PASSES or model.facts.is_full:
            return found
        for other in self._records.models.values():
            also = None if other is model else self._next(other)
            if also is None or also.verb not in PASSES or not other.is_in_memory:
                continue
            if other.facts.is_full or other.facts.base != model.facts.base:
                continue
            if num_bytes + len(also.body) <= _TOGETHER_BYTES:
                found.append((other, also))
                num_bytes += len(also.body)
        return found

    async def _conclude(self, model: Model, request: Request, line: Line) -> None:
        seq = request.seq
        await self._upkeep.before_outcome(model, request, line)
        replaced = self._records.checkpoints.get(line.get("checkpoint", {}).get("path", ""))
        await self._ledger.settle(request, line)
        model.waiting.pop(seq, None)
        model.next_seq = max(model.next_seq, seq + 1)
        await self._upkeep.after(model, request, line, replaced)

    def _begin_sample(self, request: Request) -> None:
        task = asyncio.create_task(self._sample(request))
        self._samples[request.request_id] = task
        task.add_done_callback(lambda _: self._samples.pop(request.request_id, None))

    async def _sample(self, request: Request) -> None:
        try:
            data = await self._sampling.run(request)
            line: dict[str, Any] = {"message": "SampleResponse", "data": base64.b64encode(data).decode()}
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            line = {"error": "it was cancelled", "category": "user"}
        except Exception as error:
            line = failed(error, request)
        await self._ledger.settle(request, line)

    def _limit_wait(self, model: Model, seq: int) -> None:
        """Have a request fail that waits too long for one before it."""
        if seq > model.next_seq:
            asyncio.get_running_loop().call_later(_GAP_TIMEOUT_S, self._give_up, model, seq)

    def _give_up(self, model: Model, seq: int) -> None:
        """Fail a request that still waits for one that never came, and go on behind it."""
        request = model.waiting.get(seq)
        if request is None or seq < model.next_seq:
            return
        if model.next_seq in model.waiting:  # it has come, and another one behind it may not
            self._limit_wait(model, seq)
            return
        line = {
            "error": f"the request with seq_id {model.next_seq} did not come within {_GAP_TIMEOUT_S:g} s, and nothing is "
            "executed without it. Create the model again from a checkpoint",
            "category": "user",
            "skipped": True,
        }
        del model.waiting[seq]
        model.next_seq = seq + 1
        task = asyncio.ensure_future(self._ledger.settle(request, line))
        task.add_done_callback(lambda _: self._wake.set())


def _behind(anchor: int, promises: _Promises) -> list[str]:
    """The requests behind an anchor that changed the model, which are executed once more from there."""
    return [
        request_id
        for seq, request_id, promise in promises
        if promise.done.is_set() and seq > anchor and promise.verb in CHANGES_MODEL and not promise.was_skipped
    ]
