"""Agents whose programs go on while weights change under the answers that they wait for."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.inference import hf
from skyrl_train.runs import train
from tests.support.async_runs import BATCH, SAMPLES, agent_config, check_each_prompt_once, check_versions, trained

told: list[tuple[str, str]] = []
"""Prompt's uid and text of each answer that a program was given."""
WAIT_S = 20.0


class Playing:
    """What programs of this process share."""

    started = itertools.count()
    is_updated: Callable[[], bool] | None = None
    """Whether weights came; None: programs do not wait for them."""


def play(task: Any, address: Any) -> float:
    """Two questions, the second of which goes on from the first's answer; the address tells the session. Programs of the
    second batch and later ones ask the second when weights have come, where they wait for them."""
    messages = list(task["prompt"])
    is_later = next(Playing.started) >= BATCH * SAMPLES
    for number in range(2):
        end = time.monotonic() + WAIT_S
        while number and is_later and Playing.is_updated and not Playing.is_updated() and time.monotonic() < end:
            time.sleep(0.01)
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(f"{address.session_url}/chat/completions", body)
        with urllib.request.urlopen(request, timeout=30) as response:
            said = json.load(response)["choices"][0]["message"]
        told.append((task["uid"], said["content"]))
        messages += [said, {"role": "user", "content": "And now?"}]
    return float(len(said["content"]) % 3)


@pytest.mark.parametrize("in_flight", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_program_that_outlives_a_weight_update_keeps_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    load = hf.load_for_engine

    def slowed(*given: Any) -> Any:
        """Where weights come in flight, the engine is slow from the end of the first batch on until they do, so that they
        find answers under way; else programs wait for them between their questions."""
        model = load(*given)
        norm = model.model.norm.weight
        first, forwards = norm.detach().clone(), itertools.count()
        slow_from = 40

        def slow(*_: Any) -> None:
            is_waiting = in_flight and next(forwards) > slow_from and torch.equal(norm, first)
            time.sleep(0.15 if is_waiting else 0.002)

        model.register_forward_pre_hook(slow)
        is_updated = None if in_flight else lambda: not torch.equal(norm, first)
        monkeypatch.setattr(Playing, "is_updated", staticmethod(is_updated) if is_updated else None)
        return model

    monkeypatch.setattr(hf, "load_for_engine", slowed)
    told.clear()
    monkeypatch.setattr(Playing, "started", itertools.count())
    config = agent_config(tmp_path, in_flight_updates=in_flight, dump_rollouts=True)
    train(config)
    check_each_prompt_once(tmp_path, config, num_steps=3)
    assert check_versions(tmp_path, max_staleness=1) == {0, 1}
    trajectories = [(prompt.uid, each) for batch in trained(tmp_path) for prompt, each in with_prompts(batch)]
    assert all([turn.parent for turn in each.turns] == [None, 0] for _, each in trajectories)
    # Tokens that were drawn beyond the last step's batch are trained on by nobody.
    assert not Counter((uid, turn.response_text) for uid, each in trajectories for turn in each.turns) - Counter(told)
    turns = [turn for _, each in trajectories for turn in each.turns]
    runs = [[run.version for run in turn.weight_versions] for turn in turns]
    assert all(versions == sorted(set(versions)) for versions in runs)
    assert (max(map(len, runs)) > 1) == in_flight, "an answer is of several versions where they come in flight"
    spans = [{run.version for turn in each.turns for run in turn.weight_versions} for _, each in trajectories]
    assert max(map(len, spans)) > 1, "a program asks before and after an update"


def with_prompts(batch: Any) -> Any:
    by_uid = {prompt.uid: prompt for prompt in batch.prompts}
    return [(by_uid[each.prompt_uid], each) for each in batch.trajectories]
