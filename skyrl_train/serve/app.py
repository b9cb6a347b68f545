"""Who may ask, and what each address answers: the routes of the API over `service.py`.

A key is one tenant's, and everything that an address names is looked up among that tenant's. Bodies are bounded before they
are read, and nothing of them is executed. Errors are `{"error", "detail", "category"}`; a request that was accepted and
failed is told so by its promise, with status 200, as SDKs expect it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from skyrl_train.errors import SaveError
from skyrl_train.serve import wire
from skyrl_train.serve.asked import Adam, Asked, Save, checked
from skyrl_train.serve.counts import CONTENT_TYPE, as_prometheus
from skyrl_train.serve.models import ModelFacts
from skyrl_train.serve.records import KINDS, Checkpoint, Model, as_time
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.service import Service
from skyrl_train.serve.verbs import REFUSED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request as HTTPRequest

API = "/api/v1"
_POLL_S = 30.0
"""How long a poll is held; SDKs give up after 45."""
_MAX_PAGE = 1000
_NOT_SERVED = {
    "create_custom_loss": "nothing that a client sends is executed here. TrainingClient.forward_backward_custom computes on "
    "your side",
    "audit": "the server's journal has every request",
    "auth": "send the key itself",
    "billing": "nothing is billed here; /metrics counts requests, tokens and bytes",
    "publish": "what a tenant has is its own. Send the files of `tinker checkpoint download`",
    "retrieve_futures": "retrieve_future is, one for each request",
}
"""By a part of an address, with what to use instead."""
_NOT_SUPPORTED = ("loss:gspo", "publish", "train_unembed")
"""What capabilities deny, as tests/conformance reads them."""
_CONSTANT: Mapping[str, object] = {
    # `custom_loss_server_side` stays false: nothing that a client sends is executed.
    "client/config": {
        "proto_compress_fwdbwd": True,
        "parallel_fwdbwd_chunks": True,
        "create_model_via_load_weights": True,
        "sample_join_sampling_session": True,
    },
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},
}
"""What is answered whatever is sent."""

logger = logging.getLogger(__name__)
Verb = Callable[["Call"], Awaitable[Any]]


class _Answer(JSONResponse):
    """In ASCII: a text of a client may hold half of a surrogate pair, which is no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Call:
    """One HTTP request of a tenant."""

    def __init__(self, request: HTTPRequest, tenant: str, body: bytes) -> None:
        self.request, self.tenant, self.body = request, tenant, body

    @property
    def content(self) -> dict[str, Any]:
        """The body as a JSON object. Raises Refused."""
        if self.content_type not in _JSON:
            raise Refused(f"Content-Type {self.content_type[:60]!r} is not read here; application/json is", status=415)
        return wire.parsed_json(self.body)

    @property
    def content_type(self) -> str:
        """Of the body, without its parameters."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def checkpoint(self) -> str:
        """The path of the checkpoint that the address names."""
        return f"tinker://{self.path['model']}/{self.path['part']}/{self.path['name']}"

    @property
    def path(self) -> Mapping[str, str]:
        """The parts of the address that its route names."""
        return self.request.path_params

    def page(self, found: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
        """Return the part of a list that `limit` and `offset` ask for, and the cursor. Raises Refused."""
        try:
            limit, offset = (int(self.request.query_params.get(name, default)) for name, default in _PAGE)
        except ValueError:
            raise Refused("limit and offset must be whole numbers") from None
        if not (0 <= limit <= _MAX_PAGE and offset >= 0):
            raise Refused(f"limit must be from 0 to {_MAX_PAGE}, and offset from 0 on")
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return list(found[offset : offset + limit]), cursor


_JSON = ("application/json", "")
_PAGE = (("limit", "20"), ("offset", "0"))


def make_app(service: Service, tenants: Mapping[str, str]) -> Starlette:
    """Return the application. `tenants`: by key."""
    api = _Api(service)

    async def answer(request: HTTPRequest, verb: Verb) -> Response:
        try:
            tenant = _tenant(request, tenants)
            found = await verb(Call(request, tenant, await _body(request)))
            return found if isinstance(found, Response) else _Answer(found)
        except Refused as error:
            return _Answer(error.body, error.status)
        except SaveError as error:
            return _Answer(Refused(str(error), category="server").body, 503)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return _Answer(Refused("the server failed at this", category="server").body, 500)

    def route(path: str, verb: Verb, *methods: str, below: str = f"{API}/") -> Route:
        async def endpoint(request: HTTPRequest) -> Response:
            return await answer(request, verb)

        return Route(below + path, endpoint, methods=list(methods) or ["POST"])

    def constant(content: object) -> Verb:
        async def verb(_: Call) -> object:
            return content

        return verb

    async def health(_: HTTPRequest) -> Response:
        return _Answer({"status": "ok"})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        behind = await service.start()
        if behind:
            logger.warning(
                "%d verbs are executed once more, those of each model when it is asked for something", behind
            )
        sweeping = asyncio.create_task(service.checkpoints.sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await service.close()

    async def download(request: HTTPRequest) -> Response:
        try:
            return FileResponse(service.checkpoints.file(request.path_params), media_type="application/octet-stream")
        except Refused as error:
            return _Answer(error.body, error.status)

    constants = [route(path, constant(content)) for path, content in _CONSTANT.items()]
    signed = Route(f"{API}/download/{{expires}}/{{signature}}/{{model}}/{{part}}/{{name}}/{{file}}", download)
    metrics = route("metrics", api.metrics, "GET", below="/")
    keyless = [Route(f"{API}/healthz", health), signed]
    return Starlette(
        routes=[*keyless, metrics, *constants, *(route(*each) for each in api.routes())], lifespan=lifespan
    )


class _Api:
    """The verbs by their addresses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[tuple[Any, ...]]:
        """Return addresses, verbs and methods."""
        saves = ("save_weights", "save_weights_for_sampler", "save_weights_external")
        checkpoint = "training_runs/{model}/checkpoints/{part}/{name}"
        return [
            ("get_server_capabilities", self._capabilities, "GET"),
            ("create_session", lambda call: self._service.create_session(call.tenant, call.content)),
            ("session_heartbeat", self._heartbeat),
            ("sessions/{session}/finish", lambda call: self._service.finish_session(call.tenant, call.path["session"])),
            ("sessions", self._sessions, "GET"),
            ("sessions/{session}", self._session, "GET"),
            ("create_model", lambda call: self._service.create_model(call.tenant, call.content)),
            ("load_weights", self._load),
            ("get_info", self._info),
            ("forward_backward", lambda call: self._pass(call, "forward_backward")),
            ("forward", lambda call: self._pass(call, "forward")),
            ("optim_step", self._optim_step),
            *((name, self._of_model(name, Save)) for name in saves),
            ("unload_model", self._of_model("unload_model", Asked)),
            ("copy_weights", self._copy),
            ("create_sampling_session", lambda call: self._service.create_sampling_session(call.tenant, call.content)),
            ("join_sampling_session", self._join),
            ("samplers/{sampler}", self._sampler, "GET"),
            ("asample", lambda call: self._service.sample(call.tenant, call.content)),
            ("retrieve_future", self._retrieve),
            ("cancel_future", self._cancel),
            ("weights_info", self._weights_info),
            ("training_runs", self._runs, "GET"),
            ("training_runs/{model}", self._run, "GET"),
            ("training_runs/{model}/checkpoints", self._checkpoints_of_run, "GET"),
            ("checkpoints", self._checkpoints, "GET"),
            (checkpoint, self._delete, "DELETE"),
            (f"{checkpoint}/ttl", self._ttl, "PUT"),
            (f"{checkpoint}/external_weights_urls", lambda call: self._urls(call, archive=False), "GET"),
            (f"{checkpoint}/archive", lambda call: self._urls(call, archive=True), "GET"),
            ("{path:path}", self._unknown, "GET", "POST", "PUT", "DELETE"),
        ]

    async def _capabilities(self, call: Call) -> Any:
        models = [
            {"model_name": name, "max_context_length": each.about.max_length, "trainable": True, "sampleable": True}
            | {"takes_images": each.images is not None}
            for name, each in self._service.bases.by_name.items()
        ]
        denied = () if self._service.limits.full_for == call.tenant else ("full_fine_tuning",)
        return {"supported_models": models, "not_supported": [*_NOT_SUPPORTED, *denied]}

    async def metrics(self, call: Call) -> Any:
        """The tenant's numbers for Prometheus."""
        return Response(as_prometheus(self._service.records, call.tenant), media_type=CONTENT_TYPE)

    async def _heartbeat(self, call: Call) -> Any:
        session = self._service.records.session(call.tenant, call.content.get("session_id"))
        if session.is_finished:
            raise Refused("the session is finished", status=410)
        return {"type": "session_heartbeat"}

    async def _sessions(self, call: Call) -> Any:
        own = [each.session_id for each in self._service.records.sessions.values() if each.tenant == call.tenant]
        return {"sessions": call.page(own[::-1])[0]}

    async def _session(self, call: Call) -> Any:
        records = self._service.records
        session = records.session(call.tenant, call.path["session"])
        models = [each for each in records.models if each.startswith(f"{session.session_id}:")]
        samplers = [key for key, each in records.samplers.items() if each.session_id == session.session_id]
        return {
            "training_run_ids": models,
            "sampler_ids": samplers,
            "user_metadata": session.metadata.get("user_metadata"),
            "display_name": session.metadata.get("display_name"),
        }

    async def _info(self, call: Call) -> Any:
        model = self._service.records.model(call.tenant, call.content.get("model_id"))
        bases, base = self._service.bases, model.facts.base
        name = bases.name(base)
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": name,
            **_kind(model.facts),
            "model_data": {"arch": bases.of(base).about.architecture, "model_name": name, "tokenizer_id": name},
        }

    async def _ordered(
        self,
        call: Call,
        verb: str,
        model: object,
        seq: object,
        content: Callable[[], Mapping[str, Any]],
        body: Callable[[], bytes] = bytes,
    ) -> Any:
        """Promise a verb of a model. Where its `content` or its `body` raises Refused the promise says why: the number is
        used, and requests with later ones do not wait for it."""
        try:
            asked, data = content(), body()
        except Refused as error:
            verb, asked, data = REFUSED, {"error": str(error)}, b""
        return await self._service.submit(call.tenant, verb, model, seq, asked, data)

    async def _pass(self, call: Call, verb: str) -> Any:
        """Promise a pass. What is journaled is the same for a retry, whose bytes may differ in the order of entries."""
        content: Mapping[str, Any] = {}
        if call.content_type == wire.PROTOBUF:
            sent = wire.parsed_protobuf(call.body)
            if sent.seq_id < 1:
                raise Refused(f"seq_id must be from 1 on; got {sent.seq_id}, and 0 is none in protobuf")
            model, seq, verb = sent.model_id, sent.seq_id, "forward" if sent.forward_only else "forward_backward"
        else:
            sent, content = None, call.content
            model, seq = content.get("model_id"), content.get("seq_id")

        def body() -> bytes:
            message = wire.message_of_json(content, backward=verb == "forward_backward") if sent is None else sent
            wire.decoded(message)
            data: bytes = message.SerializeToString(deterministic=True)
            return data

        return await self._ordered(call, verb, model, seq, dict, body)

    async def _load(self, call: Call) -> Any:
        content = call.content
        model = content.get("model_id")
        if model is None:
            return await self._service.load_weights(call.tenant, content)
        seq = content.get("seq_id")
        return await self._ordered(
            call, "load_weights", model, seq, lambda: self._service.load_into(call.tenant, content)
        )

    async def _optim_step(self, call: Call) -> Any:
        content = call.content
        params: Any = content.get("adam_params", content.get("optimizer_params"))
        model, seq = content.get("model_id"), content.get("seq_id")
        return await self._ordered(call, "optim_step", model, seq, lambda: _as_sent(Adam, params, "adam_params"))

    def _of_model(self, verb: str, kind: type[Asked]) -> Verb:
        async def submit(call: Call) -> Any:
            content = call.content
            model, seq = content.pop("model_id", None), content.pop("seq_id", None)
            return await self._ordered(call, verb, model, seq, lambda: _as_sent(kind, content, verb))

        return submit

    async def _copy(self, call: Call) -> Any:
        key = call.request.headers.get("x-idempotency-key", "")
        return await self._service.checkpoints.copy(call.tenant, call.content, key)

    async def _ttl(self, call: Call) -> Any:
        await self._service.checkpoints.set_ttl(call.tenant, call.checkpoint, call.content)
        return {}

    async def _urls(self, call: Call, *, archive: bool) -> Any:
        base = f"{call.request.base_url}".rstrip("/") + API
        return await self._service.checkpoints.urls(call.tenant, call.checkpoint, base, archive=archive)

    async def _join(self, call: Call) -> Any:
        return await self._service.join(call.tenant, call.content.get("sampling_session_id"))

    async def _sampler(self, call: Call) -> Any:
        sampler = self._service.records.sampler(call.tenant, call.path["sampler"])
        base = self._service.bases.name(self._service.records.base_of(sampler))
        return {"sampler_id": sampler.sampler_id, "base_model": base, "model_path": sampler.path}

    async def _retrieve(self, call: Call) -> Any:
        request_id = call.content.get("request_id")
        outcome = await self._service.retrieve(call.tenant, request_id, timeout_s=_POLL_S)
        if outcome is None:
            return _Answer({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if "error" in outcome:
            return {"error": outcome["error"], "category": outcome["category"]}
        if "json" in outcome:
            return outcome["json"]
        data = wire.from_base64(outcome["data"])
        if wire.PROTOBUF in call.request.headers.get("accept", ""):
            return Response(data, media_type=wire.PROTOBUF)
        return wire.as_json(outcome["message"], data)

    async def _cancel(self, call: Call) -> Any:
        await self._service.cancel(call.tenant, call.content.get("request_id"))
        return {}

    async def _weights_info(self, call: Call) -> Any:
        facts = self._service.records.checkpoint(call.tenant, call.content.get("tinker_path")).facts
        return {
            "base_model": self._service.bases.name(facts.base),
            **_kind(facts),
            "train_unembed": facts.is_full,
            "train_mlp": facts.train_mlp,
            "train_attn": facts.train_attn,
        }

    async def _runs(self, call: Call) -> Any:
        own = [each for each in self._service.records.models.values() if each.tenant == call.tenant]
        found, cursor = call.page(own[::-1])
        return {"training_runs": [self._as_run(each) for each in found], "cursor": cursor}

    async def _run(self, call: Call) -> Any:
        return self._as_run(self._service.records.model(call.tenant, call.path["model"], loaded=False))

    async def _checkpoints_of_run(self, call: Call) -> Any:
        model = self._service.records.model(call.tenant, call.path["model"], loaded=False)
        found = self._service.records.checkpoints_of(call.tenant, model.model_id)
        return {"checkpoints": [_as_checkpoint(each) for each in found]}

    async def _checkpoints(self, call: Call) -> Any:
        found, cursor = call.page(self._service.records.checkpoints_of(call.tenant))
        return {"checkpoints": [_as_checkpoint(each) for each in found], "cursor": cursor}

    async def _delete(self, call: Call) -> Any:
        await self._service.checkpoints.delete(call.tenant, call.checkpoint)
        return Response(status_code=204)

    async def _unknown(self, call: Call) -> Any:
        path = call.path["path"]
        for name, instead in _NOT_SERVED.items():
            if name in path.split("/"):
                raise Refused(f"{name} is not served: {instead}", status=404)
        raise Refused(f"{call.request.method} {API}/{path[:100]} is not served", status=404)

    def _as_run(self, model: Model) -> dict[str, Any]:
        found = self._service.records.checkpoints_of(model.tenant, model.model_id)
        last = {
            kind: next((_as_checkpoint(each) for each in found if each.kind == kind), None) for kind in KINDS.values()
        }
        return {
            "training_run_id": model.model_id,
            "base_model": self._service.bases.name(model.facts.base),
            "model_owner": model.tenant,
            **_kind(model.facts),
            "last_request_time": as_time(model.last_request_at),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": model.metadata,
        }


def _kind(facts: ModelFacts) -> dict[str, Any]:
    """Whether a model is an adapter, and of which rank, as SDKs read it."""
    return {"is_lora": not facts.is_full, "lora_rank": facts.rank or None}


def _as_sent(kind: type[Asked], content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the content, which is journaled as it came. Raises Refused."""
    checked(kind, content, where)
    return content


def _as_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(checkpoint.path.split("/")[3:]),
        "checkpoint_type": checkpoint.kind,
        "time": as_time(checkpoint.at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.num_bytes,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires_at is None else as_time(checkpoint.expires_at),
    }


def _tenant(request: HTTPRequest, tenants: Mapping[str, str]) -> str:
    """Raises Refused for a key of nobody. Keys are looked up by their hash, so that time tells nothing of them."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
    tenant = tenants.get(key)
    if tenant is None:
        raise Refused("X-API-Key is missing, or nobody's", status=401)
    return tenant


async def _body(request: HTTPRequest) -> bytes:
    """Raises Refused for one that is too large, before it is read where its length is stated."""
    limit = wire.MAX_BODY_BYTES
    too_large = Refused(f"a body may have {limit} bytes; send fewer examples at once", status=413)
    stated = request.headers.get("content-length", "0")
    if not stated.isdigit() or int(stated) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large
    return wire.decompressed(b"".join(parts), request.headers.get("content-encoding", ""))
