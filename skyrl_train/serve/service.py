"""The order of things: what is accepted is journaled, then executed once, in the order of its sequence numbers; then its
outcome is journaled, and then told.

    submit --journal: accept--> promise --scheduler, one verb at a time--> learner  --journal: outcome--> retrieve
                                       \\-- a task for each sample     --> engine  /

A model's requests are executed by `seq`, whatever order they come in; models take turns. Started again, the server loads
each model's last anchor, executes the verbs behind it that change the model once more, and goes on with what was accepted
and has no outcome. What a request does depends on the model's state and the request alone, so that it comes to the same.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError, SaveError
from skyrl_train.serve.asked import Adam, Adapter, checked
from skyrl_train.serve.models import Models
from skyrl_train.serve.records import Model, Outcome, Promise, Records, Request
from skyrl_train.serve.refusals import Refused, not_there
from skyrl_train.serve.sampling import Sampling
from skyrl_train.serve.verbs import CHANGES_MODEL, LOADS, Verbs, failed
from skyrl_train.system import derive_seed
from skyrl_train.system.files import AppendLog, DamagedLine, log_lines

_MAX_AHEAD = 4096
"""How far a sequence number may be ahead of the next one that is executed."""
_MAX_WAITING_BYTES = 512 << 20
"""Of bodies that wait to be executed, of all tenants together."""
_MAX_SAMPLES = 4096
"""Requests for samples that are on their way, of all tenants together."""
_GAP_TIMEOUT_S = 600.0
"""How long a request waits for one with a lower sequence number that never comes."""
_KEPT_OUTCOME_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class Service:
    """Accepts requests of tenants and has them executed. Lives on one event loop."""

    def __init__(self, models: Models, folder: Path, *, base_model: str, seed: int, anchor_every: int = 20) -> None:
        """Read the journal in `folder`. `base_model`: the name that clients know the base by; `anchor_every`: requests of a
        model behind which its state is written, at the next optimizer step. Raises DataError for a damaged journal."""
        self.base_model, self.records = base_model, Records()
        self.architecture, self.max_length = models.architecture, models.max_length
        self._models, self._folder, self._seed, self._anchor_every = models, folder, seed, anchor_every
        self._outcomes: OrderedDict[str, tuple[Outcome, int]] = OrderedDict()
        """The last ones, with their size, in case they are asked for soon."""
        self._num_outcome_bytes = self._num_waiting_bytes = 0
        self._is_closing = False
        self._verbs = Verbs(models, self.records, folder)
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._sampling = Sampling(models, seed=seed)
        (folder / "models").mkdir(parents=True, exist_ok=True)
        self._log = self._read(folder / "journal.jsonl")

    def _read(self, path: Path) -> AppendLog:
        length, num_writes = 0, 0
        try:
            for end, line in log_lines(path):
                self.records.take(line, length)
                length, num_writes = end, max(num_writes, line.get("write", 0))
        except DamagedLine as error:
            raise DataError(f"{path}, line {error.number}: {error}. Choose another --folder to begin anew") from error
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: not a journal of skyrl-serve ({type(error).__name__}: {error})") from error
        return AppendLog(path, length=length, num_writes=num_writes)

    async def start(self) -> int:
        """Bring models back to where they were and go on; returns how many verbs were executed once more. Raises
        SkyrlTrainError."""
        num_replayed = 0
        by_model: dict[str, list[tuple[int, str, Promise]]] = {}
        for request_id, promise in self.records.promises.items():
            by_model.setdefault(promise.owner, []).append((promise.seq, request_id, promise))
        for model in self.records.models.values():
            if not model.is_loaded:
                continue
            await self._verbs.restore(model)
            model.next_seq = max(1, model.anchor + 1)
            for seq, request_id, promise in sorted(by_model.pop(model.model_id, ()), key=lambda each: each[0]):
                if not promise.done.is_set():
                    model.waiting[seq] = self._request(request_id)
                    model.next_seq = min(model.next_seq, seq) if seq == model.anchor else model.next_seq
                    continue
                model.next_seq = max(model.next_seq, seq + 1)
                if seq > model.anchor and promise.verb in CHANGES_MODEL and not promise.was_skipped:
                    await self._verbs.execute(model, self._request(request_id))
                    num_replayed += 1
        for owner, promises in by_model.items():
            for _, request_id, promise in promises if owner in self.records.samplers else ():
                if not promise.done.is_set():
                    self._begin_sample(self._request(request_id))
        self._scheduler = asyncio.create_task(self._schedule())
        self._wake.set()
        return num_replayed

    async def close(self) -> None:
        """Stop; what was accepted goes on when the server is started again. Raises SaveError."""
        self._is_closing = True
        tasks = [*self._samples.values(), *([self._scheduler] if self._scheduler else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._verbs.close()
        await asyncio.to_thread(self._log.close)
        await asyncio.to_thread(self._models.close)

    # What is answered at once

    async def create_session(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a session."""
        session = uuid.uuid4().hex
        metadata = {key: content[key] for key in ("user_metadata", "display_name", "sdk_version") if key in content}
        await self._note({"session": session, "tenant": tenant, "at": time.time(), "metadata": metadata})
        return {"type": "create_session", "session_id": session}

    async def finish_session(self, tenant: str, session_id: str) -> dict[str, Any]:
        """End a session; its models and checkpoints stay."""
        if not self.records.session(tenant, session_id).is_finished:
            await self._note({"finished": session_id})
        return {}

    async def create_sampling_session(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to sample from a checkpoint or the base model; the same request gives the same session."""
        session = self.records.session(tenant, content.get("session_id"))
        sampler = f"{session.session_id}:sample:{_whole(content, 'sampling_session_seq_id')}"
        path = content.get("model_path")
        if path is None:
            self.require_base(content.get("base_model"))
        else:
            self.records.checkpoint(tenant, path, "sampler")
        known = self.records.samplers.get(sampler)
        if known is not None and known.path != path:
            raise Refused(f"{sampler} samples from {known.path} already", status=409)
        if known is None:
            await self._note({"sampler": sampler, "tenant": tenant, "session": session.session_id, "path": path})
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def delete_checkpoint(self, tenant: str, path: str) -> None:
        """Forget a checkpoint and remove its files. Samplers of it fail from here on."""
        checkpoint = self.records.checkpoint(tenant, path)
        await self._note({"deleted": path})
        await asyncio.to_thread(shutil.rmtree, self._folder / checkpoint.folder, True)

    def require_base(self, name: object) -> None:
        """Raises Refused for another model than the one that is served."""
        if name != self.base_model:
            raise Refused(f"base_model {str(name)[:100]!r} is not served here; {self.base_model!r} is", status=404)

    # What is promised

    async def create_model(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Make a new adapter."""
        model_id = self._new_model_id(tenant, content)
        self.require_base(content.get("base_model"))
        if content.get("lora_config") is None:
            raise Refused("create_model needs lora_config: full fine-tuning is not served yet")
        checked(Adam, content.get("optimizer_config") or {}, "optimizer_config")
        facts = checked(Adapter, content["lora_config"], "lora_config").facts(derive_seed(self._seed, model_id))
        made = {"facts": asdict(facts), "metadata": content.get("user_metadata")}
        return await self._promise(tenant, "create_model", model_id, 0, made)

    async def load_weights(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Load a checkpoint into a model, which is made for it where the request names none."""
        with_optimizer = content.get("optimizer") is True
        checkpoint = self.records.checkpoint(tenant, content.get("path"), "training" if with_optimizer else None)
        loaded = {"path": checkpoint.path, "folder": checkpoint.folder, "optimizer": with_optimizer}
        if content.get("model_id") is None:
            made = {**loaded, "facts": asdict(checkpoint.facts), "metadata": content.get("user_metadata")}
            return await self._promise(tenant, "create_from_state", self._new_model_id(tenant, content), 0, made)
        model = self.records.model(tenant, content["model_id"])
        if model.facts.shape != checkpoint.facts.shape:
            raise Refused(f"{checkpoint.path} is of an adapter of another rank or other layers than {model.model_id}")
        return await self.submit(tenant, "load_weights", model.model_id, content.get("seq_id"), loaded)

    async def submit(
        self, tenant: str, verb: str, model_id: object, seq_id: object, content: Mapping[str, Any], body: bytes = b""
    ) -> dict[str, Any]:
        """Promise a verb of a model, behind all with lower sequence numbers. Raises Refused."""
        model = self.records.model(tenant, model_id)
        last = max([model.next_seq - 1, *model.waiting])
        seq = last + 1 if seq_id is None else seq_id
        if type(seq) is not int or not 0 <= seq < 2**53:
            raise Refused(f"seq_id must be a whole number from 0 on; got {str(seq)[:40]}")
        if f"{model.model_id}:{seq}" not in self.records.promises:
            if seq < model.next_seq:
                raise Refused(f"seq_id {seq} goes back: the next of {model.model_id} is {model.next_seq}", status=409)
            if seq > model.next_seq + _MAX_AHEAD:
                raise Refused(f"seq_id {seq} is more than {_MAX_AHEAD} ahead of the next, {model.next_seq}")
        if self._num_waiting_bytes + len(body) > _MAX_WAITING_BYTES:
            raise Refused("too much waits to be computed; send it again later", status=429, category="server")
        return await self._promise(tenant, verb, model.model_id, seq, content, body)

    async def sample(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Promise samples."""
        sampler = self.records.sampler(tenant, content.get("sampling_session_id"))
        asked = self._sampling.check(content)
        if len(self._samples) >= _MAX_SAMPLES:
            raise Refused("too many samples are on their way; ask again later", status=429, category="server")
        promised = await self._promise(tenant, "sample", sampler.sampler_id, asked.seq_id, dict(content))
        ids = [f"{promised['request_id']}:{index}" for index in range(asked.num_samples)]
        return {**promised, "sample_sequence_ids": ids}

    async def retrieve(self, tenant: str, request_id: object, *, timeout_s: float) -> Outcome | None:
        """Return the outcome of a request; None where there is none in time."""
        promise = self.records.promise(tenant, request_id)
        if self._log.failed is not None:
            raise Refused(f"nothing can be written any more: {self._log.failed}", status=503, category="server")
        try:
            await asyncio.wait_for(promise.done.wait(), timeout_s)
        except asyncio.TimeoutError:
            return None
        kept = self._outcomes.get(str(request_id))
        if kept is not None:
            return kept[0]
        assert promise.outcome_place is not None, "it has an outcome"
        return await asyncio.to_thread(self._log.read, promise.outcome_place)

    async def cancel(self, tenant: str, request_id: object) -> None:
        """Give samples up, if they are not there yet. Other verbs are not stopped."""
        self.records.promise(tenant, request_id)
        if (task := self._samples.get(str(request_id))) is not None:
            task.cancel()

    def _new_model_id(self, tenant: str, content: Mapping[str, Any]) -> str:
        session = self.records.session(tenant, content.get("session_id"))
        return f"{session.session_id}:train:{_whole(content, 'model_seq_id')}"

    async def _promise(
        self, tenant: str, verb: str, owner: str, seq: int, content: Mapping[str, Any], body: bytes = b""
    ) -> dict[str, Any]:
        """Accept a request once, however often it comes: it is on disk when this returns."""
        request_id = f"{owner}:{seq}"
        digest = hashlib.blake2b(
            json.dumps([verb, content], sort_keys=True).encode() + body, digest_size=16
        ).hexdigest()
        answer = {"request_id": request_id, "model_id": owner if owner in self.records.models or seq == 0 else None}
        promise = self.records.promises.get(request_id)
        if promise is not None:
            if promise.digest != digest:
                raise Refused(f"{request_id} was another request: a retry must be the same, byte for byte", status=409)
            if promise.accepted is not None:
                await self._log.on_disk(promise.accepted)
            return answer
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
        self._num_waiting_bytes += len(body)
        request = _request_of(line)
        if owner in self.records.models:
            self.records.models[owner].waiting[seq] = request
        promise.place = await self._log.on_disk(written)
        promise.accepted = None
        if verb == "sample":
            self._begin_sample(request)
        else:
            model = self.records.models[owner]
            if seq > model.next_seq:
                asyncio.get_running_loop().call_later(_GAP_TIMEOUT_S, self._give_up, model, seq)
            self._wake.set()
        return answer

    # How it is executed

    async def _schedule(self) -> None:
        """Execute what is next of each model, one after the other, the models in turn."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for model in list(self.records.models.values()):
                seq = 0 if 0 in model.waiting else model.next_seq
                request = model.waiting.get(seq)
                if request is None or self.records.promises[request.request_id].accepted is not None:
                    continue
                self._wake.set()
                line = await self._verbs.execute(model, request)
                if request.verb in LOADS and "error" not in line:  # first of all: what was loaded may be deleted
                    await self._anchor(model, seq)
                await self._settle(request, line)
                model.waiting.pop(seq, None)
                model.next_seq = max(model.next_seq, seq + 1)
                model.num_since_anchor += 1
                is_due = model.num_since_anchor >= self._anchor_every
                if request.verb == "optim_step" and is_due and "error" not in line:
                    await self._anchor(model, seq)

    def _begin_sample(self, request: Request) -> None:
        task = asyncio.create_task(self._sample(request))
        self._samples[request.request_id] = task
        task.add_done_callback(lambda _: self._samples.pop(request.request_id, None))

    async def _sample(self, request: Request) -> None:
        try:
            sampler = self.records.samplers[request.owner]
            checkpoint = None
            if sampler.path is not None:
                checkpoint = self.records.checkpoint(sampler.tenant, sampler.path)
            data = await self._sampling.run(request, checkpoint, self._folder)
            line: dict[str, Any] = {"message": "SampleResponse", "data": base64.b64encode(data).decode()}
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            line = {"error": "it was cancelled", "category": "user"}
        except Exception as error:
            line = failed(error, request)
        await self._settle(request, line)

    def _give_up(self, model: Model, seq: int) -> None:
        """Fail a request that still waits for one that never came, and go on behind it."""
        request = model.waiting.get(seq)
        if request is None or model.next_seq in model.waiting or seq < model.next_seq:
            return
        line = {
            "error": f"the request with seq_id {model.next_seq} did not come within {_GAP_TIMEOUT_S:g} s, and nothing is "
            "executed without it. Create the model again from a checkpoint",
            "category": "user",
            "skipped": True,
        }
        del model.waiting[seq]
        model.next_seq = seq + 1
        task = asyncio.ensure_future(self._settle(request, line))
        task.add_done_callback(lambda _: self._wake.set())

    async def _settle(self, request: Request, line: dict[str, Any]) -> None:
        """Journal an outcome, and tell whoever waits for it when it is on disk."""
        whole = {"outcome": request.request_id, **line}
        place = await self._log.on_disk(self._log.append(whole))
        self._num_waiting_bytes -= len(request.body)
        size = len(line.get("data", "")) + 200
        self._outcomes[request.request_id] = (whole, size)
        self._num_outcome_bytes += size
        while self._num_outcome_bytes > _KEPT_OUTCOME_BYTES:
            self._num_outcome_bytes -= self._outcomes.popitem(last=False)[1][1]
        self.records.settle(whole, place)

    async def _anchor(self, model: Model, seq: int) -> None:
        """Have the state behind a request on disk; where the disk refuses, more is executed once more."""
        before = model.anchor
        try:
            await self._verbs.write_anchor(model, seq)
        except SaveError as error:
            logger.warning("no anchor of %s: %s", model.model_id, error)
            return
        await self._note({"anchor": model.model_id, "seq": seq})
        model.num_since_anchor = 0
        if 0 <= before != seq:
            await self._verbs.remove_anchor(model, before)

    async def _note(self, line: Mapping[str, Any]) -> None:
        """Bring a line to disk and take it."""
        place = await self._log.on_disk(self._log.append(line))
        self.records.take(line, place)

    def _request(self, request_id: str) -> Request:
        """Read an accepted request from the journal."""
        place = self.records.promises[request_id].place
        if place is None:
            raise not_there("request", request_id)
        return _request_of(self._log.read(place))


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


def _whole(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise Refused(f"{name} must be a whole number from 0 on; got {str(value)[:40]}")
    return value
