"""Checkpoints: save, list, load, download, delete, and the records that the command line reads."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from driver import Run, Session, checked
from expect import refused
from measure import DATA, PROBES, Noise, probe
from tinker import types

FOLDERS = {"training": "weights", "sampler": "sampler_weights"}


def saved(run: Run, kind: str, name: str) -> str:
    return run.save(name) if kind == "training" else run.save_for_sampler(name)


def address(path: str) -> str:
    """The route of a checkpoint's record."""
    run, folder, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{folder}/{name}"


@pytest.mark.parametrize("kind", list(FOLDERS))
def check_path_is_parsed(run: Run, kind: str) -> None:
    """The path of a {kind} checkpoint is what the SDK parses: its run, its kind and its name."""
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(saved(run, kind, "parsed.1"))
    assert parsed.training_run_id == run.id
    assert parsed.checkpoint_type == kind
    assert parsed.checkpoint_id == f"{FOLDERS[kind]}/parsed.1"


@pytest.mark.parametrize("kind", list(FOLDERS))
def check_saved_is_listed(run: Run, kind: str) -> None:
    """A {kind} checkpoint is in the list of its run, in the SDK's schema."""
    path = saved(run, kind, "listed")
    found = types.CheckpointsListResponse.model_validate(run.server.get(f"training_runs/{run.id}/checkpoints"))
    assert [(each.tinker_path, each.checkpoint_type) for each in found.checkpoints] == [(path, kind)]


def check_list_of_all(run: Run) -> None:
    """A checkpoint is in the list of all checkpoints, with a cursor."""
    path = run.save("of-all")
    found = types.CheckpointsListResponse.model_validate(run.server.get("checkpoints?limit=1000&offset=0"))
    assert path in [each.tinker_path for each in found.checkpoints]


def check_training_run_is_listed(run: Run) -> None:
    """A training run is in the list of runs, in the SDK's schema."""
    found = types.TrainingRunsResponse.model_validate(run.server.get("training_runs?limit=1000&offset=0"))
    assert run.id in [each.training_run_id for each in found.training_runs]


def check_training_run_record(run: Run) -> None:
    """The record of a run names its base model, its rank and its last checkpoints."""
    path, snapshot = run.save("last"), run.save_for_sampler("last")
    found = types.TrainingRun.model_validate(run.server.get(f"training_runs/{run.id}"))
    assert (found.base_model, found.is_lora, found.lora_rank) == (run.server.model, True, 8)
    assert found.last_checkpoint is not None
    assert found.last_checkpoint.tinker_path == path
    assert found.last_sampler_checkpoint is not None
    assert found.last_sampler_checkpoint.tinker_path == snapshot


def check_session_record(session: Session) -> None:
    """The record of a session names its models and samplers."""
    own = session.server.session()
    run, sampler = own.model(), own.sampler()
    found = types.GetSessionResponse.model_validate(own.server.get(f"sessions/{own.id}"))
    assert (found.training_run_ids, found.sampler_ids) == ([run.id], [sampler.id])


def check_weights_info(run: Run) -> None:
    """What is told of a checkpoint's weights is enough to make a model for them."""
    info = types.WeightsInfoResponse.model_validate(run.server.call("weights_info", {"tinker_path": run.save("info")}))
    assert (info.base_model, info.is_lora, info.lora_rank) == (run.server.model, True, 8)


def check_metadata_of_a_run(session: Session) -> None:
    """A run keeps what its owner wrote of it."""
    run = session.model(user_metadata={"purpose": "check"})
    assert types.TrainingRun.model_validate(run.server.get(f"training_runs/{run.id}")).user_metadata == {
        "purpose": "check"
    }


@pytest.mark.since("0.29")
def check_metadata_of_a_checkpoint(run: Run) -> None:
    """A checkpoint keeps what its owner wrote of it."""
    run.save("noted", user_metadata={"step": "3"})
    (found,) = run.server.get(f"training_runs/{run.id}/checkpoints")["checkpoints"]
    assert found["user_metadata"] == {"step": "3"}


def check_two_saves(session: Session, noise: Noise, lr: float) -> None:
    """Two checkpoints of a run are loaded each by its own weights."""
    run, found = session.model(), []
    for name in ("one", "two"):
        run.forward_backward(DATA)
        run.step(learning_rate=lr)
        found.append((run.save(name), probe(run)))
    for path, expected in found:
        noise.same(probe(session.load(path, False)), expected)
    noise.differ(found[0][1], found[1][1])


def check_checkpoint_stays(session: Session, noise: Noise, lr: float) -> None:
    """A checkpoint stays what it was while its run learns on."""
    run = session.model()
    path, before = run.save("stays"), probe(run)
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    noise.same(probe(session.load(path, True)), before)


def check_loaded_model_is_another(session: Session, noise: Noise, lr: float) -> None:
    """A loaded model learns on without changing the run that it comes from."""
    run = session.model()
    loaded, before = session.load(run.save("origin"), True), probe(run)
    loaded.forward_backward(DATA)
    loaded.step(learning_rate=lr)
    noise.same(probe(run), before)


def check_loaded_model_has_its_name(session: Session) -> None:
    """A model that is made by loading has the name that the SDK computes: session, 'train', number."""
    loaded = session.load(session.model().save("named"), False, model_seq_id=6500)
    assert loaded.id == f"{session.id}:train:6500"
    loaded.forward(DATA)


