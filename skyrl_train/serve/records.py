"""What the server knows: sessions, models, samplers, checkpoints and promises, each of one tenant. All of it is made of the
journal's lines, so that a server that starts again knows the same.

    {"session": "9f..", "tenant": "ann", "at": 1.7e9, "metadata": {}}
    {"accept": "9f..:train:0:7", "tenant": "ann", "verb": "forward_backward", "model": "9f..:train:0", "seq": 7, "at": 1.7e9,
     "digest": "5c..", "content": {}, "body": "base64"}                    before a promise is given
    {"outcome": "9f..:train:0:7", "message": "ForwardBackwardOutput", "data": "base64"}    or "json", or "error"
    {"sampler": "9f..:sample:0", "tenant": "ann", "session": "9f..", "path": "tinker://..."}      or null, and "base"
    {"anchor": "9f..:train:0", "seq": 40}      the model's state behind request 40 is on disk: replay begins there
    {"deleted": "tinker://..."}
    {"ttl": "tinker://...", "expires_at": 1.7e9}      or null, for ever
    {"copy": "5c..:train:0", "tenant": "ann", "at": 1.7e9, "checkpoint": {}}      a run of one checkpoint and no adapter
    {"joined": "9f..:sample:0"}      by one client more
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, TypeVar

from skyrl_train.serve.models import ModelFacts
from skyrl_train.serve.refusals import Refused, not_there

Kind = Literal["training", "sampler", "external"]
KINDS: dict[str, Kind] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""By the part of a path that says so."""
MAKES_MODEL = ("create_model", "create_from_state")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
Outcome = Mapping[str, Any]
"""`json`; or `message` and `data`; or `error` and `category`."""


@dataclass(kw_only=True)
class Session:
    """One process of a client, as it describes itself."""

    session_id: str
    tenant: str
    metadata: Mapping[str, Any]
    is_finished: bool = False


@dataclass(kw_only=True)
class Request:
    """A verb on its way: of a model, in the order of `seq`, or of a sampler."""

    request_id: str
    tenant: str
    verb: str
    owner: str
    """Id of the model or the sampler."""
    seq: int
    at: float
    content: Mapping[str, Any]
    body: bytes = b""

    @property
    def num_bytes(self) -> int:
        """What is kept of it until it is executed, but for what is short: its body, and images of a prompt."""
        chunks = self.content["prompt"]["chunks"] if self.verb == "sample" else ()
        return len(self.body) + sum(len(str(each.get("data", ""))) for each in chunks)


@dataclass(kw_only=True)
class Checkpoint:
    """What a client saved under a name."""

    path: str
    tenant: str
    model_id: str
    kind: Kind
    folder: str
    """Below the server's folder, of numbers alone."""
    at: float
    num_bytes: int
    facts: ModelFacts
    metadata: Mapping[str, Any] | None = None
    is_named: bool = True
    """False for what a client samples from without having named it; such are not listed."""
    expires_at: float | None = None
    """When it is there no more; None for never."""
    copied_from: str | None = None

    @property
    def lives(self) -> bool:
        """Whether its time is not over."""
        return self.expires_at is None or time.time() < self.expires_at


@dataclass(kw_only=True)
class Model:
    """A training run: one adapter, or all weights of a copy of the base."""

    model_id: str
    tenant: str
    number: int
    """Counts models that have adapters; names of folders and adapters are made of it. -1 for a run of a copy."""
    facts: ModelFacts
    metadata: Mapping[str, Any] | None
    last_request_at: float
    next_seq: int = 1
    """The next request that is executed."""
    waiting: dict[int, Request] = field(default_factory=dict)
    anchor: int = -1
    """The last request behind which the state is on disk; -1 for none."""
    num_since_anchor: int = 0
    behind_anchor: list[str] = field(default_factory=list)
    """Ids of requests of an earlier process that changed the model behind its anchor, to be executed once more."""
    is_loaded: bool = True
    is_in_memory: bool = False
    last_turn: int = 0
    """When a verb of it was executed, in the order of all."""

    @property
    def name(self) -> str:
        """What the learners and the engine call its adapter."""
        return f"m{self.number}"

    @property
    def folder(self) -> str:
        """Where its state is kept, below the server's folder."""
        return f"models/{self.number:06d}"


