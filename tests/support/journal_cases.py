"""A stream over a scripted engine, whose runs are killed and go on from what is left of their journals."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config import TrainerConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.rollout import ConsumedPrompts, Journal, RolloutGenerator
from skyrl_train.rollout.stream import RolloutStream, Taken
from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams, Trajectory
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment, done_with, go_on_with
from tests.support.fakes import FakeEngine, make_output, make_prompts, make_tokenizer
from tests.support.fakes_resumable import TURNS

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
BATCH, SAMPLES, STEPS, STALENESS = 2, 2, 4, 2
STREAM_PROMPTS = make_prompts(BATCH * STEPS, steps=[go_on_with("Try again"), done_with(1.0)])
ENVIRONMENTS = [
    FAKE_ENVIRONMENT,
    *(f"tests.support.fakes_resumable:{name}" for name in ("Secret", "WithState", "Deterministic")),
]


class VersionedEngine(FakeEngine):
    """Two turns a sample, whose log-probabilities tell the version that sampled them."""

    def __init__(self, version: int) -> None:
        super().__init__(self._versioned)
        self.weight_version = version

    def _versioned(self, _: GenerationRequest) -> GenerationOutput:
        logprobs = (-0.5 - self.weight_version,) * len(ANSWER)
        return make_output(ANSWER, logprobs=logprobs, weight_version=self.weight_version)


@dataclass(frozen=True)
class Run:
    """What one process did."""

    taken: dict[int, Taken]
    """By version."""
    requests: list[str]
    contents: dict[int, bytes]
    """Of the journal's file when a batch was taken, by version."""

    @property
    def content(self) -> bytes:
        return self.contents[STEPS - 1]


def run(
    path: Path,
    *,
    environment: str = FAKE_ENVIRONMENT,
    version: int = 0,
    settled: ConsumedPrompts | None = None,
    oldest_checkpoint: Callable[[], int | None] = lambda: None,
) -> Run:
    """Takes all batches from `version` on, as a learner would."""
    FakeEnvironment.reset()
    engine = VersionedEngine(version)
    environments = EnvironmentConfig(env_class=environment, step_timeout_s=5.0, isolation="thread", num_workers=4)
    generator = RolloutGenerator(engine, TOKENIZER, GeneratorConfig(max_turns=3), environments, 0)
    journal = Journal(path, prompts="p", oldest_checkpoint=oldest_checkpoint)
    stream = RolloutStream(
        generator,
        batch_at,
        TrainerConfig(train_batch_size=BATCH, max_staleness=STALENESS),
        journal,
        total_batches=STEPS,
        n_samples_per_prompt=SAMPLES,
        sampling=SamplingParams(),
        max_failed_fraction=0.0,
    )
    taken, contents = {}, {}
    try:
        stream.begin(version=version, settled=settled or ConsumedPrompts())
        for number in range(version, STEPS):
            taken[number] = stream.take()
            contents[number] = path.read_bytes()
            engine.weight_version = number + 1
            stream.publish(number + 1)
    finally:
        stream.close()
        generator.close()
    contents[STEPS - 1] = path.read_bytes()
    return Run(taken=taken, requests=[request.request_id for request in engine.requests], contents=contents)


def batch_at(position: int) -> Sequence[Prompt]:
    return STREAM_PROMPTS[position * BATCH : (position + 1) * BATCH]


def check_crash(before: Run, content: bytes, num_whole: int, path: Path, draw: random.Random, environment: str) -> None:
    """A run finds `content`, of which `num_whole` bytes are lines that are on disk, and goes on from a checkpoint."""
    lines = [json.loads(line) for line in content[:num_whole].splitlines()]
    num_batches = max((line["batch"] + 1 for line in lines if "batch" in line), default=0)
    first = next((line["from"] for line in lines if "from" in line), 0)
    # A checkpoint of step `version` follows the update of batch `version - 1`, which was in the journal before.
    version = draw.randint(first, num_batches)
    path.write_bytes(content)
    settled = before.taken[version - 1].settled if version else ConsumedPrompts()
    after = run(path, environment=environment, version=version, settled=settled)
    trained = Counter(
        prompt.uid
        for number in range(STEPS)
        for prompt in (before if number < version else after).taken[number].rollouts.prompts
    )
    assert trained == Counter(prompt.uid for prompt in STREAM_PROMPTS), "each prompt is trained on once"
    for number in range(version, num_batches):
        assert after.taken[number].rollouts == before.taken[number].rollouts, "a batch that was trained on is the same"
    check_nothing_is_made_twice(lines, after)
    for number, taken in after.taken.items():
        trajectories = taken.rollouts.trajectories
        ages = [number - one.version for each in trajectories for turn in each.turns for one in turn.weight_versions]
        assert min(ages) >= 0
        assert max(ages) <= STALENESS
        for each in trajectories:
            check_is_of_one_environment(each, environment)


def check_nothing_is_made_twice(lines: Sequence[dict[str, Any]], after: Run) -> None:
    restarted = {line["restart"] for line in map(json.loads, after.content.splitlines()) if "restart" in line}
    kept = {line["turn"] for line in lines if "turn" in line and line["turn"][:-4] not in restarted}
    assert not kept & set(after.requests), (
        "no turn that finished is generated again, but for environments that are gone"
    )
    assert len(set(after.requests)) == len(after.requests)


def check_is_of_one_environment(trajectory: Trajectory, environment: str) -> None:
    said = [str(message["content"]) for turn in trajectory.turns for message in turn.observations]
    if environment != FAKE_ENVIRONMENT:
        secret = said[0].split()[0]
        assert said == [f"{secret} + {turn}" for turn in range(1, TURNS + 1)]
        assert trajectory.metrics == {"secret": float(secret), "turns": TURNS}


def check_cut(cut: int, before: Run, folder: Path, draw: random.Random, environment: str) -> None:
    content = before.content[:cut]
    check_crash(before, content, content.rfind(b"\n") + 1, folder / f"cut_{cut}.jsonl", draw, environment)
