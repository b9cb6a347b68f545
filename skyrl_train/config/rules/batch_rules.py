"""Rules between batch sizes as exact arithmetic: what a run's sizes are, and which rules they break.

Hard rules always hold: mini-batches divide the training batch, there is a sequence for every rank, the data fill one
batch. Strict rules keep every rank and every micro-batch equally full. Each rule is decided by itself, whatever the
others say: where one is broken that another builds on, shares are rounded up, as padding with dummy rows would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
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
