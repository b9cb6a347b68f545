"""The server over HTTP, without the SDK: order, retries, steps, samplers, checkpoints, tenants, and starting again."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from skyrl_train.learner import AdapterLearners
from skyrl_train.serve.upkeep import Upkeep
from skyrl_train.system.files import make_folder
from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, as_message, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
PROTOBUF = "application/x-protobuf"
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server")) as http:
        yield http


@pytest.fixture
def ann(server: Any) -> Caller:
    return Caller(server)


@pytest.fixture
def bob(server: Any) -> Caller:
    return Caller(server, "tml-bob-key")


def settled(caller: Caller, promise: Any) -> Any:
    found = caller.outcome(promise)
    assert "error" not in found, found
    return found


def test_chunks_of_a_batch_in_any_order_are_one_pass(ann: Caller) -> None:
    whole, cut = ann.model(), ann.model()
    settled(ann, ann.train(whole, 1, TWO))
    settled(ann, ann.step(whole, 2))
    step = ann.step(cut, 3)
    second = ann.train(cut, 2, TWO[1:])
    assert ann.send("retrieve_future", {"request_id": ann.train(cut, 1, TWO[:1])["request_id"]})["metrics"]
    settled(ann, second)
    settled(ann, step)
    np.testing.assert_allclose(ann.logprobs(whole, 3), ann.logprobs(cut, 4), atol=1e-5)


def test_nothing_leaks_over_a_step_and_weights_of_zero_teach_nothing(ann: Caller) -> None:
    model = ann.model()
    before = ann.logprobs(model, 1)
    settled(ann, ann.train(model, 2, [datum([1, 2, 3, 4], weights=[0.0] * 4)]))
    settled(ann, ann.step(model, 3))
    assert ann.logprobs(model, 4) == before
    settled(ann, ann.train(model, 5, TWO))
    settled(ann, ann.step(model, 6))
    after = ann.logprobs(model, 7)
    assert sum(after) > sum(before)
    settled(ann, ann.step(model, 8, beta1=0.0, beta2=0.0))
    assert ann.logprobs(model, 9) == after, "a step without a gradient moves nothing where averages are forgotten"


def test_a_retry_is_executed_once_and_gets_the_same_answer(ann: Caller) -> None:
    model, other = ann.model(), ann.model()
    promises = [ann.train(model, 1, TWO) for _ in range(3)]
    assert len({each["request_id"] for each in promises}) == 1
    answers = [settled(ann, each) for each in promises]
    assert answers[0] == answers[2]
    settled(ann, ann.step(model, 2))
    settled(ann, ann.step(model, 2))
    settled(ann, ann.train(other, 1, TWO))
    settled(ann, ann.step(other, 2))
    assert ann.logprobs(model, 3) == ann.logprobs(other, 3)


def test_another_request_under_a_number_and_one_that_goes_back_are_conflicts(ann: Caller) -> None:
    model = ann.model()
    settled(ann, ann.train(model, 1, TWO))
    sent = {"forward_backward_input": {"data": TWO[:1], "loss_fn": "cross_entropy"}, "model_id": model, "seq_id": 1}
    assert "must be the same" in ann.send("forward_backward", sent, status=422)["error"]
    sent = {"adam_params": {}, "model_id": model, "seq_id": 0}
    assert "was another request" in ann.send("optim_step", sent, status=422)["error"], "that made the model"
    assert (
        "ahead" in ann.send("optim_step", {"adam_params": {}, "model_id": model, "seq_id": 9999}, status=400)["error"]
    )


def test_both_wires_compute_the_same_and_are_one_request(ann: Caller, server: Any) -> None:
    zstandard = pytest.importorskip("zstandard")
    model, other = ann.model(), ann.model()
    in_json = settled(ann, ann.train(model, 1, TWO))
    message = as_message(other, 1, TWO)
    headers = {**ann.headers, "Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    for order in (message.SerializeToString(), message.SerializeToString(deterministic=True)):
        body = zstandard.ZstdCompressor().compress(order)
        promise = server.post("/api/v1/forward_backward", content=body, headers=headers).json()
    answer = server.post("/api/v1/retrieve_future", json=promise, headers={**ann.headers, "Accept": PROTOBUF})
    assert answer.headers["content-type"] == PROTOBUF
    assert settled(ann, promise) == in_json
    from skyrl_train.serve import schema

    found = schema().ForwardBackwardOutput()
    found.ParseFromString(answer.content)
    record = found.loss_fn_outputs[0]
    logprobs = np.frombuffer(record.fields["logprobs"].data, np.float32)
    expected = [each["logprobs"]["data"] for each in in_json["loss_fn_outputs"]]
    assert (record.num_datums, logprobs.tolist()) == (2, [*expected[0], *expected[1]])
    assert found.metrics["loss:sum"] == pytest.approx(-sum(map(sum, expected)), rel=1e-6)


def test_samples_score_as_a_forward_does_and_snapshots_never_move(ann: Caller) -> None:
    model = ann.model()
    settled(ann, ann.train(model, 1, TWO))
    settled(ann, ann.step(model, 2))
    first = ann.snapshot(model, 3, 100)
    promise = ann.sample(first, 0, num_samples=3, prompt_logprobs=True, topk_sample_logprobs=2)
    assert promise["model_id"] is None
    sent = settled(ann, promise)
    tokens = [1, 2, 3, *sent["sequences"][1]["tokens"]]
    scored = ann.logprobs(model, 4, tokens[:-1])[:-1]
    np.testing.assert_allclose(sent["prompt_logprobs"][1:], scored[:2], atol=1e-4)
    np.testing.assert_allclose(sent["sequences"][1]["logprobs"][:-1], scored[2:], atol=1e-4)
    assert sent["prompt_logprobs"][0] is None
    assert [len(each["topk_logprobs"]) for each in sent["sequences"]] == [
        len(each["tokens"]) for each in sent["sequences"]
    ]
    settled(ann, ann.train(model, 5, TWO))
    settled(ann, ann.step(model, 6))
    again = settled(ann, ann.sample(first, 1, num_samples=3, prompt_logprobs=True, topk_sample_logprobs=2))
    assert again == sent
    second = ann.snapshot(model, 7, 101)
    moved = settled(ann, ann.sample(second, 0, num_samples=1, prompt_logprobs=True))
    assert moved["prompt_logprobs"] != sent["prompt_logprobs"]


@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_that_are_named_at_places_of_a_prompt_are_scored_there(ann: Caller, server: Any, sparse: bool) -> None:
    from skyrl_train.serve import schema

    sampler = ann.snapshot(ann.model(), 1, 100)
    top = settled(ann, ann.sample(sampler, 0, topk_prompt_logprobs=3))["topk_prompt_logprobs"]
    first, second = ([cell[0] for cell in row] for row in top[1:])
    named = {"data": [first[2], -1, second[0], second[1]], "dtype": "int64", "shape": [2, 2]}
    if sparse:
        named = {"data": [first[2], second[1]], "dtype": "int64", "shape": [2, 2]}
        named |= {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]}
    promise = ann.sample(sampler, 1, target_prompt_logprobs=named)
    ann.outcome(promise)
    answer = server.post("/api/v1/retrieve_future", json=promise, headers={**ann.headers, "Accept": PROTOBUF})
    found = schema().SampleResponse.FromString(answer.content)
    tensor = found.target_prompt_logprobs
    assert (list(tensor.shape), tensor.dtype, found.prompt_logprobs) == ([2, 2], schema().DTYPE_FLOAT32, b"")
    values = np.frombuffer(tensor.sparse_csr.values if sparse else tensor.dense, np.float32)
    expected = [top[1][2][1], 0.0, top[2][0][1], top[2][1][1]]
    np.testing.assert_allclose(values, [expected[0], expected[3]] if sparse else expected, atol=1e-6)


def test_a_custom_loss_of_several_targets_is_told_their_log_probabilities_by_weights_of_zero(ann: Caller) -> None:
    """SDKs ask so, and send the gradient as weights afterwards."""
    model, wide = ann.model(), datum([1, 2, 3])
    wide["loss_fn_inputs"] = {
        "target_tokens": {"data": [5, 6, 7, 8, 9, 10], "dtype": "int64", "shape": [3, 2]},
        "weights": {"data": [0.0] * 6, "dtype": "float32", "shape": [3, 2]},
    }
    output = settled(ann, ann.train(model, 1, [wide], forward=True))["loss_fn_outputs"][0]
    columns = [
        settled(ann, ann.train(model, seq, [datum([1, 2, 3], targets)], forward=True))["loss_fn_outputs"][0]
        for seq, targets in ((2, [5, 7, 9]), (3, [6, 8, 10]))
    ]
    found = np.array(output["logprobs"]["data"]).reshape(3, 2)
    np.testing.assert_allclose(found.T, [each["logprobs"]["data"] for each in columns], atol=1e-5)
    assert set(output["elementwise_loss"]["data"]) == {0.0}


def test_a_session_is_warned_that_the_output_head_is_not_trained(ann: Caller) -> None:
    told = ann.send("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})
    assert "train_unembed=True trains attention and MLP layers" in told["warning_message"]
    path = ann.done("save_weights", {"model_id": ann.model(), "seq_id": 1, "path": "one"})["path"]
    assert ann.send("weights_info", {"tinker_path": path})["train_unembed"] is False


def test_stop_strings_end_a_sample_at_the_token_that_completes_them(ann: Caller) -> None:
    from transformers import AutoTokenizer

    from skyrl_train.model import resolve_model_path

    tokenizer = AutoTokenizer.from_pretrained(str(resolve_model_path("builtin:tiny_qwen2")))
    sampler = ann.snapshot(ann.model(), 1, 100)
    greedy = {"temperature": 0.0, "max_tokens": 16, "stop": []}
    tokens = settled(ann, ann.sample(sampler, 0, params=greedy))["sequences"][0]["tokens"]
    text = tokenizer.decode(tokens)[2:6]
    length = next(count for count in range(1, 17) if text in tokenizer.decode(tokens[:count]))
    for seq, stop in enumerate((text, [text], ["never in it", text]), start=1):
        found = settled(ann, ann.sample(sampler, seq, params={**greedy, "stop": stop}))["sequences"][0]
        assert (found["tokens"], found["stop_reason"]) == (tokens[:length], "stop")


def test_sampling_ends_where_it_is_told_to(ann: Caller) -> None:
    session = ann.session()
    content = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    base = ann.send("create_sampling_session", content)["sampling_session_id"]
    assert ann.send("create_sampling_session", content)["sampling_session_id"] == base
    greedy = {"temperature": 0.0, "max_tokens": 4}
    plain = settled(ann, ann.sample(base, 0, params=greedy))["sequences"][0]
    assert settled(ann, ann.sample(base, 1, params={**greedy, "seed": 99}))["sequences"][0] == plain
    assert (len(plain["tokens"]), plain["stop_reason"]) == (4, "length")
    stopped = settled(ann, ann.sample(base, 2, params={**greedy, "stop": [plain["tokens"][1]]}))["sequences"][0]
    assert (stopped["tokens"], stopped["stop_reason"]) == (plain["tokens"][:2], "stop")
    drawn = [settled(ann, ann.sample(base, number, params={"seed": 3}))["sequences"] for number in (3, 4)]
    assert drawn[0] == drawn[1]
    promise = ann.sample(base, 5, num_samples=2)
    assert len(promise["sample_sequence_ids"]) == 2
    assert ann.send("asample", {"sampling_session_id": base}, status=400)["category"] == "user"


@pytest.mark.slow
def test_loading_without_the_optimizer_forgets_it_and_with_it_goes_on(ann: Caller) -> None:
    model = ann.model()
    for seq in (1, 3):
        settled(ann, ann.train(model, seq, TWO))
        settled(ann, ann.step(model, seq + 1))
    path = ann.done("save_weights", {"model_id": model, "seq_id": 5, "path": "mine"})["path"]
    session = ann.session()

    def loaded(number: int, *, optimizer: bool) -> str:
        content = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        return str(ann.done("load_weights", content)["model_id"])

    kept, fresh = loaded(0, optimizer=True), loaded(1, optimizer=False)
    assert ann.logprobs(model, 6) == ann.logprobs(kept, 1) == ann.logprobs(fresh, 1)
    for caller_model, first in ((model, 7), (kept, 2), (fresh, 2)):
        settled(ann, ann.train(caller_model, first, TWO))
        settled(ann, ann.step(caller_model, first + 1))
    after = ann.logprobs(model, 9)
    assert after == ann.logprobs(kept, 4)
    assert after != ann.logprobs(fresh, 4)
    ann.done("load_weights", {"model_id": model, "seq_id": 10, "path": path, "optimizer": True})
    settled(ann, ann.train(model, 11, TWO))
    settled(ann, ann.step(model, 12))
    assert ann.logprobs(model, 13) == after


def test_runs_and_checkpoints_are_listed_and_names_are_kept(ann: Caller) -> None:
    model = ann.model()
    paths = [
        ann.done(verb, {"model_id": model, "seq_id": seq, "path": "one"})["path"]
        for seq, verb in ((1, "save_weights"), (2, "save_weights_for_sampler"))
    ]
    ann.snapshot(model, 3, 7)
    run = ann.get(f"training_runs/{model}")
    assert (run["last_checkpoint"]["tinker_path"], run["last_sampler_checkpoint"]["tinker_path"]) == tuple(paths)
    found = ann.get(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert {each["tinker_path"] for each in found} == set(paths), "what was sampled from without a name is not listed"
    assert all(each["size_bytes"] > 1000 for each in found)
    assert ann.get("training_runs?limit=1")["cursor"]["limit"] == 1
    taken = ann.outcome(ann.send("save_weights", {"model_id": model, "seq_id": 4, "path": "one"}))
    assert (taken["category"], "choose another name" in taken["error"]) == ("user", True)
    ann.done("save_weights", {"model_id": model, "seq_id": 5, "path": "one", "overwrite": True})
    part = paths[0].removeprefix(f"tinker://{model}/")
    assert ann.http.delete(f"/api/v1/training_runs/{model}/checkpoints/{part}", headers=ann.headers).status_code == 204
    assert "checkpoint" in ann.send("weights_info", {"tinker_path": paths[0]}, status=404)["error"]
    assert ann.send("weights_info", {"tinker_path": paths[1]})["lora_rank"] == 4


def test_nothing_of_a_tenant_is_there_for_another(ann: Caller, bob: Caller, server: Any) -> None:
    session = ann.session()
    model = ann.model(session)
    promise = ann.train(model, 1, TWO)
    path = ann.done("save_weights", {"model_id": model, "seq_id": 2, "path": "secret"})["path"]
    sampler = ann.snapshot(model, 3, 0)
    own = bob.session()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("get_info", {"model_id": model}),
        ("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}),
        ("forward_backward", {"model_id": model, "forward_backward_input": {"data": [], "loss_fn": "ppo"}}),
        ("save_weights", {"model_id": model, "path": "x"}),
        ("unload_model", {"model_id": model}),
        ("retrieve_future", {"request_id": promise["request_id"]}),
        ("cancel_future", {"request_id": promise["request_id"]}),
        ("session_heartbeat", {"session_id": session}),
        ("weights_info", {"tinker_path": path}),
        ("load_weights", {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": False}),
        ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": BASE, "lora_config": {"rank": 1}}),
        ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}),
        ("join_sampling_session", {"sampling_session_id": sampler}),
        ("asample", {"sampling_session_id": sampler, "seq_id": 0}),
    ]
    for route, content in asked:
        refused = bob.send(route, content, status=404)
        names = (model, session, path, sampler)
        nobody = {key: "nobody" if str(value) in names else value for key, value in content.items()}
        assert refused["category"] == bob.send(route, nobody, status=404)["category"] == "user"
    for route in (
        f"training_runs/{model}",
        f"training_runs/{model}/checkpoints",
        f"sessions/{session}",
        f"samplers/{sampler}",
    ):
        bob.get(route, status=404)
    assert model not in str(bob.get("training_runs"))
    assert path not in str(bob.get("checkpoints"))
    assert session not in bob.get("sessions")["sessions"]
    for key in ({}, {"X-API-Key": "tml-nobody"}, {"Authorization": "Bearer tml-ann"}):
        assert server.post("/api/v1/create_session", json={}, headers=key).status_code == 401
    assert server.get("/api/v1/healthz").json() == {"status": "ok"}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_adapter_and_ranks_stand_side_by_side(ann: Caller) -> None:
    models = [ann.model(rank=rank, seed=seed) for rank, seed in ((4, 1), (4, 1), (4, 2), (8, 1))]
    for model in models:
        settled(ann, ann.train(model, 1, TWO))
        settled(ann, ann.step(model, 2))
    found = [ann.logprobs(model, 3) for model in models]
    assert found[0] == found[1]
    assert len({tuple(each) for each in found}) == 3
    assert ann.send("get_info", {"model_id": models[3]})["lora_rank"] == 8
    ann.done("unload_model", {"model_id": models[3], "seq_id": 4})
    ann.send("get_info", {"model_id": models[3]}, status=404)
    assert ann.logprobs(models[0], 4) == found[0]


@pytest.mark.slow
def test_a_server_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """One with anchors every three requests, stopped twice; one without, not stopped."""

    def train(caller: Caller, model: str, first: int, count: int) -> None:
        for seq in range(first, first + 2 * count, 2):
            settled(caller, caller.train(model, seq, TWO))
            settled(caller, caller.step(model, seq + 1))

    with serving(tmp_path / "whole") as http:
        ann = Caller(http)
        model = ann.model()
        train(ann, model, 1, 5)
        settled(ann, ann.train(model, 11, TWO))
        settled(ann, ann.step(model, 12))
        expected = ann.logprobs(model, 13)
    folder = tmp_path / "stopped"
    with serving(folder, anchor_every=3) as http:
        ann = Caller(http)
        model = ann.model()
        train(ann, model, 1, 2)
        sampler = ann.snapshot(model, 5, 0)
        sampled = settled(ann, ann.sample(sampler, 0))
    with serving(folder, anchor_every=3) as http:
        ann = Caller(http)
        assert settled(ann, ann.sample(sampler, 0)) == sampled, "the same request"
        again = settled(ann, ann.sample(sampler, 1))
        assert again == sampled, "another with the same seed"
        train(ann, model, 6, 3)
        promise = ann.train(model, 12, TWO)
        answer = settled(ann, promise)
    anchors = [path.name for path in folder.glob("models/000000/a*")]
    assert len(anchors) == 1
    with serving(folder, anchor_every=3) as http:
        ann = Caller(http)
        assert settled(ann, ann.train(model, 12, TWO)) == answer
        settled(ann, ann.step(model, 13))
        assert ann.logprobs(model, 14) == expected
        assert ann.get("training_runs")["cursor"]["total_count"] == 1


def test_a_server_that_starts_again_brings_back_the_models_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as http:
        ann = Caller(http)
        models = [ann.model() for _ in range(3)]
        for model in models:
            settled(ann, ann.train(model, 1, TWO))
            settled(ann, ann.step(model, 2))
        expected = ann.logprobs(models[1], 3)
    made: list[str] = []
    create = AdapterLearners.create

    def counted(self: AdapterLearners, name: str, *others: Any, **named: Any) -> Any:
        made.append(name)
        return create(self, name, *others, **named)

    monkeypatch.setattr(AdapterLearners, "create", counted)
    with serving(tmp_path) as http:
        ann = Caller(http)
        assert made == []
        assert ann.logprobs(models[1], 4) == expected
        assert made == ["m1"]


def test_a_disk_that_is_full_at_an_anchor_leaves_the_model_to_be_executed_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [OSError(errno.ENOSPC, "No space left on device")]

    def made(folder: Path) -> None:
        if full:
            raise full.pop()
        make_folder(folder)

    monkeypatch.setattr("skyrl_train.serve.models.make_folder", made)
    with serving(tmp_path, anchor_every=1) as http:
        ann = Caller(http)
        model = ann.model()
        settled(ann, ann.train(model, 1, TWO))
        settled(ann, ann.step(model, 2))
        settled(ann, ann.train(model, 3, TWO))  # an anchor comes behind what is told
        assert (full, http.service.records.models[model].anchor) == ([], -1)
        settled(ann, ann.step(model, 4))
        expected = ann.logprobs(model, 5)
        assert http.service.records.models[model].anchor == 4
    with serving(tmp_path, anchor_every=1) as http:
        assert Caller(http).logprobs(model, 6) == expected


def test_what_nobody_expects_ends_no_server_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: object) -> None:
        raise RuntimeError("nobody expected it")

    with serving(tmp_path) as http:
        ann = Caller(http)
        model = ann.model()
        monkeypatch.setattr(Upkeep, "after", breaks)
        settled(ann, ann.train(model, 1, TWO))
        promise = ann.step(model, 2)
        told = ann.send("retrieve_future", {"request_id": promise["request_id"]}, status=503)
        assert "nothing is executed any more" in str(told)
    monkeypatch.undo()
    with serving(tmp_path) as http:
        assert "error" not in Caller(http).outcome(promise)


def test_a_poll_says_try_again_and_samples_can_be_given_up(ann: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ann.model()
    monkeypatch.setattr("skyrl_train.serve.app._POLL_S", 0.05)
    early = ann.step(model, 2)
    began = time.monotonic()
    waiting = ann.send("retrieve_future", {"request_id": early["request_id"]}, status=408)
    assert waiting == {"type": "try_again", "request_id": early["request_id"], "queue_state": "active"}
    assert time.monotonic() - began < 10
    monkeypatch.setattr("skyrl_train.serve.app._POLL_S", 30.0)
    settled(ann, ann.train(model, 1, TWO))
    settled(ann, early)
    sampler = ann.snapshot(model, 3, 0)
    long = ann.sample(sampler, 0, num_samples=64, params={"max_tokens": 200, "stop": []})
    ann.send("cancel_future", {"request_id": long["request_id"]})
    assert ann.outcome(long) == {"error": "it was cancelled", "category": "user"}


def test_what_never_comes_is_not_waited_for_forever(ann: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.serve.scheduler._GAP_TIMEOUT_S", 0.05)
    model = ann.model()
    assert "seq_id 1 did not come" in ann.outcome(ann.step(model, 3))["error"]
    monkeypatch.undo()
    assert (
        "goes back" in ann.send("optim_step", {"adam_params": {}, "model_id": model, "seq_id": 1}, status=422)["error"]
    )


def test_nor_behind_one_that_came_late_or_in_a_server_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as http:
        ann = Caller(http)
        late, again = ann.model(), ann.model()
        ann.step(again, 3)
        monkeypatch.setattr("skyrl_train.serve.scheduler._GAP_TIMEOUT_S", 0.3)
        computing = http.service.bases.of("")
        take_step = computing.optim_step
        monkeypatch.setattr(computing, "optim_step", lambda *given: time.sleep(0.6) or take_step(*given))
        waiting = ann.step(late, 3)
        settled(ann, ann.step(late, 1))
        assert "seq_id 2 did not come" in ann.outcome(waiting)["error"]
    with serving(tmp_path) as http:
        assert "seq_id 1 did not come" in Caller(http).outcome({"request_id": f"{again}:3"})["error"]


def test_what_is_taken_away_leaves_no_files(tmp_path: Path) -> None:
    with serving(tmp_path, anchor_every=1) as http:
        ann = Caller(http)
        model = ann.model()
        settled(ann, ann.train(model, 1, TWO))
        settled(ann, ann.step(model, 2))
        for seq in (3, 4):
            ann.done("save_weights", {"model_id": model, "seq_id": seq, "path": "one", "overwrite": True})
        sent = {"session_id": model.partition(":")[0], "model_seq_id": 1, "path": f"tinker://{model}/weights/one"}
        assert len(ann.logprobs(ann.done("load_weights", sent)["model_id"], 1)) == 4
        assert sorted(each.name for each in (tmp_path / "models" / "000000").iterdir()) == ["a2", "c4"]
        ann.done("unload_model", {"model_id": model, "seq_id": 5})
        ann.model()  # behind which the verb before is done with
        assert [each.name for each in (tmp_path / "models" / "000000").iterdir()] == ["c4"], "its checkpoints stay"


def test_a_session_that_is_finished_is_told_so(ann: Caller) -> None:
    session = ann.session()
    assert ann.send("session_heartbeat", {"session_id": session}) == {"type": "session_heartbeat"}
    ann.send(f"sessions/{session}/finish", {"status": "success"})
    ann.send("session_heartbeat", {"session_id": session}, status=410)
    answer: httpx.Response = ann.http.post("/api/v1/create_custom_loss", json={}, headers=ann.headers)
    assert (answer.status_code, "forward_backward_custom" in answer.text) == (404, True)
    assert ann.http.post("/api/v1/billing/usage", json={}, headers=ann.headers).status_code == 404
