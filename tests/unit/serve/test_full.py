"""Full fine-tuning for one tenant: its steps against float64, beside adapters, over all that happens to models."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.learner import AdamWStep, AdapterLearners, read_model
from skyrl_train.model import resolve_model_path
from skyrl_train.serve import Limits
from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]
FOR_ANN = Limits(full_for="ann")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server"), limits=FOR_ANN) as http:
        yield http


@pytest.fixture
def ann(server: Any) -> Iterator[Caller]:
    """Who may, with no model yet."""
    caller = Caller(server)
    yield caller
    for model in server.service.records.models.values():
        if model.is_loaded and model.facts.is_full:
            caller.done("unload_model", {"model_id": model.model_id, "seq_id": model.next_seq})


@pytest.fixture
def bob(server: Any) -> Caller:
    return Caller(server, "tml-bob-key")


def asked(caller: Caller, number: int = 0) -> dict[str, Any]:
    """As SDKs send a `CreateModelRequest` whose `lora_config` is None: they leave out what is None."""
    return {"session_id": caller.session(), "model_seq_id": number, "base_model": BASE, "type": "create_model"}


def full_model(caller: Caller) -> str:
    return str(caller.done("create_model", asked(caller))["model_id"])


def saved(caller: Caller, model: str, seq: int, verb: str = "save_weights", name: str = "one") -> str:
    return str(caller.done(verb, {"model_id": model, "seq_id": seq, "path": name})["path"])


def trained(caller: Caller, model: str, first: int, count: int = 1) -> None:
    for seq in range(first, first + 2 * count, 2):
        caller.outcome(caller.train(model, seq, TWO))
        assert "error" not in caller.outcome(caller.step(model, seq + 1))


def loaded(caller: Caller, path: str, *, optimizer: bool = False) -> str:
    content = {"session_id": caller.session(), "model_seq_id": 0, "path": path, "optimizer": optimizer}
    return str(caller.done("load_weights", content)["model_id"])


def sampler_of(caller: Caller, path: str) -> str:
    content = {"session_id": caller.session(), "sampling_session_seq_id": 0, "model_path": path}
    return str(caller.send("create_sampling_session", content)["sampling_session_id"])


def folder_of(http: Any, path: str) -> Path:
    return Path(http.service._folder) / http.service.records.checkpoints[path].folder


def test_two_passes_and_a_step_of_adamw_are_those_of_float64(ann: Caller, server: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = full_model(ann)
    rates = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    rows = [datum([1, 2, 3, 4], weights=[0.0, 1.0, 2.0, 0.5]), datum([9, 8, 7])]
    seq = 1
    for _ in range(2):
        for row in rows:
            ann.outcome(ann.train(model, seq, [row]))
            seq += 1
        assert "error" not in ann.outcome(ann.step(model, seq, **rates))
        seq += 1
    found = read_model(folder_of(server, saved(ann, model, seq)))

    oracle: Any = AutoModelForCausalLM.from_pretrained(
        str(resolve_model_path("builtin:tiny_qwen2")), dtype=torch.float64
    )
    parameters = dict(oracle.named_parameters())
    averages = {name: [torch.zeros_like(each), torch.zeros_like(each)] for name, each in parameters.items()}
    for step in (1, 2):
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            tokens = row["model_input"]["chunks"][0]["tokens"]
            targets, weights = (row["loss_fn_inputs"][name]["data"] for name in ("target_tokens", "weights"))
            logprobs = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
            total = total - (logprobs[range(len(tokens)), targets] * torch.tensor(weights, dtype=torch.float64)).sum()
        gradients = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values()))))
        norm = torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt()
        assert norm > rates["grad_clip_norm"], "it clips"
        with torch.no_grad():
            for name, weight in parameters.items():
                gradient = gradients[name] * rates["grad_clip_norm"] / norm
                first, second = averages[name]
                first.lerp_(gradient, 1 - rates["beta1"])
                second.lerp_(gradient.square(), 1 - rates["beta2"])
                weight.mul_(1 - rates["learning_rate"] * (rates["weight_decay"] if weight.ndim > 1 else 0))
                scale = (second / (1 - rates["beta2"] ** step)).sqrt() + rates["eps"]
                weight.sub_(rates["learning_rate"] * first / (1 - rates["beta1"] ** step) / scale)
    assert found.keys() == parameters.keys()
    for name, weight in parameters.items():
        torch.testing.assert_close(found[name].double(), weight.detach(), rtol=0, atol=2e-6, msg=name)


def test_a_full_model_and_adapters_do_not_touch_each_other(ann: Caller, bob: Caller, server: Any) -> None:
    adapter, base = bob.model(), ann.send("create_sampling_session", {**asked(ann), "sampling_session_seq_id": 0})
    before = bob.logprobs(adapter, 1)
    weights = {
        name: each.detach().clone() for name, each in server.service.bases.of("").learners.base_weights().items()
    }
    drawn = ann.outcome(ann.sample(base["sampling_session_id"], 0))
    model = full_model(ann)
    assert ann.logprobs(model, 1) == pytest.approx(before, abs=1e-5), "it begins as its base"
    trained(ann, model, 2, count=3)
    assert bob.logprobs(adapter, 2) == before
    assert ann.outcome(ann.sample(base["sampling_session_id"], 0)) == drawn
    assert all(each.equal(weights[name]) for name, each in server.service.bases.of("").learners.base_weights().items())
    after = ann.logprobs(model, 8)
    trained(bob, adapter, 3)
    assert ann.logprobs(model, 9) == after
    info = ann.send("get_info", {"model_id": model})
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    assert bob.send("get_info", {"model_id": adapter})["lora_rank"] == 4


def test_another_tenant_is_refused_and_finds_nothing_of_it(ann: Caller, bob: Caller) -> None:
    model = full_model(ann)
    path = saved(ann, model, 1)
    assert "--full-for" in bob.send("create_model", asked(bob), status=403)["error"]
    assert "--full-for" in bob.send("create_model", {**asked(bob), "lora_config": None}, status=403)["error"]
    assert "rank" in bob.send("create_model", {**asked(bob), "lora_config": {"rank": 0}}, status=400)["error"]
    sent = {"model_id": model, "seq_id": 2}
    bob.send("optim_step", {**sent, "adam_params": {}}, status=404)
    bob.send("save_weights", {**sent, "path": "two"}, status=404)
    bob.send("unload_model", sent, status=404)
    bob.send("weights_info", {"tinker_path": path}, status=404)
    loading = {"session_id": bob.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    bob.send("load_weights", loading, status=404)
    bob.send("create_sampling_session", {**loading, "sampling_session_seq_id": 0, "model_path": path}, status=404)
    bob.get(f"training_runs/{model}", status=404)
    for caller, is_denied in ((ann, False), (bob, True)):
        assert ("full_fine_tuning" in caller.get("get_server_capabilities")["not_supported"]) == is_denied


def test_one_at_a_time_and_a_retry_of_the_first_is_no_second(ann: Caller, server: Any) -> None:
    content = asked(ann)
    model = str(ann.done("create_model", content)["model_id"])
    assert ann.done("create_model", content)["model_id"] == model
    count = sum(each.numel() for each in server.service.bases.of("").learners.base_weights().values())
    refused = ann.send("create_model", asked(ann), status=400)["error"]
    assert model in refused
    assert f" {16 * count} bytes" in refused
    path = saved(ann, model, 1)
    loading = {"session_id": ann.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    assert "unload_model" in ann.send("load_weights", loading, status=400)["error"]
    adapter = ann.model()
    into = {"model_id": adapter, "seq_id": 1, "path": path, "optimizer": False}
    assert "all weights" in ann.outcome(ann.send("load_weights", into))["error"]
    ann.done("unload_model", {"model_id": model, "seq_id": 2})
    assert ann.logprobs(loaded(ann, path), 1)


def test_loading_goes_on_with_the_averages_or_without(ann: Caller) -> None:
    model = full_model(ann)
    trained(ann, model, 1, count=2)
    path = saved(ann, model, 5)
    assert ann.send("weights_info", {"tinker_path": path}) | {"base_model": BASE} == {
        "base_model": BASE, "is_lora": False, "lora_rank": None, "train_unembed": True, "train_mlp": True, "train_attn": True
    }  # fmt: skip
    trained(ann, model, 6)
    expected = ann.logprobs(model, 8)
    ends = []
    for seq, optimizer in ((9, True), (13, False)):
        ann.done("load_weights", {"model_id": model, "seq_id": seq, "path": path, "optimizer": optimizer})
        trained(ann, model, seq + 1)
        ends.append(ann.logprobs(model, seq + 3))
    assert ends[0] == expected != ends[1]
    ann.done("unload_model", {"model_id": model, "seq_id": 17})
    again = loaded(ann, path, optimizer=True)
    trained(ann, again, 1)
    assert ann.logprobs(again, 3) == expected


def test_samples_are_of_what_was_saved_whichever_is_asked_for(ann: Caller) -> None:
    model = full_model(ann)
    samplers, expected = [], []
    for number in range(2):
        trained(ann, model, 1 + 4 * number)
        samplers.append(ann.snapshot(model, 3 + 4 * number, 100 + number))
        expected.append(ann.logprobs(model, 4 + 4 * number, [1, 2, 3, 4])[:3])
    promises = [ann.sample(samplers[number % 2], number, (1, 2, 3, 4), prompt_logprobs=True) for number in range(6)]
    answers = [ann.outcome(each) for each in promises]
    for number, answer in enumerate(answers):
        np.testing.assert_allclose(answer["prompt_logprobs"][1:], expected[number % 2], atol=1e-4)
        assert answer == answers[number % 2]
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    assert ann.send("cancel_future", {"request_id": promises[0]["request_id"]}) == {}


def test_a_copy_and_a_download_are_the_whole_model(ann: Caller, server: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = full_model(ann)
    trained(ann, model, 1)
    expected = ann.logprobs(model, 3)
    path = saved(ann, model, 4, "save_weights_for_sampler", "end")
    copied = ann.send("copy_weights", {"source_path": path, "session_id": ann.session(), "model_seq_id": 5})[
        "tinker_path"
    ]
    ann.done("unload_model", {"model_id": model, "seq_id": 5})
    for each in (path, copied):
        run, part, name = each.removeprefix("tinker://").split("/")
        url = ann.get(f"training_runs/{run}/checkpoints/{part}/{name}/archive")["url"]
        content = server.get(url.replace("http://testserver", "")).content
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            assert {"checkpoint_complete", "config.json", "model.safetensors"} <= set(archive.getnames())
            archive.extractall(tmp_path / name, filter="data")
        read: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / name))
        logprobs = read(torch.tensor([[1, 2, 3, 4]])).logits[0].log_softmax(-1)[range(4), [2, 3, 4, 7]]
        np.testing.assert_allclose(logprobs.detach(), expected, atol=1e-4)
        assert AutoTokenizer.from_pretrained(str(tmp_path / name)).vocab_size
        assert ann.outcome(ann.sample(sampler_of(ann, each), 0))["sequences"]
    assert ann.get(f"training_runs/{model}")["is_lora"] is False


@pytest.mark.slow
def test_it_waits_on_disk_while_others_compute_and_comes_back_the_same(tmp_path: Path) -> None:
    with serving(tmp_path, "deterministic=true", models_in_memory=1, limits=FOR_ANN) as http:
        ann, bob = Caller(http), Caller(http, "tml-bob-key")
        model, adapter = full_model(ann), bob.model()
        ends = []
        for turn in range(3):
            trained(ann, model, 1 + 3 * turn)
            ends.append(ann.logprobs(model, 3 + 3 * turn))
            trained(bob, adapter, 1 + 2 * turn)
            assert not http.service.records.models[model].is_in_memory
            assert model not in http.service.bases.of("").learners._learners
    with serving(tmp_path / "alone", "deterministic=true", limits=FOR_ANN) as http:
        ann = Caller(http)
        model = full_model(ann)
        for turn in range(3):
            trained(ann, model, 1 + 3 * turn)
            assert ann.logprobs(model, 3 + 3 * turn) == ends[turn]


@pytest.mark.slow
@pytest.mark.parametrize(("anchor_every", "share"), [(4, 1.0), (100, 2 / 3)])
def test_started_again_it_has_the_same_weights(tmp_path: Path, anchor_every: int, share: float) -> None:
    def played(ann: Caller, session: str) -> list[Any]:
        content = {**asked(ann), "session_id": session}
        model, told = ann.done("create_model", content)["model_id"], []
        for seq in range(1, 13, 2):
            told += [ann.outcome(ann.train(model, seq, TWO)), ann.outcome(ann.step(model, seq + 1))]
        sampler = ann.snapshot(model, 13, 100)
        return [*told, ann.outcome(ann.sample(sampler, 0)), ann.logprobs(model, 14)]

    with serving(tmp_path, anchor_every=anchor_every, limits=FOR_ANN) as http:
        session = Caller(http).session()
        expected = played(Caller(http), session)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[: int(len(whole) * share)])
    with serving(tmp_path, anchor_every=anchor_every, limits=FOR_ANN) as http:
        assert played(Caller(http), session) == expected


def test_whose_loading_was_cancelled_leaves_nothing_to_those_who_wait() -> None:
    """A loads, B waits for its user and is cancelled while it loads, A asks once more behind it."""
    import asyncio
    import threading
    from types import SimpleNamespace

    from skyrl_train.serve.models import _FullEngine

    engine: Any = SimpleNamespace(has="", close=lambda: None)
    is_loading, may_load = threading.Event(), threading.Event()

    def load_of(name: str) -> Any:
        def load(held: Any) -> Any:
            if name == "b":
                is_loading.set()
                assert may_load.wait(30)
            engine.has = name
            return engine

        return load

    async def play() -> None:
        full, told = _FullEngine(), []

        async def use(name: str, done: asyncio.Event | None = None) -> None:
            async with full.holding(Path(name), load_of(name)) as held:
                told.append((name, held.has))
                if done is not None:
                    await done.wait()
                assert held.has == name, "nobody loads while it is used"

        done = asyncio.Event()
        first, others = asyncio.create_task(use("a", done)), asyncio.create_task(use("a"))
        while len(told) < 2:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(use("b"))
        await asyncio.sleep(0.05)
        third = asyncio.create_task(use("a"))
        await asyncio.sleep(0.05)
        assert len(told) == 2, "who comes later does not overtake"
        done.set()
        await asyncio.to_thread(is_loading.wait, 30)
        second.cancel()
        await asyncio.sleep(0.05)
        may_load.set()
        await asyncio.gather(first, others, third)
        assert told == [("a", "a")] * 3
        full.close()

    asyncio.run(play())


def test_a_learner_of_all_weights_is_freed_when_it_is_removed(server: Any) -> None:
    import weakref

    from skyrl_train.config.models import OptimizerConfig

    learners: AdapterLearners = server.service.bases.of("").learners
    made = learners.create_full("passing", OptimizerConfig(name="adamw"))
    made.optim_step(AdamWStep(lr=1e-3, betas=(0.9, 0.95), eps=1e-8))
    held = [weakref.ref(each) for each in made.engine.model.parameters()]
    del made
    learners.remove("passing")
    assert not any(each() is not None for each in held)
