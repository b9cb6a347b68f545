"""Wire: routes, schemas, JSON and protobuf, zstd, content types, statuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zstandard
from driver import Run, Server, Session, checked, datum, model_input, sequence
from expect import refused, told
from measure import DATA, PROBES, SEQUENCES, Noise
from tinker import types
from wire import PROTOBUF, request_bytes


def pass_bytes(run: Run, forward_only: bool = True, seq: int | None = None, **given: Any) -> bytes:
    sent = {"data": DATA, "loss_fn": "cross_entropy", **given}
    request = {"model_id": run.id, "seq_id": run.number(seq), "forward_backward_input": sent}
    return request_bytes({**request, "forward_only": forward_only})


def send(run: Run, body: bytes, **headers: str) -> Any:
    named = {"Content-Type": PROTOBUF, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return run.server.send("POST", "forward_backward", body, named)


def check_health_needs_no_key(server: Server) -> None:
    """The server says that it is healthy to whoever asks, without a key."""
    answer = server.send("GET", "healthz", headers={"X-API-Key": ""})
    assert answer.status == 200
    assert types.HealthResponse.model_validate(answer.json()).status == "ok"


def check_capabilities_name_a_model(server: Server) -> None:
    """The capabilities name at least one model that can be trained and sampled, in the SDK's schema."""
    found = types.GetServerCapabilitiesResponse.model_validate(server.get("get_server_capabilities"))
    assert any(model.model_name == server.model for model in found.supported_models)


@pytest.mark.parametrize("sdk", ["0.18.0", "0.24.1", "0.25.0", "0.38.0"])
def check_client_config(server: Server, sdk: str) -> None:
    """The flags of the client's configuration are answered to SDK {sdk}, which asks for them before anything else."""
    types.ClientConfigResponse.model_validate(server.call("client/config", {"sdk_version": sdk}))


def check_dynamic_config(server: Server) -> None:
    """The flags that a client asks for again and again are answered, or are plainly unknown by 404."""
    answer = server.post("client/dynamic_config", {"sdk_version": "0.38.0"})
    assert answer.status in (200, 404)
    assert isinstance(answer.json(), dict)


@pytest.mark.parametrize("key", ["", "tml-nobody", "nonsense"])
def check_wrong_key(server: Server, key: str) -> None:
    """A request with the key '{key}' is refused by 401 or 403."""
    answer = server.send("GET", "get_server_capabilities", headers={"X-API-Key": key})
    assert answer.status in (401, 403)
    assert answer.body.strip()


def check_promise_is_typed(run: Run) -> None:
    """A verb answers at once by a promise that the SDK's schema accepts."""
    promise = run.submit_pass(DATA, forward_only=True)
    assert types.UntypedAPIFuture.model_validate(promise).request_id


def check_model_id(session: Session) -> None:
    """A model is named by its session and number, as clients that create one by loading compute the name themselves."""
    run = session.model(number=4021)
    assert run.id == f"{session.id}:train:4021"


def check_info_is_typed(run: Run) -> None:
    """The information about a model names it, its base model and its rank."""
    found = types.GetInfoResponse.model_validate(run.server.call("get_info", {"model_id": run.id, "type": "get_info"}))
    assert (found.model_id, found.is_lora, found.lora_rank) == (run.id, True, 8)
    assert found.model_data.model_name == run.server.model


def check_sampler_info(session: Session) -> None:
    """The record of a sampler names its base model."""
    sampler = session.sampler()
    assert session.server.get(f"samplers/{sampler.id}")["base_model"] == session.server.model


def check_telemetry_is_taken(server: Server) -> None:
    """Telemetry is taken and answered, whatever it holds."""
    given = {"events": [], "platform": "check", "sdk_version": "0", "session_id": "none", "process_uuid": "none"}
    assert server.call("telemetry", given)["status"] == "accepted"


@pytest.mark.since("0.25")
def check_pass_answers_in_protobuf(run: Run) -> None:
    """The result of a pass is protobuf where the client accepts protobuf alone."""
    promise = run.submit_pass(DATA)
    run.server.wait(promise)
    assert PROTOBUF in run.server.retrieve(promise["request_id"], accept=PROTOBUF).headers["content-type"]


