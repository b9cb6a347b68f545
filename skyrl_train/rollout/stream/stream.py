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
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from skyrl_train.algorithms import differing_prompts, shape_rewards, with_greedy_rewards
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import needs_greedy_sample
from skyrl_train.data import Curriculum, SolveRates
from skyrl_train.errors import DataError, counted
from skyrl_train.rollout.admission import (
    FAILED,
    FILTERED,
    STALE,
    SURPLUS,
    Admission,
    Closed,
    ConsumedPrompts,
)
from skyrl_train.rollout.checked_engine import check_failures
from skyrl_train.rollout.generator import ProgressCallback, RolloutGenerator
from skyrl_train.rollout.journal import Journal
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Trajectory

Group = tuple[Prompt, tuple[Trajectory, ...]]
"""A prompt with all its samples."""


def rollouts_of(groups: Sequence[Group], n_samples_per_prompt: int) -> RolloutBatch:
    """Return the groups as a batch."""
    return RolloutBatch(
        prompts=tuple(prompt for prompt, _ in groups),
        trajectories=tuple(trajectory for _, group in groups for trajectory in group),
        n_samples_per_prompt=n_samples_per_prompt,
    )


def distinct(groups: Sequence[Group]) -> list[Group]:
    """Return groups of prompts of different uids: a prompt that comes again, in the epoch after, is called `UID#copy1`. Two
    groups under one uid would be one to whatever compares the samples of a prompt."""
    seen: Counter[str] = Counter()
    found: list[Group] = []
    for prompt, group in groups:
        number = seen[prompt.uid]
        seen[prompt.uid] += 1
        uid = f"{prompt.uid}#copy{number}" if number else prompt.uid
        found.append((replace(prompt, uid=uid), tuple(replace(one, prompt_uid=uid) for one in group)))
    return found


