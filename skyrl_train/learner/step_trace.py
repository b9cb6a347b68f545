"""Memory of the learner's real step, from torch's own graph of it and without running it.

The learner's own `forward_backward` and `forward` go through model, layout, loss and backward pass as they do in
training, but on tensors that have shapes and no memory (FakeTensorMode): torch dispatches every operation and autograd
saves what it saves, while nothing is computed or allocated. `CountingMeter` adds up what would have been there.

    parameters, buffers --stand-ins of the same shapes--> the learner's own pass --meter--> what it adds at its peak

Of a sharded model the pass is traced as if its parameters were whole, in the type in which they are gathered; what ranks
gather and sum on the way comes on top as `memory.py` counts it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.memory import MemoryFacts, MemorySettings, bytes_of_sharding, memory_facts
from skyrl_train.learner.memory_blocks import BackboneCost, Cost
from skyrl_train.learner.memory_facts import facts_of_model
from skyrl_train.learner.memory_meter import CountingMeter

_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Traces passes of one model on this rank. Talks to no other rank."""

    engine: ModelEngine
    held_bytes: int
    """What lies on the device between passes: parameters, optimizer state, other models of the process."""

    def peak_bytes(self, run_pass: Callable[[], object], *, training: bool) -> int:
        """What this rank would hold at the peak of `run_pass`, which calls the learner's `forward_backward` (`training`)
        or `forward`. Raises ModelError where the model or the loss does not run on tensors without memory."""
        engine, meter = self.engine, CountingMeter(_UNLIMITED_BYTES)
        try:
            with _without_memory(engine) as stand_ins:
                engine.healing.begin_probing(meter, held=lambda: ())
                if training:
                    engine.strategy.hold_gradients(engine.model, engine.parameters.values())
                meter.adopt(stand_ins)
                meter.adopt(each.grad for each in engine.parameters.values() if each.grad is not None)
                resident = meter.in_use_bytes()
                run_pass()
                growing = engine.healing.take_peak() - resident
                if training:
                    engine.zero_grad()
        except SkyrlTrainError:
            raise
        except Exception as error:
            raise ModelError(
                f"{engine.name}: its step cannot be traced, since it does not run on tensors without memory "
                f"({type(error).__name__}: {error}). Set trainer.memory_probe=measure"
            ) from error
        return self.resident_bytes(training=training) + growing

    def resident_bytes(self, *, training: bool) -> int:
        """What a pass finds on the device, its gradients included, and what a sharded model's ranks exchange meanwhile."""
        engine = self.engine
        gradients = _gradient_bytes(engine) if training else 0
        exchanged = bytes_of_sharding(_facts_of_shards(engine), training=training) if engine.strategy.sharded else 0
        return self.held_bytes + gradients + exchanged


@contextmanager
def _without_memory(engine: ModelEngine) -> Iterator[list[Tensor]]:
    """The stand-ins, which the engine and its model have in place of their parameters and buffers meanwhile. The engine is
    alone in its process, and its passes read nothing back."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named = _stand_ins(engine, mode)

    @contextmanager
    def computing() -> Iterator[None]:
        with mode, _Numbers():  # type: ignore[no-untyped-call]
            yield

    with (
        _reparametrize_module(engine.model, named),
        _hooks_of_shards_off(engine.model),
        _nothing_packed(),
        torch.compiler.set_stance("force_eager"),
        engine.traced({name: _as_parameter(named[name]) for name in engine.parameters}, computing),
    ):
        yield list({id(each): each for each in named.values()}.values())


def _stand_ins(engine: ModelEngine, mode: FakeTensorMode) -> dict[str, Tensor]:
    """By name; tied parameters are one. Those of a sharded model are whole and have the type in which they are gathered."""
    model, device = engine.model, engine.passes.device
    device = torch.device("cpu") if device.type == "meta" else device
    gathered = engine.passes.dtype if engine.strategy.sharded else None
    made: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if id(tensor) not in made:
            is_parameter = isinstance(tensor, nn.Parameter)
            casts = gathered is not None and is_parameter and tensor.dtype == torch.float32
            with mode:
                empty = torch.empty(tensor.shape, dtype=gathered if casts else tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        named[name] = made[id(tensor)]
    return named


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    assert isinstance(tensor, nn.Parameter)
    return tensor


def _gradient_bytes(engine: ModelEngine) -> int:
    """Of the gradients that lie on the device between the micro-batches of a step."""
    total = 0
    for parameter in engine.parameters.values():
        local: Tensor = getattr(parameter, "_local_tensor", parameter)
        kept = parameter if engine.strategy.keeps_whole_gradients else local
        if engine.strategy.keeps_whole_gradients or local.device.type in (engine.passes.device.type, "meta"):
            total += kept.numel() * kept.element_size()
    return total


def _facts_of_shards(engine: ModelEngine) -> MemoryFacts:
    """What `bytes_of_sharding` reads: sizes, types, and how much is trained. Layers are traced, not counted."""
    trained = [parameter for parameter in engine.parameters.values() if parameter.requires_grad]
    everything = len(trained) == len(list(engine.model.parameters()))
    settings = MemorySettings(
        strategy="fsdp2",
        num_ranks=engine.strategy.num_ranks,
        dtype="bfloat16" if engine.passes.dtype == torch.bfloat16 else "float32",
        optimizer="adamw" if trained else "none",
        lora_rank=0 if everything else 1,
    )
    nothing = BackboneCost(saved=Cost(), attention=Cost(), scoring=(), backward=())
    return memory_facts(facts_of_model(engine.model), settings, nothing)


@contextmanager
def _hooks_of_shards_off(model: nn.Module) -> Iterator[None]:
    """Modules of a sharded model run their own forward, without gathering parameters first."""
    from torch.distributed.fsdp import FSDPModule

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
    from transformers import masking_utils

    library: Any = masking_utils
    original = library.find_packed_sequence_indices
    library.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
    try:
        yield
    finally:
        library.find_packed_sequence_indices = original


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers where a pass reads a number of a tensor without memory: metrics, and checks that hold. Sizes never depend on
    one, or the pass would wait for its device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype: torch.dtype = args[0].dtype
            return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))
