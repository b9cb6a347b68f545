"""A server of Tinker's API in this process, and what speaks to it without the SDK."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_train import load_config

if TYPE_CHECKING:
    from skyrl_train.serve import ServedModels

KEYS = {"tml-ann-key": "ann", "tml-bob-key": "bob"}
BASE = "local/tiny_qwen2"
HAS_SCHEMA = importlib.util.find_spec("tinker") is not None
NEEDS_SCHEMA = "skyrl-serve needs the extra serve: tinker's protobuf schema"


def datum(tokens: Sequence[int], targets: Sequence[int] | None = None, **inputs: Sequence[float]) -> dict[str, Any]:
    """An example in JSON, as SDK 0.24 sends it; the targets are the next tokens, and the weights 1, unless given."""
    chosen = [*tokens[1:], 7] if targets is None else list(targets)
    inputs = {"weights": [1.0] * len(chosen), **inputs}
    tensors: dict[str, Any] = {"target_tokens": {"data": chosen, "dtype": "int64", "shape": [len(chosen)]}}
    for name, values in inputs.items():
        tensors[name] = {"data": list(values), "dtype": "float32", "shape": [len(values)]}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}, "loss_fn_inputs": tensors}


class Caller:
    """Sends requests as one tenant and waits for what it is promised."""

    def __init__(self, http: Any, key: str = "tml-ann-key") -> None:
        self.http, self.headers = http, {"X-API-Key": key}

    def send(self, route: str, content: Any = None, *, status: int | None = 200, **kwargs: Any) -> Any:
        """The answer to a POST, which has this status."""
        headers = {**self.headers, **kwargs.pop("headers", {})}
        answer = self.http.post(f"/api/v1/{route}", json=content, headers=headers, **kwargs)
        assert status is None or answer.status_code == status, answer.text
        return answer.json()

    def get(self, route: str, *, status: int = 200) -> Any:
        answer = self.http.get(f"/api/v1/{route}", headers=self.headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def outcome(self, promise: Mapping[str, Any]) -> Any:
        """What became of a promise, however long that takes."""
        while True:
            sent = {"request_id": promise["request_id"]}
            answer = self.http.post("/api/v1/retrieve_future", json=sent, headers=self.headers)
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer.json()

    def done(self, route: str, content: Any) -> Any:
        """The outcome of a verb, which succeeds."""
        found = self.outcome(self.send(route, content))
        assert "error" not in found, found
        return found

    def session(self) -> str:
        sent = {"tags": [], "user_metadata": None, "sdk_version": "0.24.1"}
        return str(self.send("create_session", sent)["session_id"])

    def model(self, session: str = "", *, number: int = 0, **lora: Any) -> str:
        config = {"rank": 4, "seed": 1, **lora}
        content = {"session_id": session or self.session(), "model_seq_id": number, "base_model": BASE}
        return str(self.done("create_model", {**content, "lora_config": config})["model_id"])

    def train(
        self,
        model: str,
        seq: int,
        data: Sequence[Any],
        loss: str = "cross_entropy",
        *,
        forward: bool = False,
        **config: float,
    ) -> Any:
        """The promise of a pass."""
        entry = {"data": list(data), "loss_fn": loss, "loss_fn_config": config or None}
        name, route = ("forward_input", "forward") if forward else ("forward_backward_input", "forward_backward")
        return self.send(route, {name: entry, "model_id": model, "seq_id": seq})

    def step(self, model: str, seq: int, **params: float) -> Any:
        return self.send(
            "optim_step", {"adam_params": {"learning_rate": 1e-2, **params}, "model_id": model, "seq_id": seq}
        )

    def logprobs(self, model: str, seq: int, tokens: Sequence[int] = (1, 2, 3, 4)) -> list[float]:
        found = self.outcome(self.train(model, seq, [datum(tokens)], forward=True))
        return list(found["loss_fn_outputs"][0]["logprobs"]["data"])

    def sample(self, sampler: str, seq: int, prompt: Sequence[int] = (1, 2, 3), **content: Any) -> Any:
        """The promise of samples."""
        params = {"max_tokens": 6, "temperature": 1.0, "seed": 5, **content.pop("params", {})}
        asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": list(prompt)}]}}
        return self.send("asample", {**asked, "sampling_params": params, **content}, status=content.pop("status", 200))

    def snapshot(self, model: str, seq: int, number: int) -> str:
        """A sampler of the model as it is now."""
        sent = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number}
        return str(self.done("save_weights_for_sampler", sent)["sampling_session_id"])


@contextmanager
def serving(folder: Path, *settings: str, also: Mapping[str, str] | None = None, **service: Any) -> Iterator[Any]:
    """The HTTP client of a server, which ends as at a signal. `also`: paths of more base models by their names."""
    from skyrl_train.config.derived import learner_settings
    from skyrl_train.serve import Models

    words = ["generator.sampling.temperature=1.0", *settings]
    bases = {}
    for name, own in {BASE: [], **{name: [f"model.path={path}"] for name, path in (also or {}).items()}}.items():
        config = load_config(*words, *own, settings={"output_dir": str(folder)})
        bases[name] = Models(learner_settings(config, "policy"), config.generator)
    with serving_models(bases, folder, **service) as http:
        yield http


@contextmanager
def serving_models(bases: Mapping[str, ServedModels], folder: Path, **service: Any) -> Iterator[Any]:
    """The HTTP client of a server of these base models, which ends as at a signal."""
    from starlette.testclient import TestClient

    from skyrl_train.serve import Service, make_app

    made = Service(bases, folder, seed=0, **service)
    with TestClient(make_app(made, KEYS)) as http:
        http.service = made
        yield http


def play_two_tenants(folder: Path, *, steps: int = 3) -> None:
    """Ann's and Bob's models train in a server of this folder, and are sampled from after each step."""
    from skyrl_train.serve import RunFolders

    with serving(folder) as http:
        records, bases = http.service.records, http.service.bases
        shown = RunFolders(records, folder, lambda base, tokens: str(bases.of(base).tokenizer.decode(tokens)))
        http.service.ledger.on_settled = shown.take
        for number, key in enumerate(KEYS):
            caller = Caller(http, key)
            model = caller.model(seed=number)
            for step in range(steps):
                passes = [caller.train(model, 1 + 4 * step + each, [datum((1, 2, 3, 4 + each))]) for each in range(2)]
                for promise in (*passes, caller.step(model, 3 + 4 * step)):
                    caller.outcome(promise)
                sampler = caller.snapshot(model, 4 + 4 * step, step)
                caller.outcome(caller.sample(sampler, 0, num_samples=2 + number))
        shown.close()


def as_message(model: str, seq: int, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy") -> Any:
    """The protobuf message of examples given as `datum` makes them."""
    from skyrl_train.serve import schema

    message = schema().ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    for each in data:
        made = message.data.add()
        tokens = each["model_input"]["chunks"][0]["tokens"]
        made.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, tensor in each["loss_fn_inputs"].items():
            field, dtype = made.loss_fn_inputs[name], {"int64": np.int64, "float32": np.float32}[tensor["dtype"]]
            field.dtype = 2 if dtype is np.int64 else 1
            field.shape.extend(tensor["shape"])
            field.dense = np.asarray(tensor["data"], dtype).tobytes()
    return message
