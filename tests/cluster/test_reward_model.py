"""A reward model in an actor on Ray, and behind vLLM's server: the scores that it has in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from skyrl_train.cluster.reward_model import RayScorer
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ActorLostError, ModelError
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import SequenceScorer
from skyrl_train.rollout.rewards import RewardModel
from tests.support.reward_model_cases import CONVERSATIONS, save_reward_model

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

START_TIMEOUT_S = 600.0


def loads(folder: Path, **changes: Any) -> partial[SequenceScorer]:
    given = {"revision": None, "dtype": "float32", "device": "cpu", "max_batch_tokens": 64, "label": 0, "weights": ""}
    return partial(SequenceScorer, str(folder), **{**given, **changes})


def kill_and_wait(actor: Any) -> None:
    """Return once it is gone: `ray.kill` returns before, and a call just after it may still be answered."""
    ray.kill(actor, no_restart=True)
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.score.remote([]), timeout=60.0)


def test_an_actor_that_dies_is_started_again_once(session: RaySession, tmp_path: Path) -> None:
    load = loads(save_reward_model(tmp_path))
    expected = load().score_now(CONVERSATIONS)
    scorer = RayScorer(load, session, path=str(tmp_path), device="cpu", timeout_s=START_TIMEOUT_S)

    async def ask(times: int = 1) -> list[Any]:
        return await asyncio.gather(*(scorer.score(CONVERSATIONS) for _ in range(times)))

    try:
        assert asyncio.run(ask()) == [expected]
        kill_and_wait(scorer._actor)
        assert asyncio.run(ask(3)) == [expected] * 3
        kill_and_wait(scorer._actor)
        with pytest.raises(ActorLostError, match="died again"):
            asyncio.run(ask())
    finally:
        scorer.close()
    load = loads(tmp_path, weights="sha256:other")
    with pytest.raises(ModelError, match="and the run has scored with sha256:other"):
        RayScorer(load, session, path=str(tmp_path), device="cpu", timeout_s=START_TIMEOUT_S)


@pytest.mark.parametrize("pads_with_the_end", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_vllm_gives_the_scores_of_this_process(tmp_path: Path, pads_with_the_end: bool) -> None:
    # vLLM reads a folder's tokenizer by the class of its config; the one that other tests make is of no such class.
    tokenizer = load_tokenizer(ModelConfig())
    end = tokenizer.apply_chat_template(CONVERSATIONS[0], tokenize=True, return_dict=False)[-1]
    pad_token_id = end if pads_with_the_end else 0
    folder = save_reward_model(tmp_path / "model", tokenizer=tokenizer, pad_token_id=pad_token_id)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--runner", "pooling", "--kv-cache-memory-bytes", "50000000", "--max-num-batched-tokens", "256"]
    with (tmp_path / "server.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    reward = RewardModel(url=f"http://127.0.0.1:{port}", served_model="tiny")
    try:
        _wait_until_it_answers(server, port, tmp_path / "server.log")
        assert asyncio.run(reward.problem()) == ""
        other = RewardModel(url=f"http://127.0.0.1:{port}/v1", served_model="large")
        assert "has no model 'large'; it has tiny" in asyncio.run(other.problem())
        found = asyncio.run(reward(["unused"] * len(CONVERSATIONS), messages=CONVERSATIONS))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    expected = loads(folder)().score_now(CONVERSATIONS)
    if pads_with_the_end:  # vLLM scores that last token, as is done here where padding is another one
        assert all(abs(score - other) > 0.1 for score, other in zip(found, expected))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 0}))
        expected = loads(folder)().score_now(CONVERSATIONS)
    assert list(found) == pytest.approx(expected, abs=1e-4)


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < ends_at and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")
