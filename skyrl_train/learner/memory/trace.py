"""Memory of the learner's real step, from torch's own graph of it and without running it.

The learner's own `forward_backward` and `forward` go through model, layout, loss and backward pass as they do in
training, but on tensors that have shapes and no memory (FakeTensorMode): torch dispatches every operation and autograd
saves what it saves, while nothing is computed or allocated. `CountingMeter` adds up what would have been there.

    parameters, buffers --stand-ins of the same shapes--> the learner's own pass --meter--> what it adds, by section

Of a sharded model the pass is traced as if its parameters were whole, in the type in which they are gathered; what ranks
gather and sum on the way comes on top, counted (`share.py`). Of the tiles of logits, which all take the same, a few are
formed.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.learner.memory.fit import IN_BACKWARD, IN_EMBEDDING, IN_HEAD, IN_LAYER, PassPeaks
from skyrl_train.learner.memory.meter import CountingMeter
from skyrl_train.learner.memory.share import DeviceShare
from skyrl_train.model import decoder_layers
from skyrl_train.model.parallel import expert_modules, tiles_for_trace
from skyrl_train.model.sizes import ParameterCounts

if TYPE_CHECKING:
    from skyrl_train.learner.memory.oom_retry import SizedEngine

_UNLIMITED_BYTES = 1 << 62


def count_parameters(engine: SizedEngine) -> ParameterCounts:
    """Count the parameters of a model that may be sharded, or on the meta device."""
    blocks = [sum(each.numel() for each in layer.parameters()) for layer in decoder_layers(engine.model)] or [0]
    total = sum(each.numel() for each in engine.model.parameters())
    trained = sum(each.numel() for each in engine.parameters.values())
    experts = [
        [each for module in expert_modules(layer).values() for each in module.parameters()]
        for layer in decoder_layers(engine.model)
    ]
    return ParameterCounts(
        total=total,
        trained=trained,
        block=max(blocks),
        root=total - sum(blocks),
        block_experts=max((sum(each.numel() for each in layer) for layer in experts), default=0),
        experts=sum(each.numel() for layer in experts for each in layer),
        trained_experts=sum(each.numel() for layer in experts for each in layer if each.requires_grad),
    )


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Traces passes of one model on this rank. Talks to no other rank."""

    engine: SizedEngine
    held_bytes: int = 0
    """What lies on the device between passes: parameters, optimizer state, other models of the process."""
    device_type: str = ""
    """The type of device for which tiles of logits are formed; empty is the engine's own."""
    remedy: str = "Set trainer.memory_probe=measure"
    """What to do where the step cannot be traced."""

    def run(self, run_pass: Callable[[], object], *, training: bool) -> PassPeaks:
        """Return what `run_pass` would add, which calls the learner's `forward_backward` (`training`) or `forward`.

        Raises ModelError where the model or the loss does not run on tensors without memory.
        """
        engine, meter = self.engine, CountingMeter(_UNLIMITED_BYTES)
        try:
            with _without_memory(engine) as stand_ins, tiles_for_trace(self.device_type or engine.passes.device.type):
                engine.oom_retry.begin_probing(meter, resident=lambda: ())
                if training:
                    engine.strategy.hold_gradients(engine.model, engine.parameters.values())
                # Ahead of the sections, which count what is added to these.
                meter.adopt(stand_ins)
                meter.adopt(each.grad for each in engine.parameters.values() if each.grad is not None)
                with _sections(engine, meter) as sections:
                    run_pass()
                if training:
                    engine.zero_grad()
        except SkyrlTrainError:
            raise
        except Exception as error:
            raise ModelError(
                f"{engine.name}: its step cannot be traced, since it does not run on tensors without memory "
                f"({type(error).__name__}: {error}). {self.remedy}"
            ) from error
        return PassPeaks(sections=sections.peaks, kept=sections.kept)

    def peak_bytes(self, run_pass: Callable[[], object], *, training: bool) -> int:
        """Return what this rank would hold at the peak of `run_pass`. Raises ModelError."""
        return self.resident_bytes(training=training) + self.run(run_pass, training=training).peak_bytes

    def resident_bytes(self, *, training: bool) -> int:
        """Return what a pass finds on the device, its gradients included, and what a sharded model's ranks exchange
        meanwhile."""
        engine = self.engine
        gradients = _gradient_bytes(engine) if training else 0
        if not engine.strategy.sharded:
            return self.held_bytes + gradients
        share = DeviceShare(
            sharded=True, num_shards=engine.strategy.num_shards, compute_bytes=engine.passes.dtype.itemsize
        )
        return self.held_bytes + gradients + sum(share.exchanged(count_parameters(engine), training=training).values())


@dataclass
class _Sections:
    """Peaks of a pass, section by section."""

    meter: CountingMeter
    resident: int
    peaks: dict[str, int] = field(default_factory=dict)
    kept: int = 0

    def end(self, name: str) -> None:
        """A section ends here; the next begins at what is held now."""
        self.peaks[name] = max(self.peaks.get(name, 0), self.meter.peak_bytes() - self.resident)
        self.meter.reset_peak()


