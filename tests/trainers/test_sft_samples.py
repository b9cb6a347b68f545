"""Answers for people to read: the prompts of the first held-out examples, the same seeds at every evaluation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from skyrl_train.errors import DeadlineError
from skyrl_train.telemetry import read_metrics
from skyrl_train.trainers.evaluation.sft_evaluate import SampleWriter, cut_samples_after
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason
from tests.support.sft_runs import FakeSFTRun, RecordingLearner, make_config, make_examples


class EchoEngine:
    """Answers with the last token of the prompt and the version of its weights. Also its own WeightTransport."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.weight_version = -1
        self.requests: list[GenerationRequest] = []
        self._delay_s = delay_s

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        assert dict(weights)
        self.weight_version = version

    @contextmanager
    def lease(self) -> Iterator[None]:
        yield

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        return GenerationOutput(
            token_ids=(request.prompt_token_ids[-1], self.weight_version),
            logprobs=(0.0, 0.0),
            stop_reason=StopReason.LENGTH,
            weight_version=self.weight_version,
        )

    def close(self) -> None:
        """Nothing is held."""


def in_words(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def writer(folder: Path, engine: EchoEngine, **changes: Any) -> SampleWriter:
    settings: dict[str, Any] = {"num_samples": 2, "seed": 0, "timeout_s": 10.0, **changes}
    sets = {"easy": make_examples((5, 6, 7), "easy"), "hard": make_examples((4,), "hard")}
    return SampleWriter(
        sets,
        engine=engine,
        transport=engine,
        decode=in_words,
        sampling=SamplingParams(temperature=0.0),
        folder=folder,
        **settings,
    )


def test_the_model_as_it_is_now_answers_the_prompts_of_the_first_examples(tmp_path: Path) -> None:
    engine = EchoEngine()
    samples = writer(tmp_path, engine).write(RecordingLearner(), step=7)
    assert [(sample.set, sample.example) for sample in samples] == [
        ("easy", "easy-0"),
        ("easy", "easy-1"),
        ("hard", "hard-0"),
    ]
    assert (samples[0].prompt, samples[0].answer, samples[0].expected) == ("0 1", "1 7", "2 3 4")
    assert samples[1].prompt == "100 101 102"
    assert samples[0].stop_reason == "length"
    written = [json.loads(line) for line in (tmp_path / "step_000007.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in written] == [sample.answer for sample in samples]


def test_questions_and_seeds_are_the_same_at_every_evaluation(tmp_path: Path) -> None:
    engine = EchoEngine()
    samples = writer(tmp_path, engine)
    samples.write(RecordingLearner(), step=1)
    samples.write(RecordingLearner(), step=2)
    assert engine.requests[:3] == engine.requests[3:]
    assert len({request.seed for request in engine.requests}) == 3


def test_an_engine_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"3 samples of step 1 did not answer within 0.05 s"):
        writer(tmp_path, EchoEngine(delay_s=5.0), timeout_s=0.05).write(RecordingLearner(), step=1)


def test_samples_of_steps_that_are_repeated_are_deleted(tmp_path: Path) -> None:
    for name in ("step_000002.jsonl", "step_000004.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    cut_samples_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_000002.jsonl"]


def test_every_evaluation_writes_samples_and_shows_one(tmp_path: Path) -> None:
    run = FakeSFTRun(root=tmp_path, config=make_config(tmp_path, num_steps=3))
    run.samples = writer(run.folder.samples, EchoEngine())
    run.run()
    assert sorted(path.name for path in run.folder.samples.iterdir()) == ["step_000000.jsonl", "step_000003.jsonl"]
    assert "easy-0: '1 3'" in run.output.getvalue()
    assert "timing/sample" in read_metrics(run.folder.metrics_file)[-1]
