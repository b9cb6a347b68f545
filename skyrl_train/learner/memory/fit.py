"""Peak memory of a micro-batch from a few measured or predicted ones, and the token budget that follows. numpy only.

    bytes = base + a * positions + b * positions * longest          a, b, base >= 0

`positions` are what a forward computes: rows times the longest row where rows are padded, so that the last term is
`rows * longest^2`, attention's scores; the sum of lengths where they are packed, where it bounds the sum of squared
lengths from above. A peak is the largest of several sums (end of the forward, middle of the backward, ...), each of this
form; their maximum is convex, so the fit is lifted until no probe lies above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import BatchError, MemoryLimitError

Floats = NDArray[np.float64]

_MAX_POSITIONS = 1 << 40
"""Budget where positions cost nothing: more than any batch has."""


@dataclass(frozen=True, kw_only=True)
class MemoryProbe:
    """One micro-batch and what it took."""

    rows: int
    longest: int
    """Tokens of the longest row."""
    positions: int
    """Token positions that the forward computed: `rows * longest` padded, the sum of lengths packed."""
    training: bool
    """A forward and backward; False: a forward alone."""
    peak_bytes: int
    """The most that was allocated at once, what lies there all the time (weights, optimizer state) included."""


IN_LAYER, IN_HEAD, IN_BACKWARD, IN_EMBEDDING = (
    "in the layers",
    "in the head",
    "in the layers' backward pass",
    "in the embedding's backward pass",
)
"""Sections of a pass, in order; one that only scores has the first two."""
_AT_WORK = {IN_HEAD: "head and loss", IN_BACKWARD: "backward of a layer"}
"""What a section holds beside the activations that are kept for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class PassPeaks:
    """What one pass adds to what lies there between passes, in bytes, section by section."""

    sections: Mapping[str, int]
    """At the peak of each section."""
    kept: int
    """At the end of the layers' forward: activations for the backward pass, inputs, the last hidden state."""

    @property
    def moment(self) -> str:
        """The section that holds most."""
        return max(self.sections, key=lambda name: self.sections[name])

    @property
    def peak_bytes(self) -> int:
        return self.sections[self.moment]

    @property
    def kinds(self) -> dict[str, int]:
        """The peak, in bytes by kind."""
        if self.moment not in _AT_WORK:
            return {"activations": self.peak_bytes}
        activations = min(self.kept, self.peak_bytes)
        return {"activations": activations, _AT_WORK[self.moment]: self.peak_bytes - activations}

    def between(self, other: PassPeaks, share: float) -> PassPeaks:
        """Return what lies on the line from here to `other`: 0 is here, 1 is there, more is beyond."""

        def along(here: int, there: int) -> int:
            return round(here + share * (there - here))

        return PassPeaks(
            sections={name: along(here, other.sections[name]) for name, here in self.sections.items()},
            kept=along(self.kept, other.kept),
        )


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What a micro-batch takes at its peak, as a function of its size."""

    base_bytes: float
    """Weights, gradients, optimizer state, and whatever else does not depend on the micro-batch."""
    bytes_per_position: float
    bytes_per_position_and_length: float
    """Factor of `positions * longest`: what grows with the square of a row's length, as scores of attention do."""
    slack_bytes: float
    """The most by which a probe lay above the fitted plane; part of every prediction."""
    margin: float
    """Added to what grows with the micro-batch, e.g. 0.05 for a twentieth more."""
    longest: int
    """Tokens of the longest row that was probed; nothing is said of longer ones."""
    training: bool
    largest_relative_error: float
    """Of the fitted plane over the probes, without slack and margin: the largest of `|predicted - peak| / peak`."""
    r_squared: float
    """Share of the variance of the probes' peaks that the plane explains; 1 where they are all on it."""

    def peak_bytes(self, rows: int, longest: int, positions: int) -> int:
        """Return the peak of one micro-batch, never below the fit. Raises BatchError for sizes that contradict each other,
        or for rows longer than any probe."""
        _check_sizes(rows, longest, positions)
        self._check_length(longest)
        growing = self._growing(np.float64(positions), np.float64(longest))
        return int(np.ceil(self.base_bytes + self.slack_bytes + growing))

    def cell_share(self, probe: MemoryProbe) -> float:
        """Return what each cell of `[rows, longest]` beyond the positions of `probe` took, in positions; at most 1, which
        is what it takes where cells are positions, and at least 0."""
        cells = probe.rows * probe.longest - probe.positions
        each = self.bytes_per_position + self.bytes_per_position_and_length * probe.longest
        above = probe.peak_bytes - self.base_bytes - each * probe.positions
        if cells < 1 or above <= 0:
            return 0.0
        return min(1.0, above / (cells * self.bytes_per_position)) if self.bytes_per_position else 1.0

    def token_budget(self, limit_bytes: int, longest: int, *, padded: bool = True) -> int:
        """Return the largest C so that every micro-batch with at most C computed positions fits `limit_bytes`, whatever the
        lengths of its rows up to `longest`. A single row goes alone, even over C, and fits too.

        Padded, short rows may be many where long ones may not, because of the square: C is the least over all lengths l
        of `l * (rows of length l that fit + 1) - 1`, the last C that does not admit one row too many. Packed, positions
        may be of any lengths, so that C is what fits of rows of `longest`.

        Raises MemoryLimitError where one row of `longest` does not fit; BatchError for rows longer than any probe.
        """
        self._check_length(longest)
        one_row = self.peak_bytes(1, longest, longest)
        if one_row > limit_bytes:
            raise MemoryLimitError(
                f"one row of {longest} tokens takes {one_row} bytes at its peak, of which "
                f"{round(self.base_bytes + self.slack_bytes)} do not depend on it; {limit_bytes} bytes are there"
            )
        if not padded:
            return int(self._most(limit_bytes, np.ones(1), np.full(1, float(longest)))[0])
        lengths = np.arange(1, longest + 1, dtype=np.float64)
        rows = self._most(limit_bytes, lengths, lengths)
        return int((lengths * (rows + 1)).min()) - 1

    def _growing(self, positions: Floats | np.float64, longest: Floats | np.float64) -> Floats | np.float64:
        per_position = self.bytes_per_position + self.bytes_per_position_and_length * longest
        return positions * ((1 + self.margin) * per_position)

    def _most(self, limit_bytes: int, size: Floats, longest: Floats) -> Floats:
        """For each length, how many micro-batches' worth of `size` positions fit: exactly those that `peak_bytes` allows."""
        fixed, each = self.base_bytes + self.slack_bytes, self._growing(size, longest)
        count: Floats = np.full_like(size, _MAX_POSITIONS)
        with np.errstate(over="ignore"):
            np.divide(limit_bytes - fixed, each, out=count, where=each > 0)
        # One more than the quotient, so that counting down alone finds the border, whichever way the division rounded.
        count = np.floor(np.minimum(count, _MAX_POSITIONS / size)) + 1
        # The same arithmetic as `peak_bytes`, operation by operation: another order would round to another border.
        while (over := fixed + self._growing(count * size, longest) > limit_bytes).any():
            count -= over
        return count

    def _check_length(self, longest: int) -> None:
        if not 1 <= longest <= self.longest:
            raise BatchError(f"rows of {longest} tokens: the model was fitted on rows of 1 to {self.longest} tokens")


