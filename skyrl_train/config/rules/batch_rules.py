"""Rules between batch sizes as exact arithmetic: what a run's sizes are, and which rules they break.

Hard rules always hold: mini-batches divide the training batch, there is a sequence for every rank, the data fill one
batch. Strict rules keep every rank and every micro-batch equally full. Each rule is decided by itself, whatever the
others say: where one is broken that another builds on, shares are rounded up, as padding with dummy rows would.

Repairs are changes of sizes after which every rule holds, the least first. A change of one size is offered if one makes
everything valid. Where none does, the fewest sizes that have to change together are searched for: once the training batch
and the micro-batch are chosen, the models no longer depend on each other, so that the best mini-batch and ranks of each
are found apart and the whole search stays exact and short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, isqrt, lcm, log
from typing import Literal

Kind = Literal["data", "groups", "ranks", "divides", "even_ranks", "even_micro_batches"]


def data_parallel_size(num_ranks: int, ranks_per_share: int) -> int:
    """Shares into which rows are dealt: ranks that compute micro-batches together have the same."""
    return max(1, num_ranks // ranks_per_share)


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model and what of a batch it works on."""

    name: str
    """`policy`, `critic` or `reference`."""
    num_ranks: int
    data_parallel_size: int
    """Shares of its rows: one for all ranks that compute micro-batches together."""
    mini_batch_size: int | None
    """Prompts in one optimizer step; None for the reference, which scores whole batches."""

    @property
    def workers_field(self) -> str:
        """The name in `Sizes` of its number of ranks."""
        return "ref_num_workers" if self.name == "reference" else f"{self.name}_num_workers"

    @property
    def prompts_field(self) -> str:
        """The name in `Sizes` of the prompts of one pass."""
        return "train_batch_size" if self.mini_batch_size is None else f"{self.name}_mini_batch_size"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that the rules read. `critic_*` and `reference_*` are None where there is no such model."""

    train_batch_size: int
    policy_mini_batch_size: int
    critic_mini_batch_size: int | None
    n_samples_per_prompt: int
    policy_num_workers: int
    critic_num_workers: int | None
    ref_num_workers: int | None
    ranks_per_share: int
    """Ranks that compute micro-batches together, and so have the same rows."""
    micro_train_batch_size_per_gpu: int
    num_train_prompts: int | None
    """None where the data were not looked at."""
    equal_ranks: bool
    """Strict: ranks must have equal numbers of sequences."""
    equal_micro_batches: bool
    """Strict, and micro-batches are a fixed number of rows."""

    def roles(self) -> list[Role]:
        """The models of the run: the policy, then the critic and the reference where there are such."""
        found = [
            ("policy", self.policy_num_workers, self.policy_mini_batch_size),
            ("critic", self.critic_num_workers, self.critic_mini_batch_size),
            ("reference", self.ref_num_workers, None),
        ]
        return [
            Role(
                name=name,
                num_ranks=ranks,
                data_parallel_size=data_parallel_size(ranks, self.ranks_per_share),
                mini_batch_size=size,
            )
            for name, ranks, size in found
            if ranks is not None
        ]

    def prompts_per_pass(self, role: Role) -> int:
        """Prompts of one optimizer step, or of the whole batch that a reference scores."""
        return self.train_batch_size if role.mini_batch_size is None else role.mini_batch_size

    def rows_per_rank(self, role: Role) -> int:
        """Sequences of one pass on the fullest rank."""
        return -(-self.prompts_per_pass(role) * self.n_samples_per_prompt // role.data_parallel_size)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A rule that does not hold for a role."""

    kind: Kind
    role: Role
    field: str
    """The name in `Sizes` of what was set wrong."""
    repairs: tuple[str, ...]
    """Names in `Sizes` of every size that the rule depends on and that may be set otherwise."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names in `Sizes` of every size that the rule depends on."""
        counts_sequences = self.kind in ("ranks", "even_ranks", "even_micro_batches")
        return (*self.repairs, "n_samples_per_prompt") if counts_sequences else self.repairs

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.role.name


