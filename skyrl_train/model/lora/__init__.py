"""Adapters of low rank."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.lora.adapter import (
        adapter_off,
        adapter_tensors,
        add_adapter,
        as_they_are,
        base_with_adapter,
        by_layer,
        dropping,
        has_adapter,
        is_adapter,
        merged_weights,
        weights_by_name,
        write_adapter,
    )

__all__ = [
    "adapter_off",
    "adapter_tensors",
    "add_adapter",
    "as_they_are",
    "base_with_adapter",
    "by_layer",
    "dropping",
    "has_adapter",
    "is_adapter",
    "merged_weights",
    "weights_by_name",
    "write_adapter",
]

__getattr__ = lazily(__name__)
