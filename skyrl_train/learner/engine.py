"""What every learner shares: a model, its optimizer, and passes over micro-batches.

    closed mini-batch --rows with loss tokens--> micro-batches --forward, loss.backward()--> gradient (a sum)

Loss denominators were counted over the whole mini-batch and sit in `loss_weights`, so each micro-batch contributes a
sum and nothing here divides: how rows are split changes speed and memory, never the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.planner import MemoryAwareBatchIterator
from skyrl_train.batch.steps import learning_rate, schedule_position
from skyrl_train.config.models import OptimizerConfig
from skyrl_train.distributed import ModelStrategy, SingleProcess, by_mesh
from skyrl_train.errors import NonFiniteError, SkyrlTrainError
from skyrl_train.learner.memory.oom_retry import OomRetry
from skyrl_train.learner.offload import Offloader
from skyrl_train.learner.optimizer import (
    AdamWStep,
    allocate_state,
    build_optimizer,
    optimizer_tensors,
    step_from_host,
)
from skyrl_train.learner.passes import LossOfRows, Passes, ScoreRows
from skyrl_train.learner.profiling import Profiler
from skyrl_train.model import narrow_last_layer
from skyrl_train.model.layers import use_fast_products, use_fused_layers
from skyrl_train.model.lora import activate_adapter, adapter_tensors
from skyrl_train.telemetry import Last, Mean, StepMetrics, merge_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECLARED_METRICS = """
{policy,critic}/grad_norm | | Mean gradient norm before clipping. | | TRL `grad_norm`; verl `actor/grad_norm`,
    `critic/grad_norm`; SkyRL `policy/raw_grad_norm`
{policy,critic}/lr | | Last learning rate. | | TRL `learning_rate`; verl `actor/lr`, `critic/lr`; SkyRL
    `policy/policy_lr`
