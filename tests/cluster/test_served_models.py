"""A server whose models are in workers on Ray: the numbers of one process, also when a worker is killed under it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_train import load_config
from skyrl_train.cluster import Placement, RayModels, RaySession
from skyrl_train.config.derived import learner_settings
from skyrl_train.config.models import PlacementConfig
from skyrl_train.config.placement import plan_layout
from skyrl_train.model import load_tokenizer
from skyrl_train.serve import Models, served_images
from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving, serving_models
from tests.support.served_images import image, sample, settled, shown, text
from tests.support.vision_runs import png, save_model

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)]

PLACEMENT = PlacementConfig(backend="ray", policy_num_workers=2, start_timeout_s=600.0, silence_timeout_s=20.0)
SETTINGS = ("generator.sampling.temperature=1.0", "deterministic=true")
TENANTS = 3
OTHERS = ("step 1", "samples 2")
"""Moments that take too long for every commit."""


@contextmanager
def on_ray(session: RaySession, folder: Path, *words: str) -> Iterator[Any]:
    config = load_config(*SETTINGS, *words, settings={"output_dir": str(folder)})
    learner = learner_settings(config, "policy")
    placement = Placement(plan_layout(PLACEMENT, roles=["policy"], gpu=False), timeout_s=600.0)
    models = None
    try:
        models = RayModels(
            partial(Models, learner, config.generator),
            session,
            PLACEMENT,
            placement.slots("policy"),
            num_threads=1,
            folder=folder,
            tokenizer=load_tokenizer(config.model),
            images=served_images(learner, config.data.images),
        )
        with serving_models({BASE: models}, folder, anchor_every=4) as http:
            http.models = models
            yield http
    finally:
        if models is not None:
            models.close()
        placement.close()


def play(http: Any, strike: Any = lambda moment: None) -> list[Any]:
    """What three models answer over three steps, and samples of each and of the base. `strike` is told of moments."""
    callers = [Caller(http) for _ in range(TENANTS)]
    models = [each.model(seed=number) for number, each in enumerate(callers)]
    seen: list[Any] = []
    for step in range(3):
        first = 1 + 5 * step
        strike(f"step {step}")
        passes = [
            caller.train(model, first + part, [datum((1, 2 + number, 3, 4 + part))])
            for number, (caller, model) in enumerate(zip(callers, models))
            for part in range(2)
        ]
        strike(f"passes {step}")
        seen += [callers[0].outcome(each)["loss_fn_outputs"] for each in passes]
        steps = [caller.step(model, first + 2) for caller, model in zip(callers, models)]
        seen += [callers[0].outcome(each)["metrics"] for each in steps]
        samplers = [caller.snapshot(model, first + 3, step) for caller, model in zip(callers, models)]
        drawn = [
            caller.sample(sampler, 0, num_samples=3, prompt_logprobs=True, params={"max_tokens": 40})
            for caller, sampler in zip(callers, samplers)
        ]
        strike(f"samples {step}")
        for promise in drawn:
            found = callers[0].outcome(promise)
            assert "error" not in found, found
            seen.append((found["sequences"], found["prompt_logprobs"]))
        seen += [caller.logprobs(model, first + 4) for caller, model in zip(callers, models)]
    return seen


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with serving(tmp_path_factory.mktemp("inline"), *SETTINGS[1:], anchor_every=4) as http:
        return play(http)


def test_answers_are_those_of_one_process(session: RaySession, tmp_path: Path, inline: list[Any]) -> None:
    with on_ray(session, tmp_path) as http:
        assert play(http) == inline
        assert sorted(http.models._worker_of.values()) == [0, 0, 1], "models are spread over the workers"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("moment", ["passes 1", *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)])
def test_a_worker_that_is_lost_changes_no_answer(
    session: RaySession, tmp_path: Path, inline: list[Any], moment: str, number: int
) -> None:
    lost: list[int] = []

    def strike(now: str) -> None:
        if now == moment:
            lost.append(http.models.actors[0].identity.pid)
            os.kill(lost[0], number)

    with on_ray(session, tmp_path) as http:
        assert play(http, strike) == inline
        ends = time.monotonic() + 60
        while http.models.actors[0].identity.pid == lost[0] and time.monotonic() < ends:
            time.sleep(0.1)
        assert http.models.actors[0].identity.pid != lost[0], "it was started again"


@pytest.mark.nightly
def test_a_server_that_is_started_again_on_ray_goes_on_from_one_process(session: RaySession, tmp_path: Path) -> None:
    with serving(tmp_path, *SETTINGS[1:], anchor_every=2) as http:
        caller = Caller(http)
        model = caller.model()
        for seq in (1, 3, 5):
            caller.outcome(caller.train(model, seq, [datum((1, 2, 3, 4))]))
            caller.outcome(caller.step(model, seq + 1))
        expected = caller.logprobs(model, 7)
    with on_ray(session, tmp_path) as http:
        assert Caller(http).logprobs(model, 8) == expected


def test_images_are_seen_by_workers_as_in_one_process(session: RaySession, tmp_path: Path) -> None:
    def play(http: Any) -> list[Any]:
        caller = Caller(http)
        model = caller.model()
        seen = [settled(caller, caller.train(model, 1, [shown(1), datum([1, 2, 3])]))["loss_fn_outputs"]]
        seen.append(settled(caller, caller.step(model, 2))["metrics"])
        prompt = [text(5, 6), image(png(1)), text(7)]
        return [*seen, settled(caller, sample(caller, caller.snapshot(model, 3, 0), prompt, prompt_logprobs=True))]

    path = f"model.path={save_model(tmp_path / 'model')}"
    with serving(tmp_path / "one", *SETTINGS, path) as http:
        expected = play(http)
    (tmp_path / "ray").mkdir()
    with on_ray(session, tmp_path / "ray", path) as http:
        assert play(http) == expected
