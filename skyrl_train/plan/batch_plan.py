"""Every size that follows from the configuration, computed once and frozen. Imports neither torch nor a model."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config import TrainerConfig
from skyrl_train.config.derived import ScheduleLength
from skyrl_train.config.models import GeneratorConfig, OptimizerConfig
from skyrl_train.config.rules import Role, Sizes
from skyrl_train.parts import OPTIMIZERS

SHORTEST_ROW = 2
"""Tokens of the shortest row: one of a prompt, one of a response."""


@dataclass(frozen=True, kw_only=True)
class LearnerPlan:
    """One model's share. Sequences are rows where there is one per trajectory; step-wise each is one row or more."""

    role: str
    """`policy`, `critic` or `reference`."""
    num_ranks: int
    data_parallel_size: int
    """Shares of its rows: one for all ranks that compute micro-batches together."""
    prompts_per_pass: int
    """Prompts in one optimizer step; for the reference, which is only scored, in one training batch."""
    sequences_per_pass: int
    dummy_rows_per_pass: int
    """Rows without loss that make the shares of all ranks equal, where rows share no computation."""
    rows_per_rank: int
    """Rows of one pass on one rank, dummy rows included; about so many where whole prompts are dealt out."""
    train_micro_batches: int | None
    """Forwards and backwards that one rank accumulates in an optimizer step; None where that depends on the lengths
    (`token_budget`, `docs_per_step`, step-wise rows, layouts that share prefixes), and for the reference."""
    forward_micro_batches: int | None
    """Forwards that one rank needs to score a training batch; None as above."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one training batch and the whole run consist of. "Step" alone is a training batch."""

    num_prompts_per_batch: int
    num_samples_per_batch: int
    """Trajectories that one training batch generates."""
    num_prompts_per_step: int
    """Prompts in one optimizer step of the policy (without `docs_per_step`)."""
    num_samples_per_step: int
    """Trajectories in one optimizer step of the policy; with `docs_per_step` the fewest that close one."""
    most_samples_per_step: int
    """The same, but with `docs_per_step` as many as the last round of micro-batches may bring."""
    batches_per_epoch: int
    """Whole training batches in one pass over the prompts."""
    total_steps: int
    """Training batches in the run."""
    optimizer_steps_per_batch: int
    """The policy's, over all update epochs. With `docs_per_step` at most so many: a step may reach more than its
    target, and failed trajectories are no documents."""
    fewest_optimizer_steps_per_batch: int
    """With `docs_per_step` where no trajectory fails and each step takes as many as it may; else as above."""
    total_optimizer_steps: int
    """The policy's in the run: what its learning rate is scheduled over. Training batches in which only the critic is
    trained (`critic_warmup_steps`) have none."""
    critic_optimizer_steps_per_batch: int
    """0 where there is no critic."""
    critic_total_optimizer_steps: int
    docs_per_step: int
    """0: a step is a number of prompts."""
    total_documents: int
    """Trajectories that the policy's optimizer steps consume in the run, each update epoch counted."""
    critic_total_documents: int
    """The same of the critic, which is trained from the first batch on; 0 where there is none."""
    learners: tuple[LearnerPlan, ...]
    """The policy, then the critic and the reference where there are such."""

    @property
    def fewest_total_optimizer_steps(self) -> int:
        """The policy's in the run; `total_optimizer_steps` is the most."""
        return self.total_optimizer_steps // self.optimizer_steps_per_batch * self.fewest_optimizer_steps_per_batch

    @property
    def schedule_steps(self) -> float:
        """Length of the policy's learning-rate schedule: its optimizer steps, or with `docs_per_step` the run's documents
        in units of the target, so that a warm-up of n steps lasts n targets whatever steps overshoot."""
        return self.total_documents / self.docs_per_step if self.docs_per_step else self.total_optimizer_steps

    @property
    def critic_schedule_steps(self) -> float:
        """The same of the critic."""
        documents = self.critic_total_documents
        return documents / self.docs_per_step if self.docs_per_step else self.critic_total_optimizer_steps

    def schedule(self, role: str) -> ScheduleLength:
        """What the learning rate of `policy` or `critic` is scheduled over; nothing for a model that is only scored."""
        lengths = {
            "policy": (self.schedule_steps, self.total_documents),
            "critic": (self.critic_schedule_steps, self.critic_total_documents),
        }
        steps, documents = lengths.get(role, (0.0, 0))
        return ScheduleLength(optimizer_steps=steps, documents=documents if self.docs_per_step else 0)


@dataclass(frozen=True, kw_only=True)
class SFTPlan:
    """What a supervised run consists of, by its configuration and its data; `plan.json`."""

    num_examples: int
    num_examples_per_epoch: int
    """Weights counted."""
    num_tokens: int
    """Of all examples."""
    total_steps: int
    """Optimizer steps."""
    step: str
    """What makes one."""


