"""What the server knows: sessions, models, samplers, checkpoints and promises, each of one tenant. All of it is made of the
journal's lines, so that a server that starts again knows the same.

    {"session": "9f..", "tenant": "ann", "at": 1.7e9, "metadata": {}}
    {"accept": "9f..:train:0:7", "tenant": "ann", "verb": "forward_backward", "model": "9f..:train:0", "seq": 7, "at": 1.7e9,
     "digest": "5c..", "content": {}, "body": "base64"}                    before a promise is given
    {"outcome": "9f..:train:0:7", "message": "ForwardBackwardOutput", "data": "base64"}    or "json", or "error"
    {"sampler": "9f..:sample:0", "tenant": "ann", "session": "9f..", "path": "tinker://..."}
    {"anchor": "9f..:train:0", "seq": 40}      the model's state behind request 40 is on disk: replay begins there
    {"deleted": "tinker://..."}
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from skyrl_train.serve.models import AdapterFacts
from skyrl_train.serve.refusals import Refused, not_there

Kind = Literal["training", "sampler"]
KINDS: dict[str, Kind] = {"weights": "training", "sampler_weights": "sampler"}
"""By the part of a path that says so."""
MAKES_MODEL = ("create_model", "create_from_state")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
Outcome = Mapping[str, Any]
"""`json`; or `message` and `data`; or `error` and `category`."""


@dataclass(kw_only=True)
class Session:
    """A client's process."""

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
    facts: AdapterFacts
    metadata: Mapping[str, Any] | None = None
    is_named: bool = True
    """False for what a client samples from without having named it; such are not listed."""


@dataclass(kw_only=True)
class Model:
    """A training run: one adapter."""

    model_id: str
    tenant: str
    number: int
    """Counts models; names of folders and adapters are made of it."""
    facts: AdapterFacts
    metadata: Mapping[str, Any] | None
    last_request_at: float
    next_seq: int = 1
    """The next request that is executed."""
    waiting: dict[int, Request] = field(default_factory=dict)
    anchor: int = -1
    """The last request behind which the state is on disk; -1 for none."""
    num_since_anchor: int = 0
    is_loaded: bool = True

    @property
    def name(self) -> str:
        """The adapter's."""
        return f"m{self.number}"

    @property
    def folder(self) -> str:
        """Below the server's folder."""
        return f"models/{self.number:06d}"


@dataclass(kw_only=True)
class Sampler:
    """A sampling session: weights that never change."""

    sampler_id: str
    tenant: str
    session_id: str
    path: str | None
    """None for the base model."""
    num_clones: int = 0


class Promise:
    """What was accepted, and what came of it."""

    def __init__(self, *, tenant: str, verb: str, owner: str, seq: int, digest: str, place: int | None = None) -> None:
        self.tenant, self.verb, self.owner, self.seq, self.digest = tenant, verb, owner, seq, digest
        self.accepted: Future[int] | None = None
        """Done when the request is on disk, at the journal's byte that it gives."""
        self.place = place
        self.outcome_place: int | None = None
        self.was_skipped = False
        """Whether it was given up without being executed."""
        self.done = asyncio.Event()


class Records:
    """All of them, and whose they are."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.promises: dict[str, Promise] = {}
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
        elif "finished" in line:
            self.sessions[line["finished"]].is_finished = True

    def add_sampler(self, line: Mapping[str, Any]) -> None:
        """Take a sampler that a line states."""
        sampler = line["sampler"]
        self.samplers[sampler] = Sampler(
            sampler_id=sampler, tenant=line["tenant"], session_id=line["session"], path=line["path"]
        )

    def add_model(self, model_id: str, tenant: str, content: Mapping[str, Any], at: float) -> Model:
        """Take a new model."""
        model = Model(
            model_id=model_id,
            tenant=tenant,
            number=len(self.models),
            facts=AdapterFacts(**content["facts"]),
            metadata=content.get("metadata"),
            last_request_at=at,
        )
        self.models[model_id] = model
        return model

    def settle(self, line: Mapping[str, Any], place: int) -> None:
        """Take the outcome of a request."""
        promise = self.promises[line["outcome"]]
        promise.outcome_place, promise.was_skipped = place, bool(line.get("skipped"))
        promise.done.set()
        if checkpoint := line.get("checkpoint"):
            facts = AdapterFacts(**checkpoint["facts"])
            self.checkpoints[checkpoint["path"]] = Checkpoint(**{**checkpoint, "facts": facts})
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
            digest=line["digest"],
            place=place,
        )
        if "facts" in content:
            self.add_model(owner, line["tenant"], content, line["at"])
        if owner in self.models:
            self.models[owner].last_request_at = line["at"]

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
        """Return a tenant's sampler."""
        return _own(self.samplers, tenant, sampler_id, "sampler")

    def promise(self, tenant: str, request_id: object) -> Promise:
        """Return what a tenant was promised."""
        return _own(self.promises, tenant, request_id, "request")

    def checkpoint(self, tenant: str, path: object, kind: Kind | None = None) -> Checkpoint:
        """Return a tenant's checkpoint, of either kind unless one is given."""
        found = _own(self.checkpoints, tenant, path, "checkpoint")
        if kind not in (None, found.kind):
            raise not_there(f"{kind} checkpoint", str(path))
        return found

    def checkpoints_of(self, tenant: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return those that have names, the newest first."""
        found = [each for each in self.checkpoints.values() if each.tenant == tenant and each.is_named]
        return [each for each in reversed(found) if model_id in (None, each.model_id)]


class _Owned(Protocol):
    tenant: str


T = TypeVar("T", bound=_Owned)


def _own(table: Mapping[str, T], tenant: str, key: object, what: str) -> T:
    found = table.get(str(key))
    if found is None or found.tenant != tenant:
        raise not_there(what, str(key))
    return found


def checked_name(name: object) -> str:
    """Return a name that a client gave. Raises Refused for one that could mean anything else."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.strip("."):
        raise Refused(f"a name must match [A-Za-z0-9._-]{{1,128}}, and not of dots alone; got {str(name)[:60]!r}")
    return name
