"""Which prompt group begins when, and which groups make a batch, where generation goes on while the learner updates.

`Admission` is told what happened and says what may happen next. It has no threads and no clock, so that a simulation tries
it with a million events. Its numbers:

    version   updates that the learner has made and the engine was given; batch number `version` is the next to close
    ordinal   index of a prompt in the order of the data, over all epochs; what its seeds are derived from
    pending   a group that began and is in no batch yet: in flight, or finished

Two rules hold together that no token is trained on more than `max_staleness` versions after it was sampled:

    admission  a group begins while `started - discarded < (version + 1 + max_staleness) * train_batch_size`
    age        a group that began at version `f` is in batch `f + max_staleness` at the latest

With `oversample` more groups are pending than the batches to come have room for: of `started - discarded`, the part that is
not trained on may be so many times as large. What is too old for all batches that have room is discarded as surplus, so
that this stays a bound however long the run is.

For the second it is not enough that each group which is due has finished when its batch closes. With batches of one group
and `max_staleness=2`, groups 0 and 1 that both began at version 0 are both due in batch 2, which has room for one. So a
batch closes only where, for each later batch, the groups that are then due fit into the batches until then (`_is_on_time`);
the admission rule is what makes that possible at all, where nothing is oversampled. Of the groups that have finished the
oldest are taken; with `take_groups=in_order` the oldest of all, which are waited for.

With `dynamic_sampling=replace` groups may finish that teach nothing. They count towards a batch all the same; when it
closes, copies of the others stand in their places. Where too few of them teach, all groups of it are discarded, and the
batch is made of those that are left and others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config import TrainerConfig
from skyrl_train.system.files import whole_number

DECLARED_METRICS = """
stream/in_flight | count | Groups unfinished when the batch closed. | with `trainer.max_staleness`
stream/ready | count | Groups finished and left. | with `trainer.max_staleness`
stream/dropped_<reason> | count | Groups dropped since the last batch: `filtered`, `failed`, `rejected`, `stale`,
    `surplus` (`docs/async.md`). | where any
stream/copies | count | Groups that are copies of others. | with `dynamic_sampling=replace`
stream/response_length/{taken,surplus} | tokens | Mean length of the batch's trajectories, of surplus ones. | where
    dropped
timing/group/{taken,dropped} | s | Mean time of a group, and of dropped ones. | where dropped
timing/wait/rollouts | s | The learner's wait within `timing/generate`. | with `trainer.max_staleness` | SkyRL
    `timing/wait_for_generation_buffer`
timing/wait/admission | s | Time without groups in flight: all that may begin had finished. | with
    `trainer.max_staleness`
"""

STALE = "stale"
"""Reason of a group that was dropped in flight: it would be too old for the batches that have room."""
SURPLUS = "surplus"
"""Reason of a group that finished and was dropped for that."""
FILTERED = "filtered"
"""Reason of a group whose samples have equal rewards, where dynamic sampling leaves such groups out."""
FAILED = "failed"
"""Reason of a group that dynamic sampling leaves out because all of its samples failed."""
REJECTED = "rejected"
"""Reason of a group whose rewards differ, where those of too few others of its batch did."""


@dataclass(frozen=True, kw_only=True)
class ConsumedPrompts:
    """The prompts that are trained on, or dropped for good: each prompt is consumed once."""

    watermark: int = 0
    """All ordinals below it are settled."""
    beyond: tuple[int, ...] = ()
    """Those above it that are, ascending."""

    def holds(self, ordinal: int) -> bool:
        """Return whether the prompt need not come again."""
        return ordinal < self.watermark or ordinal in self.beyond

    def plus(self, *ordinals: int) -> ConsumedPrompts:
        """Return the set with these ordinals. Raises ValueError for one that is in it already."""
        beyond = set(self.beyond)
        for ordinal in ordinals:
            if ordinal < self.watermark or ordinal in beyond:
                raise ValueError(f"prompt {ordinal} of the order is settled already")
            beyond.add(ordinal)
        watermark = self.watermark
        while watermark in beyond:
            beyond.remove(watermark)
            watermark += 1
        return ConsumedPrompts(watermark=watermark, beyond=tuple(sorted(beyond)))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads; a checkpoint calls the watermark its frontier."""
        return {"frontier": self.watermark, "beyond": self.beyond}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> ConsumedPrompts:
        """Return the set that was written. Raises ValueError, KeyError."""
        watermark, beyond = whole_number(content, "frontier"), content["beyond"]
        numbers = isinstance(beyond, list) and all(type(ordinal) is int for ordinal in beyond)
        if not numbers or beyond != sorted(set(beyond)) or (beyond and beyond[0] <= watermark):
            raise ValueError("beyond must be a list of ascending numbers above frontier")
        if unknown := sorted(content.keys() - {"frontier", "beyond"}):
            raise ValueError(f"{unknown[0]} is unknown here")
        return ConsumedPrompts(watermark=watermark, beyond=tuple(beyond))