def make_batch_plan(
    trainer: TrainerConfig, generator: GeneratorConfig, sizes: Sizes, *, num_train_prompts: int
) -> BatchPlan:
    """The plan of a run over `num_train_prompts` prompts, for sizes that go together."""
    has_critic, samples = sizes.critic_num_workers is not None, samples_per_batch(trainer, generator)
    batches_per_epoch = num_train_prompts // trainer.train_batch_size
    total_steps = trainer.total_steps or trainer.epochs * batches_per_epoch
    roles = sizes.roles()
    fewest, most = samples_per_step(trainer, generator, roles[0])
    policy_steps = ceil_div(samples, fewest) * trainer.update_epochs_per_batch
    critic_steps = 0
    if has_critic:
        critic_steps = (
            ceil_div(samples, samples_per_step(trainer, generator, roles[1])[0]) * trainer.update_epochs_per_batch
        )
    policy_batches = total_steps - (min(trainer.algorithm.critic_warmup_steps, total_steps) if has_critic else 0)
    return BatchPlan(
        num_prompts_per_batch=trainer.train_batch_size,
        num_samples_per_batch=samples,
        num_prompts_per_step=trainer.policy_mini_batch_size,
        num_samples_per_step=fewest,
        most_samples_per_step=most,
        batches_per_epoch=batches_per_epoch,
        total_steps=total_steps,
        optimizer_steps_per_batch=policy_steps,
        fewest_optimizer_steps_per_batch=ceil_div(samples, most) * trainer.update_epochs_per_batch,
        total_optimizer_steps=policy_batches * policy_steps,
        critic_optimizer_steps_per_batch=critic_steps,
        critic_total_optimizer_steps=total_steps * critic_steps,
        docs_per_step=trainer.docs_per_step,
        total_documents=policy_batches * samples * trainer.update_epochs_per_batch,
        critic_total_documents=total_steps * samples * trainer.update_epochs_per_batch if has_critic else 0,
        learners=tuple(_learner(trainer, generator, role) for role in roles),
    )


def samples_per_step(trainer: TrainerConfig, generator: GeneratorConfig, role: Role) -> tuple[int, int]:
    """The fewest and the most trajectories of one optimizer step that is not the last of its batch.

    With `docs_per_step` a step closes after the round of micro-batches, one on each rank, that reaches the target: of
    rows that are counted, one for each trajectory, always the same whole number of rounds; else of the last round all but
    one document may be too many.
    """
    samples, target = samples_per_batch(trainer, generator), trainer.docs_per_step
    if not target:
        prompts = trainer.train_batch_size if role.mini_batch_size is None else role.mini_batch_size
        return prompts * generator.n_samples_per_prompt, prompts * generator.n_samples_per_prompt
    if trainer.docs_per_step_exact:
        return min(target, samples), min(target, samples)
    if trainer.micro_batching == "fixed":
        a_round = trainer.micro_train_batch_size_per_gpu * role.data_parallel_size
        if not generator.is_step_wise:
            rounds = ceil_div(target, a_round)
            return min(rounds * a_round, samples), min(rounds * a_round, samples)
    elif trainer.micro_batching == "token_budget":
        a_round = max(1, trainer.max_tokens_per_microbatch // SHORTEST_ROW) * role.data_parallel_size
    else:
        a_round = samples
    return min(target, samples), min(target - 1 + a_round, samples)


def samples_per_batch(trainer: TrainerConfig, generator: GeneratorConfig) -> int:
    """Trajectories of one training batch."""
    return trainer.train_batch_size * generator.n_samples_per_prompt


def optimizer_state_bytes(optimizer: OptimizerConfig) -> int:
    """Return the bytes of an optimizer's state for each parameter: AdamW's for a custom one, of which nothing is known."""
    return 0 if OPTIMIZERS.name_of(optimizer.name) == "sgd" else 8


def span(fewest: int, most: int) -> str:
    """`2 to 3`, or `3` where there is nothing between."""
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def ceil_div(total: int, part: int) -> int:
    """The smallest whole number that is at least `total / part`."""
    return -(-total // part)


def _learner(trainer: TrainerConfig, generator: GeneratorConfig, role: Role) -> LearnerPlan:
    samples = generator.n_samples_per_prompt
    prompts = trainer.train_batch_size if role.mini_batch_size is None else role.mini_batch_size
    sequences = prompts * samples
    if trainer.docs_per_step and role.mini_batch_size is not None:
        sequences, _ = samples_per_step(trainer, generator, role)
    rows_per_rank = ceil_div(sequences, role.data_parallel_size)
    by_length = trainer.layout in ("padded", "packed")
    counted = by_length and trainer.micro_batching == "fixed" and not generator.is_step_wise
    trained = counted and not trainer.docs_per_step and role.mini_batch_size is not None
    rows_to_score = ceil_div(samples_per_batch(trainer, generator), role.data_parallel_size)
    return LearnerPlan(
        role=role.name,
        num_ranks=role.num_ranks,
        data_parallel_size=role.data_parallel_size,
        prompts_per_pass=prompts,
        sequences_per_pass=sequences,
        dummy_rows_per_pass=-sequences % role.data_parallel_size,
        rows_per_rank=rows_per_rank,
        train_micro_batches=ceil_div(rows_per_rank, trainer.micro_train_batch_size_per_gpu) if trained else None,
        forward_micro_batches=ceil_div(rows_to_score, trainer.micro_forward_batch_size_per_gpu) if counted else None,
    )
