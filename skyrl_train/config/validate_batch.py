"""Rules between batch sizes: pure, exact arithmetic on the configuration.

Hard rules always hold: sizes are positive, mini-batches divide the training batch, there is a sequence for every
rank, the data fill one batch. Strict rules keep every rank and every micro-batch equally full; with
`trainer.batch_validation= relaxed`, step-wise trajectories, a token budget or `docs_per_step` they cannot or need not
hold, and what that costs is said in the plan's notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, lcm
from typing import Any

from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.schema import Config
from skyrl_train.config.sequence_parallel import data_parallel_size
from skyrl_train.errors import Violation

MAX_MULTIPLES = 1000
"""Training batch sizes tried on each side of the given one."""


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
    sequence_parallel_size: int
    """Ranks that compute micro-batches together, and so have the same rows."""
    micro_train_batch_size_per_gpu: int
    num_train_prompts: int | None
    """None where the data were not looked at."""
    equal_ranks: bool
    """Strict: ranks must have equal numbers of sequences."""
    equal_micro_batches: bool
    """Strict, and micro-batches are a fixed number of rows."""

    def roles(self) -> list[Role]:
        """The models of the run."""
        found = [
            ("policy", self.policy_num_workers, self.policy_mini_batch_size),
            ("critic", self.critic_num_workers, self.critic_mini_batch_size),
            ("reference", self.ref_num_workers, None),
        ]
        return [
            Role(
                name=name,
                num_ranks=ranks,
                data_parallel_size=data_parallel_size(ranks, self.sequence_parallel_size),
                mini_batch_size=size,
            )
            for name, ranks, size in found
            if ranks is not None
        ]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A rule that does not hold for a role."""

    kind: str
    """`data`, `groups`, `ranks`, `divides`, `even_ranks` or `even_micro_batches`."""
    role: Role
    field: str
    """The name in `Sizes` of what was set wrong."""
    repairs: tuple[str, ...]
    """Names in `Sizes` of what may be set otherwise, the likeliest first."""

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.role.name


FIELDS = {
    "train_batch_size": "trainer.train_batch_size",
    "policy_mini_batch_size": "trainer.policy_mini_batch_size",
    "critic_mini_batch_size": "trainer.critic_mini_batch_size",
    "micro_train_batch_size_per_gpu": "trainer.micro_train_batch_size_per_gpu",
    "n_samples_per_prompt": "generator.n_samples_per_prompt",
    "policy_num_workers": "placement.policy_num_workers",
    "critic_num_workers": "placement.critic_num_workers",
    "ref_num_workers": "placement.ref_num_workers",
}
"""Names in `Sizes` to names on the command line."""

_POSITIVE = (
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.epochs",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.max_tokens_per_microbatch",
    "trainer.max_tokens_per_forward_microbatch",
    "trainer.eval_batch_size",
    "generator.n_samples_per_prompt",
    "placement.policy_num_workers",
    "placement.critic_num_workers",
    "placement.ref_num_workers",
)


def validate_batch_sizes(config: Config, *, num_train_prompts: int | None = None) -> list[Violation]:
    """Every violation, each with the rule in words, the numbers, and the nearest values on both sides that are valid.

    A suggested value repairs its rule and, where that is possible, breaks no other. Sizes that are not positive are
    reported alone: nothing can be said of the rest.
    """
    negative = list(_not_positive(config))
    if negative:
        return negative
    sizes = sizes_of(config, num_train_prompts=num_train_prompts)
    return [
        Violation(
            field=FIELDS[problem.field],
            rule=_rule(sizes, problem),
            value=str(getattr(sizes, problem.field)),
            remedy=_remedy(sizes, problem),
        )
        for problem in problems(sizes)
    ]


