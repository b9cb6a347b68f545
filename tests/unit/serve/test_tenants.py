"""Many tenants on one base: each ends as it would have alone, in memory or on disk meanwhile, and what nobody needs goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)


def played(caller: Caller, number: int, steps: int = 3) -> list[Any]:
    """What a tenant is told: its losses, samples, and log-probabilities of its weights in the end. AdamW's `eps` is long:
    with the default of 1e-12 a gradient that is rounding alone moves a weight as far as any other."""
    model, told = caller.model(rank=2 + number % 3, seed=number, train_mlp=number % 2 == 0), []
    for step in range(steps):
        row = [1 + (3 * number + step + index) % 40 for index in range(4 + number % 3)]
        promises = [
            caller.train(model, 1 + 3 * step, [datum(row)]),
            caller.step(model, 2 + 3 * step, learning_rate=1e-3, eps=0.1),
        ]
        told += [caller.outcome(each)["metrics"] for each in promises]
        sampler = caller.snapshot(model, 3 + 3 * step, step)
        answer = caller.outcome(caller.sample(sampler, 0, prompt=row[: 2 + number % 2]))
        told.append([each["tokens"] for each in answer["sequences"]])
    return [told, caller.logprobs(model, 1 + 3 * steps)]


def together(http: Any, count: int, play: Callable[[Caller, int], Any] = played) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: play(Caller(http), number), range(count)))


def weights(http: Any) -> dict[int, dict[str, torch.Tensor]]:
    """The adapters of a server, by their seeds."""
    service = http.service
    return {
        each.facts.seed: service.bases.of("").learners.tensors(each.name) for each in service.records.models.values()
    }


@pytest.mark.slow
def test_eight_tenants_together_end_with_the_weights_and_samples_of_each_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "together") as http:
        found, ends = together(http, 8), weights(http)
    with serving(tmp_path / "alone") as http:
        alone, expected = [played(Caller(http), number) for number in range(8)], weights(http)
    for number in range(8):
        assert [each for each in found[number][0] if isinstance(each, list)] == [
            each for each in alone[number][0] if isinstance(each, list)
        ], "sampled tokens"
        for key, tensor in ends[number].items():
            torch.testing.assert_close(tensor, expected[number][key], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_deterministic_tenants_end_byte_for_byte_as_alone_even_where_one_model_fits_in_memory(tmp_path: Path) -> None:
    with serving(tmp_path / "together", "deterministic=true", models_in_memory=1) as http:
        found = together(http, 3)
        models = http.service.records.models.values()
        assert sum(each.is_in_memory for each in models) <= 2, "one, and one more with a gradient at most"
        assert all(each.anchor > 0 for each in models if not each.is_in_memory)
    with serving(tmp_path / "alone", "deterministic=true") as http:
        assert found == [played(Caller(http), number) for number in range(3)]


def test_passes_that_wait_together_are_computed_as_one_and_a_wrong_one_is_told_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as http:
        callers = [Caller(http) for _ in range(4)]
        models = [caller.model(seed=number) for number, caller in enumerate(callers)]
        computing, packed = http.service.bases.of(""), []
        compute, step, may_go = computing.together, computing.optim_step, threading.Event()

        def held(name: str, settings: Any) -> Any:
            may_go.wait(60)
            return step(name, settings)

        monkeypatch.setattr(computing, "optim_step", held)
        monkeypatch.setattr(computing, "together", lambda asked: packed.append(len(asked)) or compute(asked))
        steps = [callers[0].step(models[0], 1)]
        losses = ("cross_entropy", "no_such_loss", "cross_entropy")
        rows = [datum([1, 2, 3, 4]), datum([9, 8, 7])]
        passes = [
            caller.train(model, 1, rows, loss)
            for caller, model, loss in zip(callers[1:], models[1:], losses, strict=True)
        ]
        may_go.set()
        answers = [caller.outcome(each) for caller, each in zip(callers[1:], passes)]
        assert packed == [2]
        assert "no_such_loss" in answers[1]["error"]
        steps += [callers[1].step(models[1], 2)]
        assert all("error" not in callers[0].outcome(each) for each in steps)
        alone = callers[0].outcome(callers[0].train(models[0], 2, rows))
        for answer in (answers[0], answers[2]):
            assert answer["metrics"]["loss:sum"] == pytest.approx(alone["metrics"]["loss:sum"], rel=1e-6)
        callers[0].done("unload_model", {"model_id": models[0], "seq_id": 3})


def test_a_model_that_cannot_come_back_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, models_in_memory=1) as http:
        ann, bob = Caller(http), Caller(http, "tml-bob-key")
        broken, well = ann.model(), bob.model()
        rows = [datum([1, 2, 3, 4])]
        ann.outcome(ann.train(broken, 1, rows))
        settled = ann.outcome(ann.step(broken, 2))
        assert "error" not in settled
        bob.outcome(bob.train(well, 1, rows))
        (file,) = (tmp_path / "models" / "000000").glob("a2/model.safetensors")
        file.write_bytes(b"damaged")
        computing, may_go = http.service.bases.of(""), threading.Event()
        compute = computing.forward_backward

        def held(*given: Any) -> Any:
            may_go.wait(60)
            return compute(*given)

        monkeypatch.setattr(computing, "forward_backward", held)
        first = bob.train(well, 2, rows)
        promises = ann.train(broken, 3, rows), bob.train(well, 3, rows)
        may_go.set()
        assert "metrics" in bob.outcome(first)
        assert "error" in ann.outcome(promises[0])
        assert "metrics" in bob.outcome(promises[1])


@pytest.mark.slow
def test_a_journal_is_written_without_what_is_over_and_a_server_starts_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [datum([1, 2, 3, 4]), datum([9, 8, 7])]

    def train(caller: Caller, model: str, first: int, count: int) -> None:
        for seq in range(first, first + 2 * count, 2):
            caller.outcome(caller.train(model, seq, two))
            assert "error" not in caller.outcome(caller.step(model, seq + 1))

    with serving(tmp_path / "whole") as http:
        ann = Caller(http)
        model = ann.model()
        train(ann, model, 1, 6)
        expected = ann.logprobs(model, 13)
        whole = (tmp_path / "whole" / "journal.jsonl").stat().st_size
    monkeypatch.setattr("skyrl_train.serve.ledger._LEAST_TO_COMPACT", 0)
    monkeypatch.setattr("skyrl_train.serve.upkeep._KEPT_S", -1.0)
    folder = tmp_path / "short"
    with serving(folder, anchor_every=4) as http:
        ann = Caller(http)
        model = ann.model()
        path = ann.done("save_weights", {"model_id": model, "seq_id": 1, "path": "kept"})["path"]
        train(ann, model, 2, 6)
        assert (folder / "journal.jsonl").stat().st_size < whole / 2
        assert http.service.records.promises.keys() < {f"{model}:{seq}" for seq in range(14)}
        last = ann.train(model, 14, two)
        told = ann.outcome(last)
    with serving(folder, anchor_every=4) as http:
        ann = Caller(http)
        assert ann.outcome(ann.train(model, 14, two)) == told
        assert ann.logprobs(model, 15) == pytest.approx(expected, abs=1e-6)
        assert ann.send("weights_info", {"tinker_path": path})["lora_rank"] == 4
        assert (
            "goes back"
            in ann.send("optim_step", {"adam_params": {}, "model_id": model, "seq_id": 3}, status=422)["error"]
        )
        ann.send("retrieve_future", {"request_id": f"{model}:3"}, status=404)


@pytest.mark.slow
def test_snapshots_without_a_name_go_when_newer_ones_are_there_and_nobody_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_train.serve.upkeep._KEPT_SNAPSHOTS", 2)
    with serving(tmp_path) as http:
        ann = Caller(http)
        model = ann.model()
        named = ann.done("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "named"})["path"]
        for seq in range(2, 6):
            ann.snapshot(model, seq, seq)
        files = tmp_path / "models" / "000000"
        assert len(list(files.glob("c*"))) == 5, "sampled from within the hour"
        monkeypatch.setattr("skyrl_train.serve.upkeep._KEPT_S", -1.0)
        samplers = [ann.snapshot(model, seq, seq) for seq in range(6, 9)]
        ann.logprobs(model, 9)  # behind which the snapshot before is done with
        assert sorted(each.name for each in files.glob("c*")) == ["c1", "c7", "c8"]
        assert "sequences" in ann.outcome(ann.sample(samplers[-1], 0))
        assert "there is no checkpoint" in ann.outcome(ann.sample(samplers[0], 0))["error"]
        assert ann.send("weights_info", {"tinker_path": named})["lora_rank"] == 4
    with serving(tmp_path) as http:
        assert "sequences" in Caller(http).outcome(Caller(http).sample(samplers[-1], 1))