def check_load_keeps_the_rank(session: Session) -> None:
    """A model that is made by loading has the rank of its checkpoint."""
    run = session.model(lora_config={"rank": 4})
    loaded = session.load(run.save("ranked"), False)
    assert loaded.server.call("get_info", {"model_id": loaded.id})["lora_rank"] == 4


def check_checkpoint_from_another_session(session: Session, noise: Noise, lr: float) -> None:
    """A checkpoint is loaded in another session of its owner."""
    run = session.model()
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    noise.same(probe(session.server.session().load(run.save("elsewhere"), False)), probe(run))


@pytest.mark.parametrize("kind", list(FOLDERS))
def check_deleted_is_gone(session: Session, kind: str) -> None:
    """A {kind} checkpoint that was deleted is in no list, and is neither loaded nor sampled."""
    run = session.model()
    path = saved(run, kind, "gone")
    assert run.server.send("DELETE", address(path)).status in (200, 204)
    assert path not in str(run.server.get(f"training_runs/{run.id}/checkpoints"))
    refused(lambda: session.load(path, False))
    refused(lambda: session.sampler(path).sample(PROBES[0]))


def check_delete_keeps_the_others(session: Session) -> None:
    """A deletion takes nothing but the checkpoint that it names."""
    run = session.model()
    kept, gone = run.save("kept"), run.save("gone")
    run.server.send("DELETE", address(gone))
    assert [each["tinker_path"] for each in run.server.get(f"training_runs/{run.id}/checkpoints")["checkpoints"]] == [
        kept
    ]
    session.load(kept, True)


def check_delete_twice(run: Run) -> None:
    """What was deleted is not there to be deleted again."""
    path = run.save("once")
    run.server.send("DELETE", address(path))
    assert run.server.send("DELETE", address(path)).status == 404


def check_sampler_outlives_its_checkpoint(session: Session) -> None:
    """A sampler whose checkpoint was deleted answers by the old weights or says that they are gone: it does not hang."""
    run = session.model()
    sampler, path = None, run.save_for_sampler("outlived")
    sampler = session.sampler(path)
    run.server.send("DELETE", address(path))
    from driver import RequestFailed, StatusError

    try:
        assert sampler.sample(PROBES[0])["sequences"]
    except (RequestFailed, StatusError):
        refused(lambda: sampler.sample(PROBES[0]))


@pytest.mark.since("0.29")
def check_same_name_needs_overwrite(session: Session, noise: Noise, lr: float) -> None:
    """A name that is taken is refused without overwrite, and replaced with it."""
    run = session.model()
    path = run.save("taken")
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    refused(lambda: run.save("taken"))
    assert run.save("taken", overwrite=True) == path
    noise.same(probe(session.load(path, False)), probe(run))


@pytest.mark.parametrize("path", ["tinker://nobody/weights/x", "tinker://a/b", "/etc/passwd", "file:///etc/passwd", ""])
def check_unknown_path(session: Session, path: str) -> None:
    """Loading from '{path}' is refused."""
    refused(lambda: session.load(path, False))


def check_unknown_record(run: Run) -> None:
    """The record of a run that does not exist is 404."""
    for path in (
        "training_runs/nobody:train:0",
        "training_runs/nobody:train:0/checkpoints",
        "sessions/nobody",
        "samplers/nobody",
    ):
        assert run.server.send("GET", path).status == 404


@pytest.mark.since("0.29")
@pytest.mark.full(needs="external_weights")
def check_download(session: Session, lr: float) -> None:
    """Weights saved for others are downloaded from addresses that need no key, and differ when the model learnt."""
    run, bodies = session.model(), []
    for name in ("before", "after"):
        found = run.server.get(address(run.save_external(name)) + "/external_weights_urls")
        assert types.ExternalWeightsUrlsResponse.model_validate(found).urls
        files: dict[str, Any] = {}
        for file, url in found["urls"].items():
            with urllib.request.urlopen(url, timeout=60) as response:
                files[file] = response.read()
        assert all(files.values())
        bodies.append(files)
        run.forward_backward(DATA)
        run.step(learning_rate=lr)
    assert bodies[0] != bodies[1]


@pytest.mark.since("0.29")
@pytest.mark.full(needs="external_weights")
def check_external_is_listed(run: Run) -> None:
    """Weights saved for others are listed as of the kind 'external'."""
    path = run.save_external("shown")
    (found,) = run.server.get(f"training_runs/{run.id}/checkpoints")["checkpoints"]
    assert (found["tinker_path"], found["checkpoint_type"]) == (path, "external")


@pytest.mark.full(needs="ttl")
def check_time_to_live(run: Run) -> None:
    """A checkpoint is given a time to live, which its record shows, and which is taken back; a minute is too short."""
    path = run.save("mortal")

    def expires(seconds: int | None) -> Any:
        body = json.dumps({"ttl_seconds": seconds}).encode()
        answer = run.server.send("PUT", address(path) + "/ttl", body, {"Content-Type": "application/json"})
        checked(answer)
        (found,) = run.server.get(f"training_runs/{run.id}/checkpoints")["checkpoints"]
        return types.Checkpoint.model_validate(found).expires_at

    assert expires(7200) is not None
    assert expires(None) is None
    refused(lambda: expires(60))