@dataclass(frozen=True, kw_only=True)
class Closed:
    """A batch, and what it leaves behind."""

    ordinals: tuple[int, ...]
    """`trainer.train_batch_size` groups, ascending; with `dynamic_sampling=replace` one may be there again, in the place of
    another."""
    dropped: Mapping[int, str]
    """Groups that were given up since the batch before, or have a copy of another in their place, with the reason."""

    @property
    def trained(self) -> tuple[int, ...]:
        """The groups of the batch, each once."""
        return tuple(dict.fromkeys(self.ordinals))


@dataclass
class _Pending:
    """A group that is in no batch yet."""

    began_at: int
    """Version of the weights that engines had when it began."""
    is_finished: bool = False
    idle_reason: str = ""
    """Why a group that finished teaches nothing; empty where it does."""


@dataclass
class Admission:
    """The rules and what they know; see the head of this file."""

    trainer: TrainerConfig
    total_batches: int
    """Of the run, those that are closed included: no group begins that none of them has room for."""
    version: int
    """Also the number of batches that are closed when it begins."""
    settled: ConsumedPrompts
    """Where to go on in the data."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Groups that were dropped, by reason."""

    def __post_init__(self) -> None:
        self._num_closed = self.version
        self._next = self.settled.watermark
        self._pending: dict[int, _Pending] = {}
        self.dropped: dict[int, str] = {}
        """Groups that were discarded since the batch before, with the reason."""

    @property
    def num_in_flight(self) -> int:
        """Groups that began and have not finished."""
        return sum(not group.is_finished for group in self._pending.values())

    @property
    def num_ready(self) -> int:
        """Groups that finished and are in no batch yet."""
        return len(self._pending) - self.num_in_flight

    @property
    def is_exhausted(self) -> bool:
        """Whether dynamic sampling has discarded so many groups since the batch before that no other begins for the next
        one: with none in flight, it cannot be made."""
        filters = self.trainer.algorithm.filters
        limit = filters.dynamic_sampling_max_batches * self.trainer.train_batch_size
        return filters.dynamic_sampling != "none" and len(self.dropped) >= limit

    def start(self) -> int | None:
        """Return the ordinal of the group that begins now; None where none may."""
        trainer = self.trainer
        num_batches = min(self.version + 1 + trainer.max_staleness, self.total_batches) - self._num_closed
        # What is pending is `started - discarded` less what was trained on.
        most = round(num_batches * trainer.train_batch_size * trainer.oversample)
        if len(self._pending) >= most or self.is_exhausted:
            return None
        while self.settled.holds(self._next) or self._next in self._pending:
            self._next += 1
        ordinal = self._next
        self._next += 1
        self._pending[ordinal] = _Pending(began_at=self.version)
        return ordinal

    def finish(self, ordinal: int, *, idle_reason: str = "") -> None:
        """A group has finished. `idle_reason`: why it teaches nothing; empty where it does."""
        group = self._pending[ordinal]
        group.is_finished, group.idle_reason = True, idle_reason

    def discard(self, ordinal: int, reason: str) -> None:
        """A group is given up for good, and another may begin in its place."""
        del self._pending[ordinal]
        self.settled = self.settled.plus(ordinal)
        self.discarded[reason] += 1
        self.dropped[ordinal] = reason

    def retake(self, closed: Closed) -> None:
        """Close the next batch as a run before has closed it, none of whose groups began in this one."""
        self.settled = self.settled.plus(*closed.trained, *closed.dropped)
        self.discarded.update(closed.dropped.values())
        self._num_closed += 1

    def restore(self, ordinal: int, began_at: int) -> None:
        """A group begins that began at that version in a run before."""
        self._pending[ordinal] = _Pending(began_at=began_at)

    def publish(self, version: int) -> None:
        """Engines have the weights of `version`. Raises ValueError unless it is the next one."""
        if version != self.version + 1:
            raise ValueError(f"version {version} was published after version {self.version}")
        self.version = version

    def close(self) -> Closed | None:
        """Return the next batch, whose groups are settled by that; None where it cannot be closed yet. Those of a batch of
        which too few teach are discarded, so that others may begin.

        Raises ValueError where the batch of this version is closed already.
        """
        if self._num_closed != self.version:
            raise ValueError(f"batch {self.version} is closed, and version {self.version + 1} was not published yet")
        chosen, ordinals = self._choose(), []
        while len(chosen) == self.trainer.train_batch_size and not (ordinals := self._with_copies(chosen)):
            for ordinal in chosen:
                self.discard(ordinal, self._pending[ordinal].idle_reason or REJECTED)
            chosen = [] if self.is_exhausted else self._choose()
        if not ordinals:
            return None
        left = {ordinal: group for ordinal, group in self._pending.items() if ordinal not in chosen}
        if self.trainer.take_groups == "in_order" or self.trainer.stale_groups == "drop":
            for ordinal, group in left.items():
                if self._due(group) <= self.version:
                    self.discard(ordinal, SURPLUS if group.is_finished else STALE)
        elif not self._is_on_time(left):
            if self.num_in_flight or self.trainer.algorithm.filters.dynamic_sampling == "none":
                return None
            # Only where a run before discarded groups that failed, or were of a rejected batch, and are pending once more,
            # beside those that began in their places: the youngest go until the others are on time.
            while left and not self._is_on_time(left):
                self.discard(left.popitem()[0], SURPLUS)
        for ordinal in chosen:
            if ordinal not in ordinals:
                self.discard(ordinal, self._pending[ordinal].idle_reason)
        closed = Closed(ordinals=tuple(ordinals), dropped=self.dropped)
        for ordinal in closed.trained:
            del self._pending[ordinal]
        self.settled = self.settled.plus(*closed.trained)
        self._num_closed += 1
        self.dropped = {}
        return closed

    def _choose(self) -> list[int]:
        """Return the groups of the next batch, or fewer where it cannot be closed."""
        # Groups are held in the order in which they began, the oldest first.
        candidates = list(self._pending.items())
        if self.trainer.take_groups == "in_order":
            candidates = candidates[: self.trainer.train_batch_size]
        return [ordinal for ordinal, group in candidates if group.is_finished][: self.trainer.train_batch_size]

    def _with_copies(self, chosen: list[int]) -> list[int]:
        """Return the groups to train on, ascending but for copies of those that teach, in turn, in the places of the others;
        none where too few teach."""
        chosen, filters = sorted(chosen), self.trainer.algorithm.filters
        if filters.dynamic_sampling != "replace":
            return chosen
        sources = [ordinal for ordinal in chosen if not self._pending[ordinal].idle_reason]
        if not sources or len(sources) < filters.replace_min_share * len(chosen):
            return []
        copies = itertools.cycle(sources)
        return [next(copies) if self._pending[ordinal].idle_reason else ordinal for ordinal in chosen]

    def _due(self, group: _Pending) -> int:
        """Return the number of the last batch that may hold the group."""
        return group.began_at + self.trainer.max_staleness

    def _is_on_time(self, left: Mapping[int, _Pending]) -> bool:
        """Whether the batches after this one can hold every group that is `left` before it is too old."""
        due = Counter(self._due(group) for group in left.values())
        room, num_due = 0, 0
        for number in range(self.version, max(due, default=0) + 1):
            num_due += due[number]
            if num_due > room:
                return False
            room += self.trainer.train_batch_size
        return True