@pytest.mark.since("0.25")
def check_samples_answer_in_protobuf(session: Session) -> None:
    """The result of sampling is protobuf where the client accepts protobuf alone."""
    promise = session.sampler().submit(PROBES[0])
    session.server.wait(promise)
    assert PROTOBUF in session.server.retrieve(promise["request_id"], accept=PROTOBUF).headers["content-type"]


def check_other_results_are_json(run: Run) -> None:
    """The result of an optimizer step is JSON, which its schema accepts."""
    run.forward_backward(DATA)
    promise = run.submit_step(learning_rate=1e-4)
    run.server.wait(promise)
    answer = run.server.retrieve(promise["request_id"], accept="application/json")
    assert "application/json" in answer.headers["content-type"]
    types.OptimStepResponse.model_validate(answer.json())


@pytest.mark.since("0.25")
@pytest.mark.parametrize("level", [1, 19])
def check_zstd(run: Run, noise: Noise, level: int) -> None:
    """A body compressed by zstd at level {level} means what it says uncompressed."""
    plain = run.forward(DATA).flat
    packed = zstandard.ZstdCompressor(level=level).compress(pass_bytes(run))
    promise = json.loads(send(run, packed, Content_Encoding="zstd").body)
    noise.same(
        np.concatenate([each["logprobs"]["data"] for each in run.server.wait(promise)["loss_fn_outputs"]]),
        plain,
        "forward",
    )


@pytest.mark.since("0.25")
def check_zstd_without_a_size(run: Run) -> None:
    """A zstd frame that does not tell its size is read, too: streaming compressors write such."""
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    packed = packer.compress(pass_bytes(run)) + packer.flush()
    answer = send(run, packed, Content_Encoding="zstd")
    assert answer.status == 200, answer.body
    run.server.wait(answer.json())


@pytest.mark.full(needs="wire:json")
def check_json_means_the_same(run: Run, noise: Noise) -> None:
    """A pass in JSON, as SDK 0.24 sends it, gives the log-probabilities of the same pass in protobuf."""
    sent = [run.server.wait(run.submit_pass(DATA, json_wire=wire)) for wire in (True, False)]
    left, right = (np.concatenate([each["logprobs"]["data"] for each in one["loss_fn_outputs"]]) for one in sent)
    noise.same(left, right, "forward")


@pytest.mark.full(needs="wire:json")
def check_json_trains_the_same(session: Session, noise: Noise, lr: float) -> None:
    """A pass in JSON adds the gradient that it adds in protobuf."""
    from measure import probe

    probes = []
    for wire in (True, False):
        run = session.model()
        run.server.wait(run.submit_pass(DATA, json_wire=wire))
        run.step(learning_rate=lr)
        probes.append(probe(run))
    noise.alike(probes)


@pytest.mark.full(needs="wire:json")
def check_json_results(run: Run) -> None:
    """The result of a pass is JSON where the client accepts JSON alone."""
    promise = run.submit_pass(DATA, json_wire=True)
    result = run.server.wait(promise, accept="application/json")
    answer = run.server.retrieve(promise["request_id"], accept="application/json")
    assert "application/json" in answer.headers["content-type"]
    assert [len(each["logprobs"]["data"]) for each in result["loss_fn_outputs"]] == [
        len(each) - 1 for each in SEQUENCES
    ]


@pytest.mark.full(needs="wire:json")
def check_json_forward_route(run: Run, noise: Noise) -> None:
    """The route /forward of SDK 0.24 gives the log-probabilities of forward_backward, and no gradient."""
    output = run.server.wait(run.submit_pass(DATA, forward_only=True, json_wire=True))
    whole = np.concatenate([each["logprobs"]["data"] for each in output["loss_fn_outputs"]])
    noise.same(whole, run.forward(DATA).flat, "forward")


@pytest.mark.full(needs="wire:json")
def check_json_samples(session: Session) -> None:
    """Samples in JSON are those in protobuf, with null where protobuf has NaN."""
    sampler = session.sampler()
    promise = sampler.submit(PROBES[0], params={"temperature": 0.0}, prompt_logprobs=True)
    packed = session.server.wait(promise)
    plain = session.server.wait(promise, accept="application/json")
    assert plain["sequences"][0]["tokens"] == packed["sequences"][0]["tokens"]
    assert plain["prompt_logprobs"][0] is None
    assert packed["prompt_logprobs"][0] is None


