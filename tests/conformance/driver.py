"""A client of Tinker's API that shows what the SDK hides: raw HTTP, with requests and results in the SDK's schema.

The SDK retries, renumbers and waits by itself; a check of idempotence or of an order has to do none of it. Each object here
sends exactly one request for each call, and numbers it as it is told.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tinker  # noqa: F401  (before wire, which then takes its schema from it)
import zstandard
from wire import PROTOBUF, Json, read_output, read_sample, request_bytes

TIMEOUT_S = 60.0  # of one HTTP request: the SDK's long poll takes 45
DEADLINE_S = float(os.environ.get("CONFORMANCE_DEADLINE_S", "180"))  # of one result
Prompt = Sequence[int] | Json  # token ids, or a ModelInput


class StatusError(Exception):
    """The server answered a request by this HTTP status."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}: {answer.body[:300]!r}")
        self.answer = answer


class RequestFailed(Exception):
    """The future of a request ended in this error."""

    def __init__(self, result: Json) -> None:
        super().__init__(f"{result.get('category')}: {result.get('error')}")
        self.message, self.category = str(result.get("error")), result.get("category")


@dataclass(frozen=True)
class Answer:
    """One HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """One server under one key. Each thread has its own connection, as servers close idle ones."""

    def __init__(self, url: str, key: str, model: str, json_wire: bool = False) -> None:
        self.url, self.key, self.model, self.json_wire = url.rstrip("/"), key, model, json_wire
        self._local = threading.local()

    def _connection(self, fresh: bool) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if fresh or getattr(self._local, "connection", None) is None:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._local.connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        return self._local.connection  # type: ignore[no-any-return]

    def send(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """The response to one request, whatever its status. Without a key of its own it carries the server's."""
        sent = {"X-API-Key": self.key, **(headers or {})}
        sent = {name: value for name, value in sent.items() if value}
        begun = time.perf_counter()
        for attempt in (0, 1):
            connection = self._connection(fresh=attempt == 1)
            try:
                connection.request(method, urlsplit(self.url).path + "/api/v1/" + path, body, sent)
                response = connection.getresponse()
                read = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None  # it takes no request any more, a server that is starting included
                closed = isinstance(error, http.client.RemoteDisconnected | BrokenPipeError | ConnectionResetError)
                if attempt == 1 or not closed:
                    raise
        if response.will_close:
            self._local.connection = None
        named = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, named, read, time.perf_counter() - begun)

    def post(self, path: str, given: Json, **headers: str) -> Answer:
        sent = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        return self.send("POST", path, json.dumps(given).encode(), sent)

    def call(self, path: str, given: Json, **headers: str) -> Json:
        return checked(self.post(path, given, **headers))

    def get(self, path: str) -> Json:
        return checked(self.send("GET", path))

    def retrieve(
        self, request_id: str, accept: str = f"{PROTOBUF}, application/json", metadata: bool = False
    ) -> Answer:
        """One poll of a future."""
        return self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": metadata}, Accept=accept)

    def wait(self, promise: Json, accept: str | None = None) -> Json:
        """The result of a promise, in JSON's shape. Raises RequestFailed, or StatusError for another status than 408."""
        accept = accept or ("application/json" if self.json_wire else f"{PROTOBUF}, application/json")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            answer = self.retrieve(promise["request_id"], accept)
            if answer.status == 408:
                continue
            if answer.status != 200:
                raise StatusError(answer)
            result = self.decode(answer, sampled="sample_sequence_ids" in promise)
            if result.get("type") == "try_again":
                continue
            if "error" in result:
                raise RequestFailed(result)
            return result
        raise TimeoutError(f"{promise} has no result after {DEADLINE_S:g} s")

    @staticmethod
    def decode(answer: Answer, sampled: bool) -> Json:
        if PROTOBUF in answer.headers.get("content-type", ""):
            return read_sample(answer.body) if sampled else read_output(answer.body)
        return answer.json()  # type: ignore[no-any-return]

    def with_key(self, key: str) -> Server:
        return Server(self.url, key, self.model, self.json_wire)

    def session(self) -> Session:
        given = {"tags": [], "user_metadata": {}, "sdk_version": "conformance", "type": "create_session"}
        return Session(self, self.call("create_session", given)["session_id"])


