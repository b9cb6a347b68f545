"""Batch sizes of a configuration: which rules between them do not hold, in words, with what to type instead.

The rules are in `batch_rules.py`; with `trainer.batch_validation=relaxed`, step-wise trajectories, a token budget or
`docs_per_step` the strict ones cannot or need not hold, and what that costs is said in the plan's notes. All rules are
reported, and each remedy, applied, leaves none broken (`batch_repairs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.batch_repairs import Repair, find_repairs
from skyrl_train.config.batch_rules import Problem, Sizes, problems
from skyrl_train.config.schema import Config
from skyrl_train.config.validate_placement import placement_violations, process_violations
from skyrl_train.errors import Violation

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

BATCH_SIZE_FIELDS = (
    *FIELDS.values(),
    "generator.step_wise_trajectories",
    "trainer.batch_validation",
    "trainer.docs_per_step",
    "trainer.micro_batching",
    "critic.model.path",
)
"""Settings that decide about batch sizes, beside those of the algorithm, the placement and the strategy."""

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
    """Every violation, each with the rule in words, the numbers, and changes after which nothing is wrong any more.

    Where one size is enough, the nearest valid values of it on both sides are offered; else the fewest sizes that have to
    change together. Sizes that are not positive are reported alone: nothing can be said of the rest.
    """
    negative = list(_not_positive(config))
    if negative:
        return negative
    sizes = sizes_of(config, num_train_prompts=num_train_prompts)
    found = problems(sizes)
    repairs = find_repairs(sizes, partial(_goes_with_the_rest, config)) if found else []
    return [
        Violation(
            field=FIELDS[problem.field],
            rule=_rule(sizes, problem),
            value=str(getattr(sizes, problem.field)),
            remedy=_remedy(sizes, problem, repairs),
        )
        for problem in found
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


def _not_positive(config: Config) -> Iterator[Violation]:
    for field in _POSITIVE:
        section, name = field.split(".")
        value = getattr(getattr(config, section), name)
        if value < 1:
            rule = "must be a positive whole number"
            yield Violation(field=field, rule=rule, value=str(value), remedy=f"try {field}=1")


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
    prompts = sizes.prompts_per_pass(role)
    if problem.kind == "divides":
        return f"must divide trainer.train_batch_size={batch} (prompts); {batch % prompts} would be left over"
    part = f"{prompts * samples} sequences of a mini-batch ({prompts} prompts x {samples} samples)"
    if problem.kind == "even_ranks":
        return (
            f"the {whole if role.mini_batch_size is None else part} must divide evenly over the {ranks} {role.name} "
            f"ranks; {prompts * samples % ranks} would be left over"
        )
    return (
        f"must divide the {sizes.rows_per_rank(role)} sequences of a {role.name} rank, or be no smaller: the {part} over "
        f"{ranks} ranks"
    )


def _remedy(sizes: Sizes, problem: Problem, repairs: Sequence[Repair]) -> str:
    """`try A=8, or A=16, or B=4`; sizes that have to change together are `A=8 B=4 together`."""
    options = [
        " ".join(f"{FIELDS[field]}={value}" for field, value in repair.changes)
        + (" together" if len(repair.changes) > 1 else "")
        for repair in repairs
    ]
    padded = replace(sizes, equal_ranks=False, equal_micro_batches=False)
    if problem.kind in ("even_ranks", "even_micro_batches") and not problems(padded):
        options.append("trainer.batch_validation=relaxed, which pads what is uneven")
    if options:
        return "try " + ", or ".join(options)
    return "no sizes repair this with the placement and strategy as they are: change those first"


def _goes_with_the_rest(config: Config, field: str, value: int) -> bool:
    """Whether the rules of placement allow a number of ranks; they say nothing of other sizes."""
    section, _, name = FIELDS[field].partition(".")
    if section != "placement":
        return True
    changed: dict[str, Any] = {name: value}
    placement = replace(config.placement, **changed)
    if getattr(placement, name) != value:  # it follows from nodes and GPUs that are stated
        return False
    after = _placement_fields(replace(config, placement=placement))
    return FIELDS[field] not in after and after <= _placement_fields(config)


def _placement_fields(config: Config) -> set[str]:
    return {violation.field for check in _PLACEMENT_RULES for violation in check(config)}


_PLACEMENT_RULES: tuple[Callable[[Config], Iterator[Violation]], ...] = (process_violations, placement_violations)
