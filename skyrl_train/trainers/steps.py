"""The verbs of the loop, one function each: generate, assemble, score, estimate, update, sync.

They know Protocols and tensors, and nothing of timing, logging or checkpoints, so that every trainer shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from skyrl_train.algorithms import (
    EntropyControllerState,
    SamplingState,
    estimate_advantages,
    initial_entropy_state,
    mask_rows,
    next_entropy_state,
    sample_dynamically,
    shape_rewards,
    teacher_logprobs,
    with_greedy_rewards,
    with_reward_columns,
    with_sample_counts,
    with_step_columns,
)
from skyrl_train.batch import TrainingInputBatch, assemble as assemble_rows
from skyrl_train.batch.plane import DataPlane, ReferencedColumns
from skyrl_train.batch.steps import MiniBatch, check_staleness, mini_batches
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    FilterConfig,
    estimator_reads,
    is_self_taught,
    needs_greedy_sample,
)
from skyrl_train.config.derived import old_logprobs_scored
from skyrl_train.config.models import SamplingConfig
from skyrl_train.errors import BatchError, NonFiniteError
from skyrl_train.interfaces import (
    Generator,
    HoldsScores,
    Learner,
    ScoreMethod,
    Scorer,
    ScoresDistributions,
    WeightTransport,
)
from skyrl_train.rollout import ConsumedPrompts
from skyrl_train.rollout.stream import RolloutStream
from skyrl_train.telemetry import Mean, StepMetrics, merge_metrics
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams

DECLARED_METRICS = """
policy/entropy_coef | | Weight of the entropy bonus. | with `entropy_controller=adaptive`
"""

Progress = Callable[[int, int], None]
"""Called with the number of optimizer steps that are done, and that of all."""
PromptBatches = Callable[[int], Sequence[Prompt]]
"""The training prompts after so many batches: a function of that position alone (`data/prompts.py: PromptSource.batch`)."""
Assemble = Callable[..., TrainingInputBatch]
"""`assemble` for one run: called with rollouts, `step` and `weight_version`."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One training batch of rollouts."""

    rollouts: RolloutBatch
    """To train on: rewards shaped, prompts chosen by dynamic sampling where that is on."""
    everything: RolloutBatch
    """All that was generated, rewarded as the environment did."""
    num_prompt_batches: int
    """Batches taken from the prompt source; more than one only with dynamic sampling."""
    metrics: Mapping[str, float]
    """`sampling/...`, and of a stream its own; empty without either."""
    settled: ConsumedPrompts | None = None
    """Of a stream: prompts that need not come again."""


