"""What a plan allows but does not give for nothing: each note has a fact with its numbers and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from skyrl_train.config import TrainerConfig
from skyrl_train.config.data import NO_HELD_OUT, DataConfig, EnvironmentConfig
from skyrl_train.config.fields import unusual_values
from skyrl_train.config.models import GeneratorConfig, OptimizerConfig
from skyrl_train.plan.batch_plan import BatchPlan, LearnerPlan, ceil_div, span
from skyrl_train.plan.estimate import PassEstimate
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.rollout.envs import sandbox_lines


@dataclass(frozen=True, kw_only=True)
class PlanNote:
    """One thing worth knowing before a run."""

    field: str
    """The setting that would change it."""
    fact: str
    cost: str

    def __str__(self) -> str:
        return f"{self.field}: {self.fact}; {self.cost}"


def plan_notes(
    plan: BatchPlan,
    *,
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    critic_optimizer: OptimizerConfig,
    num_train_prompts: int,
) -> list[PlanNote]:
    """What follows from the sizes alone."""
    notes = [*_data_notes(plan, num_train_prompts), *_document_notes(plan)]
    for learner in plan.learners:
        notes += _rank_notes(learner, step_wise=generator.is_step_wise)
        notes += _micro_batch_notes(learner, trainer.micro_train_batch_size_per_gpu)
    notes += _cap_notes(trainer, generator.max_context_length)
    if generator.eval_differences:
        fact = f"evaluation samples with {generator.eval_differences}"
        notes.append(PlanNote(field="generator.eval_sampling", fact=fact, cost="its figures are of answers made so"))
    notes += _schedule_notes("trainer.policy", trainer.policy.optimizer, plan.schedule_steps)
    if plan.critic_total_optimizer_steps:
        notes += _schedule_notes("critic", critic_optimizer, plan.critic_schedule_steps)
    return notes


def size_notes(config: object) -> list[PlanNote]:
    """Settings larger than anybody is likely to mean."""
    return [
        PlanNote(field=name, fact=f"{value:g} is above the usual {usual.value:g}", cost=usual.why)
        for name, value, usual in unusual_values(config)
    ]


def estimate_notes(estimates: list[PassEstimate]) -> list[PlanNote]:
    """What follows from the lengths."""
    notes = []
    for estimate in estimates:
        if estimate.rows_over_cap:
            which = "max_tokens_per_microbatch" if estimate.training else "max_tokens_per_forward_microbatch"
            notes.append(
                PlanNote(
                    field=f"trainer.{which}",
                    fact=f"{estimate.rows_over_cap} of {estimate.num_rows} rows of a {estimate.role} pass exceed the "
                    "cap and go alone",
                    cost=f"the largest forward computes {estimate.largest_micro_batch_tokens} tokens, over the cap",
                )
            )
    return notes


def environment_notes(env_class: PartSpec | None) -> list[PlanNote]:
    """What is known of the chosen environment's scoring."""
    if env_class is None or part_name(env_class) not in _GSM8K_ENVIRONMENTS:
        return []
    return [
        PlanNote(
            field="environment.env_class",
            fact=f"skyrl-gym's {part_name(env_class)} compares the first `#### ` answer with the ground truth as text",
            cost="right answers written `#### 42.`, `#### 42.0` or `#### $42`, or after another one, earn 0 or the reward "
            "for form; environment=word_problems accepts them and takes the last, where answers are integers",
        )
    ]


def sandbox_notes(environment: EnvironmentConfig) -> list[PlanNote]:
    """What the code that the model writes is not kept from."""
    if environment.sandbox == "required":
        return []
    return [
        PlanNote(
            field="environment.sandbox",
            fact=f"the model's code runs in a sandbox that is {line}",
            cost="what it lacks, a program of the model can use; environment.sandbox=required starts only with namespaces",
        )
        for line in sandbox_lines(environment)
    ]


def data_notes(data: DataConfig) -> list[PlanNote]:
    """What is known of the chosen data."""
    if data.validation is not None or data.held_out or data.mix:
        return []
    fact, _, remedy = NO_HELD_OUT.partition("; ")
    return [PlanNote(field="data.validation", fact=fact, cost=remedy)]


_GSM8K_ENVIRONMENTS = ("gsm8k", "gsm8k_multi_turn")


def percent(share: float | Fraction) -> str:
    """`27 %`; below ten percent with one digit more."""
    value = 100 * float(share)
    return f"{value:.0f} %" if value >= 9.5 or value == 0 else f"{value:.1f} %"


