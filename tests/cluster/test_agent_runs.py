"""Agents are trained by the command line with vLLM, beside the learner and apart from it on Ray: what is trained on is what
was sampled."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.rollout import listening
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.support.command_runs import RAY, exported, records, relative_difference, run_command
from tests.support.vllm_apart import settings_apart

pytestmark = pytest.mark.cluster

BATCH, SAMPLES, STEPS = 4, 4, 2
SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "generator=agent",
    "generator.backend=vllm",
    "generator.agent_loop.run=tests.cluster.test_agent_runs:play",
    "data.validation=[]",
    f"trainer.train_batch_size={BATCH}",
    f"trainer.policy_mini_batch_size={BATCH // 2}",  # of several the policy scores the batch
    f"trainer.critic_mini_batch_size={BATCH // 2}",
    f"generator.n_samples_per_prompt={SAMPLES}",
    "generator.max_turns=3",
    "generator.sampling.max_generate_length=24",
    "trainer.policy.optimizer.lr=1e-3",
    "trainer.ckpt_interval=0",
)
PLACEMENTS = {"inline": ("placement=inline",), "ray": (*RAY, "placement.start_timeout_s=400")}
STREAMS = {"serial": (), "stream": ("trainer.max_staleness=1", "trainer.in_flight_updates=true")}
TOLD = "AGENT_TEST_TOLD"
"""Environment variable with the file that programs write what they were given to."""


def play(task: Any, address: Any) -> float:
    """A question, what follows from its answer, and another question beside these."""
    first = ask(task, address, list(task["prompt"]))
    ask(task, address, [*task["prompt"], first, {"role": "user", "content": "And now?"}])
    last = ask(task, address, [{"role": "user", "content": "How many?"}], streams=True)
    return float(sum(map(ord, last["content"])) % 7)


def ask(task: Any, address: Any, messages: list[Any], *, streams: bool = False) -> Any:
    body = {"messages": messages, "stream": streams, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {address.api_key}"}
    request = urllib.request.Request(f"{address.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        said = response.read().decode()
    if streams:
        events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
        pieces = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
        message, usage = {"role": "assistant", "content": "".join(pieces)}, events[-1]["usage"]
    else:
        completion = json.loads(said)
        message, usage = completion["choices"][0]["message"], completion["usage"]
    line = json.dumps([task["uid"], message["content"], usage["completion_tokens"]]) + "\n"
    file = os.open(os.environ[TOLD], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(file, line.encode())
    os.close(file)
    return message


@pytest.mark.nightly
def test_vllm_tells_whoever_listens_what_it_samples() -> None:
    engine, heard = VLLMEngine(settings_apart()), []
    request = GenerationRequest(
        request_id="r-0", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_generate_length=9), seed=3
    )

    async def ask_engine() -> GenerationOutput:
        with listening(heard.append):
            return await asyncio.wait_for(engine.generate(request), 120)

    try:
        output = asyncio.run(ask_engine())
    finally:
        engine.close()
    assert [token for tokens in heard for token in tokens] == list(output.token_ids)
    assert len(heard) > 1


@pytest.mark.parametrize(
    ("placement", "stream"),
    [
        pytest.param("inline", "serial", marks=pytest.mark.nightly),
        pytest.param("inline", "stream", marks=pytest.mark.nightly),
        pytest.param("ray", "serial", marks=pytest.mark.nightly),
        pytest.param("ray", "stream", marks=pytest.mark.nightly),
    ],
)
def test_agents_are_trained_on_what_vllm_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, stream: str
) -> None:
    folder, told = tmp_path / "run", tmp_path / "told.jsonl"
    monkeypatch.setenv(TOLD, str(told))
    run_command(folder, *SIZES, *PLACEMENTS[placement], *STREAMS[stream], f"trainer.total_steps={STEPS}")
    given = Counter(tuple(json.loads(line)) for line in told.read_text().splitlines())
    found: Counter[tuple[Any, ...]] = Counter()
    for step in range(1, STEPS + 1):
        (batch,) = read_rollouts(folder / "rollouts" / f"train_step_{step:06d}.parquet").values()
        assert len(batch.trajectories) == BATCH * SAMPLES
        for each in batch.trajectories:
            assert not each.failed
            assert sorted(str(turn.parent) for turn in each.turns) == ["0", "None", "None"]
            found.update((each.prompt_uid, turn.response_text, len(turn.response_token_ids)) for turn in each.turns)
            ages = {step - 1 - run.version for turn in each.turns for run in turn.weight_versions}
            assert ages <= ({0} if stream == "serial" else {0, 1})
    assert not found - given, "what is trained on was given to a program"
    assert stream == "stream" or found == given
    metrics = [record for record in records(folder) if record["step"]]
    assert [record["env/agent/turns"] for record in metrics] == [3.0] * STEPS
    assert all(record["policy/grad_norm"] > 0 for record in metrics)
    assert all(record["env/agent/unmatched"] == 0 for record in metrics)
    # The engine gave the probabilities that the trainer computes for the very tokens, of its own weights.
    name = "mismatch/logprob_diff_max" if stream == "serial" else "off_policy/numerics_abs_max"
    assert metrics[0][name] < 1e-4
    recording = ("generator=replay", f"generator.replay_path={folder / 'rollouts'}")
    replayed = tmp_path / "replayed"
    kept = tuple(each for each in SIZES if "generator=agent" not in each and "agent_loop" not in each)
    kept = tuple(each for each in kept if "backend" not in each)
    rows = ("generator.step_wise_trajectories=true", "environment=single_turn", f"trainer.total_steps={STEPS}")
    run_command(replayed, *kept, *recording, *rows)
    assert relative_difference(exported(replayed), exported(folder)) == 0.0
