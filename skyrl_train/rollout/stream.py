"""`RolloutStream`: prompt groups that are kept in flight while the learner updates.

    main thread                            the generator's loop thread
    -------------------------------------  ---------------------------------------------------------------
    take()     waits for a batch           groups run, each a task; one that finishes may complete a batch
    update     of the learner              groups run on, with the weights that the engine has
    publish()  after the engine's sync     admission lets further groups begin

Which group begins when, and which ones make a batch, is `admission.py`. A group begins with the prompt's ordinal, from which
its seeds and requests derive, and never with the time; what the engine answers still depends on the weights that it has
when it is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_train.errors import DataError
from skyrl_train.rollout.admission import Admission, AdmissionSettings, Closed, Settled
from skyrl_train.rollout.checked_engine import check_failures
from skyrl_train.rollout.generator import ProgressCallback, RolloutGenerator
from skyrl_train.rollout.journal import Journal, JournaledEngine
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Trajectory


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What a stream is made with."""

    admission: AdmissionSettings
    n_samples_per_prompt: int
    sampling: SamplingParams
    max_failed_fraction: float
    """`environment.max_failed_fraction`, of a batch."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One training batch of the stream."""

    rollouts: RolloutBatch
    settled: Settled
    """The prompts that are trained on, this batch included, or dropped."""
    metrics: Mapping[str, float]
    """`stream/...`, `staleness/...` and `timing/wait/...`."""


