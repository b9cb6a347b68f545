"""Answers of the model as it is now to held-out prompts, for people to read: `samples/step_000010.jsonl`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from skyrl_train.data.sft import ExampleSet
from skyrl_train.errors import DeadlineError, counted
from skyrl_train.images import ImageSpans, between
from skyrl_train.interfaces import InferenceEngine, Learner, WeightTransport
from skyrl_train.rollout import LoopThread
from skyrl_train.system import derive_seed
from skyrl_train.system.files import json_line, write_atomically
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of the model to a held-out prompt."""

    set: str
    example: str
    prompt: str
    answer: str
    expected: str
    """What the data says after the prompt."""
    stop_reason: str


@dataclass(frozen=True, kw_only=True)
class _Question:
    set: str
    example: str
    prompt_ids: tuple[int, ...]
    expected_ids: tuple[int, ...]
    images: ImageSpans


class SampleWriter:
    """Generates from the first examples of each set, always the same ones with the same seeds."""

    def __init__(
        self,
        sets: Mapping[str, ExampleSet],
        *,
        engine: InferenceEngine,
        transport: WeightTransport,
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingParams,
        num_samples: int,
        seed: int,
        timeout_s: float,
        folder: Path,
    ) -> None:
        """`decode` gives the text of token ids, special ones included. `num_samples` of each set are answered; fewer where
        a set has fewer examples with a prompt."""
        self._engine = engine
        self._transport = transport
        self._decode = decode
        self._sampling = sampling
        self._seed = seed
        self._timeout_s = timeout_s
        self._folder = folder
        self._questions = [
            question for name, examples in sets.items() for question in _questions(name, examples, num_samples)
        ]

    def write(self, learner: Learner, *, step: int) -> list[Sample]:
        """Gives the engine the learner's weights, generates, and writes the file. Raises DeadlineError, EngineError."""
        self._transport.sync(learner.weights(), step)
        loop = LoopThread("sft-samples")
        try:
            outputs = loop.run(self._generate(step))
        finally:
            loop.close()
        samples = [self._sample(question, output) for question, output in zip(self._questions, outputs)]
        lines = (json_line(asdict(sample)) for sample in samples)
        write_atomically(self._folder / f"step_{step:06d}.jsonl", b"".join(lines))
        return samples

    async def _generate(self, step: int) -> list[GenerationOutput]:
        requests = [
            GenerationRequest(
                request_id=f"sample-{index:06d}",
                prompt_token_ids=question.prompt_ids,
                sampling=self._sampling,
                seed=derive_seed(self._seed, "sft sample", index),
                images=question.images,
            )
            for index, question in enumerate(self._questions)
        ]
        answers = asyncio.gather(*(self._engine.generate(request) for request in requests))
        try:
            return list(await asyncio.wait_for(answers, self._timeout_s))
        except asyncio.TimeoutError as error:
            raise DeadlineError(
                f"{counted(len(requests), 'sample')} of step {step}",
                self._timeout_s,
                "Lower trainer.eval_samples, or raise trainer.eval_sample_timeout_s",
            ) from error

    def _sample(self, question: _Question, output: GenerationOutput) -> Sample:
        return Sample(
            set=question.set,
            example=question.example,
            prompt=self._decode(question.prompt_ids),
            answer=self._decode(output.token_ids),
            expected=self._decode(question.expected_ids),
            stop_reason=output.stop_reason.value,
        )


def _questions(name: str, examples: ExampleSet, count: int) -> list[_Question]:
    """The prompts of the first examples: what comes before their first trained token. Text rows have almost none."""
    chosen = np.arange(min(count, len(examples)))
    flat, images = examples.gather(chosen), examples.images(chosen)
    found, start = [], 0
    for index, length in enumerate(flat.lengths.tolist()):
        ids, mask = flat.input_ids[start : start + length], flat.loss_mask[start : start + length]
        first = int(mask.argmax())
        found.append(
            _Question(
                set=name,
                example=examples.name(index),
                prompt_ids=tuple(ids[:first].tolist()),
                expected_ids=tuple(ids[first:].tolist()),
                images=between(images[index], 0, first) if images else (),
            )
        )
        start += length
    return found


def cut_samples_after(folder: Path, step: int) -> None:
    """Deletes the samples of later steps, which a resumed run writes again."""
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdigit() and int(number) > step:
            path.unlink()
