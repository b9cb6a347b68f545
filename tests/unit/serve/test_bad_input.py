"""What comes over the network may be anything: each is told what is wrong, nothing changes by it, and memory is bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serve_cases import BASE, HAS_SCHEMA, KEYS, NEEDS_SCHEMA, Caller, as_message, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
PROTOBUF = {"Content-Type": "application/x-protobuf"}
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server")) as http:
        yield http


@pytest.fixture(scope="module")
def ann(server: Any) -> Caller:
    return Caller(server)


@pytest.fixture(scope="module")
def model(ann: Caller) -> str:
    return ann.model()


def passed(ann: Caller, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    answer = ann.http.post("/api/v1/forward_backward", content=body, headers={**ann.headers, **headers})
    return answer.status_code, answer.json()


def test_messages_that_are_cut_off_or_no_messages_are_refused(ann: Caller, model: str) -> None:
    whole = as_message(model, 1, TWO).SerializeToString()
    draw = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(whole[: draw.integers(1, len(whole))])
        damaged[draw.integers(len(damaged))] ^= int(draw.integers(1, 256))
        status, body = passed(ann, bytes(damaged), PROTOBUF)
        assert status in (400, 404, 413, 422) or body.get("request_id", "").startswith(model), (status, body)
        if status != 200:
            assert body["category"] == "user"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"\1\2\3"), "no whole int32 numbers"),
        (lambda m: setattr(m.data[0].loss_fn_inputs["target_tokens"], "dtype", 0), "type 0 are not read"),
        (lambda m: m.data[0].loss_fn_inputs["target_tokens"].shape.append(9), "do not have the shape"),
        (lambda m: setattr(m.data[0].model_input.add().image, "data", b"PNG"), "images are not taken"),
        (lambda m: setattr(m.data[0].loss_fn_inputs["weights"].sparse_csr, "values", b"\0" * 4), "two dimensions"),
    ],
)
def test_messages_whose_parts_do_not_fit_fail_in_their_turn(ann: Caller, change: Any, says: str) -> None:
    import re

    model = ann.model()
    message = as_message(model, 1, TWO)
    change(message)
    for _ in range(2):
        status, promise = passed(ann, message.SerializeToString(), PROTOBUF)
        found = ann.outcome(promise)
        assert (status, found["category"], bool(re.search(says, found["error"]))) == (200, "user", True), found
    assert ann.logprobs(model, 2), "the number was used: the next request does not wait for it"


def test_what_a_client_says_beside_what_is_read_makes_no_model(ann: Caller, server: Any) -> None:
    model = ann.model()
    sampler = ann.snapshot(model, 1, 0)
    known = dict(server.service.records.models)
    for number, facts in enumerate(({}, {"rank": 8, "seed": 1})):
        assert "metrics" in ann.outcome(ann.step(model, 2 + number, facts=facts))
        ann.outcome(ann.sample(sampler, number, facts=facts))
    assert server.service.records.models == known


def test_half_of_a_surrogate_pair_is_answered_as_it_came(ann: Caller, model: str) -> None:
    def sent(route: str, content: Any) -> Any:
        return ann.http.post(f"/api/v1/{route}", content=json.dumps(content), headers=ann.headers)

    metadata = {"name": "\ud83d"}
    session = sent("create_session", {"user_metadata": metadata}).json()["session_id"]
    assert ann.get(f"sessions/{session}")["user_metadata"] == metadata
    refused = sent("unload_model", {"model_id": model, "seq_id": "\ud83d"})
    assert (refused.status_code, "must be a whole number" in refused.json()["error"]) == (400, True)


def test_sparse_tensors_are_bounded_and_must_fit(ann: Caller) -> None:
    model = ann.model()
    bad: list[tuple[list[int], list[int], list[int]]] = [
        ([1 << 30, 1 << 30], [0], []),
        ([2, 4], [0, 1, 1], [9]),
        ([2, 4], [0, 2, 1], [0]),
        ([-1, 4], [0], []),
        ([2], [0, 0, 0], []),
    ]
    for seq, (shape, crow, col) in enumerate(bad, start=1):
        message = as_message(model, seq, [datum([1, 2])])
        tensor = message.data[0].loss_fn_inputs["target_tokens"]
        tensor.sparse_csr.values = np.ones(len(col), np.int64).tobytes()
        tensor.sparse_csr.crow_indices = np.asarray(crow, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.asarray(col, np.int64).tobytes()
        del tensor.shape[:]
        tensor.shape.extend(shape)
        found = ann.outcome(passed(ann, message.SerializeToString(), PROTOBUF)[1])
        assert (found["category"], "sparse" in found["error"]) == ("user", True), found


def test_bombs_other_encodings_and_huge_bodies_are_refused(ann: Caller) -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor(level=19).compress(b"\0" * (1 << 28))
    assert len(bomb) < 1 << 16
    assert passed(ann, bomb, {**PROTOBUF, "Content-Encoding": "zstd"})[0] == 413
    assert passed(ann, b"not zstd", {**PROTOBUF, "Content-Encoding": "zstd"})[0] == 400
    cut = zstandard.ZstdCompressor().compress(np.random.default_rng(0).bytes(1000))[:300]
    assert passed(ann, cut, {**PROTOBUF, "Content-Encoding": "zstd"})[0] in (400, 404)
    assert passed(ann, b"x", {**PROTOBUF, "Content-Encoding": "br"})[0] == 415
    assert passed(ann, b"\0" * ((32 << 20) + 1), PROTOBUF)[0] == 413

    def stream() -> Iterator[bytes]:
        for _ in range(200):
            yield b"\0" * (1 << 20)

    answer = ann.http.post("/api/v1/forward_backward", content=stream(), headers={**ann.headers, **PROTOBUF})
    assert answer.status_code == 413, "a length that is not stated is counted"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"a": NaN}', b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100],
)
def test_bodies_that_are_no_objects_of_json_are_refused(ann: Caller, body: bytes) -> None:
    for route in ("create_model", "optim_step", "asample", "forward_backward", "retrieve_future", "load_weights"):
        answer = ann.http.post(f"/api/v1/{route}", content=body, headers=ann.headers)
        assert answer.status_code in (400, 404), (route, answer.text)
        assert answer.json()["category"] == "user"


@pytest.mark.parametrize(
    ("inputs", "loss", "says"),
    [
        (datum([1, 2, 492]), "cross_entropy", "token ids are from 0 to 491"),
        (datum([1, 2, 3], [2, 3, -1]), "cross_entropy", "token ids are from 0 to 491"),
        (datum([1, 2, 3], [2, 3]), "cross_entropy", "one for each of 3 tokens"),
        (datum([1, 2, 3], weights=[1.0]), "cross_entropy", "weights has the shape"),
        (datum([1, 2, 3]), "ppo", "needs 'logprobs'"),
        (datum([1, 2, 3]), "stable_reinforce", "no public formula"),
        (datum([1] * 5000), "cross_entropy", "context length"),
    ],
)
def test_examples_that_cannot_be_computed_fail_as_the_users_and_change_nothing(
    ann: Caller, inputs: Any, loss: str, says: str
) -> None:
    model = ann.model()
    before = ann.logprobs(model, 1)
    found = ann.outcome(ann.train(model, 2, [datum([1, 2]), inputs], loss))
    assert (found["category"], says in found["error"]) == ("user", True), found
    assert ann.outcome(ann.step(model, 3))["metrics"]["grad_norm:mean"] == 0.0
    assert ann.logprobs(model, 4) == before


def test_advantages_that_are_not_finite_are_refused_before_anything_is_computed(ann: Caller) -> None:
    model = ann.model()
    for seq, value in enumerate((float("nan"), float("inf")), start=1):
        bad = datum([1, 2, 3], logprobs=[-1.0] * 3, advantages=[0.0, value, 1.0])
        status, promise = passed(ann, as_message(model, seq, [bad], "ppo").SerializeToString(), PROTOBUF)
        assert status == 200
        found = ann.outcome(promise)
        assert found == {"error": "example 0: advantages has a value that is not finite", "category": "user"}


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_gone(ann: Caller) -> None:
    model = ann.model()
    before = ann.logprobs(model, 1)
    huge = datum([1, 2, 3], weights=[3e38] * 3)
    assert "not finite" in ann.outcome(ann.train(model, 2, [huge, huge]))["error"]
    found = ann.outcome(ann.step(model, 3))
    assert (found["category"], "No weight was changed" in found["error"]) == ("user", True), found
    assert ann.logprobs(model, 4) == before
    ann.outcome(ann.train(model, 5, TWO))
    assert "metrics" in ann.outcome(ann.step(model, 6))
    assert ann.logprobs(model, 7) != before


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("lora_config", {"rank": 0}),
        ("lora_config", {"rank": 10_000}),
        ("lora_config", {"rank": "8"}),
        ("lora_config", {"rank": 8, "seed": 1.5}),
        ("lora_config", {"rank": 8, "train_attn": False, "train_mlp": False}),
        ("lora_config", []),
        ("optimizer_config", {"type": "dimuon"}),
        ("model_seq_id", -1),
        ("model_seq_id", True),
    ],
)
def test_models_that_cannot_be_made_are_refused(ann: Caller, part: str, value: Any) -> None:
    content = {"session_id": ann.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    assert ann.send("create_model", {**content, part: value}, status=400)["category"] == "user"
    ann.send("create_model", {**content, "base_model": "Qwen/Other"}, status=404)


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": -1},
        {"learning_rate": "1"},
        {"beta1": 1.0},
        {"eps": 1e400},
        {"type": "dimuon"},
        {"beta2": True},
    ],
)
def test_steps_that_cannot_be_made_are_refused(ann: Caller, model: str, params: Any) -> None:
    body = json.dumps({"model_id": model, "adam_params": params}).replace("Infinity", "1e999")
    answer = ann.http.post("/api/v1/optim_step", content=body, headers=ann.headers)
    found = answer.json() if answer.status_code == 400 else ann.outcome(answer.json())
    assert (found["category"], "adam_params" in found["error"]) == ("user", True), found


@pytest.mark.parametrize(
    "change",
    [
        {"params": {"max_tokens": 0}},
        {"params": {"temperature": -0.1}},
        {"params": {"top_p": 0}},
        {"params": {"top_k": -2}},
        {"params": {"stop": [""] * 65}},
        {"params": {"stop": [1, "a"]}},
        {"params": {"seed": 0.5}},
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}},
        {"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1]}},
        {"prompt": {"chunks": [{"tokens": [1]}, {"type": "image", "data": "aGk=", "format": "png"}]}},
        {"num_samples": 0},
        {"num_samples": 10**6},
        {"topk_prompt_logprobs": 1000},
        {"prompt_logprobs_last_n": 3},
        {"target_prompt_logprobs": {"data": [1]}},
        {"record_stability_info": True},
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"tokens": [492]}]}},
        {"prompt": {"chunks": [{"tokens": [2**40]}]}},
        {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "file:///etc/passwd"}]}},
        {"prompt": {"chunks": [{"tokens": [1] * 5000}]}},
        {"seq_id": -1},
        {"seq_id": None},
    ],
)
def test_samples_that_cannot_be_made_are_refused(ann: Caller, change: dict[str, Any]) -> None:
    content = {"session_id": ann.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = ann.send("create_sampling_session", content)["sampling_session_id"]
    params = {"max_tokens": 2, **change.get("params", {})}
    sent = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": params,
    }
    refused = ann.send(
        "asample", {**sent, **{key: each for key, each in change.items() if key != "params"}}, status=400
    )
    assert refused["category"] == "user"
    assert len(refused["error"]) < 600


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".", "..", "x" * 129, "a b", "é", "a\0b", 7, ["a"]])
def test_names_never_become_paths(ann: Caller, server: Any, name: Any) -> None:
    model = ann.model()
    before = sorted(path.name for path in Path(server.service._folder).rglob("*"))
    found = ann.outcome(ann.send("save_weights", {"model_id": model, "seq_id": 1, "path": name}))
    assert (found["category"], "must match" in found["error"]) == ("user", True)
    after = sorted(path.name for path in Path(server.service._folder).rglob("*"))
    assert after == before
    sent = {"model_id": model, "path": f"tinker://{model}/weights/{name}", "optimizer": False}
    assert "there is no checkpoint" in ann.outcome(ann.send("load_weights", sent))["error"]


@pytest.mark.slow
def test_many_clients_at_once_each_get_their_own(server: Any) -> None:
    callers = [Caller(server, key) for key in KEYS] * 20
    with ThreadPoolExecutor(20) as pool:
        sessions = list(pool.map(Caller.session, callers))
        models = list(pool.map(lambda pair: pair[0].model(pair[1], rank=1), zip(callers[:12], sessions)))

        def trained(pair: tuple[Caller, str]) -> list[float]:
            caller, model = pair
            promises = [caller.train(model, 1, TWO), caller.step(model, 2, eps=0.1)]
            assert all("error" not in caller.outcome(each) for each in promises)
            return caller.logprobs(model, 3)

        found = list(pool.map(trained, zip(callers, models)))
    assert len(set(sessions)) == len(sessions)
    assert all(each == pytest.approx(found[0], abs=1e-5) for each in found), "passes of several are computed as one"