def problems(sizes: Sizes) -> list[Problem]:
    """Every rule that does not hold for positive sizes: that of the data, then those of each model."""
    roles = sizes.roles()
    found = []
    if not data_fill_a_batch(sizes):
        found.append(Problem(kind="data", role=roles[0], field="train_batch_size", repairs=("train_batch_size",)))
    return [*found, *(_problem(role, kind) for role in roles for kind in broken_rules(sizes, role))]


def data_fill_a_batch(sizes: Sizes) -> bool:
    """True where the data were not looked at."""
    return sizes.num_train_prompts is None or sizes.train_batch_size <= sizes.num_train_prompts


def broken_rules(sizes: Sizes, role: Role) -> Iterator[Kind]:
    """The kinds of rule that do not hold for one model."""
    samples, shares = sizes.n_samples_per_prompt, role.data_parallel_size
    prompts = sizes.prompts_per_pass(role)
    if role.num_ranks % sizes.ranks_per_share:
        yield "groups"
    if sizes.train_batch_size * samples < shares:
        yield "ranks"
    if sizes.train_batch_size % prompts:
        yield "divides"
    if sizes.equal_ranks and prompts * samples % shares:
        yield "even_ranks"
    if sizes.equal_micro_batches and role.mini_batch_size is not None:
        rows, micro = sizes.rows_per_rank(role), sizes.micro_train_batch_size_per_gpu
        if micro < rows and rows % micro:
            yield "even_micro_batches"


def _problem(role: Role, kind: Kind) -> Problem:
    workers, prompts, micro = role.workers_field, role.prompts_field, "micro_train_batch_size_per_gpu"
    field, repairs = {
        "groups": (workers, (workers,)),
        "ranks": (workers, (workers, "train_batch_size")),
        "divides": (prompts, (prompts, "train_batch_size")),
        "even_ranks": (workers if role.mini_batch_size is None else prompts, (prompts, workers)),
        "even_micro_batches": (micro, (micro, prompts, workers)),
    }[kind]
    return Problem(kind=kind, role=role, field=field, repairs=repairs)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending: 12 gives 1, 2, 3, 4, 6, 12."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*low, *(exact_quotient(number, divisor) for divisor in low)}))


def exact_quotient(total: int, part: int) -> int:
    """`total / part`. Raises ValueError where that is not a whole number."""
    quotient, rest = divmod(total, part)
    if rest:
        raise ValueError(f"{total} is not a multiple of {part}")
    return quotient


MAX_MULTIPLES = 1000
"""Training batch sizes tried on each side of the given one."""
_NEAR = 32
"""Whole numbers beside a training batch size that are tried whatever they divide into."""
_MOST_BATCHES = 32
"""Training batch sizes, the nearest, that are combined with changes of other sizes."""
_MOST_MICRO = 3
"""Micro-batch sizes, likewise."""
MAX_OFFERED = 3
"""Changes of several sizes that are offered."""

Accepts = Callable[[str, int], bool]
"""Whether the rules outside this file allow a value of a size."""
_Cost = tuple[int, float]


@dataclass(frozen=True)
class Repair:
    """Sizes to be set together, by their names in `Sizes`; in the order of `Sizes`."""

    changes: tuple[tuple[str, int], ...]

    def applied(self, sizes: Sizes) -> Sizes:
        """Return `sizes` after the change."""
        return _changed(sizes, dict(self.changes))


def find_repairs(sizes: Sizes, accepts: Accepts) -> list[Repair]:
    """Changes after which no rule is broken and that `accepts` allows, the least first; none where none was found.

    Of single sizes the nearest on both sides; where no single one is enough, up to `MAX_OFFERED` sets of the fewest.
    """
    found = problems(sizes)
    if not found:
        return []
    shared = [field for field in found[0].repairs if all(field in problem.repairs for problem in found)]

    def is_clean(field: str, value: int) -> bool:
        return accepts(field, value) and not problems(Repair(((field, value),)).applied(sizes))

    singles = [
        Repair(((field, value),))
        for field in shared
        for value in nearest(getattr(sizes, field), _candidates(sizes, field), partial(is_clean, field))
        if value is not None
    ]
    if singles:
        return sorted(singles, key=lambda repair: _distance(getattr(sizes, repair.changes[0][0]), repair.changes[0][1]))
    return _Combined(sizes, accepts).search()