def fit_memory_model(probes: Sequence[MemoryProbe], *, margin: float = 0.05) -> MemoryModel:
    """Fit the plane by non-negative least squares of relative errors.

    The square term is fitted where the probes can tell it from the others, which takes three, of two lengths. Where
    they can not, what it would have been is part of the cost of a position, which holds for rows up to the longest
    probed. Raises BatchError for probes that cannot be fitted and for a margin that is negative or not a number.
    """
    _check_probes(probes)
    if not 0.0 <= margin < float("inf"):
        raise BatchError(f"the margin is a share of at least 0 that is added; got {margin}")
    positions = np.array([probe.positions for probe in probes], dtype=np.float64)
    lengths = np.array([probe.longest for probe in probes], dtype=np.float64)
    peaks = np.array([probe.peak_bytes for probe in probes], dtype=np.float64)
    columns = np.stack([np.ones_like(positions), positions, positions * lengths], axis=1)
    # Errors are relative: a large probe would otherwise decide alone, and small micro-batches be foretold by chance.
    weighted = columns / peaks[:, None]
    if _rank(weighted) < 3:
        columns, weighted = columns[:, :2], weighted[:, :2]
    solution = _non_negative_least_squares(weighted)
    predicted = columns @ solution
    residuals = peaks - predicted
    base, per_position, *square = solution.tolist()
    variance = float(((peaks - peaks.mean()) ** 2).sum())
    return MemoryModel(
        base_bytes=base,
        bytes_per_position=per_position,
        bytes_per_position_and_length=square[0] if square else 0.0,
        slack_bytes=max(0.0, float(residuals.max())),
        margin=margin,
        longest=int(lengths.max()),
        training=probes[0].training,
        largest_relative_error=float((np.abs(residuals) / peaks).max()),
        r_squared=1.0 - float((residuals**2).sum()) / variance if variance else 1.0,
    )


