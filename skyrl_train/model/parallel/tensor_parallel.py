"""Ranks that compute the same rows, each with a part of every matrix (Megatron-LM, arXiv:1909.08053).

Which matrices are cut, and how, is said by the plan that transformers has for the model's family (`model.tp_plan`):

    colwise                        rows of the weight: this rank's part of the outputs, such as its attention heads
    rowwise                        columns of the weight: what this rank's part of the inputs adds; ranks' results are summed
    replicated_with_grad_allreduce a norm of single heads: whole on each rank, and its gradient summed

    x --whole--> q, k, v of own heads --> attention --> own heads --> out: sum over ranks --whole--> ...

The embedding and the output head are cut along the vocabulary, whatever the plan says of them: log-probabilities are made of
each rank's logits by exchanging a few numbers per token (`model/layers/logprobs.py`). All else, such as norms of hidden
states, every rank has and computes alike, gradients included.

Cut parameters are DTensors over the group, so that whoever saves, loads or sends them knows their place; a module has its
part as a plain tensor while it computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import TensorWeakRef

from skyrl_train.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_CUT = {"colwise": 0, "rowwise": 1}
"""Dimension of a linear layer's weight that is cut, by its style in a plan."""
_SUMMED = "replicated_with_grad_allreduce"
_OF_VOCABULARY = ("colwise_gather_output", "embedding_rowwise")
"""Styles that a plan may give to the embedding and the output head."""
_GROUP = "skyrl_tensor_group"
"""Attribute of a model whose matrices are cut."""
_SIZE = "strategy.tensor_parallel_size"