def mean_length(groups: Sequence[Group]) -> float:
    """Return how many tokens were sampled in a trajectory, in the mean; 0 where there are none that did not fail."""
    lengths = [
        sum(turn.num_response_tokens for turn in one.turns) for _, group in groups for one in group if not one.failed
    ]
    return math.fsum(lengths) / len(lengths) if lengths else 0.0


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One training batch of the stream."""

    rollouts: RolloutBatch
    everything: RolloutBatch
    """The groups of `rollouts`, then those that had finished and were discarded since the batch before."""
    settled: ConsumedPrompts
    """The prompts that are trained on, this batch included, or dropped."""
    metrics: Mapping[str, float]
    """`stream/...`, `engines/...`, `timing/group/...` and `timing/wait/...`."""


@dataclass
class _Clock:
    """When a group began, and finished."""

    began_s: float
    ended_s: float | None = None


class RolloutStream:
    """Makes training batches of `generator` while its caller is at something else. Used from one thread."""

    def __init__(
        self,
        generator: RolloutGenerator,
        prompts: Callable[[int], Sequence[Prompt]],
        trainer: TrainerConfig,
        journal: Journal,
        *,
        total_batches: int,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        max_failed_fraction: float,
        on_progress: ProgressCallback | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`prompts` gives the batch at a position of the data (`PromptSource.batch`), in whose place a `curriculum` chooses
        one. What is in the `journal` is taken from there; the stream closes it. `total_batches` are those of the run.
        `on_progress` is told how many groups are ready while `take` waits."""
        self._generator, self._prompts, self._journal = generator, prompts, journal
        self._trainer, self._filters = trainer, trainer.algorithm.filters
        self._total_batches, self._n_samples, self._sampling = total_batches, n_samples_per_prompt, sampling
        self._samples_greedily = needs_greedy_sample(trainer.algorithm)
        self._max_failed_fraction = max_failed_fraction
        self._on_progress = on_progress
        self._curriculum = curriculum
        self._rates: SolveRates = {}
        self._chosen: dict[int, list[Prompt]] = {}
        """By position, those with a group that is not settled."""
        self._admission: Admission | None = None
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._is_restored = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._results: dict[int, Group] = {}
        """Of groups that finished, discarded ones included, until a batch is made of them."""
        self._clocks: dict[int, _Clock] = {}
        self._idle_s, self._idle_since = 0.0, 0.0
        """Seconds without any group in flight, and when they began."""

    def begin(self, *, version: int, settled: ConsumedPrompts) -> None:
        """Have groups begin. The engine has the weights of `version`, which is also the number of finished steps."""
        self._generator.thread.run(self._begin(version, settled))

    def learn(self, rates: SolveRates) -> None:
        """Tell the curriculum's estimates, by which prompts are chosen from now on."""
        self._rates = rates

    def publish(self, version: int) -> None:
        """Tell that the engine was given the weights of `version`."""
        self._generator.thread.run(self._publish(version))

    def take(self) -> Taken:
        """Return the next batch, for the learner at the version that was published last.

        Raises SkyrlTrainError where more than `max_failed_fraction` of it failed, DataError where the filters leave nothing
        to train on, and whatever ended a group: DataError, ConfigError.
        """
        began = time.monotonic()
        taken = self._generator.thread.run(self._take())
        waited = {"timing/wait/rollouts": time.monotonic() - began}
        return replace(taken, metrics={**taken.metrics, **waited})

    def close(self) -> None:
        """End all groups in flight. Idempotent."""
        if not self._generator.thread.is_closed:
            self._generator.thread.run(self._end())
        self._journal.close()

    async def _begin(self, version: int, settled: ConsumedPrompts) -> None:
        self._admission = Admission(
            trainer=self._trainer, total_batches=self._total_batches, version=version, settled=settled
        )
        self._idle_since = time.monotonic()
        self._journal.resume(version, settled)
        if self._curriculum is not None:
            self._chosen = {
                position: self._curriculum.named(uids)
                for position, uids in self._journal.chosen.items()
                if position >= settled.watermark // self._trainer.train_batch_size
            }
            self._journal.chosen.clear()
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
                    # The journal may be ahead of the checkpoint: no group begins at a version that is not reached yet.
                    self._rules.restore(ordinal, min(began_at, version))
                    self._start(ordinal)
        self._start_groups()

    async def _take(self) -> Taken:
        while True:
            # Ahead of everything else: a batch without the group that failed would be another one than the rules say.
            if self._error is not None:
                raise self._error
            version = self._rules.version
            if (known := self._journal.batches.get(version)) is not None:
                self._rules.retake(known)
                # Those that were stale never finished, so that the journal has no samples of them.
                finished = [ordinal for ordinal, reason in known.dropped.items() if reason != STALE]
                self._results.update({ordinal: self._recorded(ordinal) for ordinal in (*known.trained, *finished)})
                return self._batch(known)
            if (closed := self._rules.close()) is not None:
                taken = self._batch(closed)
                # A batch that was trained on and is not in the journal would be another one after a kill.
                await self._journal.keep_batch(version, closed)
                return taken
            self._start_groups()  # in the places of those of a batch that was rejected
            self._check_discarded()
            if not self._tasks:
                raise DataError(
                    f"{self._journal.path}: the groups in it are none of this run at version {version}: no batch can be "
                    "made of them. Start over with trainer.resume_mode=none"
                )
            if self._on_progress is not None:
                size = self._trainer.train_batch_size
                self._on_progress(min(self._rules.num_ready, size), size)
            # On the thread of all groups, and nothing was awaited since the look
            # at what is ready: no group can have finished in between, unseen.
            self._changed.clear()
            await self._changed.wait()

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        # Ahead of the cancellations: a group that finishes all the same finds out by it that it no longer counts.
        self._tasks.clear()
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
            # Ahead of the group's own lines. What a resumed run knows of its age is the version that stands here.
            self._journal.begin(ordinal, self._rules.version)
            self._start(ordinal)
        now = time.monotonic()
        if self._idle_since:
            self._idle_s += now - self._idle_since
        self._idle_since = 0.0 if self._rules.num_in_flight else now

    def _start(self, ordinal: int) -> None:
        self._clocks[ordinal] = _Clock(time.monotonic())
        self._tasks[ordinal] = asyncio.ensure_future(self._run(ordinal))

    def _prompt(self, ordinal: int) -> Prompt:
        position, index = divmod(ordinal, self._trainer.train_batch_size)
        return (self._prompts(position) if self._curriculum is None else self._choose(self._curriculum, position))[
            index
        ]

    def _choose(self, curriculum: Curriculum, position: int) -> Sequence[Prompt]:
        """Return the prompts that the curriculum chose for a position: once and for all, as the journal has them."""
        if position not in self._chosen:
            # Prompts of the positions that are not consumed yet: their
            # samples are on their way, and the estimates do not have them.
            busy = {prompt.uid for chosen in self._chosen.values() for prompt in chosen}
            prompts = curriculum.batch(self._rates, position, self._rules.version + 1, busy=busy)
            self._journal.choose(position, tuple(prompt.uid for prompt in prompts))
            self._chosen[position] = prompts
        return self._chosen[position]

    def _recorded(self, ordinal: int) -> Group:
        """Return a group of a batch that a run before has closed, which was in the journal before the batch was."""
        trajectories = self._journal.group(ordinal)
        if trajectories is None:
            raise DataError(
                f"{self._journal.path}: batch {self._rules.version} has group {ordinal}, of which there is no line. "
                "Start over with trainer.resume_mode=none"
            )
        return self._prompt(ordinal), trajectories

    async def _run(self, ordinal: int) -> None:
        try:
            prompt = self._prompt(ordinal)
            trajectories = self._journal.group(ordinal)
            # What failed in a run before is tried again, since what broke it may be mended.
            if trajectories is None or any(trajectory.failed for trajectory in trajectories):
                trajectories = await self._sample(ordinal, prompt)
                await self._journal.keep_group(ordinal, prompt, trajectories)
            self._finish(ordinal, (prompt, trajectories))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # it belongs to whoever takes the next batch
            self._error = self._error or error
        finally:
            self._tasks.pop(ordinal, None)
            self._changed.set()

    async def _sample(self, ordinal: int, prompt: Prompt) -> tuple[Trajectory, ...]:
        """Return the samples of a group, with the reward of the greedy one where there is one."""
        samples = await self._generator.run_group(
            prompt,
            ordinal=ordinal,
            n_samples_per_prompt=self._n_samples,
            sampling=self._sampling,
            journal=self._journal,
            with_greedy=self._samples_greedily,
        )
        if not self._samples_greedily:
            return samples
        *others, greedy = samples
        # Shaped by itself, as the samples will be: the difference of a shaped and a plain reward says nothing.
        baseline = shape_rewards(rollouts_of([(prompt, (greedy,))], 1), self._filters)
        group = rollouts_of([(prompt, tuple(others))], self._n_samples)
        return with_greedy_rewards(group, baseline).trajectories

    def _finish(self, ordinal: int, group: Group) -> None:
        """A group is ready for a batch, or discarded, and others begin in its place."""
        if ordinal not in self._tasks:
            return  # dropped, or closed: asyncio.wait_for loses a cancellation where what it waits for is done by then
        self._results[ordinal] = group
        self._clocks[ordinal].ended_s = time.monotonic()
        mode, reason = self._filters.dynamic_sampling, self._idle_reason(group)
        # Discarded at once, so that another begins in its place; with `replace` the batch needs it for a copy of another.
        if mode == "filter" and reason:
            self._rules.discard(ordinal, reason)
        else:
            self._rules.finish(ordinal, idle_reason=reason)
        self._start_groups()

    def _idle_reason(self, group: Group) -> str:
        """Return why dynamic sampling does not train on a group; empty where it does."""
        if self._filters.dynamic_sampling == "none":
            return ""
        shaped = shape_rewards(rollouts_of([group], self._n_samples), self._filters)
        if differing_prompts(shaped)[0]:
            return ""
        return FAILED if all(trajectory.failed for trajectory in shaped.trajectories) else FILTERED

    def _check_discarded(self) -> None:
        """Raise SkyrlTrainError where too much of what was discarded since the batch before has failed, DataError where so
        much was discarded that no batch can be made."""
        rules = self._rules
        gone = [one for ordinal in rules.dropped for one in self._results[ordinal][1]]
        batch_size = self._trainer.train_batch_size
        check_failures(gone, max(len(gone), batch_size * self._n_samples), limit=self._max_failed_fraction)
        if not rules.is_exhausted:
            return
        advice = (
            "The task is too easy or too hard for the model, or generator.n_samples_per_prompt is too small; to go on "
            "without, set trainer.algorithm.filters.dynamic_sampling=none"
        )
        if self._filters.dynamic_sampling == "replace":
            share = self._filters.replace_min_share
            raise DataError(
                f"dynamic sampling: {len(rules.dropped) // batch_size} times {counted(batch_size, 'prompt')} sampled for a "
                f"batch, and each time fewer than trainer.algorithm.filters.replace_min_share={share:g} of them have "
                f"trajectories that differ in reward. {advice}"
            )
        if not self._tasks:
            raise DataError(
                f"dynamic sampling: of {len(rules.dropped) + rules.num_ready} prompts that were sampled for a batch, "
                f"{rules.num_ready} have trajectories that differ in reward, where {batch_size} are needed. {advice}"
            )

    def _batch(self, closed: Closed) -> Taken:
        """Raises SkyrlTrainError as `take` does."""
        # Those that were dropped in flight would go on to take the engine's time.
        for ordinal in closed.dropped:
            if (task := self._tasks.pop(ordinal, None)) is not None:
                task.cancel()
        trained = {ordinal: self._results.pop(ordinal) for ordinal in closed.trained}
        gone = {ordinal: self._results.pop(ordinal) for ordinal in closed.dropped if ordinal in self._results}
        everything = rollouts_of([*trained.values(), *gone.values()], self._n_samples)
        metrics = {
            "stream/in_flight": float(self._rules.num_in_flight),
            "stream/ready": float(self._rules.num_ready),
            **self._dropped_metrics(closed, list(trained.values()), gone),
            **self._generator.engine_metrics(),
            **self._journal.take_counts(),
        }
        settled = self._rules.settled
        # What was chosen for positions that are consumed is asked for no more.
        first = settled.watermark // self._trainer.train_batch_size
        self._chosen = {position: chosen for position, chosen in self._chosen.items() if position >= first}
        # Not between batches that a run before has closed: the groups that
        # it had begun come first, or they would begin anew at this version.
        if self._is_restored:
            self._start_groups()
        metrics["timing/wait/admission"], self._idle_s = self._idle_s, 0.0
        # What was discarded counts, too: else a run could go on with filters that drop all that fails.
        trajectories = everything.trajectories
        check_failures(trajectories, len(trajectories), limit=self._max_failed_fraction)
        # By the batch's ordinals, not by `trained`: with `replace` a group may be there several times.
        rollouts = rollouts_of(distinct([trained[ordinal] for ordinal in closed.ordinals]), self._n_samples)
        return Taken(rollouts=rollouts, everything=everything, settled=settled, metrics=metrics)

    def _dropped_metrics(self, closed: Closed, taken: Sequence[Group], gone: Mapping[int, Group]) -> dict[str, float]:
        """Return what was dropped, and whether what was dropped in favour of others is longer than what was taken."""
        now, counts = time.monotonic(), Counter(closed.dropped.values())
        clocks = {ordinal: self._clocks.pop(ordinal, None) for ordinal in (*closed.trained, *closed.dropped)}
        metrics = {f"stream/dropped_{reason}": float(count) for reason, count in sorted(counts.items())}
        if num_copies := len(closed.ordinals) - len(closed.trained):
            metrics["stream/copies"] = float(num_copies)
        too_many = [ordinal for ordinal, reason in closed.dropped.items() if reason in (STALE, SURPLUS)]
        for name, ordinals in (("taken", closed.trained), ("dropped", too_many)) if too_many else ():
            found = [clock for ordinal in ordinals if (clock := clocks[ordinal]) is not None]
            if found:  # none of a batch that the journal has
                seconds = math.fsum((clock.ended_s or now) - clock.began_s for clock in found)
                metrics[f"timing/group/{name}"] = seconds / len(found)
        if surplus := mean_length([gone[ordinal] for ordinal in too_many if ordinal in gone]):
            name = "stream/response_length"
            metrics |= {f"{name}/taken": mean_length(taken), f"{name}/surplus": surplus}
        return metrics