def nearest(value: int, candidates: Iterable[int], valid: Callable[[int], bool]) -> tuple[int | None, int | None]:
    """The nearest valid candidates below and above `value`; None where there is none."""
    known = sorted({candidate for candidate in candidates if candidate >= 1})
    below = next((candidate for candidate in reversed(known) if candidate < value and valid(candidate)), None)
    above = next((candidate for candidate in known if candidate > value and valid(candidate)), None)
    return below, above


def _changed(sizes: Sizes, changes: dict[str, int]) -> Sizes:
    """Return what `dataclasses.replace` would, without its checks of each field: the search makes thousands."""
    return Sizes(**{**vars(sizes), **changes})


def _distance(old: int, new: int) -> float:
    return abs(log(new / old))


def _by_distance(value: int, candidates: Iterable[int]) -> list[int]:
    """Other positive values, the nearest first."""
    others = {candidate for candidate in candidates if candidate >= 1 and candidate != value}
    return sorted(others, key=lambda candidate: (_distance(value, candidate), candidate))


class _Combined:
    """The search for the fewest sizes that change together, where one alone is never enough."""

    def __init__(self, sizes: Sizes, accepts: Accepts) -> None:
        self._sizes = sizes
        self._accepts = accepts
        self._allowed: dict[tuple[str, int], bool] = {}
        self._best: dict[frozenset[str], tuple[_Cost, Repair]] = {}
        """The least change of each set of sizes, of those sets that have the fewest."""
        self._least: _Cost = (len(vars(sizes)), 0.0)
        """The cost of the best repair that was found; nothing that costs more is looked into."""

    def search(self) -> list[Repair]:
        """The best of each set of sizes, the least change first."""
        sizes = self._sizes
        micro = sizes.micro_train_batch_size_per_gpu
        micros = [micro, *_by_distance(micro, _candidates(sizes, "micro_train_batch_size_per_gpu"))[:_MOST_MICRO]]
        for batch in (sizes.train_batch_size, *self._batches()):
            if self._least[0] <= 2 and _distance(sizes.train_batch_size, batch) >= self._least[1]:
                break
            changed = {"train_batch_size": batch} if batch != sizes.train_batch_size else {}
            if changed and not self._allows("train_batch_size", batch):
                continue
            for rows in micros if sizes.equal_micro_batches else micros[:1]:
                more = {"micro_train_batch_size_per_gpu": rows} if rows != micro else {}
                self._complete({**changed, **more})
        ranked = sorted(self._best.values(), key=lambda entry: entry[0])
        return [repair for _, repair in ranked[:MAX_OFFERED]]

    def _batches(self) -> list[int]:
        sizes = self._sizes
        start = sizes.train_batch_size
        near = [*range(start - _NEAR, start + _NEAR + 1), *_candidates(sizes, "train_batch_size")]
        most = [sizes.num_train_prompts or start, *(role.data_parallel_size for role in sizes.roles())]
        limit = sizes.num_train_prompts or max([start + _NEAR, *near, *most])
        fitting = [value for value in _by_distance(start, [*near, *most, *divisors(start)]) if value <= limit]
        return fitting[:_MOST_BATCHES]

    def _complete(self, changes: dict[str, int]) -> None:
        """Adds the least changes of each model to those of the training batch and micro-batch, if that is worth it."""
        sizes = _changed(self._sizes, changes)
        if not data_fill_a_batch(sizes):
            return
        total = dict(changes)
        broken = [role for role in sizes.roles() if any(broken_rules(sizes, role))]
        if (len(total) + len(broken), self._cost(total)[1]) >= self._least:
            return
        for index, role in enumerate(broken):
            count, distance = self._cost(total)
            left = self._least[0] - count - (len(broken) - index - 1)
            is_tight = count + len(broken) - index >= self._least[0]
            best = self._of_role(sizes, role, most=left, limit=self._least[1] - distance if is_tight else inf)
            if best is None:
                return
            total |= best
        cost = self._cost(total)
        if cost >= self._least:
            return
        if cost[0] < self._least[0]:
            self._best.clear()
        self._least = cost
        repair = Repair(tuple((field, total[field]) for field in vars(sizes) if field in total))
        self._best[frozenset(total)] = (cost, repair)

    def _cost(self, changes: Mapping[str, int]) -> _Cost:
        """The number of sizes that change, then how far: the sum of |ln(new / old)|."""
        return len(changes), sum(_distance(getattr(self._sizes, field), value) for field, value in changes.items())

    def _of_role(self, sizes: Sizes, role: Role, *, most: int, limit: float) -> dict[str, int] | None:
        """The least change of a model's own sizes, of at most `most` of them; None where none is nearer than `limit`."""
        mini, ranks = role.mini_batch_size, role.num_ranks
        minis = [value for value in divisors(sizes.train_batch_size) if value != mini] if mini is not None else []
        options: list[tuple[float, int | None, int]] = [(_distance(mini or 1, value), value, ranks) for value in minis]
        prompts = sizes.prompts_per_pass(role)
        options += [(_distance(ranks, value), mini, value) for value in _ranks(sizes, role, prompts) if value != ranks]
        found = self._first(sizes, role, options, limit)
        if found is not None or most < 2:
            return found
        pairs: list[tuple[float, int | None, int]] = [
            (_distance(mini or 1, value) + _distance(ranks, others), value, others)
            for value in minis
            for others in _ranks(sizes, role, value)
        ]
        return self._first(sizes, role, pairs, inf)

    def _first(
        self, sizes: Sizes, role: Role, options: list[tuple[float, int | None, int]], limit: float
    ) -> dict[str, int] | None:
        """The nearest of `options`, (distance, mini-batch, ranks), that leaves no rule of this model broken."""
        for distance, mini, ranks in sorted(options):
            if distance >= limit:
                return None
            changed = Role(
                name=role.name,
                num_ranks=ranks,
                data_parallel_size=data_parallel_size(ranks, sizes.ranks_per_share),
                mini_batch_size=mini,
            )
            if any(broken_rules(sizes, changed)):
                continue
            changes = {role.prompts_field: mini} if mini is not None and mini != role.mini_batch_size else {}
            changes |= {role.workers_field: ranks} if ranks != role.num_ranks else {}
            if all(self._allows(*change) for change in changes.items()):
                return changes
        return None

    def _allows(self, field: str, value: int) -> bool:
        if (field, value) not in self._allowed:
            self._allowed[field, value] = self._accepts(field, value)
        return self._allowed[field, value]


