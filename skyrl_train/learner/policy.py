"""The policy, and the reference it is held near: token log-probabilities, and the policy's loss.

loss = sum over tokens of loss_weight * (policy_loss + kl_loss_coef * KL(policy || reference) - entropy_coef * entropy)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.algorithms import missing_step_column
from skyrl_train.algorithms.losses import (
    PolicyLossInputs,
    is_tokenwise,
    policy_loss,
    token_kl,
    unbiased_kl,
    with_proximal,
)
from skyrl_train.batch import ROUTED, TrainingInputBatch
from skyrl_train.batch.layouts import Layout
from skyrl_train.batch.steps import Ages, LossDenominators, MiniBatch, ages_in
from skyrl_train.config.algorithm import AlgorithmConfig, loss_reads
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import BatchError, ModelError
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.holds_model import HoldsModel
from skyrl_train.learner.optimizer import AdamWStep
from skyrl_train.learner.policy_metrics import ledger_metrics, rollout_difference
from skyrl_train.learner.state import take_weights
from skyrl_train.model import output_head
from skyrl_train.model.files import export_model
from skyrl_train.model.layers import LossOfTokens, OfDistribution, TokenScores, score_tokens, sum_of_squares
from skyrl_train.model.lora import adapter_off, adapter_tensors
from skyrl_train.parts import POLICY_LOSSES
from skyrl_train.telemetry import Mean, StepMetrics, later

DECLARED_METRICS = """
loss/{total,policy,kl,entropy} | | Loss and its parts without coefficients: means over optimizer steps. | reinforcement
    learning, parts in use | TRL `loss`; verl `actor/pg_loss`, `actor/kl_loss`; SkyRL `policy/final_loss`,
    `policy/policy_loss`
policy/entropy | nats | Mean entropy of trained tokens' distributions. | | TRL `entropy`; verl `actor/entropy`; SkyRL
    `policy/policy_entropy`