@contextmanager
def _sections(engine: SizedEngine, meter: CountingMeter) -> Iterator[_Sections]:
    """Cuts the pass inside where the last hidden state is there, where its gradient is, and where that of the embedded
    tokens is."""
    found = _Sections(meter=meter, resident=meter.in_use_bytes())
    model: Any = engine.model
    # Hooks on gradients run in the backward pass, if there is one: only at its end is it known which section was the last.
    last = [IN_HEAD]

    def at_gradient(tensor: Any, ended: str, begun: str) -> None:
        def cut(_: Tensor) -> None:
            found.end(ended)
            last.append(begun)  # and is the last section, unless another begins

        if tensor.requires_grad:
            tensor.register_hook(cut)

    def after_layers(_module: object, _inputs: object, output: Any) -> None:
        found.end(IN_LAYER)
        found.kept = max(found.kept, meter.in_use_bytes() - found.resident)
        at_gradient(output.last_hidden_state, IN_HEAD, IN_BACKWARD)

    def after_embedding(_module: object, _inputs: object, output: Tensor) -> None:
        at_gradient(output, IN_BACKWARD, IN_EMBEDDING)

    handles = [
        model.base_model.register_forward_hook(after_layers),
        model.get_input_embeddings().register_forward_hook(after_embedding),
    ]
    try:
        yield found
        found.end(last[-1])
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_memory(engine: SizedEngine) -> Iterator[list[Tensor]]:
    """Yields the stand-ins, which the engine and its model have in place of their parameters and buffers meanwhile."""
    # Constants that a model keeps beside its parameters and buffers are real.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named = _stand_ins(engine, mode)
    own: dict[str, Any] = {name: named[name] for name in engine.parameters}

    @contextmanager
    def computing() -> Iterator[None]:
        with mode, _Answers():  # type: ignore[no-untyped-call]
            yield

    with (
        _reparametrize_module(engine.model, named),
        _hooks_of_shards_off(engine.model),
        _nothing_packed(),
        torch.compiler.set_stance("force_eager"),  # compiled layers are traced as they are written
        warnings.catch_warnings(),
        engine.traced(own, computing),
    ):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # nothing is computed
        yield list({id(each): each for each in named.values()}.values())


def _stand_ins(engine: SizedEngine, mode: FakeTensorMode) -> dict[str, Tensor]:
    """By name; tied parameters are one. Those of a sharded model are whole and have the type in which they are gathered."""
    model, device = engine.model, engine.passes.device
    # Of a plan the learner is on the meta device, whose tensors have no storage that could be counted.
    device = torch.device("cpu") if device.type == "meta" else device
    gathered = engine.passes.dtype if engine.strategy.sharded else None
    made: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if id(tensor) not in made:  # a tied parameter stays one, or it and its gradient would count twice
            is_parameter = isinstance(tensor, nn.Parameter)
            casts = gathered is not None and is_parameter and tensor.dtype == torch.float32
            with mode:
                empty = torch.empty(tensor.shape, dtype=gathered if casts else tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        named[name] = made[id(tensor)]
    return named


def _gradient_bytes(engine: SizedEngine) -> int:
    """What the gradients take that lie on the device between the micro-batches of a step."""
    total = 0
    for parameter in engine.parameters.values():
        local: Tensor = getattr(parameter, "_local_tensor", parameter)
        kept = parameter if engine.strategy.keeps_whole_gradients else local
        if engine.strategy.keeps_whole_gradients or local.device.type in (engine.passes.device.type, "meta"):
            total += kept.numel() * kept.element_size()
    return total


@contextmanager
def _hooks_of_shards_off(model: nn.Module) -> Iterator[None]:
    """Modules of a sharded model run their own forward, without gathering parameters first."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    kept = [(module._forward_pre_hooks, module._forward_hooks) for module in sharded]
    try:
        for module in sharded:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for module, (before, after) in zip(sharded, kept):
            module._forward_pre_hooks, module._forward_hooks = before, after


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """transformers looks at position ids whether rows are packed, cannot where they have no memory, and makes a mask then
    that the real pass does without: padded rows never are."""
    library: Any = masking_utils
    original = library.find_packed_sequence_indices
    library.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
    try:
        yield
    finally:
        library.find_packed_sequence_indices = original


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what tensors without memory cannot.

    A pass reads numbers of them for metrics, and for checks that hold; sizes never depend on one, or the pass would wait
    for its device. And torch states the shape of a product of experts for bfloat16 alone, though it multiplies others.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype: torch.dtype = args[0].dtype
            return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten._grouped_mm.default:
            return _product_of_experts(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _product_of_experts(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The empty result of `torch._grouped_mm`: rows of `left` in groups that end at `offs`, each times its matrix of
    `right`; or, of two matrices, a product for each group, which is what gradients of the matrices are."""
    if left.dim() == 2 and right.dim() == 2 and offs is not None:
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    batch = left.shape[:1] if left.dim() == 3 and right.dim() == 3 else ()
    return left.new_empty(*batch, left.shape[-2], right.shape[-1])