def checked(answer: Answer) -> Json:
    if not 200 <= answer.status < 300:
        raise StatusError(answer)
    return answer.json() if answer.body else {}


@dataclass
class Session:
    """A session, in which models and samplers are numbered."""

    server: Server
    id: str
    models: Any = field(default_factory=itertools.count)
    samplers: Any = field(default_factory=itertools.count)

    def create(self, number: int | None = None, **fields: Any) -> Json:
        """The promise of a new model."""
        given = {"session_id": self.id, "model_seq_id": next(self.models) if number is None else number}
        given |= {"base_model": self.server.model, "lora_config": {"rank": 8, "seed": 5}, "type": "create_model"}
        return self.server.call("create_model", {**given, **fields})

    def model(self, **fields: Any) -> Run:
        return Run(self, self.server.wait(self.create(**fields))["model_id"])

    def load(self, path: str, optimizer: bool | None, **fields: Any) -> Run:
        """A new model from a checkpoint, in one request, as SDKs since 0.25 make it."""
        given: Json = {"session_id": self.id, "model_seq_id": next(self.models), "path": path, "type": "load_weights"}
        if optimizer is not None:
            given["optimizer"] = optimizer
        result = self.server.wait(self.server.call("load_weights", {**given, **fields}))
        return Run(self, result.get("model_id") or f"{self.id}:train:{given['model_seq_id']}")

    def sampler(self, path: str | None = None) -> Sampler:
        """A sampler of a checkpoint, or of the base model."""
        about = {"base_model": self.server.model} if path is None else {"model_path": path}
        given = {"session_id": self.id, "sampling_session_seq_id": next(self.samplers), **about}
        given["type"] = "create_sampling_session"
        return Sampler(self, self.server.call("create_sampling_session", given)["sampling_session_id"])


@dataclass
class Run:
    """A training run. `seq` is the number of its next request."""

    session: Session
    id: str
    seq: int = 1

    @property
    def server(self) -> Server:
        return self.session.server

    def number(self, seq: int | None) -> int:
        if seq is None:
            seq, self.seq = self.seq, self.seq + 1
        return seq

    def submit(self, verb: str, given: Json, seq: int | None = None) -> Json:
        """The promise of a request in JSON."""
        return self.server.call(verb, {"model_id": self.id, "seq_id": self.number(seq), **given})

    def submit_pass(
        self,
        data: Sequence[Json],
        loss: str = "cross_entropy",
        config: Json | None = None,
        forward_only: bool = False,
        seq: int | None = None,
        zstd: bool = False,
        json_wire: bool | None = None,
    ) -> Json:
        """The promise of forward_backward, or of forward, on the wire of the SDK that is tested."""
        given: Json = {
            "data": list(data),
            "loss_fn": loss,
            **({"loss_fn_config": config} if config is not None else {}),
        }
        request: Json = {"model_id": self.id, "seq_id": self.number(seq)}
        if self.server.json_wire if json_wire is None else json_wire:
            name = "forward" if forward_only else "forward_backward"
            field_name = "forward_input" if forward_only else "forward_backward_input"
            return self.server.call(name, {**request, field_name: given})
        body = request_bytes({**request, "forward_backward_input": given, "forward_only": forward_only})
        headers = {"Content-Type": PROTOBUF}
        if zstd:
            body, headers["Content-Encoding"] = zstandard.ZstdCompressor().compress(body), "zstd"
        return checked(self.server.send("POST", "forward_backward", body, headers))

    def forward_backward(self, data: Sequence[Json], loss: str = "cross_entropy", config: Json | None = None) -> Output:
        return Output(self.server.wait(self.submit_pass(data, loss, config)))

    def forward(self, data: Sequence[Json], loss: str = "cross_entropy", config: Json | None = None) -> Output:
        return Output(self.server.wait(self.submit_pass(data, loss, config, forward_only=True)))

    def submit_step(self, seq: int | None = None, **adam: Any) -> Json:
        return self.submit("optim_step", {"adam_params": adam, "type": "optim_step"}, seq)

    def step(self, **adam: Any) -> Json:
        """One AdamW step with the SDK's defaults but for what is given."""
        defaults = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        return self.server.wait(self.submit_step(**{**defaults, **adam}))

    def save(self, name: str, **fields: Any) -> str:
        promise = self.submit("save_weights", {"path": name, "type": "save_weights", **fields})
        return str(self.server.wait(promise)["path"])

    def save_external(self, name: str) -> str:
        promise = self.submit("save_weights_external", {"path": name, "type": "save_weights_external"})
        return str(self.server.wait(promise)["path"])

    def save_for_sampler(self, name: str) -> str:
        promise = self.submit("save_weights_for_sampler", {"path": name, "type": "save_weights_for_sampler"})
        return str(self.server.wait(promise)["path"])

    def snapshot(self) -> Sampler:
        """A sampler of the weights as they are, without a name."""
        given = {"sampling_session_seq_id": next(self.session.samplers), "type": "save_weights_for_sampler"}
        result = self.server.wait(self.submit("save_weights_for_sampler", given))
        return Sampler(self.session, result["sampling_session_id"])


