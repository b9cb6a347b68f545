"""Adapters of low rank."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.lora.adapter import (
        activate_adapter,
        adapter_off,
        adapter_tensors,
        add_adapter,
        as_they_are,
        base_with_adapter,
        by_layer,
        dropping,
        has_adapter,
        is_adapter,
        layers_to_adapt,
        merged_weights,
        remove_adapter,
        weights_by_name,
        write_adapter,
    )

__all__ = [
    "activate_adapter",
    "adapter_off",
    "adapter_tensors",
    "add_adapter",
    "as_they_are",
    "base_with_adapter",
    "by_layer",
    "dropping",
    "has_adapter",
    "is_adapter",
    "layers_to_adapt",
    "merged_weights",
    "remove_adapter",
    "weights_by_name",
    "write_adapter",
]

__getattr__ = lazily(__name__)
