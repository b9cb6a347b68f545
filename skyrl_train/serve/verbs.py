"""The verbs of a model: what each does to its learner and to the disk, and the outcome that is journaled for it."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_train.errors import ActorLostError, BatchError, CheckpointError, NonFiniteError, SaveError, SkyrlTrainError
from skyrl_train.serve import wire
from skyrl_train.serve.asked import Adam, Save, checked
from skyrl_train.serve.images import RequestImages
from skyrl_train.serve.limits import Limits
from skyrl_train.serve.models import Bases, Rows, ServedModels
from skyrl_train.serve.records import KINDS, Model, Records, Request, checked_name
from skyrl_train.serve.refusals import Refused
from skyrl_train.system import WorkerThread

CHANGES_MODEL = ("forward_backward", "optim_step", "load_weights", "create_from_state")
PASSES = ("forward", "forward_backward")
LOADS = ("load_weights", "create_from_state")
REFUSED = "refused"
"""The verb of a request that was wrong as it came. It takes its turn: SDKs never use its number again."""
_PARTS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
_OF_USERS = (Refused, NonFiniteError, BatchError, CheckpointError)
_CLOSE_TIMEOUT_S = 30.0
Line = dict[str, Any]
"""An outcome, as it is journaled."""

logger = logging.getLogger(__name__)


class Verbs:
    """Executes verbs, one at a time, on the learners' thread."""

    def __init__(self, bases: Bases, records: Records, folder: Path, limits: Limits) -> None:
        self._bases, self._records, self._folder, self._limits = bases, records, folder, limits
        self._thread = WorkerThread("learner")
        self._verbs = {
            "create_model": self._create,
            "create_from_state": self._load,
            "load_weights": self._load,
            "forward": self._pass,
            "forward_backward": self._pass,
            "optim_step": self._step,
            "unload_model": self._unload,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "save_weights_external": self._save,
            REFUSED: self._refuse,
        }

    async def execute(self, model: Model, request: Request) -> Line:
        """Return the outcome of a verb, whatever it raises but ActorLostError, behind which it is executed once more."""
        try:
            return await self._verbs[request.verb](model, request)
        except ActorLostError:
            raise
        except Exception as error:
            return failed(error, request)

    async def execute_passes(self, asked: Sequence[tuple[Model, Request]]) -> list[Line | None]:
        """Return the outcomes of passes of several models, in one pass as far as they can be. What is refused, has no rows,
        or has no gradient where most have one, is executed by itself; so are all where one of them breaks. There is none of
        a model that was lost with its worker."""
        rows: dict[str, Rows] = {}
        images = RequestImages(self._models(asked[0][0]).images)
        for model, request in asked:
            with suppress(Exception):  # it is told in its own turn
                rows[model.name] = await self._call(self._rows, model, request, images)
        fits = {name: each for name, each in rows.items() if each.of_targets.batch is not None}
        kinds = [each.backward for each in fits.values()]
        fits = {name: each for name, each in fits.items() if each.backward == (kinds.count(True) * 2 >= len(kinds))}
        found: dict[str, bytes] = {}
        if len(fits) > 1:
            try:
                found = await self._call(self._models(asked[0][0]).together, fits)
            except Exception as error:
                logger.info("passes of %d models are computed one by one: %s", len(fits), error)
        lines: list[Line | None] = []
        for model, request in asked:
            try:
                data = found.get(model.name)
                lines.append(_of_pass(data) if data is not None else await self.execute(model, request))
            except ActorLostError as error:
                logger.warning("%s of %s is executed once more: %s", request.verb, model.model_id, error)
                lines.append(None)
        return lines

    async def restore(self, model: Model) -> None:
        """Make the model's learner, and bring it to its anchor. Raises CheckpointError, ModelError."""
        await self._call(self._models(model).create, model.name, model.facts)
        if model.anchor >= 0:
            folder = self._anchor(model, model.anchor)
            await self._call(lambda: self._models(model).load(model.name, folder, with_optimizer=True))

    async def put_away(self, model: Model) -> None:
        """Take the learner and its optimizer out of memory; its anchor has them."""
        await self._call(self._models(model).remove, model.name)

    def has_gradient(self, model: Model) -> bool:
        """Whether passes have added to a gradient that no step has taken."""
        return self._models(model).has_gradient(model.name)

    async def write_anchor(self, model: Model, seq: int) -> None:
        """Write the state behind a request, between optimizer steps. Raises SaveError."""
        await self._call(lambda: self._models(model).save(model.name, self._anchor(model, seq), with_optimizer=True))

    async def remove_anchor(self, model: Model, seq: int) -> None:
        """Delete the state of a model that was written at an earlier verb."""
        await asyncio.to_thread(shutil.rmtree, self._anchor(model, seq), True)

    def can_execute(self, model: Model) -> bool:
        """Whether the base of a model is served."""
        return self._bases.name(model.facts.base) in self._bases.by_name

    def take_lost(self) -> frozenset[str]:
        """Return the names of models that were lost with a worker since the last time."""
        return frozenset().union(*(each.take_lost() for each in self._bases.by_name.values()))

    async def close(self) -> None:
        """Let the running verb end."""
        await asyncio.to_thread(self._thread.close, _CLOSE_TIMEOUT_S)

    async def _create(self, model: Model, request: Request) -> Line:
        del request
        await self._call(self._models(model).create, model.name, model.facts)
        return {"json": {"type": "create_model", "model_id": model.model_id}}

    async def _load(self, model: Model, request: Request) -> Line:
        content, folder = request.content, self._folder / request.content["folder"]
        await self._call(self._models(model).create, model.name, model.facts)  # nothing, where it is there
        await self._call(lambda: self._models(model).load(model.name, folder, with_optimizer=content["optimizer"]))
        return {"json": {"type": "load_weights", "path": content["path"], "model_id": model.model_id}}

    async def _pass(self, model: Model, request: Request) -> Line:
        rows = await self._call(self._rows, model, request)
        return _of_pass(await self._call(self._models(model).forward_backward, model.name, rows))

    def _rows(self, model: Model, request: Request, images: RequestImages | None = None) -> Rows:
        return self._models(model).rows(wire.decoded(wire.parsed_protobuf(request.body)), images)

    async def _step(self, model: Model, request: Request) -> Line:
        step = checked(Adam, request.content, "adam_params").step()
        return {"json": {"metrics": dict(await self._call(self._models(model).optim_step, model.name, step))}}

    async def _unload(self, model: Model, request: Request) -> Line:
        del request
        await self._call(self._models(model).remove, model.name)
        return {"json": {"type": "unload_model", "model_id": model.model_id}}

    async def _refuse(self, model: Model, request: Request) -> Line:
        del model
        raise Refused(request.content["error"])

    async def _save(self, model: Model, request: Request) -> Line:
        """Of all kinds. What has no name but a number of a sampling session is sampled from at once, and not listed."""
        asked, part = checked(Save, request.content, request.verb), _PARTS[request.verb]
        given, number = asked.path, asked.sampling_session_seq_id
        name = checked_name(f"{request.seq:06d}" if given is None else given)
        path = f"tinker://{model.model_id}/{part}/{name}"
        may_replace = part == "weights" and asked.overwrite
        is_taken = path in self._records.checkpoints or (part == "sampler_weights" and path in self._records.gone)
        if is_taken and not may_replace:
            raise Refused(f"{path} is taken, and samplers of it must not move; choose another name")
        session = model.model_id.partition(":")[0]
        sampler = f"{session}:sample:{number}"
        samples = part == "sampler_weights" and given is None and number is not None
        if samples and sampler in self._records.samplers:
            raise Refused("sampling_session_seq_id must be a number that no sampling session has")
        self._limits.require_room(self._records, model.tenant)
        folder = f"{model.folder}/c{request.seq}"
        num_bytes = await self._call(
            lambda: self._models(model).save(model.name, self._folder / folder, with_optimizer=part == "weights")
        )
        checkpoint = {
            "path": path,
            "tenant": model.tenant,
            "model_id": model.model_id,
            "kind": KINDS[part],
            "folder": folder,
            "at": request.at,
            "num_bytes": num_bytes,
            "facts": model.facts.line(),
            "metadata": asked.user_metadata,
            "is_named": given is not None or part == "weights",
            "expires_at": None if asked.ttl_seconds is None else request.at + asked.ttl_seconds,
        }
        answer = {"type": request.verb, "path": path}
        if not samples:
            return {"json": answer, "checkpoint": checkpoint}
        made = {"sampler": sampler, "tenant": model.tenant, "session": session, "path": path}
        if asked.kind == "inflight":
            made["follows"] = model.model_id
        return {"json": {**answer, "sampling_session_id": sampler}, "checkpoint": checkpoint, "made": made}

    def _models(self, model: Model) -> ServedModels:
        return self._bases.of(model.facts.base)

    def _anchor(self, model: Model, seq: int) -> Path:
        return self._folder / model.folder / f"a{seq}"

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _of_pass(data: bytes) -> Line:
    return {"message": "ForwardBackwardOutput", "data": base64.b64encode(data).decode()}


def failed(error: Exception, request: Request) -> Line:
    """Return the outcome of a verb that raised: whose doing it is, and in how many words it is told."""
    if isinstance(error, _OF_USERS) and not isinstance(error, SaveError):
        return {"error": str(error), "category": error.category if isinstance(error, Refused) else "user"}
    logger.error("%s of %s failed", request.verb, request.owner, exc_info=error)
    what = str(error) if isinstance(error, SkyrlTrainError) else type(error).__name__
    return {"error": f"{request.verb} failed on the server: {what}", "category": "server"}
