"""Limits and bad input: each is refused in words, by a status that the SDK does not retry, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
import zstandard
from driver import Run, Sampler, Server, Session, datum, model_input, sequence, tensor
from expect import RETRIED, refused, told
from measure import DATA, PROBES, Noise, probe
from wire import PROTOBUF, Json, request_bytes

NAN, INFINITE, FAR = float("nan"), float("inf"), 2**31 - 1
GOOD = sequence([5, 6, 7, 8])


def with_inputs(**inputs: Json) -> Json:
    return {**GOOD, "loss_fn_inputs": {**GOOD["loss_fn_inputs"], **inputs}}


BAD_DATUMS: dict[str, Json] = {
    "targets are shorter than the input": datum([5, 6, 7], [6, 7], weights=[1.0, 1.0]),
    "targets are longer than the input": datum([5, 6], [6, 7, 8], weights=[1.0] * 3),
    "weights are shorter than the targets": datum([5, 6, 7], [6, 7, 8], weights=[1.0]),
    "weights are longer than the targets": datum([5, 6, 7], [6, 7, 8], weights=[1.0] * 9),
    "a weight is NaN": datum([5, 6, 7], [6, 7, 8], weights=[1.0, NAN, 1.0]),
    "a weight is infinite": datum([5, 6, 7], [6, 7, 8], weights=[1.0, INFINITE, 1.0]),
    "an input token is beyond every vocabulary": datum([5, FAR, 7], [6, 7, 8], weights=[1.0] * 3),
    "an input token is negative": datum([5, -1, 7], [6, 7, 8], weights=[1.0] * 3),
    "a target is beyond every vocabulary": datum([5, 6, 7], [6, FAR, 8], weights=[1.0] * 3),
    "a target is negative": datum([5, 6, 7], [6, -5, 8], weights=[1.0] * 3),
    "there are no weights": datum([5, 6, 7], [6, 7, 8]),
    "there are no targets": {"model_input": model_input([5, 6]), "loss_fn_inputs": {"weights": tensor([1.0, 1.0])}},
}


@pytest.mark.parametrize("what", list(BAD_DATUMS))
def check_bad_datum(session: Session, noise: Noise, what: str) -> None:
    """A pass is refused where {what}, and the model is as before."""
    run = session.model()
    refused(lambda: run.forward_backward([DATA[0], BAD_DATUMS[what]]))
    run.forward_backward(DATA[:2])
    run.step(**noise.push())
    same = session.model()
    same.forward_backward(DATA[:2])
    same.step(**noise.push())
    noise.same(probe(run), probe(same))


@pytest.mark.parametrize("field", ["logprobs", "advantages"])
@pytest.mark.parametrize("value", [NAN, INFINITE])
def check_bad_reinforcement(run: Run, field: str, value: float) -> None:
    """importance_sampling is refused where {field} holds {value}."""
    fields = {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3, field: [1.0, value, 1.0]}
    refused(lambda: run.forward_backward([datum([5, 6, 7], [6, 7, 8], **fields)], "importance_sampling"))


@pytest.mark.parametrize("field", ["logprobs", "advantages"])
def check_missing_reinforcement(run: Run, field: str) -> None:
    """importance_sampling is refused where {field} is missing, by the name of the field."""
    fields = {name: [0.5] * 3 for name in ("logprobs", "advantages") if name != field}
    assert field in refused(
        lambda: run.forward_backward([datum([5, 6, 7], [6, 7, 8], **fields)], "importance_sampling")
    )


def check_no_datums(run: Run) -> None:
    """A pass without datums is refused."""
    refused(lambda: run.forward_backward([]))


BAD_ADAM: dict[str, Json] = {
    "the learning rate is negative": {"learning_rate": -0.1},
    "beta1 is 1": {"learning_rate": 0.1, "beta1": 1.0},
    "beta2 is above 1": {"learning_rate": 0.1, "beta2": 1.5},
    "eps is negative": {"learning_rate": 0.1, "eps": -1.0},
    "the learning rate is a word": {"learning_rate": "fast"},
}


@pytest.mark.parametrize("what", list(BAD_ADAM))
def check_bad_adam(session: Session, noise: Noise, what: str) -> None:
    """A step is refused where {what}, and the weights stay."""
    run = session.model()
    run.forward_backward(DATA)
    refused(lambda: run.server.wait(run.submit_step(**BAD_ADAM[what])))
    noise.same(probe(run), probe(session.model()))


def check_learning_rate_that_is_no_number(session: Session, noise: Noise) -> None:
    """A step whose learning rate is NaN, which JSON does not know, is refused."""
    run = session.model()
    run.forward_backward(DATA)
    body = json.dumps({"model_id": run.id, "seq_id": run.number(None), "adam_params": {"learning_rate": NAN}}).encode()
    answer = run.server.send("POST", "optim_step", body, {"Content-Type": "application/json"})
    if answer.status == 200:
        refused(lambda: run.server.wait(answer.json()))
    else:
        told(answer)
    noise.same(
        probe(Run(session, run.id, seq=run.seq if answer.status == 200 else run.seq - 1)), probe(session.model())
    )


@pytest.mark.since("0.33")
def check_unknown_optimizer(session: Session) -> None:
    """An optimizer that is not served is refused, never replaced by another."""
    refused(lambda: session.model(optimizer_config={"type": "no_such_optimizer"}))
    run = session.model()
    run.forward_backward(DATA)
    given = {"optimizer_params": {"type": "no_such_optimizer", "learning_rate": 0.1}, "type": "optim_step"}
    refused(lambda: run.server.wait(run.submit("optim_step", given)))


@pytest.mark.parametrize("base", ["nobody/no-such-model", "", "../../etc", "conformance"])
def check_unknown_base_model(session: Session, base: str) -> None:
    """A model or a sampler of the base model '{base}' is refused."""
    refused(lambda: session.model(base_model=base))
    given = {"session_id": session.id, "sampling_session_seq_id": next(session.samplers), "base_model": base}
    refused(lambda: session.server.call("create_sampling_session", given))


@pytest.mark.parametrize("rank", [0, -3])
def check_bad_rank(session: Session, rank: int) -> None:
    """An adapter of rank {rank} is refused."""
    refused(lambda: session.model(lora_config={"rank": rank}))


def check_failed_model_is_none(session: Session) -> None:
    """A model that could not be made takes no requests."""
    number = next(session.models)
    refused(lambda: session.model(base_model="nobody/no-such-model", number=number))
    refused(lambda: Run(session, f"{session.id}:train:{number}").forward(DATA))


def check_unknown_session(server: Server) -> None:
    """A model or a sampler in a session that does not exist is refused."""
    nobody = Session(server, "session-of-nobody")
    refused(lambda: nobody.model())
    refused(lambda: nobody.sampler())


@pytest.mark.parametrize("verb", ["forward_backward", "optim_step", "save_weights", "get_info"])
def check_unknown_model(session: Session, verb: str) -> None:
    """{verb} of a model that does not exist is refused at once."""
    run = Run(session, "model-of-nobody")
    if verb == "forward_backward":
        refused(lambda: run.forward(DATA))
    elif verb == "get_info":
        refused(lambda: session.server.call(verb, {"model_id": run.id}))
    else:
        refused(lambda: session.server.wait(run.submit(verb, {"adam_params": {}, "path": "x"})))


def check_unknown_sampler(session: Session) -> None:
    """Samples of a sampler that does not exist are refused."""
    refused(lambda: Sampler(session, "sampler-of-nobody").sample(PROBES[0]))


@pytest.mark.parametrize(
    "name", ["../escape", "a/b", "/etc/passwd", "..", "x" * 300, "with space", "ünï", "a\x00b", "-rf\n", "tinker://x"]
)
@pytest.mark.parametrize("verb", ["save_weights", "save_weights_for_sampler"])
def check_bad_name(run: Run, verb: str, name: str) -> None:
    """{verb} under the name {name!r:.40} is refused."""
    refused(lambda: run.server.wait(run.submit(verb, {"path": name, "type": verb})))


@pytest.mark.parametrize("name", ["step-001", "a.b_c-D9", "x" * 64])
def check_good_name(run: Run, name: str) -> None:
    """A checkpoint is saved under the name {name:.40}."""
    assert run.save(name).endswith(f"/weights/{name}")


BAD_SAMPLES: dict[str, Json] = {
    "max_tokens is 0": {"params": {"max_tokens": 0}},
    "max_tokens is negative": {"params": {"max_tokens": -4}},
    "the temperature is negative": {"params": {"temperature": -1.0}},
    "top_p is above 1": {"params": {"top_p": 1.5}},
    "top_p is 0": {"params": {"top_p": 0.0}},
    "num_samples is 0": {"num_samples": 0},
    "num_samples is negative": {"num_samples": -1},
    "the prompt is empty": {"prompt": model_input([])},
    "a prompt token is beyond every vocabulary": {"prompt": model_input([5, FAR])},
    "a prompt token is negative": {"prompt": model_input([5, -2])},
    "the prompt is no list of chunks": {"prompt": {"chunks": "words"}},
    "a prompt chunk is of an unknown type": {"prompt": {"chunks": [{"type": "telepathy", "tokens": [1]}]}},
    "max_tokens is a word": {"params": {"max_tokens": "many"}},
}


@pytest.mark.parametrize("what", list(BAD_SAMPLES))
def check_bad_samples(session: Session, what: str) -> None:
    """Samples are refused where {what}, and the sampler goes on."""
    sampler = session.sampler()
    given = dict(BAD_SAMPLES[what])
    refused(lambda: sampler.sample(given.pop("prompt", PROBES[0]), **given))
    assert sampler.sample(PROBES[0])["sequences"]


def context(capabilities: Json, server: Server) -> int:
    about = next(each for each in capabilities["supported_models"] if each["model_name"] == server.model)
    found = about.get("max_context_length")
    return int(found) if found else 0


def check_context_is_stated(server: Server, capabilities: Json) -> None:
    """The capabilities state how many tokens a model takes."""
    assert context(capabilities, server) > 0


def check_prompt_beyond_the_context(session: Session, capabilities: Json) -> None:
    """A prompt longer than the stated context is refused."""
    length = context(capabilities, session.server) + 1
    refused(lambda: session.sampler().sample([7] * length, {"max_tokens": 1}))


def check_datum_beyond_the_context(run: Run, capabilities: Json) -> None:
    """A datum longer than the stated context is refused, and its neighbours in the batch add nothing."""
    length = context(capabilities, run.server) + 1
    refused(lambda: run.forward_backward([DATA[0], sequence([7] * (length + 1))]))


@pytest.mark.since("0.25")
def check_zstd_bomb(run: Run) -> None:
    """A small body that unpacks to gigabytes is refused, and the server goes on."""
    packer = zstandard.ZstdCompressor(level=3).compressobj()
    block, parts = b"\x00" * (1 << 24), []
    for _ in range(128):  # two gigabytes
        parts.append(packer.compress(block))
    body = b"".join([*parts, packer.flush()])
    answer = run.server.send("POST", "forward_backward", body, {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"})
    told(answer)
    assert len(run.forward(DATA).logprobs) == len(DATA)


def check_huge_body(run: Run) -> None:
    """A body of 200 MB is refused by a status or by a closed connection, and the server goes on."""
    with contextlib.suppress(ConnectionError):  # a server need not read what it refuses
        answer = run.server.send("POST", "forward_backward", b"\x00" * 200_000_000, {"Content-Type": PROTOBUF})
        assert answer.status not in RETRIED
        assert 400 <= answer.status < 500
    assert run.server.send("GET", "healthz").status == 200
    assert len(run.forward(DATA).logprobs) == len(DATA)


@pytest.mark.since("0.25")
@pytest.mark.parametrize("seq", [0, -1])
def check_bad_number(run: Run, seq: int) -> None:
    """A pass numbered {seq} is refused: 0 on the wire is a number that was not given."""
    sent: Any = {"data": DATA, "loss_fn": "cross_entropy"}
    body = request_bytes({"model_id": run.id, "seq_id": seq, "forward_backward_input": sent})
    answer = run.server.send("POST", "forward_backward", body, {"Content-Type": PROTOBUF})
    if answer.status == 200:
        refused(lambda: run.server.wait(answer.json()))
    else:
        told(answer)


@pytest.mark.parametrize("seq", ["one", None, 1.5, [1]])
def check_number_of_another_type(run: Run, seq: Any) -> None:
    """A step whose number is {seq!r} is refused, or taken as the next where it was left out."""
    if seq is None:
        run.server.wait(
            run.server.call("optim_step", {"model_id": run.id, "seq_id": 1, "adam_params": {"learning_rate": 0.0}})
        )
        return
    given = {"model_id": run.id, "seq_id": seq, "adam_params": {"learning_rate": 1e-4}}
    refused(lambda: run.server.wait(run.server.call("optim_step", given)))


@pytest.mark.parametrize(
    "verb", ["create_model", "optim_step", "asample", "save_weights", "load_weights", "retrieve_future"]
)
def check_empty_request(server: Server, verb: str) -> None:
    """{verb} of an empty object is refused in words."""
    told(server.post(verb, {}))


@pytest.mark.since("0.29")
def check_custom_loss_on_the_server(session: Session) -> None:
    """A custom loss to be run by the server is refused by a server that does not claim to."""
    if session.server.call("client/config", {"sdk_version": "0.38.0"}).get("custom_loss_server_side"):
        return
    given = {
        "session_id": session.id,
        "custom_loss_seq_id": 0,
        "name": "x",
        "inputs": [],
        "graph": {"format": 1, "nodes": []},
    }
    refused(lambda: session.server.wait(session.server.call("create_custom_loss", given)))


def check_error_names_the_cause(run: Run) -> None:
    """The error of a datum with a missing field names the field."""
    bad = BAD_DATUMS["there are no weights"]
    assert "weights" in refused(lambda: run.forward_backward([bad]))


@pytest.mark.parametrize("where", ["an address of the server's own network", "file:///etc/passwd"])
def check_location_of_an_image(session: Session, where: str) -> None:
    """An image that is said to lie at {where} is refused in a prompt, and nobody goes there to fetch it."""
    sampler = session.sampler()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        location = where if where.startswith("file:") else here
        image = {"type": "image_asset_pointer", "format": "png", "location": location, "expected_tokens": 2}
        refused(lambda: sampler.sample({"chunks": [*model_input(PROBES[0])["chunks"], image]}))
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert sampler.sample(PROBES[0])["sequences"]


@pytest.mark.since("0.25")
def check_image(run: Run) -> None:
    """An image for a model that takes none is refused, and does not become an empty input."""
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.ForwardBackwardRequest(model_id=run.id, seq_id=run.number(None), loss_fn="cross_entropy")
    sent = message.data.add()
    sent.model_input.add().image.data = b"\x89PNG"
    sent.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dtype=pb.DTYPE_INT64, shape=[0], dense=b""))
    sent.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0], dense=b""))
    answer = run.server.send("POST", "forward_backward", message.SerializeToString(), {"Content-Type": PROTOBUF})
    if answer.status == 200:
        refused(lambda: run.server.wait(answer.json()))
    else:
        told(answer)