def sizes_of(config: Config, *, num_train_prompts: int | None = None) -> Sizes:
    """What of `config` the rules read."""
    trainer, placement = config.trainer, config.placement
    has_critic, has_reference = bool(config.critic.model.path), needs_reference(trainer.algorithm)
    strict = is_strict(config)
    return Sizes(
        train_batch_size=trainer.train_batch_size,
        policy_mini_batch_size=trainer.policy_mini_batch_size,
        critic_mini_batch_size=trainer.critic_mini_batch_size if has_critic else None,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        policy_num_workers=placement.policy_num_workers,
        critic_num_workers=placement.critic_num_workers if has_critic else None,
        ref_num_workers=placement.ref_num_workers if has_reference else None,
        sequence_parallel_size=config.strategy.sequence_parallel_size,
        micro_train_batch_size_per_gpu=trainer.micro_train_batch_size_per_gpu,
        num_train_prompts=num_train_prompts,
        equal_ranks=strict,
        equal_micro_batches=strict and trainer.micro_batching == "fixed",
    )


def is_strict(config: Config) -> bool:
    """Whether uneven shares are refused. They are noted instead where they were asked for or cannot be avoided."""
    trainer = config.trainer
    return (
        trainer.batch_validation == "strict"
        and not config.generator.step_wise_trajectories
        and trainer.docs_per_step == 0
        and trainer.micro_batching not in ("token_budget", "auto")
    )


def problems(sizes: Sizes) -> list[Problem]:
    """The rules that do not hold for positive sizes."""
    roles = sizes.roles()
    found = []
    if sizes.num_train_prompts is not None and sizes.num_train_prompts < sizes.train_batch_size:
        found.append(Problem(kind="data", role=roles[0], field="train_batch_size", repairs=("train_batch_size",)))
    return [*found, *(problem for role in roles for problem in _role_problems(sizes, role))]


def nearest(value: int, candidates: Iterable[int], valid: Callable[[int], bool]) -> tuple[int | None, int | None]:
    """The nearest valid candidates below and above `value`; None where there is none."""
    known = sorted({candidate for candidate in candidates if candidate >= 1})
    below = next((candidate for candidate in reversed(known) if candidate < value and valid(candidate)), None)
    above = next((candidate for candidate in known if candidate > value and valid(candidate)), None)
    return below, above


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending: 12 gives 1, 2, 3, 4, 6, 12."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(exact_quotient(number, divisor) for divisor in low)})


def exact_quotient(total: int, part: int) -> int:
    """`total / part`. Raises ValueError where that is not a whole number."""
    quotient, rest = divmod(total, part)
    if rest:
        raise ValueError(f"{total} is not a multiple of {part}")
    return quotient


def _not_positive(config: Config) -> Iterator[Violation]:
    for field in _POSITIVE:
        section, name = field.split(".")
        value = getattr(getattr(config, section), name)
        if value < 1:
            rule = "must be a positive whole number"
            yield Violation(field=field, rule=rule, value=str(value), remedy=f"try {field}=1")


def _role_problems(sizes: Sizes, role: Role) -> Iterator[Problem]:
    workers = _workers_field(role)
    prompts = sizes.train_batch_size if role.mini_batch_size is None else role.mini_batch_size
    mini_batch = workers if role.mini_batch_size is None else f"{role.name}_mini_batch_size"
    if role.num_ranks % sizes.sequence_parallel_size:
        yield Problem(kind="groups", role=role, field=workers, repairs=(workers,))
        return
    if sizes.train_batch_size * sizes.n_samples_per_prompt < role.data_parallel_size:
        yield Problem(kind="ranks", role=role, field=workers, repairs=(workers, "train_batch_size"))
    if sizes.train_batch_size % prompts:
        yield Problem(kind="divides", role=role, field=mini_batch, repairs=(mini_batch, "train_batch_size"))
        return
    per_rank, rest = divmod(prompts * sizes.n_samples_per_prompt, role.data_parallel_size)
    if sizes.equal_ranks and rest:
        repairs = tuple(dict.fromkeys((mini_batch, workers, "train_batch_size")))
        yield Problem(kind="even_ranks", role=role, field=mini_batch, repairs=repairs)
    elif sizes.equal_micro_batches and role.mini_batch_size is not None:
        micro = sizes.micro_train_batch_size_per_gpu
        if micro < per_rank and per_rank % micro:
            field = "micro_train_batch_size_per_gpu"
            yield Problem(kind="even_micro_batches", role=role, field=field, repairs=(field, mini_batch))


