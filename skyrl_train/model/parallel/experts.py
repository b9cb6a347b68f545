"""The experts of a mixture, where transformers keeps those of a layer as tensors over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from skyrl_train.config.rules import EXPERT_PARALLEL, num_experts
from skyrl_train.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules by name that hold all experts of a layer, of families whose experts are tensors over experts: the
    first dimension of each parameter is the expert, and the module computes `(tokens, experts of each, weights of each)`."""
    return {
        name: module
        for name, module in model.named_modules()
        # which transformers gives to classes whose computation may be replaced, all with these arguments
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "num_experts")
    }


def check_experts(model: PreTrainedModel, *, size: int, num_shards: int, name: str) -> None:
    """Raises ModelError where the experts of `model`, which need not have weights, cannot be divided over groups of `size`
    and what a rank has of them among `num_shards / size` ranks, where these are more."""
    found, kind = expert_modules(model), type(model).__name__
    off = f"Set {EXPERT_PARALLEL}=1"
    begins = f"model path {name!r}: {EXPERT_PARALLEL}={size}, but"
    if not found:
        is_mixture = num_experts(model.config.get_text_config().to_dict())
        why = "keeps its experts in a form that cannot be divided" if is_mixture else "is dense: it has no experts"
        raise ModelError(f"{begins} {kind} {why}. {off}")
    same = max(1, num_shards // size)
    for key, module in found.items():
        count = int(module.num_experts)
        if count % size:
            fitting = [str(each) for each in range(1, size) if count % each == 0]
            raise ModelError(f"{begins} it must divide the {count} experts of {key}. Try {' or '.join(fitting)}")
        for part, parameter in module.named_parameters():
            if "." in part or parameter.shape[0] != count:
                raise ModelError(f"{begins} {kind} has {key}.{part}, which is not divided by experts. {off}")
            if parameter.shape[1] % same:
                raise ModelError(
                    f"{begins} the {same} ranks with the same experts must divide dimension 1 of {key}.{part}, "
                    f"{tuple(parameter.shape)}. Try a larger {EXPERT_PARALLEL}"
                )
