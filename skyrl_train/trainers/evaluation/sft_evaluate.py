"""Held-out loss of supervised training, by set and over all of them, and what follows from it: best step, early stop. And
answers of the model as it is then to held-out prompts, for people to read: `samples/step_000010.jsonl`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.data import one_ahead
from skyrl_train.data.sft import ExampleSet, example_batch
from skyrl_train.errors import DeadlineError, counted
from skyrl_train.images import between
from skyrl_train.interfaces import InferenceEngine, Learner, WeightTransport
from skyrl_train.rollout import LoopThread
from skyrl_train.system import derive_seed
from skyrl_train.system.files import json_line, write_atomically
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams

DECLARED_METRICS = """
eval/loss | nats | Mean cross-entropy of a held-out token. | supervised evaluations | TRL `eval_loss`
eval/perplexity | | Its exponential. | supervised evaluations
eval/<part>/{loss,perplexity} | | The same of one held-out set. | where several
"""

LOSS = "eval/loss"
"""Over all sets, every trained token the same weight."""
TRAIN_LOSS = "train/loss"
"""Mean negative log-probability of the step's trained tokens, before the update; no evaluation before training has one."""
_LARGEST_EXPONENT = 700.0
Progress = Callable[[int, int], None]
"""Called with the number of batches that are done, and that of all."""


@dataclass(frozen=True, kw_only=True)
class SetLoss:
    """The loss of one held-out set."""

    total: float
    """Sum of the negative log-probabilities of its trained tokens."""
    num_tokens: int
    """Trained tokens of the set."""

    @property
    def mean(self) -> float:
        return self.total / self.num_tokens


class SFTEvaluator:
    """Measures the loss of a learner's present weights on held-out sets."""

    def __init__(self, sets: Mapping[str, ExampleSet], *, batch_size: int, is_async: bool) -> None:
        """`batch_size` counts examples; it changes the loss by rounding at most. `is_async`: while one batch is scored,
        the next is made."""
        self.sets = dict(sets)
        self._size = batch_size
        self._is_async = is_async

    def evaluate(self, learner: Learner, *, step: int, on_progress: Progress) -> dict[str, float]:
        """`eval/loss`, `eval/perplexity`, and the same by set (`eval/NAME/loss`) where there is more than one."""
        batches = [
            (name, start) for name, examples in self.sets.items() for start in range(0, len(examples), self._size)
        ]

        def batch_of(number: int) -> TrainingInputBatch:
            name, start = batches[number]
            examples = self.sets[name]
            return example_batch(examples, np.arange(start, min(start + self._size, len(examples))), step=step)

        parts: dict[str, list[SetLoss]] = {name: [] for name in self.sets}
        with closing(one_ahead(batch_of, len(batches), is_async=self._is_async)) as made:
            for number, batch in enumerate(made):
                logprobs = learner.forward(batch)[batch["loss_mask"]]
                loss = SetLoss(total=-float(logprobs.double().sum()), num_tokens=len(logprobs))
                parts[batches[number][0]].append(loss)
                on_progress(number + 1, len(batches))
        losses = {name: _joined(of_set) for name, of_set in parts.items()}
        metrics = _metrics("eval", _joined(losses.values()))
        if len(losses) > 1:
            for name, loss in losses.items():
                metrics |= _metrics(f"eval/{name}", loss)
        return metrics


def _joined(parts: Iterable[SetLoss]) -> SetLoss:
    listed = list(parts)
    return SetLoss(total=math.fsum(part.total for part in listed), num_tokens=sum(part.num_tokens for part in listed))


def _metrics(prefix: str, loss: SetLoss) -> dict[str, float]:
    perplexity = math.exp(min(loss.mean, _LARGEST_EXPONENT)) if math.isfinite(loss.mean) else math.nan
    return {f"{prefix}/loss": loss.mean, f"{prefix}/perplexity": perplexity}


@dataclass(frozen=True, kw_only=True)
class LossHistory:
    """The held-out losses of a run so far. They are read from its record, so that a resumed run knows them too."""

    entries: tuple[tuple[int, float], ...] = ()
    """(step, loss), steps ascending; the evaluation before training is not among them."""

    @staticmethod
    def of(records: Sequence[Mapping[str, Any]]) -> LossHistory:
        """From the lines of `metrics.jsonl`."""
        return LossHistory(
            entries=tuple(
                (record["step"], float(record[LOSS]))
                for record in records
                if TRAIN_LOSS in record and record.get(LOSS) is not None
            )
        )

    def plus(self, step: int, loss: float) -> LossHistory:
        """With one more; a loss that is not finite is none."""
        return LossHistory(entries=(*self.entries, (step, loss))) if math.isfinite(loss) else self

    @property
    def best_step(self) -> int | None:
        """The step with the lowest loss, the earliest of equals; None before the first evaluation."""
        return min(self.entries, key=lambda entry: entry[1])[0] if self.entries else None

    def should_stop(self, *, patience: int, min_delta: float) -> bool:
        """Return whether the last `patience` evaluations brought no loss that is lower by more than `min_delta`; never for a
        patience of 0."""
        if patience == 0:
            return False
        best, since = math.inf, 0
        for _, loss in self.entries:
            better = loss < best - min_delta
            best, since = (loss, 0) if better else (best, since + 1)
        return since >= patience