"""


class PolicyLearner(HoldsModel):
    """A `Learner` for the policy, or for a reference where the engine has no optimizer."""

    def __init__(
        self,
        engine: ModelEngine,
        *,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        on_policy: bool = False,
    ):
        """`on_policy`: `old_logprobs` may be missing, since the policy that is differentiated is the old one."""
        super().__init__(engine)
        self._model_config = model
        self._algorithm = algorithm
        POLICY_LOSSES.resolve(algorithm.policy_loss)  # refused before any rollout
        self._on_policy = on_policy
        self._temperature = temperature if temperature > 0 else 1.0
        """Rollouts are sampled from softmax(logits / temperature), so that is the policy whose probabilities count;
        greedy sampling has no such distribution and is scored at 1."""

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]` on the CPU: log-probability of each token with `loss_mask`, 0 elsewhere."""
        return self.engine.forward(
            batch, lambda hidden, rows, layout: self._scores(hidden, rows, layout, with_entropy=False).logprobs
        )

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]` on the CPU: sum over the vocabulary of squared probabilities where `forward` has one's log."""
        return self.engine.forward(
            batch,
            lambda hidden, rows, layout: (
                self._scores(hidden, rows, layout, with_entropy=False, of_distribution=sum_of_squares).logprobs
            ),
        )

    def forward_distributions(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens, vocabulary]` on the CPU: where `forward` has a token's log-probability, those of all tokens that
        might stand in its place."""
        return self.engine.forward(
            batch,
            lambda hidden, rows, layout: (
                self._scores(hidden, rows, layout, with_entropy=False, of_distribution=lambda log_p: log_p).logprobs
            ),
            numbers=(output_head(self.engine.model).weight.shape[0],),
        )

    def forward_with_entropy(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens, 2]` on the CPU: what `forward` gives, and the entropy (nats) of the distribution that a token with
        `loss_mask` was drawn from."""

        def score(hidden: Tensor, rows: TrainingInputBatch, layout: Layout) -> Tensor:
            scores = self._scores(hidden, rows, layout, with_entropy=True)
            return torch.stack((scores.logprobs, scores.entropy), dim=-1)

        return self.engine.forward(batch, score, numbers=(2,))

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        """Return scores as `forward` does, with the adapter off: by the model that training started from, which sends tokens
        to the experts that it would."""
        with adapter_off(self.engine.model):
            return self.forward(batch.without_columns(ROUTED))

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Adds the gradient of the mini-batch's loss. Raises BatchError for a missing column that the loss needs."""
        _require_columns(mini_batch.batch, self._algorithm, on_policy=self._on_policy)
        # Found before the rows are moved: reading them back of a device would make the host wait.
        ages = ages_in(mini_batch.batch)
        return self.engine.forward_backward(
            mini_batch.batch,
            lambda hidden, rows, layout: self._loss(hidden, rows, layout, mini_batch.denominators, ages),
            num_documents=mini_batch.denominators.num_sequences,
        )

    def optim_step(self, settings: AdamWStep | None = None) -> StepMetrics:
        """Clips, steps, zeroes the gradients, advances the schedule, or does as `settings` say. Raises NonFiniteError before
        any weight moves."""
        return self.engine.optim_step(settings)

    def export_hf(self, folder: Path) -> None:
        """Model, generation config and tokenizer for `from_pretrained`, an adapter merged, and by itself in `adapter/`.
        Raises ModelError."""
        tensors = self.whole_state_dict()
        full = self.engine.strategy.full
        adapter = {name: full(tensor.detach()) for name, tensor in adapter_tensors(self.engine.model).items()}
        if not self.engine.strategy.rank:
            export_model(folder, self.engine.model, tensors, self._model_config, adapter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all parameters, of which every rank is given the whole. Raises ModelError where they do not fit."""
        count = take_weights(self.engine.model, self.engine.parameters, weights, role=self.engine.name)
        if count != len(self.engine.parameters):
            raise ModelError(
                f"the {self.engine.name} model has {len(self.engine.parameters)} parameters and got {count}"
            )

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """The type that forwards are cast to; None where they have that of the parameters."""
        return None if self.engine.passes.dtype == torch.float32 else self.engine.passes.dtype

    def _scores(
        self,
        hidden: Tensor,
        rows: TrainingInputBatch,
        layout: Layout,
        *,
        with_entropy: bool,
        loss_of_tokens: LossOfTokens | None = None,
        of_distribution: OfDistribution | None = None,
    ) -> TokenScores:
        return score_tokens(
            hidden,
            rows,
            layout,
            output_head(self.engine.model),
            temperature=self._temperature,
            with_entropy=with_entropy,
            compute_dtype=self._compute_dtype,
            loss_of_tokens=loss_of_tokens,
            of_distribution=of_distribution,
        )

    def _loss(
        self,
        hidden: Tensor,
        rows: TrainingInputBatch,
        layout: Layout,
        denominators: LossDenominators,
        ages: Ages,
    ) -> tuple[Tensor, StepMetrics]:
        """The rows' share of the step's loss, and its metrics; `ages` are those of the step's trained tokens.

        `loss/*` are means whose weight is the rows' share of the step's tokens: they add up to the step's loss over
        micro-batches and ranks, and average over optimizer steps.
        """

        def loss_of_tokens(places: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
            # The same terms as below, of the tokens of one tile as one
            # row: the head forms their gradient while it has their logits.
            columns = {name: column[places].unsqueeze(0) for name, column in rows.token_columns.items()}
            return self._terms(columns, logprobs.unsqueeze(0), entropy.unsqueeze(0)).total

        scores = self._scores(
            hidden,
            rows,
            layout,
            with_entropy=True,
            loss_of_tokens=loss_of_tokens if is_tokenwise(self._algorithm) else None,
        )
        terms = self._terms({name: rows.padded(name) for name in rows.token_columns}, scores.logprobs, scores.entropy)
        num_tokens = layout.scored.num_loss_tokens if layout.scored is not None else int(rows["loss_mask"].sum())
        share = num_tokens / max(1, denominators.num_tokens)
        metrics: StepMetrics = {
            **{f"loss/{name}": Mean(later(term), share) for name, term in terms.parts.items()},
            "loss/total": Mean(later(terms.total), share),
            "policy/entropy": Mean(later(scores.entropy.sum()), float(num_tokens)),
            **rollout_difference(terms.inputs),
            **ledger_metrics(terms.inputs, rows, self._algorithm, ages),
            **terms.metrics,
        }
        return terms.total, metrics

    def _terms(self, columns: Mapping[str, Tensor], logprobs: Tensor, entropy: Tensor) -> _Terms:
        """The loss of `[rows, len]` tokens and its parts, from their columns of the same shape."""
        algorithm, mask, weights = self._algorithm, columns["loss_mask"], columns["loss_weights"]
        inputs = PolicyLossInputs(
            logprobs=logprobs,
            old_logprobs=column_or_default(columns, "old_logprobs", logprobs),
            advantages=column_or_default(columns, "advantages", torch.zeros_like(logprobs)),
            loss_mask=mask,
            rollout_logprobs=_optional(columns, "rollout_logprobs", logprobs),
            ref_logprobs=_optional(columns, "ref_logprobs", logprobs),
            values=_optional(columns, "values", logprobs),
            compute_dtype=self._compute_dtype,
            sequence_log_ratio=columns.get("sequence_log_ratio"),
            policy_weights=columns.get("policy_weights"),
        )
        output = policy_loss(inputs, algorithm)
        parts = {"policy": (weights * output.token_losses).sum()}
        total = parts["policy"]
        if algorithm.kl_loss_coef:
            token_kls = token_kl(
                algorithm.kl_estimator, logprobs, columns["ref_logprobs"], mask, compute_dtype=self._compute_dtype
            )
            if algorithm.kl_bias_correction:
                # Tokens are of an older policy: an estimate over them is one
                # of another KL until it is weighed by how likely they are now.
                proximal = with_proximal(inputs, algorithm).old_logprobs
                token_kls = unbiased_kl(token_kls, logprobs, proximal, mask)
            parts["kl"] = (weights * token_kls).sum()
            total = total + algorithm.kl_loss_coef * parts["kl"]
        # A coefficient that is adapted changes from step to step: it comes as a column, and not from the configuration.
        if "entropy_coef" in columns:
            parts["entropy"] = (weights * entropy).sum()
            total = total - (weights * columns["entropy_coef"] * entropy).sum()
        elif algorithm.entropy_coef:
            parts["entropy"] = (weights * entropy).sum()
            total = total - algorithm.entropy_coef * parts["entropy"]
        return _Terms(total=total, parts=parts, inputs=inputs, metrics=output.metrics)


@dataclass(frozen=True, kw_only=True)
class _Terms:
    total: Tensor
    parts: dict[str, Tensor]
    """`policy`, and `kl` and `entropy` where they are in use: weighted sums over tokens, without their coefficients."""
    inputs: PolicyLossInputs
    metrics: StepMetrics


def column_or_default(columns: Mapping[str, Tensor], name: str, default: Tensor) -> Tensor:
    """Return the column in the type of `default`, which stands in for a column that is not there: one that the loss
    does not read, or the old log-probabilities of an update that is on-policy by construction."""
    return columns[name].to(default.dtype) if name in columns else default.detach()


def _optional(columns: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor | None:
    return columns[name].to(like.dtype) if name in columns else None


def _require_columns(batch: TrainingInputBatch, algorithm: AlgorithmConfig, *, on_policy: bool) -> None:
    names = {"loss_weights"} | loss_reads(algorithm).columns
    if on_policy:
        # The policy that is differentiated is the old one then, and its own log-probabilities stand in.
        names -= {"old_logprobs"}
    if algorithm.proximal == "behaviour":
        names |= {"rollout_logprobs"}
    if algorithm.kl_loss_coef > 0:
        names |= {"ref_logprobs"}
    for name in sorted(names):
        if name not in batch:
            raise BatchError(f"the mini-batch has no column {name!r}, which the policy's loss needs")
    missing = missing_step_column(batch, algorithm)
    if missing:
        raise BatchError(
            f"the mini-batch has no column {missing!r}, and its loss reads other rows than those it is given: complete it "
            "with step_columns.with_step_columns before it is split"
        )
