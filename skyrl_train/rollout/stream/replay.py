"""`ReplayGenerator`: recorded rollouts in place of an engine and environments.

For debugging an update without generating, and for comparing trainers on the same rollouts. It also supplies the
prompts, since a recording says what each step trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_train.errors import ConfigError, DataError, EngineError, Violation, counted
from skyrl_train.images import ImageSpan, ImageSpans
from skyrl_train.rollout.checked_engine import check_failures, checked_trajectory
from skyrl_train.rollout.journal import FILE, batch_places, read_group
from skyrl_train.rollout.stream.stream import distinct, rollouts_of
from skyrl_train.telemetry.records import read_facts, read_rollouts
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams

_LARGEST_ID = 2**31
_NOT_TRAINED_ON = re.compile(r"(?:eval|failed)_step_\d+\.(?:parquet|jsonl)")


@dataclass(frozen=True)
class _RecordedStep:
    """Where one step's rollouts are, and what they answer."""

    path: Path
    recorded_step: int
    prompts: tuple[Prompt, ...]
    n_samples_per_prompt: int
    groups: tuple[int, ...] = ()
    """Of a journal: where its groups are."""


class ReplayGenerator:
    """Implements `Generator` from a run's `rollouts/` (`telemetry/records/store.py`), from JSON lines
    (`telemetry/records/log.py`), or from the journal of a run whose rollouts were made while the learner updated
    (`journal.py`), and supplies the prompts of each step.

    Steps are taken in the order of their recording: the first recorded one is step 1, whatever its number was.
    """

    is_recorded = True

    def __init__(
        self,
        path: Path | str,
        *,
        vocabulary_size: int = _LARGEST_ID,
        max_context_length: int = _LARGEST_ID,
        max_failed_fraction: float = 1.0,
        shape: Callable[[RolloutBatch], RolloutBatch] = lambda rollouts: rollouts,
    ) -> None:
        """
        Args:
            path: A file, Parquet or JSON lines, or a folder of them such as a run's `rollouts/` (those of evaluations and
                failed steps are left out); or a run's `journal/`.
            vocabulary_size: Rows of the policy's embedding.
            max_context_length: Most tokens of a prompt and its response together.
            max_failed_fraction: Most trajectories of a step, as a fraction, that may be refused for one of these two, or for
                a log-probability above 0. They fail, with the reason.
            shape: What is made of a journal's rewards, which are those of the environment; rollouts have it in them.

        Raises:
            DataError: There is no such file, a row in it is not a recorded trajectory, or it lacks prompts of its step.
            SkyrlTrainError: More trajectories of a step are refused.
        """
        self._limits = {"vocabulary_size": vocabulary_size, "max_context_length": max_context_length}
        self._max_failed_fraction = max_failed_fraction
        self._steps: list[_RecordedStep] = []
        self._loaded: tuple[Path, dict[int, RolloutBatch]] | None = None
        self._shape = shape
        self._spans: dict[str, ImageSpan] = {}
        path = Path(path).expanduser()
        self.images_folder = (path.parent if _is_step(path) else path).parent / "images"
        """Where the run that was recorded has its images."""
        journal = path / FILE if path.is_dir() else path
        if journal.name == FILE and journal.is_file():
            for index, groups in enumerate(batch_places(journal)):
                # Read for its prompts and to be checked, and let go: memory
                # holds one step, which is read again when its turn comes.
                batch = self._of_journal(journal, groups)
                step = _RecordedStep(journal, index + 1, batch.prompts, batch.n_samples_per_prompt, groups)
                self._steps.append(step)
            return
        for file in _files(path):
            if (fraction := read_facts(file).sample_fraction) < 1:
                raise DataError(
                    f"generator.replay_path: {file} holds {fraction:g} of its step's prompts, and a step is replayed whole. "
                    "Record with rollouts.sample_fraction=1."
                )
            self._steps.extend(
                _RecordedStep(file, step, batch.prompts, batch.n_samples_per_prompt)
                for step, batch in self._load(file).items()
            )

    @property
    def num_steps(self) -> int:
        """Training steps that the recording has."""
        return len(self._steps)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all steps, in order."""
        return [prompt for step in self._steps for prompt in step.prompts]

    @property
    def images(self) -> ImageSpans:
        """Each image of the recording once, without pixels."""
        return tuple(span for _, span in sorted(self._spans.items()))

    def check(self, *, train_batch_size: int, n_samples_per_prompt: int, total_steps: int) -> None:
        """Raises ConfigError, with all violations, where a run of these sizes cannot be replayed from the recording."""
        violations: list[Violation] = []
        for field, rule, given, recorded in (
            (
                "trainer.train_batch_size",
                "must be the recorded number of prompts per step",
                train_batch_size,
                {len(step.prompts) for step in self._steps},
            ),
            (
                "generator.n_samples_per_prompt",
                "must be the recorded number of samples per prompt",
                n_samples_per_prompt,
                {step.n_samples_per_prompt for step in self._steps},
            ),
        ):
            if recorded != {given}:
                sizes = ", ".join(map(str, sorted(recorded)))
                remedy = f"Set {field}={sizes}" if len(recorded) == 1 else f"The recording mixes {sizes}; split it"
                violations.append(Violation(field=field, rule=rule, value=str(given), remedy=remedy))
        if total_steps > self.num_steps:
            violations.append(
                Violation(
                    field="trainer.total_steps",
                    rule=f"must be at most the number of recorded steps, {self.num_steps}",
                    value=str(total_steps),
                    remedy=f"Set trainer.total_steps={self.num_steps}",
                )
            )
        if violations:
            raise ConfigError(violations)

    def prompts_for_step(self, global_step: int) -> list[Prompt]:
        """Return what step `global_step` (from 1) trained on. Raises DataError past the end of the recording."""
        return list(self._step(global_step).prompts)

    def batch(self, position: int) -> list[Prompt]:
        """Return the prompts after `position` steps, as `PromptSource.batch` gives them."""
        return self.prompts_for_step(position + 1)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n_samples_per_prompt: int,
        sampling: SamplingParams,  # noqa: ARG002
        global_step: int,
        purpose: str,
    ) -> RolloutBatch:
        """Return the recorded rollouts of `global_step`; `prompts` and `n_samples_per_prompt` must be the recorded ones.

        Raises:
            EngineError: `purpose` is not `train`: new answers to held-out prompts need an engine.
            DataError: The recording has no such step, or other prompts or samples in it.
        """
        if purpose != "train":
            raise EngineError(
                f"generator=replay has no engine, so it cannot generate for {purpose!r}. "
                "Set data.validation=[] to train without evaluation."
            )
        step = self._step(global_step)
        is_journal = bool(step.groups)
        batch = self._of_journal(step.path, step.groups) if is_journal else self._load(step.path)[step.recorded_step]
        if [prompt.uid for prompt in prompts] != [prompt.uid for prompt in batch.prompts]:
            raise DataError(
                f"{step.path}: the prompts of step {global_step} are not those asked for. "
                "Take them from the recording, in its order."
            )
        if n_samples_per_prompt != batch.n_samples_per_prompt:
            raise DataError(
                f"{step.path}: the recording has {counted(batch.n_samples_per_prompt, 'sample')} of each prompt. "
                f"Set generator.n_samples_per_prompt={batch.n_samples_per_prompt}."
            )
        return batch

    def close(self) -> None:
        self._loaded = None

    def _step(self, global_step: int) -> _RecordedStep:
        if not 1 <= global_step <= self.num_steps:
            raise DataError(
                f"the recording has {counted(self.num_steps, 'step')}, and step {global_step} was asked for. "
                f"Set trainer.total_steps={self.num_steps}."
            )
        return self._steps[global_step - 1]

    def _load(self, path: Path) -> dict[int, RolloutBatch]:
        """Return one file's batches; the last file read is kept, so that memory holds one at a time."""
        if self._loaded is None or self._loaded[0] != path:
            # Let go ahead of reading, or two files would be in memory at once.
            self._loaded = None
            self._loaded = path, {step: self._checked(batch) for step, batch in read_rollouts(path).items()}
        return self._loaded[1]

    def _of_journal(self, journal: Path, places: Sequence[int]) -> RolloutBatch:
        groups = [read_group(journal, place) for place in places]
        sizes = {len(group) for group in groups}
        if len(sizes) != 1 or 0 in sizes:
            raise DataError(
                f"{journal}: the groups of a batch must have as many samples as one another, and some; got {sorted(sizes)}"
            )
        named = distinct([(group[0][0], tuple(trajectory for _, trajectory in group)) for group in groups])
        return self._shape(self._checked(rollouts_of(named, sizes.pop())))

    def _checked(self, batch: RolloutBatch) -> RolloutBatch:
        checked = [checked_trajectory(trajectory, **self._limits) for trajectory in batch.trajectories]
        # Those that are refused here: what failed when it was recorded
        # failed in that run's step, too, and was let pass there.
        refused = [after for before, after in zip(batch.trajectories, checked) if after.failed and not before.failed]
        check_failures(refused, len(checked), limit=self._max_failed_fraction)
        spans = (span for each in checked for turn in each.turns for span in turn.images)
        self._spans |= {span.image.key: span for span in spans}
        return replace(batch, trajectories=tuple(checked))


def _is_step(path: Path) -> bool:
    """Whether a path is a file of rollouts, or a folder that stands for one."""
    return not path.is_dir() or path.suffix == ".parquet"


def _files(path: Path) -> list[Path]:
    if path.exists() and _is_step(path):
        return [path]
    if not path.is_dir():
        raise DataError(
            f"generator.replay_path: no such file or folder: {path}. "
            "Give a file of rollouts, or a run's rollouts/ or journal/ folder."
        )
    # A run that an older version began has JSON lines up to where it went on.
    files = [each for pattern in ("*.parquet", "*.jsonl") for each in path.glob(pattern)]
    files = sorted((file for file in files if not _NOT_TRAINED_ON.fullmatch(file.name)), key=lambda file: file.stem)
    if not files:
        raise DataError(
            f"generator.replay_path: {path} holds no training rollouts (*.parquet, *.jsonl). "
            "Record some with trainer.dump_rollouts=true."
        )
    return files
