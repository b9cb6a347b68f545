"""The first look at a run: what it tells of good, impossible and broken tasks, and that the run is the same behind it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.config import Config
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.model import load_tokenizer
from skyrl_train.plan import plan_batches
from skyrl_train.runs import train
from skyrl_train.runs.look import Seen, look_lines, look_warnings, why_skipped
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.types import Prompt, RolloutBatch, StopReason, Trajectory
from tests.support.fakes_trainer import failed_trajectory, make_trajectory, make_turn, records_without_timings

CALLS: list[str] = []


def short(completion: str) -> float:
    CALLS.append(completion)
    return 1.0 / (1 + len(completion))


def impossible(completion: str, answer: str) -> float:
    return float(completion == f"of {answer}, in a form that nobody guesses")


def exact(completion: str, answer: str) -> float:
    return float(completion == f"#### {answer}")


def independent(completion: str) -> float:
    assert isinstance(completion, str)
    return 0.25


def by_chance(completion: str) -> float:
    assert isinstance(completion, str)
    return random.random()


def broken(completion: str) -> float:
    raise KeyError(f"no answer among {len(completion)} characters")


def config_of(folder: Path, reward: str, **trainer: object) -> Config:
    """Two steps of four prompts with two samples each of at most eight tokens, rewarded on a thread."""
    config = Config(output_dir=str(folder))
    sizes = {
        "total_steps": 2,
        "train_batch_size": 4,
        "policy_mini_batch_size": 2,
        "eval_interval": 0,
        "eval_before_train": False,
        "ckpt_interval": 0,
        "export_hf": False,
    }
    optimizer = replace(config.trainer.policy.optimizer, lr=0.01)
    return replace(
        config,
        data=replace(config.data, max_train_prompts=8, validation=()),
        environment=replace(
            config.environment, env_class="single_turn", reward=f"{__name__}:{reward}", isolation="thread"
        ),
        generator=replace(
            config.generator,
            n_samples_per_prompt=2,
            sampling=replace(config.generator.sampling, max_generate_length=8),
        ),
        trainer=replace(
            config.trainer,
            policy=replace(config.trainer.policy, optimizer=optimizer),
            **{**sizes, **trainer},  # type: ignore[arg-type]
        ),
    )


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed of the look."""
    return "first look" + capsys.readouterr().out.partition("first look")[2]


def test_a_look_alone_shows_samples_and_times_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config_of(tmp_path, "exact"), only_looks=True) is None
    shown = told(capsys)
    assert shown.startswith("first look: 2 prompts x 4 samples, ")
    lines = [line.split()[0] for line in shown.splitlines()]
    expected = ["highest", "prompt", "it", "answer", "lowest", "prompt", "it", "answer", "groups", "time", "memory"]
    assert lines[1:12] == expected
    assert "2 steps " in shown
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("reward", "warning"),
    [
        ("independent", "the reward is independent of the text, as far as was tried"),
        ("impossible", "the reward is independent of the text, as far as was tried"),
        ("exact", "the reward does read the text: one that was not sampled earns 1"),
        ("by_chance", "the same text was rewarded with "),
    ],
)
def test_rewards_are_tried_with_texts_that_were_not_sampled(
    reward: str, warning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_of(tmp_path, reward), only_looks=True)
    assert f"warning: first look: {warning}" in told(capsys)


def test_a_reward_that_always_raises_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        SkyrlTrainError,
        match=r"8 of 8 trajectories failed, more than environment.max_failed_fraction=0.5:(.|\n)*KeyError: 'no answer among",
    ):
        train(config_of(tmp_path, "broken", look="full"))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow  # two runs: that they are the same is what the look promises
def test_a_run_is_the_same_bit_for_bit_behind_its_look(tmp_path: Path) -> None:
    calls = []
    for look in ("off", "full"):
        CALLS.clear()
        state = torch.random.get_rng_state()
        train(config_of(tmp_path / look, "short", look=look, ckpt_interval=2))
        torch.random.set_rng_state(state)
        calls.append(len(CALLS))
    off, full = tmp_path / "off", tmp_path / "full"
    assert calls == [16, 16 + 8 + 14]  # the look's own, which no metric counts
    assert records_without_timings(full / "metrics.jsonl") == records_without_timings(off / "metrics.jsonl")
    for name in ("train_step_000001.parquet", "train_step_000002.parquet"):
        assert read_rollouts(full / "rollouts" / name) == read_rollouts(off / "rollouts" / name)
    files = sorted(path.relative_to(off) for path in off.glob("checkpoints/step_000002/**/*.safetensors"))
    assert files
    for file in files:
        after, alone = load_file(full / file), load_file(off / file)
        assert after.keys() == alone.keys()
        assert all(torch.equal(after[key], alone[key]) for key in alone)


def sample(prompt: int, number: int, reward: float, text: str, *, stop: StopReason = StopReason.STOP) -> Trajectory:
    turn = make_turn((1, 2), (3, 4), reward=reward, response_text=text, stop_reason=stop)
    return replace(make_trajectory(turn), prompt_uid=f"p{prompt}", sample_index=number)