@dataclass(kw_only=True)
class Sampler:
    """A sampling session."""

    sampler_id: str
    tenant: str
    session_id: str
    path: str | None
    """None for the base model."""
    base: str = ""
    """As `Bases.recorded` has the base model that is sampled from; of a checkpoint its model tells."""
    follows: str | None = None
    """The model whose later saves of the kind `inflight` move it; None for weights that never change."""
    num_clones: int = 0
    used_at: float = 0.0
    """When samples were last asked for."""


class Promise:
    """What was accepted, and what came of it."""

    def __init__(
        self, *, tenant: str, verb: str, owner: str, seq: int, at: float, digest: str, place: int | None = None
    ) -> None:
        self.tenant, self.verb, self.owner, self.seq, self.digest = tenant, verb, owner, seq, digest
        self.at = at
        """When it was accepted."""
        self.accepted: Future[int] | None = None
        """Done when the request is on disk, at the journal's byte that it gives."""
        self.place = place
        self.outcome_place: int | None = None
        self.was_skipped = False
        """Whether it was given up without being executed."""
        self.is_recorded = False
        """Whether a checkpoint or a sampler is known by its outcome."""
        self.done = asyncio.Event()


class Records:
    """All of them, and whose they are."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.num_adapters = 0
        """That ever were."""
        self.samplers: dict[str, Sampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.promises: dict[str, Promise] = {}
        self.num_open: Counter[str] = Counter()
        """Promises without an outcome, by tenant."""
        self.num_requests: Counter[tuple[str, str, str]] = Counter()
        """Outcomes by tenant, verb and `done` or `failed`."""
        self.gone: set[str] = set()
        """Paths of checkpoints that were deleted: none of a sampler's is ever taken again."""

    def take(self, line: Mapping[str, Any], place: int) -> None:
        """Take a line of the journal that begins at a byte. Raises ValueError, LookupError, TypeError for others."""
        if "session" in line and "sampler" not in line:
            session = line["session"]
            self.sessions[session] = Session(session_id=session, tenant=line["tenant"], metadata=line["metadata"])
        elif "accept" in line:
            self._accept(line, place)
        elif "outcome" in line:
            self.settle(line, place)
        elif "sampler" in line:
            self.add_sampler(line)
        elif "anchor" in line:
            self.models[line["anchor"]].anchor = line["seq"]
        elif "deleted" in line:
            self.checkpoints.pop(line["deleted"], None)
            self.gone.add(line["deleted"])
        elif "ttl" in line:
            if (checkpoint := self.checkpoints.get(line["ttl"])) is not None:
                checkpoint.expires_at = line["expires_at"]
        elif "copy" in line:
            copy = _checkpoint(line["checkpoint"])
            self.checkpoints[copy.path] = copy
            if line["copy"] not in self.models:
                self.add_model(line["copy"], copy.tenant, copy.facts, line["at"], number=-1).is_loaded = False
        elif "joined" in line:
            self.samplers[line["joined"]].num_clones += 1
        elif "finished" in line:
            self.sessions[line["finished"]].is_finished = True

    def add_sampler(self, line: Mapping[str, Any]) -> None:
        """Take a sampler that a line states, and move those that follow the same model."""
        sampler, follows = line["sampler"], line.get("follows")
        for each in self.samplers.values() if follows else ():
            each.path = line["path"] if each.follows == follows else each.path
        self.samplers[sampler] = Sampler(
            sampler_id=sampler,
            tenant=line["tenant"],
            session_id=line["session"],
            path=line["path"],
            base=line.get("base", ""),
            follows=follows,
        )

    def add_model(
        self, model_id: str, tenant: str, facts: ModelFacts, at: float, *, number: int, metadata: Any = None
    ) -> Model:
        """Record a new model of a tenant. `number`: its place in the order of creation, or -1 for what only holds copies."""
        model = Model(
            model_id=model_id, tenant=tenant, number=number, facts=facts, metadata=metadata, last_request_at=at
        )
        self.models[model_id] = model
        return model

    def settle(self, line: Mapping[str, Any], place: int) -> None:
        """Take the outcome of a request."""
        promise = self.promises[line["outcome"]]
        promise.outcome_place, promise.was_skipped = place, bool(line.get("skipped"))
        promise.is_recorded = "checkpoint" in line or "made" in line
        promise.done.set()
        self.num_open[promise.tenant] -= 1
        self.num_requests[promise.tenant, promise.verb, "failed" if "error" in line else "done"] += 1
        if line.get("checkpoint"):
            checkpoint = _checkpoint(line["checkpoint"])
            self.checkpoints[checkpoint.path] = checkpoint
        if line.get("made"):
            self.add_sampler(line["made"])
        if "error" in line if promise.verb in MAKES_MODEL else promise.verb == "unload_model":
            self.models[promise.owner].is_loaded = False

    def _accept(self, line: Mapping[str, Any], place: int) -> None:
        owner, content = line["owner"], line["content"]
        self.promises[line["accept"]] = Promise(
            tenant=line["tenant"],
            verb=line["verb"],
            owner=owner,
            seq=line["seq"],
            at=line["at"],
            digest=line["digest"],
            place=place,
        )
        self.num_open[line["tenant"]] += 1
        if line["verb"] in MAKES_MODEL:  # of others the content is the client's, and may name anything
            facts, number = ModelFacts(**content["facts"]), self.num_adapters
            self.num_adapters += 1
            metadata = content.get("metadata")
            self.add_model(owner, line["tenant"], facts, line["at"], number=number, metadata=metadata)
        if owner in self.models:
            self.models[owner].last_request_at = line["at"]
        elif owner in self.samplers:
            self.samplers[owner].used_at = line["at"]

    def is_needed(self, request_id: str) -> bool:
        """Whether a server that starts again must know of a request: it has no outcome, says what there is, or changed a
        model behind its anchor."""
        promise = self.promises[request_id]
        if not promise.done.is_set() or promise.is_recorded or promise.verb in (*MAKES_MODEL, "unload_model"):
            return True
        model = self.models.get(promise.owner)
        return model is not None and model.is_loaded and promise.seq > model.anchor

    def session(self, tenant: str, session_id: object) -> Session:
        """Return a tenant's session. Raises Refused with 404, for another tenant's, too; so do the others."""
        return _own(self.sessions, tenant, session_id, "session")

    def model(self, tenant: str, model_id: object, *, loaded: bool = True) -> Model:
        """Return a tenant's model, unloaded ones where they need not be `loaded`."""
        found = _own(self.models, tenant, model_id, "model")
        if loaded and not found.is_loaded:
            raise not_there("model", str(model_id))
        return found

    def sampler(self, tenant: str, sampler_id: object) -> Sampler:
        """Return a tenant's sampler. Raises Refused where there is none of that id."""
        return _own(self.samplers, tenant, sampler_id, "sampler")

    def model_of(self, sampler: Sampler) -> Model | None:
        """Return the model whose weights are sampled from; None for the base's."""
        return self.models.get((sampler.path or "").removeprefix("tinker://").partition("/")[0])

    def base_of(self, sampler: Sampler) -> str:
        """Return the base of what is sampled from, as it is recorded."""
        model = self.model_of(sampler)
        return sampler.base if model is None else model.facts.base

    def promise(self, tenant: str, request_id: object) -> Promise:
        """Return what a tenant was promised."""
        return _own(self.promises, tenant, request_id, "request")

    def checkpoint(self, tenant: str, path: object, kind: Kind | None = None) -> Checkpoint:
        """Return a tenant's checkpoint, of either kind unless one is given."""
        found = _own(self.checkpoints, tenant, path, "checkpoint")
        if kind not in (None, found.kind) or not found.lives:
            raise not_there("checkpoint", str(path))
        return found

    def checkpoints_of(self, tenant: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return those that have names, the newest first."""
        every = self.checkpoints.values()
        found = [each for each in every if each.tenant == tenant and each.is_named and each.lives]
        return [each for each in reversed(found) if model_id in (None, each.model_id)]


T = TypeVar("T", Session, Model, Sampler, Promise, Checkpoint)


def _own(table: Mapping[str, T], tenant: str, key: object, what: str) -> T:
    found = table.get(str(key))
    if found is None or found.tenant != tenant:
        raise not_there(what, str(key))
    return found


def _checkpoint(line: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(**{**line, "facts": ModelFacts(**line["facts"])})


def as_time(seconds: float) -> str:
    """Return a moment as SDKs read it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def checked_name(name: object) -> str:
    """Return a name that a client gave. Raises Refused for one that could mean anything else."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.strip("."):
        raise Refused(f"a name must match [A-Za-z0-9._-]{{1,128}}, and not of dots alone; got {str(name)[:60]!r}")
    return name