def _data_notes(plan: BatchPlan, num_train_prompts: int) -> Iterator[PlanNote]:
    rest = num_train_prompts % plan.num_prompts_per_batch
    if rest:
        yield PlanNote(
            field="trainer.train_batch_size",
            fact=f"{num_train_prompts} training prompts are {plan.batches_per_epoch} batches and {rest} left over",
            cost=f"{percent(Fraction(rest, num_train_prompts))} of the prompts sit out each epoch",
        )


def _document_notes(plan: BatchPlan) -> Iterator[PlanNote]:
    target, samples = plan.docs_per_step, plan.num_samples_per_batch
    fewest, most = plan.num_samples_per_step, plan.most_samples_per_step
    if not target:
        return
    if target >= samples:
        yield PlanNote(
            field="trainer.docs_per_step",
            fact=f"{target} documents a step, but a batch has {samples}",
            cost="a step is closed by the end of its batch; documents are not carried over",
        )
        return
    steps, rest = ceil_div(samples, fewest), samples % fewest
    if rest and fewest == most:
        yield PlanNote(
            field="trainer.docs_per_step",
            fact=f"{samples} documents are {steps - 1} steps of {fewest} and one of {rest}",
            cost=f"the last step of a batch has {percent(Fraction(rest, fewest))} of the others' documents at the same "
            "learning rate",
        )
    if most > target:
        ranks = plan.learners[0].data_parallel_size
        yield PlanNote(
            field="trainer.docs_per_step_exact",
            fact=f"a step overshoots its {target} documents by {span(fewest - target, most - target)}: it closes after a "
            f"whole micro-batch on each of {ranks} ranks",
            cost=f"{span(plan.fewest_optimizer_steps_per_batch, plan.optimizer_steps_per_batch)} steps a batch; their "
            "losses divide by what was reached",
        )


def _rank_notes(learner: LearnerPlan, *, step_wise: bool) -> Iterator[PlanNote]:
    ranks, workers = learner.data_parallel_size, f"placement.{_workers(learner)}"
    if ranks == 1:
        return
    if step_wise:
        worst = Fraction(ranks - 1, learner.sequences_per_pass + ranks - 1)
        yield PlanNote(
            field=workers,
            fact=f"rows vary with the turns: up to {ranks - 1} dummy rows in a {learner.role} pass of at least "
            f"{learner.sequences_per_pass} rows over {ranks} ranks",
            cost=f"at most {percent(worst)} of the pass",
        )
    elif learner.dummy_rows_per_pass:
        dummies, rows = learner.dummy_rows_per_pass, learner.sequences_per_pass
        yield PlanNote(
            field=workers,
            fact=f"{dummies} dummy rows beside {rows} in a {learner.role} pass over {ranks} ranks",
            cost=f"{percent(Fraction(dummies, dummies + rows))} of the pass",
        )


def _micro_batch_notes(learner: LearnerPlan, size: int) -> Iterator[PlanNote]:
    rows = learner.rows_per_rank
    if learner.train_micro_batches is None:
        return
    if size > rows:
        yield PlanNote(
            field="trainer.micro_train_batch_size_per_gpu",
            fact=f"{size} rows allowed, but a {learner.role} rank has {rows} in a step",
            cost="none: one forward holds them all",
        )
    elif rows % size:
        full = Fraction(rows, learner.train_micro_batches * size)
        yield PlanNote(
            field="trainer.micro_train_batch_size_per_gpu",
            fact=f"{rows} rows of a {learner.role} rank are {learner.train_micro_batches} micro-batches of up to "
            f"{size}",
            cost=f"they are {percent(full)} full",
        )


def _cap_notes(trainer: TrainerConfig, longest: int) -> Iterator[PlanNote]:
    if trainer.micro_batching != "token_budget":
        return
    for field in ("max_tokens_per_microbatch", "max_tokens_per_forward_microbatch"):
        cap = getattr(trainer, field)
        if cap < longest:
            yield PlanNote(
                field=f"trainer.{field}",
                fact=f"a row may have up to generator.max_context_length={longest} tokens, the cap is {cap}",
                cost=f"a longer row goes alone and computes up to {longest} tokens: plan memory for that",
            )


def _schedule_notes(section: str, optimizer: OptimizerConfig, total_steps: float) -> Iterator[PlanNote]:
    if optimizer.warmup_steps >= total_steps > 0:
        reached = total_steps / optimizer.warmup_steps
        yield PlanNote(
            field=f"{section}.optimizer.warmup_steps",
            fact=f"{optimizer.warmup_steps} steps of warm-up in a run of {total_steps:g} optimizer steps",
            cost=f"the learning rate ends at {percent(reached)} of its peak",
        )


def _workers(learner: LearnerPlan) -> str:
    return "ref_num_workers" if learner.role == "reference" else f"{learner.role}_num_workers"