@dataclass(frozen=True, kw_only=True)
class Learners:
    """The models of a run."""

    policy: Learner
    reference: Scorer | None
    """A model that only scores; see `config.algorithm.needs_reference`."""
    critic: Learner | None
    """Only where the advantage estimator needs values."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The metrics and the state that an update leaves."""

    metrics: StepMetrics
    """Merged over all optimizer steps."""
    num_optimizer_steps: int
    """Those of the policy, without the critic's."""
    entropy: EntropyControllerState
    """After the last of them."""


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The configured sampling as the engine takes it."""
    return SamplingParams(**{field.name: getattr(config, field.name) for field in fields(SamplingParams)})


def generate(
    generator: Generator,
    prompts: PromptBatches,
    trainer: TrainerConfig,
    *,
    n_samples_per_prompt: int,
    sampling: SamplingParams,
    step: int,
    position: int,
    hold: Callable[[RolloutBatch], RolloutBatch] | None = None,
) -> Generated:
    """The rollouts of training step `step`, whose prompts begin at batch `position`. What `hold` gives takes the place of
    what was generated (`DataPlane.hold`).

    With dynamic sampling, batches are generated until enough prompts have differing rewards; DataError where none do.
    A prompt that comes again in a later batch of the same step is sampled again. Recorded rollouts are what a step was
    trained on: their rewards are shaped and their prompts chosen already.
    """
    filters = FilterConfig() if generator.is_recorded else trainer.algorithm.filters
    state = SamplingState()
    parts: list[RolloutBatch] = []
    while True:
        part = generator.generate(
            prompts(position + len(parts)),
            n_samples_per_prompt=n_samples_per_prompt,
            sampling=sampling,
            global_step=step,
            purpose=f"train-{len(parts)}" if parts else "train",
        )
        part = part if hold is None else hold(part)
        if needs_greedy_sample(trainer.algorithm) and not generator.is_recorded:
            greedy = generator.generate(
                part.prompts,
                n_samples_per_prompt=1,
                sampling=replace(sampling, temperature=0.0),
                global_step=step,
                purpose=f"greedy-{len(parts)}",
            )
            part = with_greedy_rewards(part, shape_rewards(greedy, filters))
        parts.append(part)
        sampled = sample_dynamically(
            state, shape_rewards(part, filters), num_prompts=trainer.train_batch_size, config=filters
        )
        if sampled.rollouts is not None:
            return Generated(
                rollouts=sampled.rollouts,
                everything=_joined(parts),
                num_prompt_batches=len(parts),
                metrics=sampled.metrics,
            )
        state = sampled.state


def take(
    stream: RolloutStream,
    trainer: TrainerConfig,
    *,
    position: int,
    hold: Callable[[RolloutBatch], RolloutBatch] | None = None,
) -> Generated:
    """The next batch of rollouts of a stream. `position`: of the data, in whole batches that are settled; `hold` as of
    `generate`."""
    taken = stream.take()
    rollouts = taken.rollouts if hold is None else hold(taken.rollouts)
    return Generated(
        rollouts=shape_rewards(rollouts, trainer.algorithm.filters),
        everything=taken.everything,
        num_prompt_batches=taken.settled.watermark // trainer.train_batch_size - position,
        metrics=taken.metrics,
        settled=taken.settled,
    )


def assemble(
    rollouts: RolloutBatch, *, trainer: TrainerConfig, step: int, weight_version: int, **shape: Any
) -> TrainingInputBatch:
    """Trajectories to training rows, with the boundaries of the mini-batches in the metadata, less the loss of those
    that the filters leave out. `shape` is passed on (`batch/assembly.py: assemble`). Raises BatchError."""
    batch = assemble_rows(rollouts, trainer, global_step=step, weight_version=weight_version, **shape)
    algorithm = trainer.algorithm
    return mask_rows(with_reward_columns(batch, rollouts, algorithm), rollouts, algorithm)


def score(
    batch: TrainingInputBatch,
    learners: Learners,
    trainer: TrainerConfig,
    *,
    rollouts: RolloutBatch | None = None,
    with_entropies: bool = False,
) -> TrainingInputBatch:
    """Adds `old_logprobs` of the rows where they can matter, from `metadata.first_scored_row` on, and `ref_logprobs` and
    `values` where there is a reference and a critic. A policy that is its own teacher reads the teacher's prompts from the
    `rollouts` that the batch is made of. `with_entropies` adds `entropies`, of the forward that gives `old_logprobs` where
    there is one."""
    first = _first_scored_row(batch, trainer)
    rows, found = batch, batch
    if with_entropies:
        names = ("old_logprobs", "entropies") if first < batch.num_rows else ("", "entropies")
        found = _with_scores(found, rows, _scorer(learners.policy), names, "forward_with_entropy")
    elif first < batch.num_rows:
        later = rows.slice(first, rows.num_rows) if first else rows
        found = _with_scores(found, later, learners.policy, ("old_logprobs",))
    found = replace(found, metadata=replace(found.metadata, first_scored_row=first))
    if is_self_taught(trainer.algorithm) and rollouts is not None:
        found = found.with_columns(ref_logprobs=teacher_logprobs(rows, rollouts, learners.policy.forward))
    if "sum_pi_squared" in estimator_reads(trainer.algorithm).columns:
        found = _with_scores(found, rows, _scorer(learners.policy), ("sum_pi_squared",), "forward_sum_pi_squared")
    if learners.reference is not None:
        found = _with_scores(found, rows, learners.reference, ("ref_logprobs",))
    if learners.critic is not None:
        found = _with_scores(found, rows, learners.critic, ("values",))
    return found


def _with_scores(
    batch: TrainingInputBatch,
    rows: TrainingInputBatch,
    model: Scorer | Learner | ScoresDistributions,
    names: tuple[str, ...],
    method: ScoreMethod = "forward",
) -> TrainingInputBatch:
    """The batch with what `model` says of each token of `rows`, its last ones, under `names`; what has no name is not kept.
    Scores stay where they were computed where the columns of the rows are references, too."""
    if isinstance(rows.token_columns, ReferencedColumns) and isinstance(model, HoldsScores):
        return batch.with_layer(model.hold_scores(rows, names, method).behind(batch.num_rows - rows.num_rows))
    scores: Tensor = getattr(model, method)(rows)
    before = scores.new_zeros(batch.num_tokens - rows.num_tokens)
    columns = scores.T.contiguous() if len(names) > 1 else (scores,)
    return batch.with_columns(
        **{name: torch.cat([before, column]) if len(before) else column for name, column in zip(names, columns) if name}
    )


def _first_scored_row(batch: TrainingInputBatch, trainer: TrainerConfig) -> int:
    """From which row on the policy scores the batch; the number of rows where it scores none."""
    scored = old_logprobs_scored(trainer)
    if scored == "later":
        return _known(batch.metadata.policy_mini_batch_boundaries, "policy_mini_batch_boundaries")[0][1]
    return 0 if scored == "all" else batch.num_rows


def estimate(batch: TrainingInputBatch, algorithm: AlgorithmConfig, *, kl_coef: float, seed: int) -> TrainingInputBatch:
    """Adds `advantages` and `returns`, and how often each trajectory counts where they are resampled.

    `kl_coef` weighs the KL that is taken from the rewards; `seed` is the run's.
    """
    estimated = estimate_advantages(batch, algorithm, kl_reward_coef=kl_coef)
    return with_sample_counts(estimated, algorithm.filters, seed=seed)


def update(
    batch: TrainingInputBatch,
    learners: Learners,
    trainer: TrainerConfig,
    *,
    on_progress: Progress,
    entropy: EntropyControllerState | None = None,
    plane: DataPlane | None = None,
) -> Update:
    """Make all optimizer steps of one training batch; the critic's before the policy's, and without the policy's during
    the critic's warm-up. `entropy`: the state of the controller of the entropy bonus before them; None if it is the first.
    `plane`: where the rows' arrays are, if not here.

    Raises BatchError, before any of them, for a token that is older than `trainer.max_staleness` allows; NonFiniteError,
    naming the training step and the optimizer step: the update ends there.
    """
    (plane or DataPlane()).ask(check_staleness, batch)
    preparer = MiniBatchPreparer(learners.policy, trainer.algorithm, entropy)
    parts: list[StepMetrics] = []
    policy_parts: list[StepMetrics] = []
    if learners.critic is not None:
        boundaries = _known(batch.metadata.critic_mini_batch_boundaries, "critic_mini_batch_boundaries")
        parts = update_learner(learners.critic, batch, boundaries, trainer, name="critic", on_progress=on_progress)
    if learners.critic is None or batch.metadata.global_step > trainer.algorithm.critic_warmup_steps:
        boundaries = _known(batch.metadata.policy_mini_batch_boundaries, "policy_mini_batch_boundaries")
        policy_parts = update_learner(
            learners.policy, batch, boundaries, trainer, name="policy", on_progress=on_progress, preparer=preparer
        )
    return Update(
        metrics=merge_metrics([*parts, *policy_parts]),
        num_optimizer_steps=len(policy_parts),
        entropy=preparer.entropy,
    )


class MiniBatchPreparer:
    """What the policy's optimizer steps need of each other: columns over each mini-batch, the weight of the entropy."""

    def __init__(self, policy: Learner, algorithm: AlgorithmConfig, entropy: EntropyControllerState | None) -> None:
        self._policy, self._algorithm = policy, algorithm
        self.entropy = entropy or initial_entropy_state(self._algorithm)

    def prepare(self, mini_batch: MiniBatch) -> tuple[MiniBatch, StepMetrics]:
        """The closed mini-batch with the columns that its loss reads across rows, and what was found."""

        def score_now(what: Literal["logprobs", "entropy"], rows: TrainingInputBatch) -> Tensor:
            if what == "logprobs":
                return self._policy.forward(rows)
            return _scorer(self._policy).forward_with_entropy(rows)[:, 1]

        rows, metrics = with_step_columns(mini_batch.batch, self._algorithm, score_now)
        if self._algorithm.entropy_controller == "adaptive":
            weight = torch.full((rows.num_tokens,), self.entropy.applied, dtype=torch.float64)
            rows = rows.with_columns(entropy_coef=weight)
            metrics = {**metrics, "policy/entropy_coef": Mean(self.entropy.applied, 1.0)}
        return replace(mini_batch, batch=rows), metrics

    def observe(self, metrics: StepMetrics) -> None:
        """Moves the weight of the entropy after one optimizer step."""
        if self._algorithm.entropy_controller == "adaptive" and "policy/entropy" in metrics:
            found = metrics["policy/entropy"].value
            self.entropy = next_entropy_state(self.entropy, entropy=found, config=self._algorithm)


