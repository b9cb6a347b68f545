"""A reference server of Tinker's API, in one process, with arithmetic small enough to be exact.

The "language model" is the one of `softmax.py`. Nothing here is fast, safe from a hostile user or meant for training: it
says what the suite takes for right, and `planted.py` breaks it on purpose. Run alone:
`python reference.py --port 8000 --keys tml-a,tml-b [--journal FILE]`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from softmax import CONTEXT, Weights, forward_backward, optim_step, require, sample, short, zeros
from wire import LARGEST_BODY, PROTOBUF, Json, Refused, output_bytes, read_body, sample_bytes

BASE = "conformance/linear-softmax"
HOLD_S = 1.0  # how long a poll of an unfinished request is held before 408
CONFIG = {"proto_compress_fwdbwd": True, "sample_join_sampling_session": True}
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
NOT_SUPPORTED = ["loss:gspo", "inflight_sampler", "copy_weights", "publish"]


@dataclass
class Model(Weights):
    """A training run, and its requests that wait for those before them."""

    owner: str
    id: str
    metadata: Json | None
    rank: int = 32
    next_seq: int = 0
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)


@dataclass
class Owned(Weights):
    """What else a tenant has: a session, a sampler, a checkpoint or the future of a request."""

    owner: str
    about: Json = field(default_factory=dict)
    result: Json | None = None
    over: bool = False


class Service:
    """The state of the server and its verbs; `handle` is the only way in, for HTTP and for the journal alike.

    `run_X` is what a request of POST /api/v1/X does to a model when its turn has come, `now_X` what is answered at once.
    """

    def __init__(self, keys: list[str], journal: Path | None = None) -> None:
        self.keys, self.changed = keys, threading.Condition(threading.RLock())
        self.models: dict[str, Model] = {}
        self.sessions: dict[str, Owned] = {}
        self.samplers: dict[str, Owned] = {}
        self.checkpoints: dict[str, Owned] = {}
        self.futures: dict[str, Owned] = {}
        self.promises: dict[str, tuple[str, Json]] = {}
        self.journal: Path | None = None
        for line in journal.read_text().splitlines() if journal is not None and journal.exists() else []:
            path, headers, body = json.loads(line)
            self.handle("POST", path, headers, base64.b64decode(body))
        self.journal = journal

    def handle(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes, str]:
        """The status, the body and the content type that answer a request; an error is `{"detail": ...}`."""
        try:
            status, answer = self.route(method, path, headers, body)
        except Refused as refusal:
            status, answer = refusal.status, {"detail": str(refusal)}
        except (KeyError, TypeError, ValueError) as error:
            status, answer = 422, {"detail": f"the request lacks or misuses a field: {error!r}"}
        if isinstance(answer, bytes):
            return status, answer, PROTOBUF
        return status, json.dumps(answer).encode(), "application/json"

    def route(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        parts, owner = path.partition("?")[0].removeprefix("/api/v1/").split("/"), headers.get("x-api-key", "")
        if parts == ["healthz"]:
            return 200, {"status": "ok"}
        if parts[0] == "download":  # a signed address: whoever has it needs no key
            return 200, next(self.file(kept) for name, kept in self.checkpoints.items() if short(name) == parts[1])
        if owner not in self.keys:
            raise Refused(401, "the header X-API-Key holds no key of this server")
        if method != "POST":
            with self.changed:
                return 200, self.rest(method, parts, owner, headers, json.loads(body or b"{}"))
        given, verb = read_body(headers, body), "_".join(parts)
        if parts[0] == "sessions" and parts[-1] == "finish":
            given, verb = {"session_id": parts[1]}, "finish"
        if verb == "retrieve_future":
            return self.retrieve(given, owner, headers)
        with self.changed:
            run: Any = getattr(self, f"run_{verb}", None)
            now: Any = getattr(self, f"now_{verb}", None)
            if run is None and now is None:
                raise Refused(404, f"POST {path} is not served here")
            digest = short(f"{path} {headers.get('content-type')} {base64.b64encode(body).decode()}")
            answer = now(given, owner, digest) if run is None else self.enqueue(run, given, owner, digest)
            if self.journal is not None:
                kept = {name: value for name, value in headers.items() if name.startswith(("content-", "x-api"))}
                with self.journal.open("a", encoding="utf-8") as out:
                    out.write(json.dumps([path, kept, base64.b64encode(body).decode()]) + "\n")
        return 200, answer

    @staticmethod
    def own(table: dict[str, Any], name: Any, owner: str) -> Any:
        if name not in table or table[name].owner != owner:
            raise Refused(404, f"{name!r} is not known here")
        return table[name]

    def once(self, key: str, digest: str, make: Callable[[], Json]) -> Json:
        """The same answer to the same request, which a client sends again when an answer was lost."""
        if key not in self.promises:
            self.promises[key] = (digest, make())
        if self.promises[key][0] != digest:
            raise Refused(422, f"{key.split()[1:]} was given before, to another request")
        return self.promises[key][1]

    def enqueue(self, run: Callable[[Model, Json], Json], given: Json, owner: str, digest: str) -> Json:
        """The promise of a request to a model. Requests run in the order of their numbers, each once."""
        seq: Any = given.get("seq_id")
        if given.get("session_id") is not None:  # create_model, or load_weights in its place
            self.own(self.sessions, given["session_id"], owner)
            model_id, seq = f"{given['session_id']}:train:{int(given['model_seq_id'])}", 0
            model = self.models.setdefault(model_id, Model(owner, model_id, given.get("user_metadata")))
        else:
            model = self.own(self.models, given.get("model_id"), owner)

        def make() -> Json:
            require(isinstance(seq, int) and seq >= model.next_seq, f"seq_id {seq!r} is not {model.next_seq} or above")
            model.waiting[seq] = self.future(name, owner, lambda _: run(model, given))
            while model.next_seq in model.waiting:
                model.waiting.pop(model.next_seq)()
                model.next_seq += 1
            return {"request_id": name, "model_id": model.id}

        name = "request-" + short(f"{model.id} {seq}")
        return self.once(f"{owner} {model.id} {seq}", digest, make)

    def future(self, name: str, owner: str, run: Callable[[Owned], Json]) -> Callable[[], None]:
        """A function that runs a request and keeps its result, or its error, under its name."""
        future = self.futures[name] = Owned(owner)

        def finish() -> None:
            try:
                result = run(future)
            except (Refused, KeyError, TypeError, ValueError) as error:
                result = {"error": str(error), "category": "user"}
            with self.changed:
                future.result = result
                self.changed.notify_all()

        return finish

    def retrieve(self, given: Json, owner: str, headers: dict[str, str]) -> tuple[int, Json | bytes]:
        with self.changed:
            future = self.own(self.futures, given["request_id"], owner)
            if not self.changed.wait_for(lambda: future.result is not None, HOLD_S):
                return 408, {"type": "try_again", "request_id": given["request_id"], "queue_state": "active"}
        if PROTOBUF in headers.get("accept", "") and "loss_fn_outputs" in future.result:
            return 200, output_bytes(future.result)
        if PROTOBUF in headers.get("accept", "") and "sequences" in future.result:
            return 200, sample_bytes(future.result)
        return 200, future.result

    def run_create_model(self, model: Model, given: Json) -> Json:
        del self.models[model.id]  # until nothing is wrong with it
        require(given["base_model"] == BASE, f"base_model {given['base_model']!r} is not served: choose {BASE}")
        require((given.get("optimizer_config") or {"type": "adamw"})["type"] == "adamw", "only adamw is served")
        model.rank = (given.get("lora_config") or {}).get("rank", 32)
        require(model.rank >= 1, "lora_config.rank must be at least 1")
        self.models[model.id] = model
        return {"type": "create_model", "model_id": model.id}

    def run_load_weights(self, model: Model, given: Json) -> Json:
        require(model.next_seq <= 1, "load_weights must be a model's first request: create one from the checkpoint")
        kept = self.own(self.checkpoints, given["path"], model.owner)
        model.weights, model.rank = kept.weights, kept.about["rank"]
        if given.get("optimizer", False):
            model.moments = kept.moments
        return {"type": "load_weights", "path": given["path"], "model_id": model.id}

    def run_forward_backward(self, model: Model, given: Json) -> Json:
        return forward_backward(model, given["forward_backward_input"], not given.get("forward_only"))

    def run_forward(self, model: Model, given: Json) -> Json:
        return forward_backward(model, given["forward_input"], False)

    def run_optim_step(self, model: Model, given: Json) -> Json:
        require("adam_params" in given, "only adam_params are served: no other optimizer")
        return {"type": "optim_step", **optim_step(model, given["adam_params"])}

    def save(self, model: Model, given: Json, kind: str, folder: str) -> str:
        name = given.get("path") or f"unnamed-{model.next_seq}"
        fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
        require(fits, f"path {name!r} must be 1 to 128 letters, digits, '.', '_' or '-'")
        path = f"tinker://{model.id}/{folder}/{name}"
        require(path not in self.checkpoints or bool(given.get("overwrite")), f"{path} exists: set overwrite")
        about = {"checkpoint_id": f"{folder}/{name}", "checkpoint_type": kind, "tinker_path": path, "rank": model.rank}
        about |= {"user_metadata": given.get("user_metadata"), "time": "2026-01-01T00:00:00Z", "run": model.id}
        self.checkpoints[path] = Owned(model.owner, about, weights=model.weights, moments=model.moments)
        return path

    def run_save_weights(self, model: Model, given: Json) -> Json:
        return {"type": "save_weights", "path": self.save(model, given, "training", "weights")}

    def run_save_weights_external(self, model: Model, given: Json) -> Json:
        return {"type": "save_weights_external", "path": self.save(model, given, "external", "external_weights")}

    def run_save_weights_for_sampler(self, model: Model, given: Json) -> Json:
        require(given.get("kind", "snapshot") == "snapshot", "kind 'inflight' is not served: save a snapshot")
        if given.get("path") is not None:
            path = self.save(model, given, "sampler", "sampler_weights")
            return {"type": "save_weights_for_sampler", "path": path}
        name = f"{model.id.partition(':')[0]}:sample:{int(given['sampling_session_seq_id'])}"
        self.samplers[name] = Owned(model.owner, {"model_path": None}, weights=model.weights)
        return {"type": "save_weights_for_sampler", "sampling_session_id": name}

    def now_client_config(self, given: Json, owner: str, digest: str) -> Json:
        return CONFIG

    def now_client_dynamic_config(self, given: Json, owner: str, digest: str) -> Json:
        return DYNAMIC_CONFIG

    def now_telemetry(self, given: Json, owner: str, digest: str) -> Json:
        return {"status": "accepted"}

    def now_create_session(self, given: Json, owner: str, digest: str) -> Json:
        name = f"session-{len(self.sessions):06d}"
        self.sessions[name] = Owned(owner, {"user_metadata": given.get("user_metadata")})
        return {"type": "create_session", "session_id": name}

    def now_session_heartbeat(self, given: Json, owner: str, digest: str) -> Json:
        if self.own(self.sessions, given["session_id"], owner).over:
            raise Refused(410, "the session is finished")
        return {"type": "session_heartbeat"}

    def now_finish(self, given: Json, owner: str, digest: str) -> Json:
        self.own(self.sessions, given["session_id"], owner).over = True
        return {}

    def now_create_sampling_session(self, given: Json, owner: str, digest: str) -> Json:
        self.own(self.sessions, given["session_id"], owner)
        name, path = f"{given['session_id']}:sample:{int(given['sampling_session_seq_id'])}", given.get("model_path")
        if path is None and given.get("base_model") != BASE:
            raise Refused(404, f"base_model {given.get('base_model')!r} is not served: choose {BASE}")

        def make() -> Json:
            weights = zeros() if path is None else self.own(self.checkpoints, path, owner).weights
            self.samplers[name] = Owned(owner, {"model_path": path}, weights=weights)
            return {"type": "create_sampling_session", "sampling_session_id": name}

        return self.once(f"{owner} {name}", digest, make)

    def now_join_sampling_session(self, given: Json, owner: str, digest: str) -> Json:
        about = self.own(self.samplers, given["sampling_session_id"], owner).about
        about["clients"] = about.get("clients", 0) + 1
        return {"type": "join_sampling_session", "client_counter": about["clients"]}

    def now_asample(self, given: Json, owner: str, digest: str) -> Json:
        sampler, count = self.own(self.samplers, given["sampling_session_id"], owner), int(given.get("num_samples", 1))
        name = "request-" + short(f"{given['sampling_session_id']} sample {given['seq_id']}")

        def make() -> Json:
            finish = self.future(name, owner, lambda future: sample(sampler.weights, given, name, lambda: future.over))
            threading.Thread(target=finish, daemon=True).start()
            return {"request_id": name, "sample_sequence_ids": [f"{name}-{index}" for index in range(count)]}

        return self.once(f"{owner} {name}", digest, make)

    def now_cancel_future(self, given: Json, owner: str, digest: str) -> Json:
        self.own(self.futures, given["request_id"], owner).over = True
        return {}

    def now_get_info(self, given: Json, owner: str, digest: str) -> Json:
        model = self.own(self.models, given["model_id"], owner)
        about = {"arch": "linear-softmax", "model_name": BASE, "tokenizer_id": BASE}
        return {"model_data": about, "model_id": model.id, "is_lora": True, "lora_rank": model.rank, "model_name": BASE}

    def now_weights_info(self, given: Json, owner: str, digest: str) -> Json:
        rank = self.own(self.checkpoints, given["tinker_path"], owner).about["rank"]
        return {"base_model": BASE, "is_lora": True, "lora_rank": rank}

    def rest(self, method: str, parts: list[str], owner: str, headers: dict[str, str], given: Json) -> Json:
        """What the command line reads: capabilities, sessions, training runs, samplers and checkpoints, all on one page."""
        mine = {path: kept.about for path, kept in self.checkpoints.items() if kept.owner == owner}
        runs = [self.run_of(model, mine) for model in self.models.values() if model.owner == owner]
        match method, parts:
            case "GET", ["get_server_capabilities"]:
                model = {"model_name": BASE, "max_context_length": CONTEXT, "trainable": True, "sampleable": True}
                return {"supported_models": [model], "not_supported": NOT_SUPPORTED}
            case "GET", ["sessions", name]:
                about, tables = self.own(self.sessions, name, owner).about, (self.models, self.samplers)
                trained, sampled = ([key for key in table if key.startswith(f"{name}:")] for table in tables)
                return {"training_run_ids": trained, "sampler_ids": sampled, **about}
            case "GET", ["samplers", name]:
                return {"sampler_id": name, "base_model": BASE, **self.own(self.samplers, name, owner).about}
            case "GET", ["sessions"]:
                return {"sessions": [name for name, session in self.sessions.items() if session.owner == owner]}
            case "GET", ["training_runs"]:
                return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}
            case "GET", ["training_runs", name]:
                return self.run_of(self.own(self.models, name, owner), mine)
            case "GET", ["training_runs", name, "checkpoints"]:
                self.own(self.models, name, owner)
                return {"checkpoints": [about for about in mine.values() if about["run"] == name]}
            case "GET", ["checkpoints"]:
                cursor = {"offset": 0, "limit": len(mine), "total_count": len(mine)}
                return {"checkpoints": list(mine.values()), "cursor": cursor}
            case _, ["training_runs", run, "checkpoints", folder, name, *rest]:
                path = f"tinker://{run}/{folder}/{name}"
                kept = self.own(self.checkpoints, path, owner)
                if (method, rest) == ("DELETE", []):
                    del self.checkpoints[path]
                    return {}
                if (method, rest) == ("PUT", ["ttl"]):
                    seconds = given["ttl_seconds"]
                    require(seconds is None or 3600 <= seconds <= 315_360_000, "ttl_seconds is no 1 hour to 10 years")
                    end = time.gmtime(time.time() + (seconds or 0))
                    kept.about["expires_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", end) if seconds else None
                    return {}
                if (method, rest) == ("GET", ["external_weights_urls"]):
                    address = f"http://{headers.get('host')}/api/v1/download/{short(path)}"
                    return {"urls": {"adapter_model.npy": address}, "expires": "2100-01-01T00:00:00Z"}
        raise Refused(404, f"{method} /api/v1/{'/'.join(parts)} is not served here")

    @staticmethod
    def run_of(model: Model, checkpoints: dict[str, Json]) -> Json:
        about: Json = {"training_run_id": model.id, "base_model": BASE, "model_owner": short(model.owner)}
        about |= {"is_lora": True, "lora_rank": model.rank, "last_request_time": "2026-01-01T00:00:00Z"}
        for kind, name in (("training", "last_checkpoint"), ("sampler", "last_sampler_checkpoint")):
            saved = [
                each for each in checkpoints.values() if each["run"] == model.id and each["checkpoint_type"] == kind
            ]
            about[name] = saved[-1] if saved else None
        return {**about, "user_metadata": model.metadata}

    @staticmethod
    def file(kept: Owned) -> bytes:
        content = io.BytesIO()
        np.save(content, kept.weights, allow_pickle=False)
        return content.getvalue()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body leave in one packet
    service: Service

    def answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if length > LARGEST_BODY:  # it is not even read
            self.close_connection = True
            status, body, kind = 413, b'{"detail": "the body is too large"}', "application/json"
        else:
            status, body, kind = self.service.handle(self.command, self.path, headers, self.rfile.read(length))
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the suite reports what matters."""


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A reference server of Tinker's API.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one, which is printed")
    parser.add_argument("--keys", default="tml-reference,tml-other", help="the keys of the tenants, with commas")
    parser.add_argument("--journal", type=Path, help="a file by which answered requests survive a kill")
    arguments = parser.parse_args()
    Handler.service = Service(arguments.keys.split(","), arguments.journal)
    with Listener(("127.0.0.1", arguments.port), Handler) as listener:
        print(f"http://127.0.0.1:{listener.server_address[1]}", flush=True)
        listener.serve_forever()