def evaluation_line(metrics: Mapping[str, float], *, step: int) -> str:
    """`evaluation at step 10: loss 0.4321, perplexity 1.54; train 0.4100, test 0.4500`."""
    by_set = [
        f"{name.removeprefix('eval/').removesuffix('/loss')} {value:.4f}"
        for name, value in metrics.items()
        if name.endswith("/loss") and name != LOSS
    ]
    line = f"evaluation at step {step}: loss {metrics[LOSS]:.4f}, perplexity {metrics['eval/perplexity']:.4g}"
    return f"{line}; {', '.join(by_set)}" if by_set else line


def evaluation_table(records: Sequence[Mapping[str, Any]]) -> Table | None:
    """The first evaluation of the record and the last, side by side; None where there are not two."""
    evaluated = [record for record in records if record.get(LOSS) is not None]
    if len(evaluated) < 2:
        return None
    before, after = evaluated[0], evaluated[-1]
    table = Table(title="Held-out loss", box=box.SIMPLE_HEAD, title_style="bold")
    for heading in ("", f"before (step {before['step']})", f"after (step {after['step']})", "change"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in sorted(name for name in after if name.startswith("eval/") and before.get(name) is not None):
        old, new = float(before[name]), float(after[name])
        table.add_row(name.removeprefix("eval/"), f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}")
    return table


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of the model to a held-out prompt: what comes before the first trained token of an example."""

    set: str
    example: str
    prompt: str
    answer: str = ""
    """Empty until there is one."""
    expected: str
    """What the data says after the prompt."""
    stop_reason: str = ""


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
        self._engine, self._transport, self._decode = engine, transport, decode
        self._timeout_s, self._folder = timeout_s, folder
        self._requests: list[GenerationRequest] = []
        self._samples: list[Sample] = []
        for name, examples in sets.items():
            chosen = np.arange(min(num_samples, len(examples)))
            flat, images = examples.gather(chosen), examples.images(chosen)
            start = 0
            for index, length in enumerate(flat.lengths.tolist()):
                ids, mask = flat.input_ids[start : start + length].tolist(), flat.loss_mask[start : start + length]
                first = int(mask.argmax())  # text rows have almost no prompt
                number = len(self._requests)
                request = GenerationRequest(
                    request_id=f"sample-{number:06d}",
                    prompt_token_ids=tuple(ids[:first]),
                    sampling=sampling,
                    seed=derive_seed(seed, "sft sample", number),
                    images=between(images[index], 0, first) if images else (),
                )
                sample = Sample(
                    set=name, example=examples.name(index), prompt=decode(ids[:first]), expected=decode(ids[first:])
                )
                self._requests.append(request)
                self._samples.append(sample)
                start += length

    def write(self, learner: Learner, *, step: int) -> list[Sample]:
        """Gives the engine the learner's weights, generates, and writes the file. Raises DeadlineError, EngineError."""
        self._transport.sync(learner.weights(), step)
        loop = LoopThread("sft-samples")
        try:
            outputs = loop.run(self._generate(step))
        finally:
            loop.close()
        samples = [
            replace(sample, answer=self._decode(output.token_ids), stop_reason=output.stop_reason.value)
            for sample, output in zip(self._samples, outputs)
        ]
        lines = (json_line(asdict(sample)) for sample in samples)
        write_atomically(self._folder / f"step_{step:06d}.jsonl", b"".join(lines))
        return samples

    async def _generate(self, step: int) -> list[GenerationOutput]:
        answers = asyncio.gather(*(self._engine.generate(request) for request in self._requests))
        try:
            return list(await asyncio.wait_for(answers, self._timeout_s))
        except asyncio.TimeoutError as error:
            raise DeadlineError(
                f"{counted(len(self._requests), 'sample')} of step {step}",
                self._timeout_s,
                "Lower trainer.eval_samples, or raise trainer.eval_sample_timeout_s",
            ) from error


def cut_samples_after(folder: Path, step: int) -> None:
    """Deletes the samples of later steps, which a resumed run writes again."""
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdigit() and int(number) > step:
            path.unlink()