@dataclass
class Sampler:
    """A sampling session. `seq` is the number of its next request."""

    session: Session
    id: str
    seq: int = 0

    def submit(self, prompt: Prompt, seq: int | None = None, params: Json | None = None, **fields: Any) -> Json:
        """The promise of samples: `params` are SamplingParams, `fields` those of the request."""
        if seq is None:
            seq, self.seq = self.seq, self.seq + 1
        given = {
            "sampling_session_id": self.id,
            "seq_id": seq,
            "type": "sample",
            "prompt": prompt if isinstance(prompt, dict) else model_input(prompt),
        }
        given["sampling_params"] = {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **(params or {})}
        return self.session.server.call("asample", {**given, **fields})

    def sample(self, prompt: Prompt, params: Json | None = None, **fields: Any) -> Json:
        return self.session.server.wait(self.submit(prompt, params=params, **fields))


class Output:
    """The result of a pass: log-probabilities of each datum's targets, and the metrics."""

    def __init__(self, result: Json) -> None:
        self.result, self.metrics = result, result["metrics"]
        self.logprobs = [np.array(each["logprobs"]["data"], float) for each in result["loss_fn_outputs"]]

    @property
    def loss(self) -> float:
        return float(self.metrics["loss:sum"])

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate(self.logprobs)


def model_input(tokens: Sequence[int]) -> Json:
    return {"chunks": [{"type": "encoded_text", "tokens": [int(token) for token in tokens]}]}


def tensor(values: Sequence[float] | np.ndarray, dtype: str = "float32") -> Json:
    cast: Callable[[Any], Any] = int if dtype == "int64" else float
    return {"data": [cast(value) for value in values], "dtype": dtype, "shape": [len(values)]}


def datum(tokens: Sequence[int], targets: Sequence[int], **fields: Sequence[float] | np.ndarray) -> Json:
    """A datum whose every other field is float32, one number for each target."""
    inputs = {"target_tokens": tensor(targets, "int64"), **{name: tensor(values) for name, values in fields.items()}}
    return {"model_input": model_input(tokens), "loss_fn_inputs": inputs}


def sequence(tokens: Sequence[int], weights: Sequence[float] | float = 1.0) -> Json:
    """A cross-entropy datum: each token but the last predicts the one after it."""
    each = [float(weights)] * (len(tokens) - 1) if isinstance(weights, int | float) else list(weights)
    return datum(tokens[:-1], tokens[1:], weights=each)