def _rule(sizes: Sizes, problem: Problem) -> str:
    """What must hold, with the numbers."""
    role, samples, ranks = problem.role, sizes.n_samples_per_prompt, problem.role.data_parallel_size
    batch = sizes.train_batch_size
    whole = f"{batch * samples} sequences of a training batch ({batch} prompts x {samples} samples)"
    if problem.kind == "data":
        return f"must be at most the number of training prompts, {sizes.num_train_prompts}: the data fill no batch"
    if problem.kind == "groups":
        size = sizes.sequence_parallel_size
        return f"must be a multiple of strategy.sequence_parallel_size={size}: so many ranks share each micro-batch"
    if problem.kind == "ranks":
        return f"must be at most the {whole}: a {role.name} rank would have nothing to do"
    prompts = sizes.train_batch_size if role.mini_batch_size is None else role.mini_batch_size
    if problem.kind == "divides":
        return f"must divide trainer.train_batch_size={batch} (prompts); {batch % prompts} would be left over"
    part = f"{prompts * samples} sequences of a mini-batch ({prompts} prompts x {samples} samples)"
    per_rank, rest = divmod(prompts * samples, ranks)
    if problem.kind == "even_ranks":
        return (
            f"the {whole if role.mini_batch_size is None else part} must divide evenly over the {ranks} {role.name} "
            f"ranks; {rest} would be left over (trainer.batch_validation=relaxed pads them)"
        )
    return (
        f"must divide the {per_rank} sequences of a {role.name} rank, or be no smaller: the {part} over {ranks} ranks"
    )


def _workers_field(role: Role) -> str:
    return "ref_num_workers" if role.name == "reference" else f"{role.name}_num_workers"


def _remedy(sizes: Sizes, problem: Problem) -> str:
    """`try A=8 or A=16; or B=4`: for each field that may be changed, the nearest values below and above.

    Values after which nothing at all is wrong, else values that repair this rule and break no other, else any repair.
    """
    before = {other.key for other in problems(sizes)}

    def broken_with(field: str, value: int) -> set[tuple[str, str]]:
        changes: dict[str, Any] = {field: value}
        return {other.key for other in problems(replace(sizes, **changes))}

    def repairs_all(field: str, value: int) -> bool:
        return not broken_with(field, value)

    def repairs_and_breaks_none(field: str, value: int) -> bool:
        return broken_with(field, value) <= before - {problem.key}

    def repairs(field: str, value: int) -> bool:
        return problem.key not in broken_with(field, value)

    for accepts in (repairs_all, repairs_and_breaks_none, repairs):
        parts = []
        for field in problem.repairs:
            found = nearest(getattr(sizes, field), _candidates(sizes, field), partial(accepts, field))
            parts += [" or ".join(f"{FIELDS[field]}={value}" for value in found if value is not None)]
        if any(parts):
            return "try " + "; or ".join(part for part in parts if part)
    return "no change of one size repairs this; change trainer.train_batch_size and the mini-batch size together"


def _candidates(sizes: Sizes, field: str) -> Iterator[int]:
    """Every value of `field` that can repair a rule, near enough to be worth saying."""
    if field == "train_batch_size":
        yield from _multiples(sizes)
    elif field.endswith("_mini_batch_size"):
        yield from divisors(sizes.train_batch_size)
    elif field == "micro_train_batch_size_per_gpu":
        for role in sizes.roles():
            if role.mini_batch_size is not None:
                per_rank, _ = divmod(role.mini_batch_size * sizes.n_samples_per_prompt, role.data_parallel_size)
                yield from divisors(max(per_rank, 1))
    else:
        name = "reference" if field == "ref_num_workers" else field.removesuffix("_num_workers")
        (role,) = (role for role in sizes.roles() if role.name == name)
        prompts = sizes.train_batch_size if role.mini_batch_size is None else role.mini_batch_size
        sequences = sizes.train_batch_size * sizes.n_samples_per_prompt
        for shares in (*divisors(prompts * sizes.n_samples_per_prompt), sequences):
            yield shares * sizes.sequence_parallel_size


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
        around, _ = divmod(start, step)
        period, _ = divmod(lcm(*mini_batches, *ranks) + max(ranks), step)
        reach = min(period + 2, MAX_MULTIPLES)
        yield from (factor * step for factor in range(max(1, around - reach), around + reach))
