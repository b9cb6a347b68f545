"""Whole runs that a judge or a reward model scores: killed and resumed, replayed, and resumed with another model."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.judge.stub_judge import MODEL, StubJudge, points
from tests.support.command_runs import records, run_command, start_command, wait_for
from tests.support.reward_model_cases import save_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ("--config-dir", str(ROOT / "examples" / "judge" / "conf"), "+experiment=judge", "platform=cpu")
SMALL = ("data.validation=[]", "trainer.export_hf=false")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubJudge]:
    server = StubJudge()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()


def trajectories(folder: Path, step: int) -> list[dict[str, Any]]:
    return records(folder, f"rollouts/train_step_{step:06d}.parquet")


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the machine."""
    return [{k: v for k, v in each.items() if not k.startswith(("timing/", "memory/"))} for each in records(folder)]


def test_the_example_trains_on_the_grades_of_the_sampled_texts_and_replays_without_a_judge(
    judge: StubJudge, tmp_path: Path
) -> None:
    run_command(tmp_path / "run", *EXAMPLE, *SMALL)
    metrics = records(tmp_path / "run")
    assert len(metrics) == 2
    for number, step in enumerate(metrics, start=1):
        seen = trajectories(tmp_path / "run", step=number)
        assert [one["reward"] for one in seen] == [points(one["turns"][-1]["text"]) / 10 for one in seen]
        assert step["batch/trained_tokens"] == sum(len(one["turns"][-1]["response_token_ids"]) for one in seen)
        assert step["group/zero_variance"] < 1
        assert step["policy/grad_norm"] > 0
        assert step["timing/judge/calls"] + step["timing/judge/cache_hits"] == 64
        assert step["timing/judge/cost"] > 0
    num_asked = len(judge.asked)
    recorded = f"generator.replay_path={tmp_path / 'run' / 'rollouts'}"
    judge.failing = 100
    run_command(tmp_path / "replay", *EXAMPLE, *SMALL, "generator.backend=replay", recorded)
    assert [each["reward/mean"] for each in records(tmp_path / "replay")] == [each["reward/mean"] for each in metrics]
    assert [each["policy/grad_norm"] for each in records(tmp_path / "replay")] == pytest.approx(
        [each["policy/grad_norm"] for each in metrics], rel=1e-4
    )
    assert len(judge.asked) == num_asked


def test_a_run_that_is_killed_while_it_is_judged_goes_on_with_the_replies_it_has(
    judge: StubJudge, tmp_path: Path
) -> None:
    run_command(tmp_path / "whole", *EXAMPLE, *SMALL)
    asked_by_whole = [each["messages"] for each in judge.asked]
    judge.asked.clear()
    reached, hold = threading.Event(), threading.Event()
    answer = judge.reply

    def reply(request: Mapping[str, Any]) -> tuple[int, str]:
        if len(judge.asked) > 80 and not hold.is_set():  # in the second step, of whose answers some are known by now
            reached.set()
            hold.wait(60)
        return answer(request)

    judge.reply = reply  # type: ignore[method-assign]
    running = start_command(tmp_path / "killed", *EXAMPLE, *SMALL)
    assert reached.wait(300)
    time.sleep(1.0)
    os.killpg(running.process.pid, signal.SIGKILL)
    wait_for(running)
    hold.set()
    judge.asked.clear()
    run_command(tmp_path / "killed", *EXAMPLE, *SMALL)
    assert comparable(tmp_path / "killed") == comparable(tmp_path / "whole")
    assert 0 < len(judge.asked) < len(asked_by_whole) / 2
    assert all(each["messages"] in asked_by_whole for each in judge.asked)
    assert judge.asked[0]["model"] == MODEL


def test_a_run_does_not_go_on_with_another_reward_model(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path / "model")
    reward = f"environment.reward={{_target_: model, path: {folder}}}"
    arguments = ("platform=cpu", *SMALL, reward, "generator.n_samples_per_prompt=4", "generator.max_turns=1")
    arguments += ("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.eval_before_train=false")
    run_command(tmp_path / "run", *arguments, "trainer.total_steps=1", "trainer.ckpt_interval=1")
    assert len({one["reward"] for one in trajectories(tmp_path / "run", step=1)}) > 1
    save_reward_model(folder, seed=1)
    running = start_command(tmp_path / "run", *arguments, "trainer.total_steps=2", "trainer.ckpt_interval=1")
    status, said = wait_for(running)
    assert status == 2, said
    assert "environment.reward: must be as it was" in said
    assert "sha256:" in said
    save_reward_model(folder, seed=0)
    moved = reward.replace("}", ", max_batch_tokens: 100}")
    run_command(tmp_path / "run", *arguments[:3], moved, *arguments[4:], "trainer.total_steps=2")