class RolloutStream:
    """Makes training batches of `generator` while its caller is at something else. Used from one thread."""

    def __init__(
        self,
        generator: RolloutGenerator,
        prompts: Callable[[int], Sequence[Prompt]],
        settings: StreamSettings,
        journal: Journal,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """`prompts` gives the batch at a position of the data (`PromptSource.batch`). What is in the `journal` is taken from
        there; the stream closes it. `on_progress` is told how many groups are ready while `take` waits."""
        self._generator, self._prompts, self._settings = generator, prompts, settings
        self._journal = journal
        self._on_progress = on_progress
        self._admission: Admission | None = None
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._is_restored = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._results: dict[int, tuple[Prompt, tuple[Trajectory, ...]]] = {}
        self._idle_s, self._idle_since = 0.0, 0.0
        """Seconds without any group in flight, and when they began."""

    def begin(self, *, version: int, settled: Settled) -> None:
        """Have groups begin. The engine has the weights of `version`, which is also the number of finished steps."""
        self._generator.thread.run(self._begin(version, settled))

    def publish(self, version: int) -> None:
        """Tell that the engine was given the weights of `version`."""
        self._generator.thread.run(self._publish(version))

    def take(self) -> Taken:
        """Return the next batch, for the learner at the version that was published last.

        Raises SkyrlTrainError where more than `max_failed_fraction` of it failed, and whatever ended a group: DataError,
        ConfigError.
        """
        began = time.monotonic()
        taken = self._generator.thread.run(self._take())
        waited = {"timing/wait/rollouts": time.monotonic() - began}
        return Taken(rollouts=taken.rollouts, settled=taken.settled, metrics={**taken.metrics, **waited})

    def close(self) -> None:
        """End all groups in flight. Idempotent."""
        if not self._generator.thread.is_closed:
            self._generator.thread.run(self._end())
        self._journal.close()

    async def _begin(self, version: int, settled: Settled) -> None:
        self._admission = Admission(settings=self._settings.admission, version=version, settled=settled)
        self._idle_since = time.monotonic()
        self._journal.forget(settled)
        self._go_on()

    async def _publish(self, version: int) -> None:
        self._rules.publish(version)
        self._go_on()

    def _go_on(self) -> None:
        """Begin groups, but for those behind a batch that a run before has closed at this version: what the journal has of
        them may be answers of versions that the learner has yet to reach once more."""
        version = self._rules.version
        if version in self._journal.batches:
            return
        if not self._is_restored:
            self._is_restored = True
            for ordinal, began_at in sorted(self._journal.started.items()):
                if not self._rules.settled.holds(ordinal):
                    self._rules.restore(ordinal, min(began_at, version))
                    self._start(ordinal)
        self._start_groups()

    async def _take(self) -> Taken:
        while True:
            if self._error is not None:
                raise self._error
            version = self._rules.version
            if (known := self._journal.batches.get(version)) is not None:
                self._rules.retake(known)
                self._results.update({ordinal: self._recorded(ordinal) for ordinal in known.ordinals})
                return self._batch(known)
            if (closed := self._rules.close()) is not None:
                taken = self._batch(closed)
                await self._journal.keep_batch(version, closed)
                return taken
            if not self._tasks:
                raise DataError(
                    f"{self._journal.path}: the groups in it are none of this run at version {version}: no batch can be "
                    "made of them. Start over with trainer.resume_mode=none"
                )
            self._report()
            self._changed.clear()
            await self._changed.wait()

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _rules(self) -> Admission:
        assert self._admission is not None, "the stream has begun"
        return self._admission

    def _start_groups(self) -> None:
        """Begin what may begin; count the seconds in which nothing could."""
        while (ordinal := self._rules.start()) is not None:
            self._journal.begin(ordinal, self._rules.version)
            self._start(ordinal)
        self._count_idle()

    def _start(self, ordinal: int) -> None:
        self._tasks[ordinal] = asyncio.ensure_future(self._run(ordinal))

    def _prompt(self, ordinal: int) -> Prompt:
        position, index = divmod(ordinal, self._settings.admission.batch_size)
        return self._prompts(position)[index]

    def _recorded(self, ordinal: int) -> tuple[Prompt, tuple[Trajectory, ...]]:
        """Return a group of a batch that a run before has closed, which was in the journal before the batch was."""
        trajectories = self._journal.group(ordinal)
        if trajectories is None:
            raise DataError(
                f"{self._journal.path}: batch {self._rules.version} has group {ordinal}, of which there is no line. "
                "Start over with trainer.resume_mode=none"
            )
        return self._prompt(ordinal), trajectories

    async def _run(self, ordinal: int) -> None:
        settings = self._settings
        try:
            prompt = self._prompt(ordinal)
            trajectories = self._journal.group(ordinal)
            # What failed in a run before is tried again, since what broke it may be mended.
            if trajectories is None or any(trajectory.failed for trajectory in trajectories):
                trajectories = await self._generator.run_group(
                    prompt,
                    ordinal=ordinal,
                    n_samples_per_prompt=settings.n_samples_per_prompt,
                    sampling=settings.sampling,
                    wrap=lambda engine: JournaledEngine(engine, self._journal),
                )
                await self._journal.keep_group(ordinal, prompt, trajectories)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # it belongs to whoever takes the next batch
            self._error = self._error or error
        else:
            self._results[ordinal] = prompt, trajectories
            self._rules.finish(ordinal)
            self._count_idle()
        finally:
            self._tasks.pop(ordinal, None)
            self._changed.set()

    def _batch(self, closed: Closed) -> Taken:
        """Raises SkyrlTrainError as `take` does."""
        for ordinal in closed.dropped:
            self._results.pop(ordinal, None)
            if (task := self._tasks.pop(ordinal, None)) is not None:
                task.cancel()
        dropped = Counter(closed.dropped.values())
        groups = [self._results.pop(ordinal) for ordinal in closed.ordinals]
        rollouts = RolloutBatch(
            prompts=tuple(prompt for prompt, _ in groups),
            trajectories=tuple(trajectory for _, group in groups for trajectory in group),
            n_samples_per_prompt=self._settings.n_samples_per_prompt,
        )
        metrics = {
            "stream/in_flight": float(self._rules.num_in_flight),
            "stream/ready": float(self._rules.num_ready),
            **{f"stream/dropped_{reason}": float(count) for reason, count in sorted(dropped.items())},
            **staleness(rollouts.trajectories, version=self._rules.version),
        }
        settled = self._rules.settled
        if self._is_restored:
            self._start_groups()
        metrics["timing/wait/admission"], self._idle_s = self._idle_s, 0.0
        trajectories = rollouts.trajectories
        check_failures(trajectories, len(trajectories), limit=self._settings.max_failed_fraction)
        return Taken(rollouts=rollouts, settled=settled, metrics=metrics)

    def _count_idle(self) -> None:
        now = time.monotonic()
        if self._idle_since:
            self._idle_s += now - self._idle_since
        self._idle_since = 0.0 if self._rules.num_in_flight else now

    def _report(self) -> None:
        if self._on_progress is not None:
            size = self._settings.admission.batch_size
            self._on_progress(min(self._rules.num_ready, size), size)


def staleness(trajectories: Sequence[Trajectory], *, version: int) -> dict[str, float]:
    """Return by how many versions the learner at `version` is ahead of the weights that sampled its tokens: `staleness/mean`
    over tokens and `staleness/max`. Nothing where all trajectories failed."""
    ages: Counter[int] = Counter()
    for trajectory in trajectories:
        for turn in () if trajectory.failed else trajectory.turns:
            ends = [*(run.start for run in turn.weight_versions[1:]), len(turn.response_token_ids)]
            for run, end in zip(turn.weight_versions, ends):
                ages[version - run.version] += end - run.start
    if not ages:
        return {}
    mean = sum(age * count for age, count in ages.items()) / ages.total()
    return {"staleness/mean": mean, "staleness/max": float(max(ages))}