def check_ragged_batches(run: Run, noise: Noise) -> None:
    """Each datum of a batch of different lengths gets log-probabilities of its own length, as when it is sent alone."""
    together = run.forward(DATA).logprobs
    assert [len(each) for each in together] == [len(each) - 1 for each in SEQUENCES]
    for one, data in zip(together, DATA):
        noise.same(one, run.forward([data]).logprobs[0], "forward")


def check_outputs_keep_the_order(run: Run, noise: Noise) -> None:
    """The outputs of a batch come in the order of its datums."""
    turned = run.forward(DATA[::-1]).logprobs[::-1]
    for one, other in zip(run.forward(DATA).logprobs, turned):
        noise.same(one, other, "forward")


def check_metrics_say_how_they_are_reduced(run: Run) -> None:
    """Every metric of a pass is named name:reduction, with a reduction that the SDK knows: it splits at the colon."""
    for name in run.forward_backward(DATA).metrics:
        assert name.count(":") == 1, name
        assert name.split(":")[1] in {"mean", "sum", "min", "max", "slack", "hash2", "unique"}, name


def check_loss_sum_is_a_metric(run: Run) -> None:
    """The metrics of a pass hold loss:sum, without which the SDK's custom losses fail."""
    assert np.isfinite(run.forward_backward(DATA).loss)


@pytest.mark.since("0.25")
def check_forward_only(run: Run, noise: Noise) -> None:
    """A pass with forward_only answers as one with a gradient does."""
    noise.same(run.forward(DATA).flat, run.forward_backward(DATA).flat, "forward")


@pytest.mark.since("0.29")
@pytest.mark.parametrize("field", ["loss_fn_config", "loss_fn_config_v2", "both"])
def check_loss_config_fields(run: Run, noise: Noise, field: str) -> None:
    """The settings of a loss are read from the protobuf field {field}, the newer field before the older."""
    from tinker.proto import tinker_public_pb2 as pb

    old = run.forward(DATA).logprobs
    data = [
        datum(each[:-1], each[1:], logprobs=one - 0.5, advantages=[1.0] * len(one)) for each, one in zip(SEQUENCES, old)
    ]
    message = pb.ForwardBackwardRequest.FromString(pass_bytes(run, data=data, loss_fn="ppo"))
    if field != "loss_fn_config_v2":
        message.loss_fn_config["clip_high_threshold"] = 1.25 if field == "loss_fn_config" else 7.0
    if field != "loss_fn_config":
        message.loss_fn_config_v2["clip_high_threshold"].number = 1.25
    result = run.server.wait(json.loads(send(run, message.SerializeToString()).body))
    assert result["metrics"]["loss:sum"] == pytest.approx(-1.25 * sum(len(one) for one in old), rel=1e-4)


UNKNOWN = {"a_field_of_tomorrow": {"deep": [1, 2, 3]}}


@pytest.mark.parametrize("verb", ["create_session", "create_model", "asample", "optim_step"])
def check_unknown_json_field(session: Session, verb: str) -> None:
    """A field that {verb} does not know is passed over, as each new SDK sends some."""
    server = session.server
    if verb == "create_session":
        given: Any = {"tags": [], "user_metadata": None, "sdk_version": "9", "type": "create_session", **UNKNOWN}
        assert server.call(verb, given)["session_id"]
    elif verb == "create_model":
        session.model(**UNKNOWN)
    elif verb == "asample":
        assert session.sampler().sample(PROBES[0], **UNKNOWN)["sequences"]
    else:
        run = session.model()
        run.forward_backward(DATA)
        server.wait(run.submit(verb, {"adam_params": {"learning_rate": 1e-4}, **UNKNOWN}))


@pytest.mark.since("0.25")
def check_unknown_protobuf_field(run: Run) -> None:
    """A protobuf field that the server does not know is passed over."""
    tomorrow = b"\xfa\x3f\x03abc"  # field 1023, three bytes
    answer = send(run, pass_bytes(run) + tomorrow)
    assert answer.status == 200, answer.body
    run.server.wait(answer.json())


