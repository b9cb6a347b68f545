"""What becomes of checkpoints: how long they live, copies, downloads; what of it is another tenant's business (nothing)."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_train.serve.checkpoints._SWEEP_S", 0.05)
        with serving(tmp_path_factory.mktemp("server")) as http:
            yield http


@pytest.fixture
def ann(server: Any) -> Caller:
    return Caller(server)


@pytest.fixture
def bob(server: Any) -> Caller:
    return Caller(server, "tml-bob-key")


def trained(caller: Caller) -> str:
    """A model two requests from the base."""
    model = caller.model()
    caller.outcome(caller.train(model, 1, TWO))
    caller.outcome(caller.step(model, 2))
    return model


def saved(caller: Caller, model: str, seq: int, verb: str = "save_weights", name: str = "one", **content: Any) -> str:
    return str(caller.done(verb, {"model_id": model, "seq_id": seq, "path": name, **content})["path"])


def address(path: str) -> str:
    model, part, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{model}/checkpoints/{part}/{name}"


def put_ttl(caller: Caller, path: str, seconds: Any, *, status: int = 200) -> Any:
    answer = caller.http.put(f"/api/v1/{address(path)}/ttl", json={"ttl_seconds": seconds}, headers=caller.headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def loaded(caller: Caller, path: str, *, optimizer: bool = False) -> str:
    content = {"session_id": caller.session(), "model_seq_id": 0, "path": path, "optimizer": optimizer}
    return str(caller.done("load_weights", content)["model_id"])


def test_a_time_to_live_is_given_shown_and_taken_back(ann: Caller, bob: Caller) -> None:
    model = ann.model()
    path = saved(ann, model, 1, ttl_seconds=7200)

    def expires() -> Any:
        (found,) = ann.get(f"training_runs/{model}/checkpoints")["checkpoints"]
        return found["expires_at"]

    assert expires() is not None
    put_ttl(ann, path, None)
    assert expires() is None
    put_ttl(ann, path, 3600)
    assert expires() is not None
    for seconds in (60, 10**10, "3600", 3600.5):
        assert "ttl.ttl_seconds" in put_ttl(ann, path, seconds, status=400)["error"]
    put_ttl(bob, path, None, status=404)
    put_ttl(ann, f"{path}x", None, status=404)
    assert (
        "ttl_seconds"
        in ann.outcome(ann.send("save_weights", {"model_id": model, "seq_id": 2, "ttl_seconds": 1}))["error"]
    )
    assert ann.logprobs(model, 3), "what was refused has had its turn"


def test_what_has_expired_is_nowhere_and_its_files_go(ann: Caller, server: Any) -> None:
    model = trained(ann)
    path = saved(ann, model, 3)
    snapshot = saved(ann, model, 4, "save_weights_for_sampler", ttl_seconds=3600)
    folders = []
    for each in (path, snapshot):
        checkpoint = server.service.records.checkpoints[each]
        folders.append(server.service._folder / checkpoint.folder)
        assert folders[-1].is_dir()
        checkpoint.expires_at = time.time() - 1
    assert ann.get(f"training_runs/{model}/checkpoints")["checkpoints"] == []
    ann.send("weights_info", {"tinker_path": path}, status=404)
    content = {"session_id": ann.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    ann.send("load_weights", content, status=404)
    until(lambda: not any(folder.exists() for folder in folders))
    again = ann.outcome(ann.send("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "one"}))
    assert "is taken" in again["error"], "no name of a sampler is ever taken again"


@pytest.mark.parametrize("verb", ["save_weights", "save_weights_for_sampler"])
def test_a_copy_is_a_run_of_its_own_that_outlives_what_it_is_of(ann: Caller, bob: Caller, verb: str) -> None:
    model = trained(ann)
    path = saved(ann, model, 3, verb)
    expected = ann.logprobs(model, 4)
    session = ann.session()
    sent = {"source_path": path, "session_id": session, "model_seq_id": 3, "ttl_seconds": 3600}
    copy = ann.send("copy_weights", sent)["tinker_path"]
    assert copy == path.replace(model, f"{session}:train:3")
    assert ann.send("copy_weights", sent)["tinker_path"] == copy, "a retry is the same copy"
    other = saved(ann, model, 5, verb, name="other")
    assert "is there already" in ann.send("copy_weights", {**sent, "source_path": other}, status=422)["error"]
    run = ann.get(f"training_runs/{session}:train:3")
    (found,) = ann.get(f"training_runs/{session}:train:3/checkpoints")["checkpoints"]
    assert (run["lora_rank"], found["tinker_path"], found["expires_at"] is None) == (4, copy, False)
    ann.send("get_info", {"model_id": f"{session}:train:3"}, status=404)
    taken = {"session_id": session, "model_seq_id": 3, "base_model": BASE, "lora_config": {"rank": 4}}
    assert "is the run of a copy" in ann.send("create_model", taken, status=422)["error"]
    for caller, content in (
        (bob, {**sent, "session_id": bob.session()}),
        (ann, {**sent, "session_id": bob.session()}),
        (ann, {**sent, "source_path": "tinker://nobody/weights/x"}),
    ):
        caller.send("copy_weights", content, status=404)
    for content in ({"source_path": path}, {**sent, "model_seq_id": None}, {**sent, "destination_project_id": "p"}, {}):
        ann.send("copy_weights", content, status=400)
    assert ann.http.delete(f"/api/v1/{address(path)}", headers=ann.headers).status_code == 204
    assert ann.logprobs(loaded(ann, copy), 1) == expected


def test_a_copy_into_a_project_is_one_for_each_key_of_idempotence(ann: Caller, bob: Caller) -> None:
    path, hers = (saved(caller, trained(caller), 3) for caller in (ann, bob))
    sent = {"source_path": path, "destination_project_id": "proj-archive"}
    first, again, other = (
        ann.send("copy_weights", sent, headers={"X-Idempotency-Key": key})["tinker_path"] for key in ("a", "a", "b")
    )
    assert first == again != other
    copy = bob.send("copy_weights", {**sent, "source_path": hers}, headers={"X-Idempotency-Key": "a"})["tinker_path"]
    assert copy not in (first, other), "another tenant's key is another key"
    assert ann.send("copy_weights", sent)["tinker_path"] not in (first, other)


@pytest.mark.slow
def test_copies_and_joined_clients_are_there_after_a_restart_and_move_no_folder(tmp_path: Path) -> None:
    with serving(tmp_path) as http:
        ann = Caller(http)
        model, session = trained(ann), ann.session()
        path = saved(ann, model, 3)
        sent = {"source_path": path, "session_id": session, "model_seq_id": 0}
        copy = ann.send("copy_weights", sent)["tinker_path"]
        later = trained(ann)
        expected = ann.logprobs(later, 3)
        sampler = ann.snapshot(later, 4, 7)
        numbers = [
            ann.send("join_sampling_session", {"sampling_session_id": sampler})["client_counter"] for _ in range(2)
        ]
        put_ttl(ann, copy, 3600)
    with serving(tmp_path) as http:
        ann = Caller(http)
        assert ann.send("copy_weights", sent)["tinker_path"] == copy
        assert ann.logprobs(loaded(ann, copy), 1) == ann.logprobs(model, 4)
        assert ann.logprobs(later, 5) == expected
        (found,) = ann.get(f"training_runs/{session}:train:0/checkpoints")["checkpoints"]
        assert found["expires_at"] is not None
        numbers.append(ann.send("join_sampling_session", {"sampling_session_id": sampler})["client_counter"])
    assert numbers == [1, 2, 3]


def fetched(caller: Caller, url: str, *, status: int = 200) -> bytes:
    """What an address answers to whoever has it, without a key."""
    answer = caller.http.get(url.partition("testserver")[2])
    assert answer.status_code == status, answer.text
    return bytes(answer.content)


def test_files_for_others_are_safetensors_and_json_behind_signed_addresses(
    ann: Caller, bob: Caller, tmp_path: Path
) -> None:
    from safetensors.numpy import load

    model = trained(ann)
    path = saved(ann, model, 3, "save_weights_external", name="mine")
    assert path == f"tinker://{model}/external_weights/mine"
    (found,) = ann.get(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert (found["checkpoint_type"], found["size_bytes"] > 1000) == ("external", True)
    urls = ann.get(f"{address(path)}/external_weights_urls")["urls"]
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(fetched(ann, urls["adapter_config.json"]))
    assert (config["r"], config["base_model_name_or_path"]) == (4, BASE)
    tensors = load(fetched(ann, urls["adapter_model.safetensors"]))
    assert all(name.startswith("base_model.model.") for name in tensors)
    assert max(float(np.abs(each).max()) for name, each in tensors.items() if "lora_B" in name) > 0
    url = urls["adapter_config.json"]
    parts = url.split("/")
    at = parts.index("download")
    for place, value in (
        (at + 1, str(int(parts[at + 1]) + 1)),
        (at + 2, "0" * 64),
        (-1, "model.safetensors"),
        (at + 1, "x"),
    ):
        changed = [*parts]
        changed[place] = value
        fetched(ann, "/".join(changed), status=404)
    fetched(ann, url.replace("adapter_config.json", "..%2F..%2F..%2Fkeys"), status=401)
    bob.get(f"{address(path)}/external_weights_urls", status=404)
    plain = saved(ann, model, 4)
    ann.get(f"{address(plain)}/external_weights_urls", status=400)
    encrypted = {"model_id": model, "seq_id": 5, "path": "x", "age_encryption_recipients": ["age1x"]}
    assert "age_encryption_recipients" in ann.outcome(ann.send("save_weights_external", encrypted))["error"]
    assert ann.http.delete(f"/api/v1/{address(path)}", headers=ann.headers).status_code == 204
    fetched(ann, url, status=404)


def test_files_that_are_gone_are_not_there(ann: Caller, server: Any) -> None:
    path = saved(ann, trained(ann), 3, "save_weights_external")
    shutil.rmtree(server.service._folder / server.service.records.checkpoints[path].folder)
    ann.get(f"{address(path)}/external_weights_urls", status=404)
    copied = ann.send("copy_weights", {"source_path": path, "destination_project_id": "p"}, status=404)
    assert copied["category"] == "user"


def test_an_address_ends_after_an_hour(ann: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(ann, trained(ann), 3, "save_weights_external")
    monkeypatch.setattr("skyrl_train.serve.checkpoints.ADDRESS_S", -1.0)
    for url in ann.get(f"{address(path)}/external_weights_urls")["urls"].values():
        fetched(ann, url, status=404)


def test_an_archive_has_the_adapter_and_nothing_of_the_server(ann: Caller, bob: Caller, tmp_path: Path) -> None:
    from peft import PeftConfig

    for seq, verb in ((3, "save_weights"), (3, "save_weights_for_sampler")):
        path = saved(ann, trained(ann), seq, verb)
        told = ann.get(f"{address(path)}/archive")
        with tarfile.open(fileobj=io.BytesIO(fetched(ann, told["url"]))) as archive:
            members = archive.getmembers()
            assert {(each.uid, each.uname, each.isfile()) for each in members} == {(0, "", True)}
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
            archive.extractall(tmp_path / verb)
        names = sorted(each.name for each in members)
        assert names == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        assert PeftConfig.from_pretrained(str(tmp_path / verb)).r == 4
        bob.get(f"{address(path)}/archive", status=404)


def test_a_sampler_of_the_kind_inflight_moves_with_the_next_save_of_its_kind_alone(ann: Caller) -> None:
    model = trained(ann)

    def scores(sampler: str, seq: int) -> Any:
        return ann.outcome(ann.sample(sampler, seq, prompt_logprobs=True))["prompt_logprobs"]

    sent = {"model_id": model, "sampling_session_seq_id": 50, "kind": "inflight"}
    moving = ann.done("save_weights_for_sampler", {**sent, "seq_id": 3})["sampling_session_id"]
    fixed = ann.snapshot(model, 4, 51)
    before = scores(moving, 0)
    assert before == scores(fixed, 0)
    ann.outcome(ann.train(model, 5, TWO))
    ann.outcome(ann.step(model, 6))
    ann.snapshot(model, 7, 52)
    assert scores(moving, 1) == before
    second = ann.done("save_weights_for_sampler", {**sent, "seq_id": 8, "sampling_session_seq_id": 53})
    assert scores(moving, 2) == scores(second["sampling_session_id"], 0) != before
    assert scores(fixed, 1) == before
