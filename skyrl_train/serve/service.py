"""What may be asked of the server.

    submit --ledger: accept--> promise --scheduler, one verb at a time--> learner --ledger: settle--> retrieve
                                       \\-- a task for each sample     --> engine  /

Each request is checked here, then written down by the ledger, then executed by the scheduler.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.serve.asked import Adam, Adapter, checked
from skyrl_train.serve.checkpoints import Checkpoints
from skyrl_train.serve.ledger import Ledger
from skyrl_train.serve.limits import Limits
from skyrl_train.serve.models import Bases, ModelFacts, ServedModels
from skyrl_train.serve.records import MAKES_MODEL, Checkpoint, Outcome
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.sampling import Sampling
from skyrl_train.serve.scheduler import Scheduler
from skyrl_train.serve.verbs import Verbs
from skyrl_train.system import derive_seed

_MAX_AHEAD = 4096
"""How far a sequence number may be ahead of the next one that is executed."""

_NO_HEAD = (
    "adapters of this server have no part on the output head: train_unembed=True trains attention and MLP layers, as far as "
    "train_attn and train_mlp say so, and nothing else"
)
"""SDKs log it, and send train_unembed=True unless they are told otherwise."""


class Service:
    """Accepts requests of tenants and has them executed. Lives on one event loop."""

    def __init__(
        self,
        bases: Mapping[str, ServedModels],
        folder: Path,
        *,
        seed: int,
        anchor_every: int = 20,
        limits: Limits | None = None,
        models_in_memory: int = 64,
    ) -> None:
        """Read the journal in `folder`. `bases`: by the names that clients know them by, the first first; `anchor_every`:
        requests of a model behind which its state is written, at the next optimizer step; `models_in_memory`: of which more
        wait on disk. Raises DataError for a damaged journal."""
        (folder / "models").mkdir(parents=True, exist_ok=True)
        self.bases = Bases(bases)
        self._folder, self._seed = folder, seed
        self.ledger = Ledger(folder / "journal.jsonl")
        self.records = self.ledger.records
        self.limits = limits or Limits()
        self.checkpoints = Checkpoints(self.records, folder, self.ledger.note, self.bases)
        self._verbs = Verbs(self.bases, self.records, folder, self.limits)
        self._sampling = Sampling(self.bases, self.records, folder, seed=seed)
        self._scheduler = Scheduler(
            self.ledger,
            self._verbs,
            self._sampling,
            folder,
            anchor_every=anchor_every,
            models_in_memory=models_in_memory,
            packs=not any(each.about.is_deterministic for each in bases.values()),
        )

    async def start(self) -> int:
        """Go on with what was accepted; returns how many verbs are executed once more, those of each model when it is next
        asked for something. Raises SkyrlTrainError."""
        return await self._scheduler.start()

    async def close(self) -> None:
        """Stop; what was accepted goes on when the server is started again. Raises SaveError."""
        await self._scheduler.close()
        await self._verbs.close()
        await asyncio.to_thread(self.ledger.close)
        for models in self.bases.by_name.values():
            await asyncio.to_thread(models.close)

    # What is answered at once

    async def create_session(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the session of a client's process, and return its id."""
        session = uuid.uuid4().hex
        metadata = {key: content[key] for key in ("user_metadata", "display_name", "sdk_version") if key in content}
        await self.ledger.note({"session": session, "tenant": tenant, "at": time.time(), "metadata": metadata})
        return {"type": "create_session", "session_id": session, "warning_message": _NO_HEAD}

    async def finish_session(self, tenant: str, session_id: str) -> dict[str, Any]:
        """End a session; its models and checkpoints stay."""
        if not self.records.session(tenant, session_id).is_finished:
            await self.ledger.note({"finished": session_id})
        return {}

    async def create_sampling_session(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to sample from a checkpoint or the base model; the same request gives the same session."""
        session = self.records.session(tenant, content.get("session_id"))
        sampler = f"{session.session_id}:sample:{_whole(content, 'sampling_session_seq_id')}"
        path, base = content.get("model_path"), {}
        if path is not None:
            self.records.checkpoint(tenant, path, "sampler")
        elif recorded := self.bases.recorded(content.get("base_model")):
            base = {"base": recorded}
        known, name = self.records.samplers.get(sampler), self.bases.name(base.get("base", ""))
        if known is not None and (known.path, self.bases.name(known.base)) != (path, name):
            raise Refused(f"{sampler} samples from {known.path or self.bases.name(known.base)} already", status=422)
        if known is None:
            session_id = session.session_id
            await self.ledger.note({"sampler": sampler, "tenant": tenant, "session": session_id, "path": path, **base})
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def join(self, tenant: str, sampler_id: object) -> dict[str, Any]:
        """Number one client more of a sampling session, for ever: its requests are numbered by it."""
        sampler = self.records.sampler(tenant, sampler_id)
        await self.ledger.note({"joined": sampler.sampler_id})
        return {"type": "join_sampling_session", "client_counter": sampler.num_clones}

    # What is promised

    async def create_model(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Promise a new adapter on the base model, or, without `lora_config`, a copy of it of which all weights are trained.
        Raises Refused."""
        model_id = self._new_model_id(tenant, content)
        base = self.bases.recorded(content.get("base_model"))
        checked(Adam, content.get("optimizer_config") or {}, "optimizer_config")
        lora, facts = content.get("lora_config"), ModelFacts(rank=0, seed=0, base=base)
        if lora is not None:
            facts = checked(Adapter, lora, "lora_config").facts(derive_seed(self._seed, model_id), base)
            if facts.rank > (most := self.bases.of(base).about.max_rank):
                raise Refused(
                    f"lora_config.rank must be at most {most}, for which this server's vLLM has room; got {facts.rank}. "
                    f"Start it with model.lora.rank={facts.rank}"
                )
        made = {"facts": facts.line(), "metadata": content.get("user_metadata")}
        return await self._promise(tenant, "create_model", model_id, 0, made)

    async def load_weights(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Make a model of a checkpoint."""
        checkpoint, loaded = self._loaded(tenant, content)
        if content.get("base_model") is not None:
            base = self.bases.recorded(content["base_model"])
            self.bases.require_same(checkpoint.path, checkpoint.facts.base, base)
        checked(Adam, content.get("optimizer_config") or {}, "optimizer_config")
        made = {**loaded, "facts": checkpoint.facts.line(), "metadata": content.get("user_metadata")}
        return await self._promise(tenant, "create_from_state", self._new_model_id(tenant, content), 0, made)

    def load_into(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is journaled of a `load_weights` into a model that is there. Raises Refused."""
        (checkpoint, loaded), model = self._loaded(tenant, content), self.records.model(tenant, content["model_id"])
        self.bases.require_same(checkpoint.path, checkpoint.facts.base, model.facts.base)
        if model.facts.shape != checkpoint.facts.shape:
            raise Refused(
                f"{checkpoint.path} is of an adapter of another rank or other layers than {model.model_id}, or one of the "
                "two has all weights"
            )
        return loaded

    def _loaded(self, tenant: str, content: Mapping[str, Any]) -> tuple[Checkpoint, dict[str, Any]]:
        with_optimizer = content.get("optimizer") is True
        checkpoint = self.records.checkpoint(tenant, content.get("path"), "training" if with_optimizer else None)
        return checkpoint, {"path": checkpoint.path, "folder": checkpoint.folder, "optimizer": with_optimizer}

    async def submit(
        self, tenant: str, verb: str, model_id: object, seq_id: object, content: Mapping[str, Any], body: bytes = b""
    ) -> dict[str, Any]:
        """Promise a verb of a model, behind all with lower sequence numbers. Raises Refused."""
        model = self.records.model(tenant, model_id)
        self.bases.of(model.facts.base)  # or it would fail in its turn, and never be executed
        last = max([model.next_seq - 1, *model.waiting])
        seq = last + 1 if seq_id is None else seq_id
        if type(seq) is not int or not 0 <= seq < 2**53:
            raise Refused(f"seq_id must be a whole number from 0 on; got {str(seq)[:40]}")
        if f"{model.model_id}:{seq}" not in self.records.promises:
            if seq < model.next_seq:
                raise Refused(f"seq_id {seq} goes back: the next of {model.model_id} is {model.next_seq}", status=422)
            if seq > model.next_seq + _MAX_AHEAD:
                raise Refused(f"seq_id {seq} is more than {_MAX_AHEAD} ahead of the next, {model.next_seq}")
        self.ledger.require_room(len(body))
        return await self._promise(tenant, verb, model.model_id, seq, content, body)

    async def sample(self, tenant: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Promise samples of a sampler. Raises Refused where too many are on their way."""
        sampler = self.records.sampler(tenant, content.get("sampling_session_id"))
        asked = self._sampling.check(sampler, content)
        self._scheduler.require_room()
        self.ledger.require_room(0)
        promised = await self._promise(tenant, "sample", sampler.sampler_id, asked.seq_id, dict(content))
        ids = [f"{promised['request_id']}:{index}" for index in range(asked.num_samples)]
        return {**promised, "sample_sequence_ids": ids}

    async def retrieve(self, tenant: str, request_id: object, *, timeout_s: float) -> Outcome | None:
        """Return the outcome of a request; None where there is none in time."""
        promise = self.records.promise(tenant, request_id)
        return await self.ledger.outcome(str(request_id), promise, timeout_s=timeout_s)

    async def cancel(self, tenant: str, request_id: object) -> None:
        """Give samples up, if they are not there yet. Other verbs are not stopped."""
        self.records.promise(tenant, request_id)
        self._scheduler.cancel(str(request_id))

    def _new_model_id(self, tenant: str, content: Mapping[str, Any]) -> str:
        session = self.records.session(tenant, content.get("session_id"))
        model_id = f"{session.session_id}:train:{_whole(content, 'model_seq_id')}"
        known = self.records.models.get(model_id)
        if known is not None and known.number < 0:
            raise Refused(f"{model_id} is the run of a copy; choose another model_seq_id", status=422)
        return model_id

    async def _promise(
        self, tenant: str, verb: str, owner: str, seq: int, content: Mapping[str, Any], body: bytes = b""
    ) -> dict[str, Any]:
        """Accept a request, have it executed if it is a new one, and return what the client is promised."""
        if f"{owner}:{seq}" not in self.records.promises:
            self.limits.require_turn(self.records, tenant)
            if verb in MAKES_MODEL:
                self.limits.require_adapter(self.records, tenant)
                facts = ModelFacts(**content["facts"])
                models = self.bases.of(facts.base)
                if facts.is_full:
                    self.limits.require_full(self.records, tenant, models.about.full_bytes)
        request_id, request = await self.ledger.accept(tenant, verb, owner, seq, content, body)
        if request is not None:
            self._scheduler.begin(request)
        return {"request_id": request_id, "model_id": owner if owner in self.records.models else None}


def _whole(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise Refused(f"{name} must be a whole number from 0 on; got {str(value)[:40]}")
    return value
