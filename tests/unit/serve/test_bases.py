"""Several base models in one server: each request finds its own by name, and nothing of one base meets another's."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.model import resolve_model_path
from skyrl_train.serve import Limits
from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
OTHER = "tests/other"
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base of the same shapes with other weights: nothing but its name tells them apart."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models") / "other"
    source = resolve_model_path("builtin:tiny_qwen2")
    shutil.copytree(source, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(str(source))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(other: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server"), also={OTHER: other}, limits=Limits(full_for="bob")) as http:
        yield http


@pytest.fixture
def ann(server: Any) -> Caller:
    return Caller(server)


def model_on(caller: Caller, base: str, session: str = "", number: int = 0, **kind: Any) -> str:
    content = {"session_id": session or caller.session(), "model_seq_id": number, "base_model": base}
    return str(caller.done("create_model", {"lora_config": {"rank": 4, "seed": 1}, **content, **kind})["model_id"])


def base_sampler(caller: Caller, base: str, session: str = "", *, status: int = 200) -> Any:
    content = {"session_id": session or caller.session(), "sampling_session_seq_id": 0, "base_model": base}
    return caller.send("create_sampling_session", content, status=status)


def prompt_logprobs(caller: Caller, sampler: str) -> Any:
    return caller.outcome(caller.sample(sampler, 0, prompt=(1, 2, 3, 4), prompt_logprobs=True))["prompt_logprobs"][1:]


def test_each_is_told_and_answers_by_its_name(ann: Caller) -> None:
    told = ann.get("get_server_capabilities")["supported_models"]
    assert [each["model_name"] for each in told] == [BASE, OTHER]
    logprobs = {}
    for base in (BASE, OTHER):
        model = model_on(ann, base)
        info = ann.send("get_info", {"model_id": model})
        assert (info["model_name"], info["model_data"]["tokenizer_id"]) == (base, base)
        logprobs[base] = ann.logprobs(model, 1)[:3]
        sampler = base_sampler(ann, base)["sampling_session_id"]
        assert prompt_logprobs(ann, sampler) == pytest.approx(logprobs[base], abs=1e-4), "adapters begin as their base"
        assert ann.get(f"samplers/{sampler}")["base_model"] == base
        ann.outcome(ann.train(model, 2, TWO))
        ann.outcome(ann.step(model, 3))
        path = ann.done("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "end"})["path"]
        assert ann.send("weights_info", {"tinker_path": path})["base_model"] == base
        assert ann.get(f"training_runs/{model}")["base_model"] == base
        content = {"session_id": ann.session(), "sampling_session_seq_id": 0, "model_path": path}
        sampler = ann.send("create_sampling_session", content)["sampling_session_id"]
        assert prompt_logprobs(ann, sampler) == pytest.approx(ann.logprobs(model, 5)[:3], abs=1e-4)
        assert ann.get(f"samplers/{sampler}")["base_model"] == base
        copied = ann.send("copy_weights", {"source_path": path, "session_id": ann.session(), "model_seq_id": 0})
        assert ann.send("weights_info", copied)["base_model"] == base
    assert logprobs[BASE] != pytest.approx(logprobs[OTHER], abs=1e-2)
    refused = ann.send(
        "create_model", {"session_id": ann.session(), "model_seq_id": 0, "base_model": "a/b"}, status=404
    )
    assert OTHER in refused["error"]
    session = ann.session()
    base_sampler(ann, BASE, session)
    assert "already" in base_sampler(ann, OTHER, session, status=422)["error"]


def test_a_checkpoint_of_one_is_loaded_into_no_model_of_another(ann: Caller) -> None:
    model, onto = model_on(ann, BASE), model_on(ann, OTHER)
    path = ann.done("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})["path"]
    into = {"model_id": onto, "seq_id": 1, "path": path, "optimizer": True}
    refused = ann.outcome(ann.send("load_weights", into))["error"]
    assert BASE in refused
    assert OTHER in refused
    made = {"session_id": ann.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    assert OTHER in ann.send("load_weights", {**made, "base_model": OTHER}, status=400)["error"]
    again = ann.done("load_weights", made)["model_id"]
    assert ann.send("get_info", {"model_id": again})["model_name"] == BASE


def test_passes_of_different_bases_are_not_computed_together(
    ann: Caller, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model_on(ann, base) for base in (BASE, OTHER, BASE, OTHER, OTHER)]
    first, may_go, packed = server.service.bases.of(BASE), threading.Event(), []
    step = first.optim_step
    monkeypatch.setattr(first, "optim_step", lambda name, settings: may_go.wait(60) and step(name, settings))
    for name, each in server.service.bases.by_name.items():
        compute = each.together
        monkeypatch.setattr(
            each,
            "together",
            lambda asked, name=name, compute=compute: packed.append((name, len(asked))) or compute(asked),
        )
    held = ann.step(models[0], 1)
    passes = [ann.train(model, 1, TWO) for model in models[1:]]
    may_go.set()
    losses = [ann.outcome(each)["metrics"]["loss:sum"] for each in passes]
    assert "error" not in ann.outcome(held)
    assert packed == [(OTHER, 3)]
    assert losses[0] == pytest.approx(losses[2], rel=1e-6) != pytest.approx(losses[1], rel=1e-3)


def test_all_weights_of_the_second_are_trained_beside_the_first(server: Any) -> None:
    bob = Caller(server, "tml-bob-key")
    adapter, model = model_on(bob, OTHER), model_on(bob, OTHER, lora_config=None)
    assert bob.logprobs(model, 1) == pytest.approx(bob.logprobs(adapter, 1), abs=1e-5)
    refused = bob.send("create_model", {"session_id": bob.session(), "model_seq_id": 0, "base_model": BASE}, status=400)
    assert "of one model at a time" in refused["error"]
    bob.outcome(bob.train(model, 2, TWO))
    bob.outcome(bob.step(model, 3))
    assert prompt_logprobs(bob, bob.snapshot(model, 4, 100)) == pytest.approx(bob.logprobs(model, 5)[:3], abs=1e-4)


@pytest.mark.slow
def test_a_journal_of_one_base_opens_with_several_and_without_one_nothing_of_it_is_lost(
    other: str, tmp_path: Path
) -> None:
    with serving(tmp_path) as http:
        ann = Caller(http)
        session = ann.session()
        model = model_on(ann, BASE, session)
        ann.outcome(ann.train(model, 1, TWO))
        ann.outcome(ann.step(model, 2))
        path = ann.done("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["path"]
        expected = ann.logprobs(model, 4)
        sampler = base_sampler(ann, BASE, session)["sampling_session_id"]
    assert OTHER.encode() not in (tmp_path / "journal.jsonl").read_bytes()
    assert not any('"base"' in line for line in (tmp_path / "journal.jsonl").read_text().splitlines()), "as before"
    with serving(tmp_path, also={OTHER: other}) as http:
        ann = Caller(http)
        assert ann.logprobs(model, 5) == expected
        assert ann.send("weights_info", {"tinker_path": path})["base_model"] == BASE
        assert base_sampler(ann, BASE, session)["sampling_session_id"] == sampler
        onto = model_on(ann, OTHER, session, 1)
        before = ann.logprobs(onto, 1)
        ann.outcome(ann.train(onto, 2, TWO))
        journal = (tmp_path / "journal.jsonl").read_bytes()
        step = ann.step(onto, 3)
        ann.outcome(step)
        after = ann.logprobs(onto, 4)
    accepted = next(
        line for line in (tmp_path / "journal.jsonl").read_bytes()[len(journal) :].splitlines(keepends=True)
    )
    assert json.loads(accepted)["accept"] == step["request_id"]
    (tmp_path / "journal.jsonl").write_bytes(journal + accepted)  # killed before it computed
    with serving(tmp_path) as http:
        ann = Caller(http)
        assert ann.logprobs(model, 6) == expected
        sent = {"adam_params": {}, "model_id": onto, "seq_id": 4}
        assert OTHER in ann.send("optim_step", sent, status=503)["error"]
        assert not http.service.records.promises[step["request_id"]].done.is_set()
    with serving(tmp_path, also={OTHER: other}) as http:
        ann = Caller(http)
        assert "metrics" in ann.outcome(step)
        assert ann.logprobs(onto, 4) == after != before
