"""The SDK itself, unmodified: what its users call, from the first line of a program to the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from driver import Server
from measure import PROBES, SEQUENCES, Noise
from tinker import types

ADAM = types.AdamParams(learning_rate=0.01)


def as_datum(tokens: list[int], weight: float = 1.0) -> Any:
    targets, weights = np.array(tokens[1:], np.int64), np.full(len(tokens) - 1, weight, np.float32)
    inputs = {"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(weights)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


DATA = [as_datum(tokens) for tokens in SEQUENCES]


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[Any]:
    """A client of the SDK, told the server and the key as its users tell it."""
    os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"] = server.url, server.key
    os.environ["TINKER_TELEMETRY"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield tinker.ServiceClient()


@pytest.fixture
def client(service: Any, server: Server) -> Any:
    """A new model of the SDK's."""
    return done(service.create_lora_training_client(base_model=server.model, rank=8, seed=5))


def done(pending: Any) -> Any:
    """The result of what is a future in one version of the SDK and the result itself in another."""
    return pending.result(120) if hasattr(pending, "result") else pending


def logprobs(output: Any) -> list[np.ndarray]:
    return [np.array(each["logprobs"].data) for each in output.loss_fn_outputs]


def scores(client: Any) -> np.ndarray:
    return np.concatenate(logprobs(client.forward(DATA, "cross_entropy").result(120)))


def check_first_line(service: Any, server: Server) -> None:
    """ServiceClient() starts, and names the models."""
    names = [model.model_name for model in done(service.get_server_capabilities()).supported_models]
    assert server.model in names


def check_info(client: Any, server: Server) -> None:
    """A new model knows its base model and its rank."""
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank) == (server.model, 8)


def check_training_learns(client: Any) -> None:
    """Six steps of cross-entropy lower the loss, each step submitted before its pass is awaited."""
    losses = []
    for _ in range(6):
        learnt, stepped = client.forward_backward(DATA, "cross_entropy"), client.optim_step(ADAM)
        losses.append(learnt.result(120).metrics["loss:sum"])
        stepped.result(120)
    assert losses[-1] < losses[0]


def check_batch_beyond_a_chunk(client: Any, noise: Noise) -> None:
    """A batch of 1,100 datums, which the SDK sends in two chunks, is answered in its order."""
    tokens = [PROBES[index % 4][: 3 + index % 8] for index in range(1100)]
    found = logprobs(client.forward_backward([as_datum(each) for each in tokens], "cross_entropy").result(180))
    assert [len(each) for each in found] == [len(each) - 1 for each in tokens]
    alone = logprobs(client.forward([as_datum(tokens[1099])], "cross_entropy").result(120))
    noise.same(found[1099], alone[0], "forward")
    client.optim_step(ADAM).result(120)


def check_sampling_client(client: Any) -> None:
    """Samples of the weights as they are come with tokens, log-probabilities and a reason."""
    sampler = done(client.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=1)
    prompt = types.ModelInput.from_ints(PROBES[0])
    answer = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result(120)
    assert len(answer.sequences) == 3
    for each in answer.sequences:
        assert len(each.tokens) == len(each.logprobs) > 0
        assert each.stop_reason in ("stop", "length")


def check_named_sampling_client(client: Any, service: Any) -> None:
    """A named snapshot is sampled through its path."""
    path = client.save_weights_for_sampler("by-name").result(120).path
    sampler = done(service.create_sampling_client(model_path=path))
    params = types.SamplingParams(max_tokens=3)
    assert sampler.sample(prompt=types.ModelInput.from_ints(PROBES[0]), num_samples=1, sampling_params=params).result(
        120
    )


def check_compute_logprobs(client: Any, noise: Noise) -> None:
    """compute_logprobs gives the log-probabilities of forward."""
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM).result(120)
    sampler = done(client.save_weights_and_get_sampling_client())
    found = sampler.compute_logprobs(types.ModelInput.from_ints(PROBES[0])).result(120)
    assert found[0] is None
    expected = logprobs(client.forward([as_datum(PROBES[0])], "cross_entropy").result(120))[0]
    noise.same(found[1:], expected, "sampling")


@pytest.mark.parametrize("optimizer", [True, False])
def check_state(client: Any, service: Any, noise: Noise, optimizer: bool) -> None:
    """A model made from a saved state (optimizer: {optimizer}) answers as the saved one, and steps on accordingly."""
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(ADAM).result(120)
    path = client.save_state(f"state-{optimizer}").result(120).path
    name = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
    again = done(getattr(service, name)(path))
    before = scores(client)
    noise.same(scores(again), before)
    still = [as_datum(tokens, 0.0) for tokens in SEQUENCES]
    for each in (client, again):
        each.forward_backward(still, "cross_entropy")
        each.optim_step(ADAM).result(120)
    noise.same(scores(again), scores(client) if optimizer else before)


def check_wrong_request_raises(client: Any) -> None:
    """A wrong request raises an error of the user's, and the client goes on."""
    bad = types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=DATA[0].loss_fn_inputs)
    with pytest.raises(Exception, match=r"\S"):
        client.forward_backward([bad], "cross_entropy").result(60)
    assert len(logprobs(client.forward(DATA, "cross_entropy").result(60))) == len(DATA)


def check_rest_client(client: Any, service: Any) -> None:
    """The REST client lists and deletes what was saved."""
    rest = service.create_rest_client()
    path = client.save_state("rest").result(120).path
    assert path in [each.tinker_path for each in rest.list_checkpoints(client.model_id).result(60).checkpoints]
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    assert path not in [each.tinker_path for each in rest.list_checkpoints(client.model_id).result(60).checkpoints]


def command(*arguments: str, more_tries: int = 2) -> str:
    """What the client's command line printed. Where its process is ended by a signal it is started again: its threads are
    cut off as it exits, and one of them may abort it, which says nothing of the server."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "tinker.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    if ran.returncode < 0 and more_tries:
        return command(*arguments, more_tries=more_tries - 1)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def check_command_line(client: Any) -> None:
    """The command line lists runs and checkpoints, and shows one."""
    path = client.save_state("listed").result(120).path
    assert client.model_id in command("--format", "json", "run", "list", "--limit", "0")
    assert path in command("--format", "json", "checkpoint", "list", "--run-id", client.model_id)
    assert path in command("--format", "json", "checkpoint", "info", path)


@pytest.mark.since("0.29")
@pytest.mark.full(needs="external_weights")
def check_command_line_downloads(client: Any, tmp_path: Any) -> None:
    """The command line downloads a checkpoint: it loads it in a session of its own, exports and fetches that."""
    path = client.save_state("fetched").result(120).path
    command("--format", "json", "checkpoint", "download", path, "--output", str(tmp_path))
    assert any(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