def check_content_type_with_charset(server: Server) -> None:
    """A content type with a charset is the same content type."""
    given = json.dumps({"sdk_version": "0.38.0"}).encode()
    answer = server.send("POST", "client/config", given, {"Content-Type": "application/json; charset=utf-8"})
    assert answer.status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "application/octet-stream"])
def check_unknown_content_type(run: Run, kind: str) -> None:
    """A body of the content type {kind} is refused, and the refusal says why."""
    told(run.server.send("POST", "forward_backward", pass_bytes(run), {"Content-Type": kind}))


@pytest.mark.parametrize("body", ["", "{", "[1, 2]", "null", '"text"', "\\xff\\xfe"])
def check_malformed_json(server: Server, body: str) -> None:
    """The body {body!r} where JSON is due is refused, and the refusal says why."""
    sent = body.encode() if not body.startswith("\\x") else b"\xff\xfe"
    told(server.send("POST", "create_session" if body else "create_model", sent, {"Content-Type": "application/json"}))


@pytest.mark.since("0.25")
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def check_truncated_protobuf(run: Run, share: float) -> None:
    """A protobuf body cut off after {share} of its bytes is refused, and the refusal says why."""
    whole = pass_bytes(run, seq=1)
    told(send(run, whole[: int(len(whole) * share)]))


@pytest.mark.since("0.25")
def check_random_bytes_as_protobuf(run: Run) -> None:
    """Bytes that are no protobuf at all are refused, and the refusal says why."""
    told(send(run, b"\xff" * 64))


@pytest.mark.since("0.25")
def check_tensor_bytes_that_do_not_fit(run: Run) -> None:
    """A tensor whose bytes are no whole number of its dtype is refused."""
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.ForwardBackwardRequest.FromString(pass_bytes(run))
    message.data[0].loss_fn_inputs["weights"].dense += b"\x00"
    refused(lambda: run.server.wait(checked(send(run, message.SerializeToString()))))


@pytest.mark.since("0.25")
def check_body_that_is_no_zstd(run: Run) -> None:
    """A body said to be zstd that is none is refused, and the refusal says why."""
    told(send(run, pass_bytes(run, seq=1), Content_Encoding="zstd"))


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def check_unknown_route(server: Server, method: str) -> None:
    """{method} of a route that does not exist is 404, with a JSON body."""
    answer = server.send(
        method, "no_such_route", b"{}" if method == "POST" else b"", {"Content-Type": "application/json"}
    )
    assert answer.status == 404
    assert isinstance(answer.json(), dict)


def check_unknown_future(server: Server) -> None:
    """A future that nobody asked for is 404 or 410, at once: the SDK takes any other answer for a delay."""
    answer = server.retrieve("request-that-nobody-made")
    assert answer.status in (404, 410)
    assert answer.seconds < 5


def check_sample_sequence_ids(session: Session) -> None:
    """The promise of samples names each sequence, distinct ones: the SDK asserts that there is one for each sample."""
    sampler = session.sampler()
    promises = [sampler.submit(PROBES[0], num_samples=count) for count in (1, 3)]
    ids = [name for promise in promises for name in promise["sample_sequence_ids"]]
    assert [len(promise["sample_sequence_ids"]) for promise in promises] == [1, 3]
    assert len(set(ids)) == 4


def check_prompt_of_several_chunks(session: Session) -> None:
    """A prompt in several chunks is the prompt in one."""
    sampler, tokens = session.sampler(), PROBES[0]
    chunks = {"chunks": [*model_input(tokens[:5])["chunks"], *model_input(tokens[5:])["chunks"]]}
    whole, split = (sampler.sample(prompt, {"temperature": 0.0}) for prompt in (tokens, chunks))
    assert whole["sequences"][0]["tokens"] == split["sequences"][0]["tokens"]


def check_datum_of_several_chunks(run: Run, noise: Noise) -> None:
    """A datum in several chunks is the datum in one."""
    whole = sequence(PROBES[0])
    tokens = PROBES[0][:-1]
    split = {**whole, "model_input": {"chunks": model_input(tokens[:4])["chunks"] + model_input(tokens[4:])["chunks"]}}
    noise.same(run.forward([split]).flat, run.forward([whole]).flat, "forward")