def _non_negative_least_squares(weighted: Floats) -> Floats:
    """Return `x >= 0` with the least `|weighted @ x - 1|`, by trying every set of columns: there are at most three."""
    width = weighted.shape[1]
    ones = np.ones(len(weighted))
    best, best_error = np.zeros(width), float("inf")
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            part = weighted[:, chosen]
            # Columns differ by a factor of a million and more; unscaled, the small ones would be lost as rank-deficient.
            scale = np.linalg.norm(part, axis=0)
            found = np.linalg.lstsq(part / scale, ones, rcond=None)[0] / scale
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(width), error
                best[list(chosen)] = found
    return best


def _rank(weighted: Floats) -> int:
    return int(np.linalg.matrix_rank(weighted / np.linalg.norm(weighted, axis=0), tol=1e-6))


def _check_probes(probes: Sequence[MemoryProbe]) -> None:
    for probe in probes:
        _check_sizes(probe.rows, probe.longest, probe.positions)
        if probe.peak_bytes < 1:
            raise BatchError(f"a probe's peak must be positive; got {probe}")
    if len({probe.training for probe in probes}) == 2:
        raise BatchError("probes of forwards with and without a backward are fitted apart; got both")
    if len({probe.positions for probe in probes}) < 2:
        raise BatchError(
            f"at least two probes with different numbers of positions are needed; got {len(probes)} probes with "
            f"{sorted({probe.positions for probe in probes})} positions"
        )


def _check_sizes(rows: int, longest: int, positions: int) -> None:
    if rows < 1 or longest < 1 or not longest <= positions <= rows * longest:
        raise BatchError(
            f"{rows} rows of at most {longest} tokens compute {longest} to {rows * longest} positions; got {positions}"
        )


def near_the_limit(probes: Sequence[MemoryProbe]) -> list[MemoryProbe]:
    """Return probes of at least a quarter of the largest: peaks bend where they are small, and only large ones matter."""
    largest = max(probe.positions for probe in probes)
    near = [probe for probe in probes if probe.positions * 4 >= largest]
    return near if len({probe.positions for probe in near}) > 1 else list(probes)


def _alone(count: int) -> int:
    """What one rank agrees on with itself."""
    return count


def probes_at_the_limit(
    probe: Callable[[int, int], MemoryProbe | None],
    lengths: Sequence[int],
    limit_bytes: int,
    *,
    max_rows: int,
    first_rows: int = 1,
    held_bytes: Callable[[], int] = int,
    agree: Callable[[int], int] = _alone,
) -> list[MemoryProbe]:
    """Probe `first_rows` rows of the longest length, or one where so many do not fit, as in `doubled`; then as many
    positions of each other length, and where the longest row fits once alone, one row of each.

    Args:
        probe: Of rows and their length: measured, traced or compiled; None where memory ran out on any rank.
        max_rows: Of the longest length; shorter rows have no more positions.
    Raises BatchError for lengths that are none.
    """
    if not lengths or min(lengths) < 1:
        raise BatchError(f"lengths to probe are positive numbers of tokens; got {list(lengths)}")
    longest, *others = sorted(set(lengths), reverse=True)

    def grow(first: int) -> list[MemoryProbe]:
        return doubled(
            lambda rows: probe(rows, longest),
            first,
            max_rows,
            limit_bytes=limit_bytes,
            held_bytes=held_bytes,
            agree=agree,
        )

    found = grow(first_rows)
    if not found and first_rows > 1:  # a prediction led to the first size, and was too high
        found = grow(1)
    if found:
        sizes = [(found[-1].positions // other, other) for other in others]
        # One size of the longest row gives no slope in positions: shorter single rows do.
        sizes += [(1, other) for other in others] if len(found) == 1 else []
        found += [each for rows, other in sizes if (each := probe(rows, other)) is not None]
    return found


def doubled(
    probe: Callable[[int], MemoryProbe | None],
    first: int,
    most: int,
    *,
    limit_bytes: int,
    held_bytes: Callable[[], int] = int,
    agree: Callable[[int], int] = _alone,
) -> list[MemoryProbe]:
    """Probe the first size, and each time twice as much up to the most, until the next would not fit on some rank.

    Args:
        held_bytes: Gives what lies there between passes.
        agree: Returns the largest number of all ranks.
    """
    found: list[MemoryProbe] = []
    size = first
    while size <= most and (one := probe(size)) is not None:
        found.append(one)
        # Twice the rows take at most twice what these did beside what lies there anyway.
        growing = max(0, one.peak_bytes - held_bytes())
        if agree(int(one.peak_bytes + growing > limit_bytes)):
            break
        size *= 2
    return found