"""


class ModelEngine:
    """One model on one device. Without an `optimizer` it only scores."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        micro_batching: MemoryAwareBatchIterator,
        dtype: torch.dtype = torch.float32,
        optimizer: OptimizerConfig | None = None,
        state_in_host: bool = False,
        total_optimizer_steps: float = 0,
        total_documents: int = 0,
        strategy: ModelStrategy | None = None,
        adapter: str = "",
    ):
        """`strategy` says how the model is spread over ranks; alone in its process unless given. The layout of
        `micro_batching` must be exact for the model (`model/layouts.py`). `state_in_host`: the optimizer's state
        is on the device only while it steps. `adapter`: of several adapters of `model`, which engines share, the one
        that this engine trains and computes with."""
        self.strategy = strategy or SingleProcess()
        use_fast_products(model)
        use_fused_layers(model)
        narrow_last_layer(model)
        # Ahead of everything that holds parameters: sharding puts others in their place.
        self.strategy.prepare(model)
        self.model = model
        self.name = name
        """Prefix of the metrics, and the role in error messages."""
        self.num_optimizer_steps = 0
        self.num_documents = 0
        """Trajectories that its optimizer steps consumed; they drive the schedule where `total_documents` is not 0."""
        self._pending_documents = 0
        self._total_optimizer_steps = total_optimizer_steps
        """Length of the schedule; where documents drive it, `total_documents` in units of a step's target."""
        self._total_documents = total_documents
        self.optimizer_config = optimizer
        self.state_in_host = state_in_host
        self.adapter = adapter
        self.parameters: dict[str, nn.Parameter] = (
            adapter_tensors(model, adapter)
            if adapter
            else {n: p for n, p in model.named_parameters() if p.requires_grad}
        )
        """What is trained, or was before it was frozen to be scored: all of it, or the adapter."""
        self._optimizer: torch.optim.Optimizer | None = None
        if optimizer is None:
            for parameter in self.parameters.values():
                parameter.requires_grad_(False)
        else:
            self._optimizer = build_optimizer(self.parameters, optimizer)
        self.profiler: Profiler | None = None
        """Told of each optimizer step, where steps are profiled."""
        self._has_gradient = False
        self.non_finite_loss = ""
        """The first loss since the last step that is not finite, and where; empty where there is none."""
        passes = Passes(
            model=model,
            strategy=self.strategy,
            name=name,
            dtype=dtype,
            micro_batching=micro_batching,
        )
        self.oom_retry = OomRetry(passes, drop_gradients=self._drop_gradients)
        self.offloader = Offloader(
            model,
            name=name,
            device=self.passes.device,
            held=self.held_tensors,
            optimizer=self._state_on_device,
        )

    @property
    def passes(self) -> Passes:
        """The passes as they are cut and counted now."""
        return self.oom_retry.passes

    @contextmanager
    def traced(
        self, parameters: dict[str, nn.Parameter], without_memory: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """While it is open, the engine is alone in its process and has these parameters, and its passes are traced inside
        of `without_memory`, which reads nothing back (`learner/memory/trace.py`)."""
        kept = self.passes, self.strategy, self.parameters
        try:
            self.parameters, self.strategy = parameters, SingleProcess()
            self.oom_retry.use(strategy=self.strategy, without_memory=without_memory)
            yield
        finally:
            self.oom_retry.passes, self.strategy, self.parameters = kept

    def allocate_state(self) -> None:
        """Makes the optimizer's state now rather than in the first step, where there is one and the device will keep it."""
        if self._optimizer is not None and not self.state_in_host:
            allocate_state(self._optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Raises SkyrlTrainError for a model that is only scored."""
        if self._optimizer is None:
            raise SkyrlTrainError(f"the {self.name} model is only scored; it has no optimizer")
        return self._optimizer

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the device has between passes: parameters, buffers, gradients, optimizer state."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.strategy.whole_gradients(self.model)
        yield from self._state_on_device()

    def _state_on_device(self) -> Iterable[Tensor]:
        if self._optimizer is None or self.state_in_host:
            return ()
        return optimizer_tensors(self._optimizer, self.parameters).values()

    def forward(self, batch: TrainingInputBatch, score: ScoreRows, *, numbers: tuple[int, ...] = ()) -> Tensor:
        """`[num_tokens, *numbers]` on the CPU: `score` of every row that has loss tokens, 0 elsewhere."""
        self._activate()
        score_planned = partial(self.passes.score, batch=batch, score=score, numbers=numbers)
        if self.passes.meter is None:
            return score_planned(self.passes.plan(batch, training=False))
        return self.oom_retry.run(batch, score_planned, training=False)

    def forward_backward(
        self, batch: TrainingInputBatch, loss_of: LossOfRows, *, num_documents: int = 0
    ) -> StepMetrics:
        """Adds the gradient of the sum of `loss_of` over micro-batches. Metrics are merged over them.

        `num_documents`: trajectories of the whole mini-batch, of which `batch` may be one rank's share.
        """
        self._activate()
        if self.profiler is not None:
            self.profiler.begin(batch.metadata.global_step)
        # `optimizer` refuses a model that is only scored, before a gradient takes its memory.
        step = self.num_optimizer_steps if self.optimizer else 0
        # Ahead of the pass: one that fails half way has added to the
        # gradient, too, and no checkpoint may be written beside it.
        self._has_gradient = True
        accumulate = partial(self.passes.accumulate, loss_of=loss_of, step=step)
        if self.passes.meter is None:
            metrics, non_finite = accumulate(self.passes.plan(batch, training=True))
        else:  # what runs out of memory is planned and computed anew
            metrics, non_finite = self.oom_retry.run(batch, accumulate, training=True)
        self._pending_documents += num_documents
        self.non_finite_loss = self.non_finite_loss or non_finite
        return merge_metrics([metrics, self.oom_retry.metrics()])

    @property
    def has_gradient(self) -> bool:
        """Whether passes have added to the gradient since the last step."""
        return self._has_gradient

    def note_gradient(self) -> None:
        """Tell that a pass of several adapters has added to the gradient of this one."""
        self._has_gradient = True

    def _activate(self) -> None:
        self.offloader.require(optimizer=False)
        if self.adapter:
            activate_adapter(self.model, self.adapter)

    def optim_step(self, settings: AdamWStep | None = None) -> StepMetrics:
        """Clips, steps, zeroes the gradients, advances the schedule; with `settings`, as they say and without the schedule.

        Raises NonFiniteError where the loss or a gradient is not finite. No weight has moved then, and the gradients
        are gone, so that the caller may go on with another mini-batch.
        """
        optimizer, config = self.optimizer, self.optimizer_config or OptimizerConfig()
        self.offloader.require(optimizer=True)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # A mini-batch of padding alone is a step with gradient 0, as it is on a rank that computed dummy rows.
                parameter.grad = torch.zeros_like(parameter)
        # Sums over ranks first: norm, clipping and the check for NaN are of the gradient that moves the weights.
        self.strategy.reduce_gradients(self.parameters.values())
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        grad_norm = self.strategy.total_norm(gradients)
        # Ahead of the optimizer, whose averages would keep a NaN for the rest of the run.
        self._require_finite(float(grad_norm))
        max_grad_norm = config.max_grad_norm if settings is None else settings.max_grad_norm
        if max_grad_norm > 0:
            # By the norm of all gradients together; only the kernels that scale them want one mesh at a time.
            for alike in by_mesh(self.parameters.values()):
                torch.nn.utils.clip_grads_with_norm_(alike, max_grad_norm, grad_norm)
        position = schedule_position(
            optimizer_steps=self.num_optimizer_steps,
            documents=self.num_documents,
            total_optimizer_steps=self._total_optimizer_steps,
            total_documents=self._total_documents,
        )
        rate = learning_rate(position, config, self._total_optimizer_steps) if settings is None else settings.lr
        for group in optimizer.param_groups:
            group["lr"] = rate
        if settings is not None:
            settings.apply(optimizer)
        if self.state_in_host:
            step_from_host(optimizer)
        else:
            optimizer.step()
        self.num_optimizer_steps += 1
        self.num_documents += self._pending_documents
        self.zero_grad()
        if self.profiler is not None:
            self.profiler.end()
        return {f"{self.name}/grad_norm": Mean(float(grad_norm), 1.0), f"{self.name}/lr": Last(rate)}

    def zero_grad(self) -> None:
        """Drop gradients, documents and refusals that were accumulated since the last optimizer step."""
        self._drop_gradients()
        self._has_gradient = False
        self.non_finite_loss = ""
        self._pending_documents = 0

    def _drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _require_finite(self, grad_norm: float) -> None:
        """Raises NonFiniteError, with the gradients zeroed, naming the loss or the first parameters concerned."""
        # All ranks refuse a step together: one that did it alone would leave the others in the next collective.
        reason = self.strategy.first_reason(self.non_finite_loss)
        # `<`, since no comparison with a NaN is true.
        if grad_norm < float("inf") and not reason:
            return
        if not reason:
            gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
            # A collective for each sharded gradient: all ranks go through the same parameters in the same order.
            full = self.strategy.full
            bad = [name for name, grad in gradients.items() if grad is not None and not full(grad).isfinite().all()]
            reason = f"gradient norm {grad_norm}"
            if bad:
                reason += f"; not finite in {len(bad)} of {len(self.parameters)} parameters, first {bad[0]}"
        self.zero_grad()
        raise NonFiniteError(
            f"{self.name}, optimizer step {self.num_optimizer_steps}: {reason}. No weight was changed. "
            "A smaller trainer.policy.optimizer.lr or max_grad_norm may help; so may model.dtype=float32"
        )