class Vocabulary:
    """What the entries of a rank's output head are a part of: all of them, on a rank that computes by itself."""

    def whole_input(self, inputs: Tensor) -> Tensor:
        """Return `inputs`, which all ranks have alike, for a computation of each rank's part of the outputs."""
        return inputs

    def total(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:  # noqa: ARG002
        """Reduce `values` over the ranks; without a gradient."""
        return values

    def joined(self, parts: Tensor) -> Tensor:
        """Return `parts` of all ranks side by side, along the last dimension; without a gradient."""
        return parts

    def own(self, ids: Tensor, num_own: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return of token ids which are among the `num_own` of this rank, and all as numbers within them (0 for others)."""
        return torch.ones_like(ids, dtype=torch.bool), ids

    def log_softmax(self, logits: Tensor, targets: Tensor, is_own: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG002
        """Return of `[tokens, own entries]` logits the log-probabilities; and of all entries, `[tokens]` each, that of each
        target, and the logarithm of the sum of exponentials. `targets` are as `own` gives them. Without a gradient."""
        log_p = torch.log_softmax(logits, dim=-1)
        of_target = log_p.gather(1, targets[:, None]).squeeze(1)
        return log_p, of_target, logits.gather(1, targets[:, None]).squeeze(1) - of_target


class TensorGroup(Vocabulary):
    """The ranks that have parts of the same matrices, in the order of the parts."""

    def __init__(self, mesh: DeviceMesh | None, *, size: int, rank: int = 0) -> None:
        """`mesh` is the ranks; None is for a model without memory whose passes are traced: nobody is talked to."""
        self.mesh, self.size, self.rank = mesh, size, rank
        self.process_group = None if mesh is None else mesh.get_group()
        self.before_collective: Callable[[], None] = lambda: None
        """Where ranks learn that another left the pass (`distributed/oom_consensus.py`)."""
        self._last: tuple[TensorWeakRef, TensorWeakRef] | None = None

    def whole_input(self, inputs: Tensor) -> Tensor:
        """Return `inputs`; the gradients that come back are summed. Computations of one input that follow each other share
        the sum."""
        if not inputs.requires_grad:
            return inputs
        if self._last is not None and self._last[0]() is inputs:
            shared: Tensor | None = self._last[1]()
            if shared is not None:
                return shared
        found: Tensor = _WholeInput.apply(self, inputs)  # type: ignore[no-untyped-call]
        self._last = TensorWeakRef(inputs), TensorWeakRef(found)
        return found

    def added_up(self, partial: Tensor) -> Tensor:
        """Return the sum of what the ranks have, which each then goes on with alike."""
        found: Tensor = _AddedUp.apply(self, partial)  # type: ignore[no-untyped-call]
        return found

    def total(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce, in place where `values` are contiguous."""
        values = values.contiguous()
        if self._talks(values):
            self.before_collective()
            dist.all_reduce(values, op=op, group=self.process_group)
        return values

    def joined(self, parts: Tensor) -> Tensor:
        """Gather the parts of all ranks."""
        parts = parts.contiguous()
        received = [parts] * self.size
        if self._talks(parts):
            received = [torch.empty_like(parts) for _ in range(self.size)]
            self.before_collective()
            dist.all_gather(received, parts, group=self.process_group)
        return torch.cat(received, dim=-1)

    def log_softmax(self, logits: Tensor, targets: Tensor, is_own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange two numbers of each token, and their sum."""
        largest = self.total(logits.amax(-1), dist.ReduceOp.MAX)
        of_target = logits.gather(1, targets[:, None]).squeeze(1).masked_fill(~is_own, 0.0)
        sums, of_target = self.total(torch.stack([(logits - largest[:, None]).exp().sum(-1), of_target])).unbind(0)
        log_sum_exp = largest + sums.log()
        return logits - log_sum_exp[:, None], of_target - log_sum_exp, log_sum_exp

    def own(self, ids: Tensor, num_own: int) -> tuple[Tensor, Tensor]:
        """Return which are this rank's, and their numbers in its part."""
        local = ids - self.rank * num_own
        is_own = (local >= 0) & (local < num_own)
        return is_own, local.masked_fill(~is_own, 0)

    def _talks(self, values: Tensor) -> bool:
        return self.process_group is not None and not isinstance(values, FakeTensor)


class _WholeInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, inputs: Tensor) -> Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.group.total(grad.clone(memory_format=torch.contiguous_format))


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, partial: Tensor) -> Tensor:  # noqa: ARG004
        return group.total(partial.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, grad


def check_divisible(model: PreTrainedModel, size: int, *, name: str) -> None:
    """Raise ModelError where so many ranks cannot compute the model together, by its config and its family's plan; it may be
    on the meta device."""
    config = model.config.get_text_config()
    counts = {
        "attention heads": config.num_attention_heads,
        "key and value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "entries of the vocabulary": config.vocab_size,
    }
    for module_name, module, style in _planned(model, name=name):
        if style in _CUT:
            counts[f"features of {module_name}"] = module.weight.shape[_CUT[style]]
    for what, count in counts.items():
        if count % size:
            raise ModelError(
                f"model path {name!r}: {_SIZE}={size} must divide its {count} {what}, of which each rank computes a part. "
                f"Set {_SIZE} to a common divisor of {', '.join(f'{n} {w}' for w, n in list(counts.items())[:3])}"
            )


def cut_matrices(model: PreTrainedModel, group: TensorGroup, *, name: str) -> None:
    """Leave this rank its parts of the model's matrices, whose numbers are not set, and have modules compute with them.

    Call it after the blocks of the last layer were narrowed, and before the model is sharded. Raises ModelError.
    """
    check_divisible(model, group.size, name=name)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module, style in _planned(model, name=name):
        if style == _SUMMED:
            _compute_with(module, group, inputs=lambda each: each, summed=True)
            continue
        dim = _CUT[style]
        _cut(module, "weight", dim, group, made)
        if dim == 0 and module.bias is not None:
            _cut(module, "bias", 0, group, made)
        if dim == 0:
            _compute_with(module, group, inputs=group.whole_input)
        else:
            _compute_rowwise(module, group)
    embedding, head = _embedding(model), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    _cut(embedding, "weight", 0, group, made)
    _embed_own_tokens(embedding, group)
    for parameter in () if head is None else ("weight", "bias"):
        if getattr(head, parameter, None) is not None:
            _cut(head, parameter, 0, group, made)
    setattr(model, _GROUP, group)


def vocabulary_of(model: nn.Module) -> Vocabulary:
    """Return what the model's output head has a part of."""
    found: Vocabulary = getattr(model, _GROUP, None) or Vocabulary()
    return found


def local_part(parameter: Any) -> Any:
    """Return this rank's part of a cut parameter, as a plain tensor through which gradients flow; others as they are."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _planned(model: PreTrainedModel, *, name: str) -> Iterator[tuple[str, Any, str]]:
    """Name, module and style of what the family's plan says, without embedding and head. Raises ModelError for a family
    without a plan, and one whose plan has another style."""
    if getattr(model.config, "vision_config", None) is not None:
        raise _refusal(name, model, "it reads images")
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    apart = [_embedding(model), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    found = False
    for module_name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", module_name))
        if style is None or (style in _OF_VOCABULARY and any(module is each for each in apart)):
            continue
        known = style == _SUMMED or (style in _CUT and isinstance(module, nn.Linear))
        if not known:
            raise _refusal(name, model, f"transformers plans {style!r} for its {module_name}")
        found = True
        yield module_name, module, style
    if not found:
        raise _refusal(name, model, "transformers has no plan for its layers")


def _refusal(name: str, model: PreTrainedModel, reason: str) -> ModelError:
    kind = model.config.get_text_config().model_type
    return ModelError(
        f"model path {name!r}: ranks cannot compute a {kind!r} model together, since {reason}. Set {_SIZE}=1"
    )


def _embedding(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings()


def _cut(module: Any, name: str, dim: int, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """A parameter in place of `module`'s, of this rank's part and without numbers; one for all who share it."""
    whole = getattr(module, name)
    if whole not in made:
        shape = list(whole.shape)
        shape[dim] //= group.size
        part: Tensor = whole.detach().new_empty(shape)
        if group.mesh is not None:
            part = DTensor.from_local(part, group.mesh, [Shard(dim)], run_check=False)
        made[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
    setattr(module, name, made[whole])


def _compute_with(module: Any, group: TensorGroup, *, inputs: Callable[[Tensor], Tensor], summed: bool = False) -> None:
    compute = module.forward

    def forward(first: Tensor, *others: Any, **named: Any) -> Any:
        first = inputs(first)
        with _local_parameters(module, group, summed=summed):
            return compute(first, *others, **named)

    module.forward = forward


def _compute_rowwise(module: Any, group: TensorGroup) -> None:
    compute = module.forward

    def forward(inputs: Tensor) -> Tensor:
        bias = module.bias
        with _local_parameters(module, group, without="bias"):
            found = group.added_up(compute(inputs))
        return found if bias is None else found + bias.to(found.dtype)

    module.forward = forward


def _embed_own_tokens(module: Any, group: TensorGroup) -> None:
    compute, padding = module.forward, module.padding_idx
    num_own = module.num_embeddings // group.size
    if padding is not None and padding // num_own == group.rank:
        module.padding_idx = padding % num_own
    else:
        module.padding_idx = None

    def forward(ids: Tensor) -> Tensor:
        is_own, local = group.own(ids, num_own)
        with _local_parameters(module, group):
            found = compute(local)
        return group.added_up(found.masked_fill(~is_own.unsqueeze(-1), 0))

    module.forward = forward


@contextmanager
def _local_parameters(
    module: nn.Module, group: TensorGroup, *, summed: bool = False, without: str = ""
) -> Iterator[None]:
    """The module has its parts of cut parameters as plain tensors meanwhile; where `summed`, gradients of its whole ones
    are summed over the ranks."""
    held: Any = module._parameters
    kept = dict(held)
    for name, parameter in kept.items():
        if name == without:
            held[name] = None
        elif parameter is not None:
            local = local_part(parameter)
            held[name] = _WholeInput.apply(group, local) if summed else local  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        held.update(kept)
