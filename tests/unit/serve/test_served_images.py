"""Images through the server: the numbers are those of the learner on the same rows, and bad images change nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.batch import batch_of_lengths
from skyrl_train.images import ImageSpan, precedes_image
from skyrl_train.model.files import FamilyProcessor
from skyrl_train.serve import wire
from skyrl_train.serve.examples import loss_of
from skyrl_train.serve.images import RequestImages
from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving
from tests.support.served_images import BAD, TOKENS, image, logprobs, sample, settled, shown, text
from tests.support.vision_cases import PLACEHOLDER
from tests.support.vision_runs import png, save_model

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
FAMILIES = {"qwen": (), "gemma": ("trainer.layout=padded",)}


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    path = save_model(folder / "model", request.param)
    with serving(folder / "server", f"model.path={path}", *FAMILIES[request.param]) as http:
        http.model_path = path
        yield http


@pytest.fixture
def ann(server: Any) -> Caller:
    return Caller(server)


def learner_of(server: Any, model: str) -> Any:
    service = server.service
    return service.bases.of("")._trained[service.records.models[model].name]


def same_gradient(one: Any, other: Any) -> None:
    for key, each in one.engine.parameters.items():
        torch.testing.assert_close(each.grad, other.engine.parameters[key].grad, rtol=0, atol=1e-6)
    assert max(float(each.grad.abs().max()) for each in one.engine.parameters.values()) > 1e-3


def test_log_probabilities_and_gradient_are_the_learners_of_the_same_rows(ann: Caller, server: Any) -> None:
    model, again = ann.model(seed=3), ann.model(seed=3)
    sent = [shown(1), datum([1, 2, 3, 4]), shown(2)]
    found = logprobs(settled(ann, ann.train(model, 1, sent)))
    row, counted = [5, 6, *[PLACEHOLDER] * TOKENS, 7, 8, 9, 3], [False, True, *[False] * TOKENS, *[True] * 4]
    mask = torch.tensor([*counted, False, *[True] * 4, *counted])
    batch = batch_of_lengths([len(row), 5, len(row)]).with_columns(
        input_ids=torch.tensor([*row, 1, 2, 3, 4, 7, *row], dtype=torch.int32),
        loss_mask=mask,
        loss_weights=mask.double(),
    )
    process = FamilyProcessor.of(Path(server.model_path))
    one, two = ((ImageSpan(2, process(png(number), f"{number}" * 64)),) for number in (1, 2))
    batch = replace(batch, metadata=replace(batch.metadata, images=(one, (), two)))
    direct = learner_of(server, again).forward_losses(batch, [loss_of("cross_entropy", {})], backward=True).logprobs
    np.testing.assert_allclose([value for each in found for value in each if value], direct[mask], atol=1e-6)
    assert [each[1 : 1 + TOKENS] for each in found[::2]] == [[0.0] * TOKENS] * 2
    assert found[0] != found[2], "of other pictures"
    same_gradient(learner_of(server, model), learner_of(server, again))


def test_both_wires_and_all_losses_take_images(ann: Caller) -> None:
    by_json, by_message = ann.model(), ann.model()
    entry = {"data": [shown(1)], "loss_fn": "cross_entropy"}
    message = wire.message_of_json({"forward_backward_input": entry, "model_id": by_message}, backward=True)
    message.seq_id, message.data[0].model_input[1].image.expected_tokens = 1, TOKENS
    headers = {**ann.headers, "Content-Type": wire.PROTOBUF}
    promise = ann.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers).json()
    expected = settled(ann, ann.train(by_json, 1, [shown(1)]))
    assert settled(ann, promise) == expected
    signs = [1.0, *[0.0] * TOKENS, 1.0, -1.0, 0.5, 1.0]
    sent = shown(1, weight=1.0, logprobs=[-3.0] * 9, advantages=signs)
    for seq, loss in enumerate(("importance_sampling", "ppo", "cispo", "dro"), start=2):
        found = settled(ann, ann.train(by_json, seq, [sent], loss))["loss_fn_outputs"][0]
        assert found["logprobs"]["data"] == pytest.approx(logprobs(expected)[0], abs=1e-6)
        assert found["elementwise_loss"]["data"][1 : 1 + TOKENS] == [0.0] * TOKENS


def test_two_tenants_together_have_the_numbers_of_each_alone(ann: Caller, server: Any) -> None:
    callers, base, rows = [ann, Caller(server, "tml-bob-key")], server.service.bases.of(""), {}
    models, alone = ([each.model(seed=number) for number, each in enumerate(callers)] for _ in range(2))
    sent = [[shown(number), datum([1, 2, 3]), shown(2)] for number in range(2)]
    for model, data in zip(models, sent):
        content = {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}
        made = base.rows(wire.decoded(wire.message_of_json(content, backward=True)))
        rows[server.service.records.models[model].name] = pickle.loads(pickle.dumps(made))
    for number, data in enumerate(base.together(rows).values()):
        expected = settled(callers[number], callers[number].train(alone[number], 1, sent[number]))
        both = logprobs(wire.as_json("ForwardBackwardOutput", data))
        np.testing.assert_allclose(np.concatenate(both), np.concatenate(logprobs(expected)), atol=1e-6)
        same_gradient(learner_of(server, models[number]), learner_of(server, alone[number]))


def test_samples_of_a_prompt_with_an_image_score_as_a_forward_does(ann: Caller) -> None:
    model = ann.model()
    settled(ann, ann.train(model, 1, [shown(1)]))
    settled(ann, ann.step(model, 2))
    sampler = ann.snapshot(model, 3, 100)
    prompt = [text(5, 6), image(png(1), expected_tokens=TOKENS), text(7)]
    found = settled(ann, sample(ann, sampler, prompt, num_samples=2, prompt_logprobs=True, topk_sample_logprobs=1))
    assert [each is None for each in found["prompt_logprobs"]] == [True, False, *[True] * TOKENS, False]
    for seq, drawn in enumerate(found["sequences"], start=4):
        tokens, targets = drawn["tokens"], [6, *[0] * TOKENS, 7, *drawn["tokens"]]
        whole = datum(targets[:-1], targets, weights=[0.0] * len(targets))
        whole["model_input"] = {"chunks": [*prompt[:2], text(7, *tokens[:-1])]}
        (scored,) = logprobs(settled(ann, ann.train(model, seq, [whole], forward=True)))
        np.testing.assert_allclose(drawn["logprobs"], scored[-len(tokens) :], atol=1e-5)
        given = [found["prompt_logprobs"][1], found["prompt_logprobs"][-1]]
        np.testing.assert_allclose(given, [scored[0], scored[1 + TOKENS]], atol=1e-5)


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_refused_by_name_and_change_nothing(ann: Caller, case: str) -> None:
    chunk, says = BAD[case]
    model = ann.model()
    bad = {**shown(), "model_input": {"chunks": [text(5, 6), chunk, text(7, 8, 9)]}}
    found = ann.outcome(ann.train(model, 1, [datum([1, 2]), bad]))
    assert (found["category"], says in found["error"], len(found["error"]) < 400) == ("user", True, True), found
    assert settled(ann, ann.step(model, 2))["metrics"]["grad_norm:mean"] == 0.0
    sampler = ann.snapshot(model, 3, 100)
    answer = sample(ann, sampler, [text(5), chunk])
    refused = answer if "error" in answer else ann.outcome(answer)
    assert (refused["category"], says in refused["error"]) == ("user", True), refused


def test_images_stand_where_they_were_sent(server: Any) -> None:
    chunks = [image(png(0)), image(png(1)), text(5, 6), image(png(0)), text(7), image(png(2))]
    images = RequestImages(server.service.bases.of("").images)
    tokens, spans = images.placed(*wire.input_of_json({"chunks": chunks}))
    four = [PLACEHOLDER] * TOKENS
    assert tokens.tolist() == [*four, *four, 5, 6, *four, 7, *four]
    assert ([span.start for span in spans], spans[0].image is spans[2].image) == ([0, 4, 10, 15], True)
    assert np.flatnonzero(~precedes_image(len(tokens), spans)).tolist() == [7, 8, 13, 18], "text, or nothing, is next"


def test_images_are_not_predicted_and_their_sum_is_bounded(ann: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ann.model()
    found = ann.outcome(ann.train(model, 1, [shown(weight=1.0)]))
    assert "weights must be 0 at position 1" in found["error"]
    few = {**datum([1, 2, 3, 4, 5, 6]), "model_input": shown()["model_input"]}
    assert "one for each of 9 tokens" in ann.outcome(ann.train(model, 2, [few]))["error"]
    monkeypatch.setattr("skyrl_train.serve.images._MAX_PIXEL_BYTES", 1000)
    assert "1000 at most: send fewer at once" in ann.outcome(ann.train(model, 3, [shown(0), shown(1)]))["error"]


def test_a_server_says_whether_a_model_takes_images_in_its_layout(ann: Caller, server: Any, tmp_path: Path) -> None:
    assert ann.get("get_server_capabilities")["supported_models"][0]["takes_images"] is True
    with serving(tmp_path, f"model.path={server.model_path}", "trainer.layout=packed") as http:
        caller = Caller(http)
        takes = caller.get("get_server_capabilities")["supported_models"][0]["takes_images"]
        assert takes == ("qwen" in server.model_path)
        found = caller.outcome(caller.train(caller.model(), 1, [shown()]))
        assert takes or "trainer.layout=padded" in found["error"]


def test_a_server_that_starts_again_replays_passes_with_images(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")

    def ends(folder: str, *parts: Sequence[int]) -> Any:
        model = ""
        for part in parts:
            with serving(tmp_path / folder, f"model.path={path}", "deterministic=true", anchor_every=100) as http:
                caller = Caller(http)
                model = model or caller.model(seed=1)
                behind = len(http.service.records.models[model].behind_anchor)
                assert behind == part[0] - 1, "nothing was saved: passes are computed once more"
                for seq in part:
                    settled(caller, caller.train(model, seq, [shown(seq)]) if seq % 2 else caller.step(model, seq))
                found = {key: each.clone() for key, each in learner_of(http, model).engine.parameters.items()}
        return found

    again = ends("twice", (1, 2, 3, 4), (5, 6))
    assert all(torch.equal(each, again[key]) for key, each in ends("once", range(1, 7)).items())