def rollouts_of(*trajectories: Trajectory) -> RolloutBatch:
    prompts = tuple(
        Prompt(uid=f"p{index}", messages=({"role": "user", "content": f"{index} + 1?"},), extras={"answer": index + 1})
        for index in range(2)
    )
    return RolloutBatch(prompts=prompts, trajectories=trajectories, n_samples_per_prompt=len(trajectories) // 2)


def seen_of(rewards: Sequence[float], *, stop: StopReason = StopReason.STOP, others: float = 0.5) -> Seen:
    """Two samples each of two prompts, and one other answer to each that earns what the first sample did, or `others`."""
    samples = [
        sample(index // 2, index % 2, reward, f"text {index}", stop=stop) for index, reward in enumerate(rewards)
    ]
    again = [sample(index, 0, rewards[2 * index], "again") for index in range(2)]
    tried = [sample(index, 1, others, "other") for index in range(2)]
    return Seen(
        rollouts=rollouts_of(*samples),
        others=rollouts_of(again[0], tried[0], again[1], tried[1]),
        generate_s=12.0,
        learn_s=28.0,
        is_measured=True,
        peak_bytes=2_000_000_000,
        step_bytes=3_000_000_000,
    )


def warnings_of(seen: Seen, config: Config) -> list[str]:
    plan = plan_batches(config, num_train_prompts=8)
    return list(look_warnings(seen, config, plan, load_tokenizer(config.model)))


def test_two_samples_are_shown_with_what_their_reward_read_and_what_a_step_takes(tmp_path: Path) -> None:
    plan = plan_batches(config_of(tmp_path, "exact"), num_train_prompts=8)
    assert list(look_lines(seen_of([0.0, 1.0, 0.0, 0.0]), plan)) == [
        "highest     reward 1 (one number), 2 tokens, ended by stop",
        "  prompt    '0 + 1?'",
        "  it read   'text 1'",
        "  answer    1",
        "lowest      reward 0 (one number), 2 tokens, ended by stop",
        "  prompt    '0 + 1?'",
        "  it read   'text 0'",
        "  answer    1",
        "groups      1 of 2 have samples with different rewards; mean reward 0.25",
        "time        about 40 s a step: rollouts 12 s, scores and update 28 s; 2 steps 80 s, evaluations aside",
        "memory      2 GB so far, about 3 GB in a step",
    ]


def test_a_good_task_has_nothing_to_warn_of(tmp_path: Path) -> None:
    assert warnings_of(seen_of([0.0, 1.0, 1.0, 0.0]), config_of(tmp_path, "exact")) == []


def test_what_keeps_a_run_from_learning_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, "exact")
    slow = replace(config.trainer.policy.optimizer, lr=1e-6)
    config = replace(config, trainer=replace(config.trainer, policy=replace(config.trainer.policy, optimizer=slow)))
    found = warnings_of(seen_of([0.0] * 4, stop=StopReason.LENGTH, others=0.0), config)
    assert [line[:60] for line in found] == [
        "the samples of a prompt all have the same reward in 2 of 2 g",
        "the reward is independent of the text, as far as was tried: ",
        "all 4 answers were cut at the limit, and the end token '<|im",
        "trainer.policy.optimizer.lr=1e-06 x 4 updates moves a weight",
    ]
    assert "try trainer.policy.optimizer.lr=1e-04, or more trainer.total_steps" in found[-1]


def test_samples_that_failed_are_counted_with_a_reason(tmp_path: Path) -> None:
    seen = seen_of([0.0, 1.0, 1.0, 0.0])
    lost = replace(failed_trajectory(), prompt_uid="p0", sample_index=0)
    seen = replace(seen, rollouts=rollouts_of(lost, *seen.rollouts.trajectories[1:]))
    (line,) = warnings_of(seen, config_of(tmp_path, "exact"))
    assert line.startswith("1 of 4 samples failed, the first by environment_error: ")


def test_what_may_cost_is_asked_with_full_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, "exact")
    prompt = Prompt(uid="a", messages=())
    judged = {"_target_": "judge", "url": "http://127.0.0.1:8000", "model": "m"}
    paid = replace(config, environment=replace(config.environment, reward=judged))
    asks = "a reward, a tool or the environment asks a server, which may cost: trainer.look=full asks it"
    assert why_skipped(config, [prompt]) == ""
    assert why_skipped(paid, [prompt]) == asks
    assert why_skipped(replace(paid, trainer=replace(paid.trainer, look="full")), [prompt]) == ""
    assert why_skipped(config, [replace(prompt, env_class="search")]) == asks
    stale = replace(config, trainer=replace(config.trainer, max_staleness=1))
    assert why_skipped(stale, [prompt]) == "rollouts are made while the policy updates (trainer.max_staleness)"
    on_ray = replace(config, placement=replace(config.placement, backend="ray"))
    assert why_skipped(on_ray, [prompt]) == "engine and models are not both in this process"
    agent = replace(config, generator=replace(config.generator, agent_loop="agent"))
    assert why_skipped(agent, [prompt]) == "trajectories are made by generator.agent_loop, which may do anything"
