"""All rules of a configuration, and those of its batch sizes: which do not hold, in words, with what to type instead.

The rules are in `batch_rules.py`; with `trainer.batch_validation=relaxed`, step-wise trajectories, a token budget or
`docs_per_step` the strict ones cannot or need not hold, and what that costs is said in the plan's notes. All rules are
reported whose sizes are known, and each remedy, applied, leaves none broken (`find_repairs` there): it sets what is not
positive or was refused, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from skyrl_train.config.algorithm.settings import needs_reference
from skyrl_train.config.fields.fields import Range, fact, is_refused, recorded, strip, walk
from skyrl_train.config.models.placement import SHARING_SETTINGS
from skyrl_train.config.rules.batch_rules import Problem, Sizes, find_repairs, problems
from skyrl_train.config.rules.mix import mixed_datasets
from skyrl_train.config.rules.validate import RULES, rule_violations, run_rules
from skyrl_train.config.rules.validate_placement import ENGINE_PLACEMENT_RULES, PLACEMENT_RULES, PROCESS_RULES
from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation, counted
from skyrl_train.parts import BATCH_RULES

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

_STRICTNESS = (
    "generator.step_wise_trajectories",
    "generator.trajectory_rows",
    "trainer.batch_validation",
    "trainer.docs_per_step",
    "trainer.micro_batching",
)
"""Settings that decide whether uneven shares are refused."""

_POSITIVE = tuple(
    field.path
    for field in walk(Config)
    if field.path.count(".") == 1 and strip(field.annotation) is int and fact(field.annotation, Range) == Range(1)
)
"""Whole numbers of at least 1: a config that was made in Python was not checked field by field."""


def validate_config(config: Config, *, refused: Collection[str] = ()) -> list[Violation]:
    """Every rule between fields that does not hold.

    Args:
        refused: fields whose value was refused before (they carry their defaults): nothing is said that follows from one.
    """
    found = rule_violations(config, RULES, refused)
    if config.data.mix and not is_refused("data.mix", refused):
        found += mixed_datasets(config.data, config.environment, config.generator.sampling)[1]
    for spec in config.trainer.batch_rules:
        if not BATCH_RULES.violations(spec):  # else it is among those found
            found += BATCH_RULES.resolve(spec)(config, refused)
    return found


def validate_batch_sizes(
    config: Config, *, num_train_prompts: int | None = None, refused: Collection[str] = ()
) -> list[Violation]:
    """Every violation, each with the rule in words, the numbers, and changes after which nothing is wrong any more.

    Where one size is enough, the nearest valid values of it on both sides are offered; else the fewest sizes that have to
    change together. Rules that read a size that is not positive, or a setting that was refused, are left out.

    Args:
        refused: settings that carry their default because what was given is no good; they are not reported again.
    """
    negative = [field for field in _POSITIVE if field not in refused and _value(config, field) < 1]
    search = _Search(config, [*refused, *negative], num_train_prompts)
    return [
        *(
            Violation.of(
                field,
                _value(config, field),
                "must be a positive whole number",
                search.remedy() if field in FIELDS.values() else f"try {field}={_value(Config(), field)}",
            )
            for field in negative
        ),
        *search.violations(),
    ]


def batch_size_violations(config: Config, refused: Collection[str]) -> list[Violation]:
    """The rule `sizes` of `trainer.batch_rules`."""
    return validate_batch_sizes(config, refused=refused)


def with_sound_sizes(violations: Iterable[Violation], config: Config, *, refused: Collection[str]) -> list[Violation]:
    """The violations of single settings, in which a batch size that was refused is set so that all go together: its
    default alone may break a rule between them."""
    search = _Search(config, refused, None)
    return [
        replace(violation, remedy=search.remedy())
        if violation.field in FIELDS.values() and violation.remedy.startswith("try ") and search.is_repairable
        else violation
        for violation in violations
    ]


class _Search:
    """Which rules between the sizes of a config are broken, and what sets it right.

    Args of the constructor:
        wrong: settings whose value is not known: refused, so that they carry their default, or not positive.
    """

    def __init__(self, config: Config, wrong: Collection[str], num_train_prompts: int | None) -> None:
        self._wrong = wrong
        stated = [field for field in FIELDS.values() if field in wrong]
        self._config = _with_defaults(config, [field for field in stated if _value(config, field) < 1])
        self._new = {field: _value(self._config, field) for field in stated}
        """Sizes that have to be set in any case, first to their defaults."""
        self._sizes = sizes_of(self._config, num_train_prompts=num_train_prompts)
        self._found = problems(self._sizes)
        self._options = self._find_options()

    @property
    def is_repairable(self) -> bool:
        """Whether there are sizes that go together."""
        return bool(self._options)

    def violations(self) -> list[Violation]:
        """Return the violations of rules that read nothing wrong."""
        return [
            Violation.of(
                FIELDS[problem.field],
                getattr(self._sizes, problem.field),
                _rule(self._config, self._sizes, problem),
                self.remedy(problem),
            )
            for problem in self._found
            if not any(is_refused(field, self._wrong) for field in _reads(self._config, problem))
        ]

    def remedy(self, problem: Problem | None = None) -> str:
        """`try A=8, or A=16, or B=4`; sizes that have to change together are `A=8 B=4 together`."""
        options = [_typed(option) for option in self._options]
        padded = replace(self._sizes, equal_ranks=False, equal_micro_batches=False)
        if problem and problem.kind in ("even_ranks", "even_micro_batches") and not problems(padded):
            relaxed = _typed({**self._new, "trainer.batch_validation": "relaxed"})
            options.append(f"{relaxed}, which pads what is uneven")
        if options:
            return "try " + ", or ".join(options)
        return "no sizes repair this with the placement and strategy as they are: change those first"

    def _find_options(self) -> list[dict[str, int]]:
        """Sizes to be set together, by their names on the command line; those that leave most of what was given."""
        if not self._found:
            return [self._new] if self._new else []
        repairs = find_repairs(self._sizes, self._accepts)
        changes = [{**self._new, **{FIELDS[field]: value for field, value in repair.changes}} for repair in repairs]
        fewest = min(map(len, changes), default=0)
        ordered = [{field: each[field] for field in FIELDS.values() if field in each} for each in changes]
        return [option for option in ordered if len(option) == fewest]

    def _accepts(self, field: str, value: int) -> bool:
        is_section_refused = is_refused(FIELDS[field], set(self._wrong) - {FIELDS[field]})
        return not is_section_refused and _goes_with_the_rest(self._config, field, value)


def _with_defaults(config: Config, fields: Iterable[str]) -> Config:
    for field in fields:
        section, _, name = field.partition(".")
        value: dict[str, Any] = {name: _value(Config(), field)}
        part: dict[str, Any] = {section: replace(getattr(config, section), **value)}
        config = replace(config, **part)
    return config


def _value(config: Config, field: str) -> int:
    section, _, name = field.partition(".")
    value: int = getattr(getattr(config, section), name)
    return value


def _typed(changes: Mapping[str, object]) -> str:
    text = " ".join(f"{field}={value}" for field, value in changes.items())
    return f"{text} together" if len(changes) > 1 else text


def _reads(config: Config, problem: Problem) -> set[str]:
    """The settings that decide about a rule, by their names on the command line."""
    read = {FIELDS[size] for size in problem.reads}
    if problem.role.workers_field in problem.reads:
        read.update(SHARING_SETTINGS)
    if problem.kind in ("even_ranks", "even_micro_batches"):
        read.update(_STRICTNESS)
    if problem.role.name == "critic":
        read.add("critic.model.path")
    if problem.role.name == "reference":
        needs_reference(recorded(config.trainer.algorithm, read.add, "trainer.algorithm."))
    return read


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
        ranks_per_share=config.strategy.ranks_per_share,
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
        and not config.generator.is_step_wise
        and trainer.docs_per_step == 0
        and trainer.micro_batching != "token_budget"
        and not trainer.sizes_itself
    )


def _rule(config: Config, sizes: Sizes, problem: Problem) -> str:
    """What must hold, with the numbers."""
    role, samples, ranks = problem.role, sizes.n_samples_per_prompt, problem.role.data_parallel_size
    batch = sizes.train_batch_size
    whole = (
        f"{batch * samples} sequences of a training batch ({counted(batch, 'prompt')} x {counted(samples, 'sample')})"
    )
    if problem.kind == "data":
        return f"must be at most the number of training prompts, {sizes.num_train_prompts}: the data fill no batch"
    if problem.kind == "groups":
        return f"must be a multiple of {config.strategy.stated_sharing}: so many ranks share each micro-batch"
    if problem.kind == "ranks":
        return f"must be at most the {whole}: a {role.name} rank would have nothing to do"
    prompts = sizes.prompts_per_pass(role)
    if problem.kind == "divides":
        return f"must divide trainer.train_batch_size={batch} (prompts); {batch % prompts} would be left over"
    part = (
        f"{prompts * samples} sequences of a mini-batch ({counted(prompts, 'prompt')} x {counted(samples, 'sample')})"
    )
    if problem.kind == "even_ranks":
        return (
            f"the {whole if role.mini_batch_size is None else part} must divide evenly over the {ranks} {role.name} "
            f"ranks; {prompts * samples % ranks} would be left over"
        )
    return (
        f"must divide the {sizes.rows_per_rank(role)} sequences of a {role.name} rank, or be no smaller: the {part} over "
        f"{ranks} ranks"
    )


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
    rules = (*PROCESS_RULES, *PLACEMENT_RULES, *ENGINE_PLACEMENT_RULES)
    return {violation.field for violation in run_rules(config, rules)}
