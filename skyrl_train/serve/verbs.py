"""The verbs of a model: what each does to its learner and to the disk, and the outcome that is journaled for it."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.errors import BatchError, CheckpointError, NonFiniteError, SaveError, SkyrlTrainError
from skyrl_train.serve import wire
from skyrl_train.serve.asked import Adam, checked
from skyrl_train.serve.models import Models
from skyrl_train.serve.records import KINDS, Model, Records, Request, checked_name
from skyrl_train.serve.refusals import Refused
from skyrl_train.system import WorkerThread

CHANGES_MODEL = ("forward_backward", "optim_step", "load_weights", "create_from_state")
LOADS = ("load_weights", "create_from_state")
_OF_USERS = (Refused, NonFiniteError, BatchError, CheckpointError)
_CLOSE_TIMEOUT_S = 30.0
Line = dict[str, Any]
"""An outcome, as it is journaled."""

logger = logging.getLogger(__name__)


class Verbs:
    """Executes verbs, one at a time, on the learners' thread."""

    def __init__(self, models: Models, records: Records, folder: Path) -> None:
        self._models, self._records, self._folder = models, records, folder
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
        }

    async def execute(self, model: Model, request: Request) -> Line:
        """Return the outcome of a verb, whatever it raises."""
        try:
            return await self._verbs[request.verb](model, request)
        except Exception as error:
            return failed(error, request)

    async def restore(self, model: Model) -> None:
        """Make the adapter, and bring it to its anchor. Raises CheckpointError, ModelError."""
        await self._call(self._models.create, model.name, model.facts)
        if model.anchor >= 0:
            folder = self._anchor(model, model.anchor)
            await self._call(lambda: self._models.load(model.name, folder, with_optimizer=True))

    async def write_anchor(self, model: Model, seq: int) -> None:
        """Write the state behind a request, between optimizer steps. Raises SaveError."""
        await self._call(lambda: self._models.save(model.name, self._anchor(model, seq), with_optimizer=True))

    async def remove_anchor(self, model: Model, seq: int) -> None:
        """Remove an older one."""
        await asyncio.to_thread(shutil.rmtree, self._anchor(model, seq), True)

    async def close(self) -> None:
        """Let the running verb end."""
        await asyncio.to_thread(self._thread.close, _CLOSE_TIMEOUT_S)

    async def _create(self, model: Model, request: Request) -> Line:
        del request
        await self._call(self._models.create, model.name, model.facts)
        return {"json": {"type": "create_model", "model_id": model.model_id}}

    async def _load(self, model: Model, request: Request) -> Line:
        content, folder = request.content, self._folder / request.content["folder"]
        await self._call(self._models.create, model.name, model.facts)  # nothing, where it is there
        await self._call(lambda: self._models.load(model.name, folder, with_optimizer=content["optimizer"]))
        return {"json": {"type": "load_weights", "path": content["path"], "model_id": model.model_id}}

    async def _pass(self, model: Model, request: Request) -> Line:
        asked = wire.decoded(wire.parsed_protobuf(request.body))
        data = await self._call(self._models.forward_backward, model.name, asked)
        return {"message": "ForwardBackwardOutput", "data": base64.b64encode(data).decode()}

    async def _step(self, model: Model, request: Request) -> Line:
        step = checked(Adam, request.content, "adam_params").step()
        return {"json": {"metrics": dict(await self._call(self._models.optim_step, model.name, step))}}

    async def _unload(self, model: Model, request: Request) -> Line:
        del request
        await self._call(self._models.remove, model.name)
        return {"json": {"type": "unload_model", "model_id": model.model_id}}

    async def _save(self, model: Model, request: Request) -> Line:
        """Of both kinds. What has no name but a number of a sampling session is sampled from at once, and not listed."""
        content, part = request.content, "weights" if request.verb == "save_weights" else "sampler_weights"
        given, number = content.get("path"), content.get("sampling_session_seq_id")
        name = checked_name(f"{request.seq:06d}" if given is None else given)
        path = f"tinker://{model.model_id}/{part}/{name}"
        may_replace = part == "weights" and content.get("overwrite") is True
        is_taken = path in self._records.checkpoints or (part == "sampler_weights" and path in self._records.gone)
        if is_taken and not may_replace:
            raise Refused(f"{path} is taken, and samplers of it must not move; choose another name")
        session = model.model_id.partition(":")[0]
        sampler = f"{session}:sample:{number}"
        samples = part == "sampler_weights" and given is None and number is not None
        if samples and (type(number) is not int or sampler in self._records.samplers):
            raise Refused("sampling_session_seq_id must be a whole number that no sampling session has")
        folder = f"{model.folder}/c{request.seq}"
        num_bytes = await self._call(
            lambda: self._models.save(model.name, self._folder / folder, with_optimizer=part == "weights")
        )
        checkpoint = {
            "path": path,
            "tenant": model.tenant,
            "model_id": model.model_id,
            "kind": KINDS[part],
            "folder": folder,
            "at": request.at,
            "num_bytes": num_bytes,
            "facts": asdict(model.facts),
            "metadata": content.get("user_metadata"),
            "is_named": given is not None or part == "weights",
        }
        answer = {"type": request.verb, "path": path}
        if not samples:
            return {"json": answer, "checkpoint": checkpoint}
        made = {"sampler": sampler, "tenant": model.tenant, "session": session, "path": path}
        return {"json": {**answer, "sampling_session_id": sampler}, "checkpoint": checkpoint, "made": made}

    def _anchor(self, model: Model, seq: int) -> Path:
        return self._folder / model.folder / f"a{seq}"

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def failed(error: Exception, request: Request) -> Line:
    """Return the outcome of a verb that raised: whose doing it is, and in how many words it is told."""
    if isinstance(error, _OF_USERS) and not isinstance(error, SaveError):
        return {"error": str(error), "category": error.category if isinstance(error, Refused) else "user"}
    logger.error("%s of %s failed", request.verb, request.owner, exc_info=error)
    what = str(error) if isinstance(error, SkyrlTrainError) else type(error).__name__
    return {"error": f"{request.verb} failed on the server: {what}", "category": "server"}
