"""What keeps memory and disk bounded while tenants come and go.

    verbs executed --every so many--> anchor        the model's state on disk, from which a server that starts again goes on
    models in memory, one too many --> the one that has waited longest goes to its anchor, and back when it is asked for
    snapshots without a name that nobody samples from any more --> removed
    journal twice as long as what is kept of it --> written anew

What is behind a model's anchor, has its outcome and is older than an hour is left out of the journal: whoever asks for it
then is answered as for what was never there.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_train.errors import ActorLostError, SaveError
from skyrl_train.serve.ledger import Ledger
from skyrl_train.serve.records import Checkpoint, Model, Request
from skyrl_train.serve.verbs import LOADS, Line, Verbs

_KEPT_S = 3600.0
"""Outcomes can be asked for, and snapshots that were not named sampled from, at least so long."""
_KEPT_SNAPSHOTS = 16
"""The newest snapshots of a model that were not named, which stay whatever their age."""

logger = logging.getLogger(__name__)


class Upkeep:
    """Called by the scheduler around each verb of a model, on its loop."""

    def __init__(
        self,
        ledger: Ledger,
        verbs: Verbs,
        folder: Path,
        *,
        anchor_every: int,
        models_in_memory: int,
        is_sampled: Callable[[str], bool],
    ) -> None:
        """`anchor_every`: requests of a model behind which its state is written, at the next optimizer step; `is_sampled`
        tells of a sampler whether samples of it are on their way."""
        self._ledger, self._records, self._verbs, self._folder = ledger, ledger.records, verbs, folder
        self._anchor_every, self._models_in_memory, self._is_sampled = anchor_every, models_in_memory, is_sampled
        self._clock = 0
        """Counts verbs, to tell who has waited longest."""

    async def bring(self, models: Sequence[Model]) -> None:
        """Have these models in memory, others on disk if there are too many. Raises CheckpointError, ModelError."""
        self._clock += 1
        coming = [each for each in models if not each.is_in_memory]
        for model in models:
            model.last_turn = self._clock
        await self._make_room(len(coming), staying=models)
        for model in coming:
            try:
                await self._verbs.restore(model)
                for request_id in model.behind_anchor:
                    await self._verbs.execute(model, self._ledger.request(request_id))
            except BaseException:
                await self._verbs.put_away(model)  # half of it would be taken for the whole
                raise
            model.behind_anchor.clear()
            model.is_in_memory = True

    async def after(self, model: Model, request: Request, line: Line, replaced: Checkpoint | None) -> None:
        """Do what is due behind a verb whose outcome is on disk. `replaced`: the checkpoint whose path it has taken."""
        model.num_since_anchor += 1
        if "error" in line:
            return
        if request.verb == "optim_step" and model.num_since_anchor >= self._anchor_every:
            await self.anchor(model, request.seq)
            await self._ledger.compact(older_than=time.time() - _KEPT_S)
        if "made" in line:
            await self._remove_snapshots(model)
        if replaced is not None and not self._is_to_be_loaded(replaced):
            await asyncio.to_thread(shutil.rmtree, self._folder / replaced.folder, True)
        if request.verb == "unload_model" and model.anchor >= 0:
            await self._verbs.remove_anchor(model, model.anchor)

    async def before_outcome(self, model: Model, request: Request, line: Line) -> None:
        """Do what must be on disk before the outcome is: a loaded state, since what was loaded may be deleted."""
        if request.verb in LOADS and "error" not in line:
            await self.anchor(model, request.seq)

    async def anchor(self, model: Model, seq: int) -> bool:
        """Have the state behind a request on disk, and say so; where the disk refuses, or the worker is lost, more is
        executed once more."""
        before = model.anchor
        if before != seq:
            try:
                await self._verbs.write_anchor(model, seq)
            except (SaveError, ActorLostError) as error:
                logger.warning("no anchor of %s: %s", model.model_id, error)
                return False
            await self._ledger.note({"anchor": model.model_id, "seq": seq})
            if before >= 0:
                await self._verbs.remove_anchor(model, before)
        model.num_since_anchor = 0
        return True

    async def _make_room(self, num_coming: int, *, staying: Sequence[Model]) -> None:
        """Put models away until so many more fit. Those with a gradient stay, which no file has: there may be too many until
        they have stepped."""
        there = sorted(
            (each for each in self._records.models.values() if each.is_in_memory and each.is_loaded),
            key=lambda each: each.last_turn,
        )
        num_left = len(there) + num_coming
        for model in there:
            if num_left <= self._models_in_memory:
                return
            if model in staying or self._verbs.has_gradient(model) or not await self.anchor(model, model.next_seq - 1):
                continue
            await self._verbs.put_away(model)
            model.is_in_memory = False
            num_left -= 1

    async def _remove_snapshots(self, model: Model) -> None:
        """Remove those that were not named, but the newest and what somebody still samples from."""
        own = [
            each
            for each in self._records.checkpoints.values()
            if each.model_id == model.model_id and each.kind == "sampler" and not each.is_named
        ]
        own.sort(key=lambda each: each.at)
        for checkpoint in own[:-_KEPT_SNAPSHOTS]:
            if not self._is_reached(checkpoint):
                await self._ledger.note({"deleted": checkpoint.path})
                await asyncio.to_thread(shutil.rmtree, self._folder / checkpoint.folder, True)

    def _is_to_be_loaded(self, checkpoint: Checkpoint) -> bool:
        waiting = (each for model in self._records.models.values() for each in model.waiting.values())
        return any(each.content.get("folder") == checkpoint.folder for each in waiting)

    def _is_reached(self, checkpoint: Checkpoint) -> bool:
        last = checkpoint.at
        for sampler in self._records.samplers.values():
            if sampler.path == checkpoint.path:
                session = self._records.sessions[sampler.session_id]
                if self._is_sampled(sampler.sampler_id):
                    return True
                last = last if session.is_finished else max(last, sampler.used_at)
        return last > time.time() - _KEPT_S