def update_learner(
    learner: Learner,
    batch: TrainingInputBatch,
    boundaries: Sequence[tuple[int, int]],
    trainer: TrainerConfig,
    *,
    name: str,
    on_progress: Progress,
    preparer: MiniBatchPreparer | None = None,
) -> list[StepMetrics]:
    """Close, accumulate, step: once for each mini-batch of each epoch. The metrics of each optimizer step.

    `preparer` completes each closed mini-batch with what its loss reads across rows, and sees what each step found.
    """
    algorithm, epochs = trainer.algorithm, trainer.update_epochs_per_batch
    total = epochs * len(boundaries)
    parts: list[StepMetrics] = []
    for epoch in range(epochs):
        closed = mini_batches(
            batch,
            boundaries,
            loss_reduction=algorithm.loss_reduction,
            max_sequence_length_for_norm=algorithm.max_sequence_length_for_norm,
            normalize_advantages=algorithm.normalize_advantages,
        )
        for number, mini_batch in enumerate(closed, start=1):
            try:
                ready, found = (mini_batch, {}) if preparer is None else preparer.prepare(mini_batch)
                parts.append(merge_metrics([found, learner.forward_backward(ready), learner.optim_step()]))
                if preparer is not None:
                    preparer.observe(parts[-1])
            except NonFiniteError as error:
                refused = NonFiniteError(
                    f"training step {batch.metadata.global_step}, {name}: optimizer step {len(parts) + 1} of {total} "
                    f"(epoch {epoch + 1}, mini-batch {number}) was refused: {error}"
                )
                refused.learner, refused.optimizer_steps = name, len(parts)
                raise refused from error
            on_progress(len(parts), total)
    return parts


def _scorer(policy: Learner) -> ScoresDistributions:
    if not isinstance(policy, ScoresDistributions):
        raise BatchError(
            f"{type(policy).__name__} does not score distributions (interfaces.ScoresDistributions), which"
            " trainer.algorithm needs. Choose another algorithm, or give it the two methods"
        )
    return policy


def sync(policy: Learner, transport: WeightTransport, *, version: int) -> None:
    """Gives the engine the policy's weights under `version`."""
    transport.sync(policy.weights(), version)


def _known(boundaries: tuple[tuple[int, int], ...] | None, name: str) -> tuple[tuple[int, int], ...]:
    if boundaries is None:
        raise BatchError(f"the batch has no {name}: rows were taken from it after it was assembled")
    return boundaries


def _joined(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    prompts = tuple(prompt for part in parts for prompt in part.prompts)
    trajectories = tuple(trajectory for part in parts for trajectory in part.trajectories)
    return replace(parts[0], prompts=prompts, trajectories=trajectories)