def _candidates(sizes: Sizes, field: str) -> Iterator[int]:
    """Every value of `field` that can repair a rule alone, near enough to be worth saying."""
    if field == "train_batch_size":
        yield from _multiples(sizes)
    elif field.endswith("_mini_batch_size"):
        yield from divisors(sizes.train_batch_size)
    elif field == "micro_train_batch_size_per_gpu":
        for role in sizes.roles():
            if role.mini_batch_size is not None:
                yield from divisors(sizes.rows_per_rank(role))
    else:
        (role,) = (role for role in sizes.roles() if role.workers_field == field)
        yield from _ranks(sizes, role, sizes.prompts_per_pass(role))


def _ranks(sizes: Sizes, role: Role, prompts: int) -> Iterator[int]:
    """Numbers of ranks over which the sequences of `prompts` prompts divide, the most that have one each, and the given
    number rounded to whole groups."""
    group, sequences = sizes.ranks_per_share, sizes.train_batch_size * sizes.n_samples_per_prompt
    whole_groups = role.num_ranks // group
    shares = {*divisors(prompts * sizes.n_samples_per_prompt), sequences, whole_groups, whole_groups + 1} - {0}
    yield from (share * group for share in sorted(shares))


def _multiples(sizes: Sizes) -> Iterator[int]:
    """Training batch sizes near the given one, in steps of the mini-batches that have to divide it.

    What is valid repeats with the least common multiple of mini-batches and ranks, so that one period on each side is
    enough.
    """
    roles = sizes.roles()
    mini_batches = [role.mini_batch_size for role in roles if role.mini_batch_size is not None]
    ranks = [role.data_parallel_size for role in roles]
    start = min(sizes.train_batch_size, sizes.num_train_prompts or sizes.train_batch_size)
    for step in {*mini_batches, lcm(*mini_batches)}:
        around = start // step
        period = (lcm(*mini_batches, *ranks) + max(ranks)) // step
        reach = min(period + 2, MAX_MULTIPLES)
        yield from (factor * step for factor in range(max(1, around - reach), around + reach))
