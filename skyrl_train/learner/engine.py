"""What every learner shares: a model, its optimizer, and passes over micro-batches.

    closed mini-batch --rows with loss tokens--> micro-batches --forward, loss.backward()--> gradient (a sum)

Loss denominators were counted over the whole mini-batch and sit in `loss_weights`, so each micro-batch contributes a
sum and nothing here divides: how rows are split changes speed and memory, never the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from skyrl_train.batch.layout import Layout, make_layout
from skyrl_train.batch.merge import merge_counts
from skyrl_train.batch.microbatch import MicroBatchStrategy, layout_of, micro_batches
from skyrl_train.batch.schedule import learning_rate, schedule_position
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.rules import LayoutChoice
from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.distributed.strategy import ModelStrategy, SingleProcess
from skyrl_train.errors import BatchError, CheckpointError, NonFiniteError, SkyrlTrainError
from skyrl_train.learner import state
from skyrl_train.learner.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from skyrl_train.model.layouts import hidden_states
from skyrl_train.model.lora import forget_dropout_keys, has_adapter, merged_weights, set_dropout_keys
from skyrl_train.telemetry.metrics import Last, Mean, Metric, StepMetrics, Sum, merge_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
ScoreRows = Callable[[Tensor, TrainingInputBatch, Layout], Tensor]
"""`(hidden [positions, hidden], rows, layout) -> [rows, len]`."""
LossOfRows = Callable[[Tensor, TrainingInputBatch, Layout], tuple[Tensor, StepMetrics]]
"""`(hidden [positions, hidden], rows, layout) -> (sum of weighted token losses, metrics)`."""


class ModelEngine:
    """One model on one device. Without an `optimizer` it only scores."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        micro_batching: MicroBatchStrategy,
        dtype: torch.dtype = torch.float32,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
        total_documents: int = 0,
        strategy: ModelStrategy | None = None,
        layout: LayoutChoice = "padded",
        merge_turns: bool = False,
    ):
        """`strategy` says how the model is spread over ranks; alone in its process unless given. `layout` must be exact
        for the model (`model/layouts.py`); with `merge_turns`, turns that extend one another are computed together."""
        self.strategy = strategy or SingleProcess()
        self.strategy.prepare(model)
        self.model = model
        self.name = name
        """Prefix of the metrics, and the role in error messages."""
        self.dtype = dtype
        self.num_optimizer_steps = 0
        self.num_documents = 0
        """Trajectories that its optimizer steps consumed; they drive the schedule where `total_documents` is not 0."""
        self._pending_documents = 0
        self._micro_batching = micro_batching
        self._layout = layout
        self._merge_turns = merge_turns
        self._total_optimizer_steps = total_optimizer_steps
        self._total_documents = total_documents
        self._config = optimizer
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        """What is trained, or was before it was frozen to be scored: all of it, or the adapter."""
        self._optimizer: torch.optim.Optimizer | None = None
        if optimizer is None:
            for parameter in self.parameters.values():
                parameter.requires_grad_(False)
        else:
            self._optimizer = build_optimizer(self.parameters, optimizer)
        self._has_gradient = False
        self._non_finite_loss = ""

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def layout(self) -> LayoutChoice:
        """As it was given: exact for the model."""
        return self._layout

    @torch.no_grad()
    def forward(self, batch: TrainingInputBatch, score: ScoreRows) -> Tensor:
        """`[num_tokens]` on the CPU: `score` of every row that has loss tokens, 0 elsewhere."""
        scores = torch.zeros(batch.num_tokens, dtype=_score_dtype(self.parameters))
        for micro_batch, rows, layout in self._micro_batches(batch, training=False):
            with self._autocast():
                padded = self._compute(score, micro_batch, layout)
            if len(rows) == 0:
                continue
            scores[_token_indices(batch, rows)] = micro_batch.from_padded(padded).to("cpu", scores.dtype)
        return scores

    def forward_backward(
        self, batch: TrainingInputBatch, loss_of: LossOfRows, *, num_documents: int = 0
    ) -> StepMetrics:
        """Adds the gradient of the sum of `loss_of` over micro-batches. Metrics are merged over them.

        `num_documents`: trajectories of the whole mini-batch, of which `batch` may be one rank's share.
        """
        if self._optimizer is None:
            raise SkyrlTrainError(f"the {self.name} model is only scored; it has no optimizer")
        parts: list[StepMetrics] = []
        self._has_gradient = True
        self._pending_documents += num_documents
        for micro_batch, _, layout in self._micro_batches(batch, training=True):
            set_dropout_keys(self.model, micro_batch, layout, step=self.num_optimizer_steps)
            with self._autocast():
                loss, metrics = self._compute(loss_of, micro_batch, layout)
            loss.backward()  # type: ignore[no-untyped-call]
            forget_dropout_keys(self.model)
            if not self._non_finite_loss and not bool(torch.isfinite(loss.detach())):
                self._non_finite_loss = (
                    f"loss {float(loss.detach())} in the micro-batch of {micro_batch.metadata.uids[0]!r}"
                )
            parts += [metrics, self._layout_metrics(micro_batch, layout)]
        return merge_metrics(parts)

    def optim_step(self) -> StepMetrics:
        """Clips, steps, zeroes the gradients, advances the schedule.

        Raises NonFiniteError where the loss or a gradient is not finite. No weight has moved then, and the gradients
        are gone, so that the caller may go on with another mini-batch.
        """
        if self._optimizer is None or self._config is None:
            raise SkyrlTrainError(f"the {self.name} model is only scored; it has no optimizer")
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # A mini-batch of padding alone is a step with gradient 0, as it is on a rank that computed dummy rows.
                parameter.grad = torch.zeros_like(parameter)
        self.strategy.reduce_gradients(self.parameters.values())
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        grad_norm = self.strategy.total_norm(gradients)
        self._require_finite(float(grad_norm))
        if self._config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._config.max_grad_norm, grad_norm)
        position = schedule_position(
            optimizer_steps=self.num_optimizer_steps,
            documents=self.num_documents,
            total_optimizer_steps=self._total_optimizer_steps,
            total_documents=self._total_documents,
        )
        rate = learning_rate(position, self._config, self._total_optimizer_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.num_optimizer_steps += 1
        self.num_documents += self._pending_documents
        self.zero_grad()
        return {f"{self.name}/grad_norm": Mean(float(grad_norm), 1.0), f"{self.name}/lr": Last(rate)}

    def zero_grad(self) -> None:
        """Forgets what was accumulated."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._has_gradient = False
        self._non_finite_loss = ""
        self._pending_documents = 0

    def save(self, folder: Path) -> None:
        """The files of `learner/state.py`; exact. Raises CheckpointError where a gradient is pending."""
        if self._has_gradient:
            raise CheckpointError(
                f"{folder}: save between optimizer steps; the {self.name} model has a pending gradient"
            )
        if self.strategy.rank and not self.strategy.sharded:
            return
        state.write(
            folder,
            role=self.name,
            model=self._tensors(),
            optimizer=None if self._optimizer is None else optimizer_tensors(self._optimizer, self.parameters),
            steps=self.num_optimizer_steps,
            documents=self.num_documents,
            sharded=self.strategy.sharded,
            rank=self.strategy.rank,
        )

    def load(self, folder: Path) -> None:
        """Inverse of `save`. Raises CheckpointError, before anything changes, where names, shapes or types differ."""
        stored = state.read(folder, role=self.name, model=self._tensors(), with_optimizer=self._optimizer is not None)
        if self._optimizer is not None:
            load_optimizer_tensors(self._optimizer, self.parameters, stored.optimizer)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(stored.model[name])
        self.num_optimizer_steps, self.num_documents = stored.num_optimizer_steps, stored.num_documents
        self.zero_grad()

    def whole_state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers, on the CPU of rank 0; nothing on the others. Called by all.

        An adapter is part of what it adapts.
        """
        full = self.strategy.full
        named = ((name, full(tensor.detach())) for name, tensor in self.model.state_dict().items())
        whole: dict[str, Tensor] = {}
        for name, tensor in merged_weights(self.model, full) if has_adapter(self.model) else named:
            if self.strategy.rank == 0:
                whole[name] = tensor.to("cpu")
        return whole

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters, tied ones once, and what else the model keeps (persistent buffers)."""
        persistent = self.model.state_dict().keys()
        buffers = {name: value for name, value in self.model.named_buffers() if name in persistent}
        return {**self.parameters, **buffers}

    def _micro_batches(
        self, batch: TrainingInputBatch, *, training: bool
    ) -> Iterator[tuple[TrainingInputBatch, Tensor, Layout]]:
        """Micro-batches on the device, their row numbers in `batch` and layouts: only rows that have loss tokens."""
        _require_vocabulary(batch, self.model.config.get_text_config().vocab_size)
        rows = rows_with_loss(batch)
        kept = batch.take(rows)
        name = layout_of(kept, self._micro_batching, self._layout, training=training)
        for micro_batch in micro_batches(kept, self._micro_batching, training=training, agree=self.strategy.agree):
            own = micro_batch.batch
            layout = make_layout(own, name, merge=self._merge_turns, group=self.strategy.group)
            yield own.to(self.device), rows[micro_batch.rows], layout.to(self.device)

    def _compute(
        self, function: Callable[[Tensor, TrainingInputBatch, Layout], T], rows: TrainingInputBatch, layout: Layout
    ) -> T:
        """`function` of the layout's last hidden states, under the strategy."""
        return self.strategy.compute(self.model, lambda: function(hidden_states(self.model, layout), rows, layout))

    def _layout_metrics(self, rows: TrainingInputBatch, layout: Layout) -> StepMetrics:
        """Positions computed for how many tokens, the number of forwards, and what became of turns."""
        prefix = f"layout/{self.name}"
        metrics: dict[str, Metric] = {
            f"{prefix}_positions": Sum(float(layout.num_positions)),
            f"{prefix}_tokens": Sum(float(rows.num_tokens)),
            f"{prefix}_forwards_{layout.name}": Sum(1.0),
        }
        if self._merge_turns:
            merged, apart = merge_counts(rows)
            metrics |= {f"{prefix}_turns_merged": Sum(float(merged)), f"{prefix}_turns_apart": Sum(float(apart))}
        return metrics

    def _is_finite(self, gradient: Tensor) -> bool:
        return bool(self.strategy.full(gradient).isfinite().all())

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _require_finite(self, grad_norm: float) -> None:
        """Raises NonFiniteError, with the gradients zeroed, naming the loss or the first parameters concerned."""
        reason = self.strategy.first_reason(self._non_finite_loss)
        if grad_norm < float("inf") and not reason:
            return
        if not reason:
            bad = [n for n, p in self.parameters.items() if p.grad is not None and not self._is_finite(p.grad)]
            reason = f"gradient norm {grad_norm}"
            if bad:
                reason += f"; not finite in {len(bad)} of {len(self.parameters)} parameters, first {bad[0]}"
        self.zero_grad()
        raise NonFiniteError(
            f"{self.name}, optimizer step {self.num_optimizer_steps}: {reason}. No weight was changed. "
            "A smaller trainer.policy.optimizer.lr or max_grad_norm may help; so may model.dtype=float32"
        )


def _require_vocabulary(batch: TrainingInputBatch, vocabulary: int) -> None:
    """Raises BatchError for a token id that the model has no embedding for."""
    ids = batch["input_ids"]
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        token = int(outside.nonzero()[0])
        row = int(torch.searchsorted(batch.row_offsets, token, right=True)) - 1
        raise BatchError(
            f"token id {int(ids[token])} in a row of {batch.metadata.uids[row]!r}, but the model's vocabulary has "
            f"{vocabulary} entries. Were these rollouts made with another tokenizer?"
        )


def _score_dtype(parameters: dict[str, nn.Parameter]) -> torch.dtype:
    return torch.float64 if next(iter(parameters.values())).dtype == torch.float64 else torch.float32


def rows_with_loss(batch: TrainingInputBatch) -> Tensor:
    """Indices of rows that are not padding and have at least one loss token."""
    counts = torch.zeros(batch.num_tokens + 1, dtype=torch.int64)
    torch.cumsum(batch["loss_mask"], dim=0, out=counts[1:])
    per_row = counts[batch.row_offsets[1:]] - counts[batch.row_offsets[:-1]]
    return ((per_row > 0) & ~batch["is_padding"]).nonzero().squeeze(1)


def _token_indices(batch: TrainingInputBatch, rows: Tensor) -> Tensor:
    """Positions in the flat columns of `batch` of the tokens of `rows`, row after row."""
    lengths = batch.lengths[rows]
    starts = batch.row_offsets[:-1][rows]
    before = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)
