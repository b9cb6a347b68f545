"""Adapters of low rank."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.lora.adapter import (
        activate_adapter as activate_adapter,
        adapter_off as adapter_off,
        adapter_tensors as adapter_tensors,
        add_adapter as add_adapter,
        as_they_are as as_they_are,
        base_with_adapter as base_with_adapter,
        by_layer as by_layer,
        dropping as dropping,
        has_adapter as has_adapter,
        is_adapter as is_adapter,
        layers_to_adapt as layers_to_adapt,
        merged_weights as merged_weights,
        remove_adapter as remove_adapter,
        weights_by_name as weights_by_name,
        write_adapter as write_adapter,
    )
    from skyrl_train.model.lora.several import (
        adapter_slots as adapter_slots,
        adapters_at as adapters_at,
        attach_adapters as attach_adapters,
        runs_of as runs_of,
    )

__getattr__ = lazily(__name__)
