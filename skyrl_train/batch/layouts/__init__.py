"""How rows lie in one forward (padded, packed, shared prefixes), and what it costs to compute them."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.batch.layouts.cost import (
        ATTENTION_BACKWARD,
        CostModel,
        DeviceRates,
        Measured,
        ModelShape,
        rates_file,
        rates_of,
    )
    from skyrl_train.batch.layouts.layout import (
        LAYOUTS,
        Layout,
        PositionGroup,
        find_scored,
        make_layout,
        packed_layout,
        padded_layout,
        shared_layout,
        spread_to_rows,
        states_before,
    )
    from skyrl_train.batch.layouts.prefix_tree import (
        Segment,
        common_prefix,
        hosts_of,
        merge_counts,
        prefix_order,
        sharing_keys,
        tree_segments,
    )

__all__ = [
    "ATTENTION_BACKWARD",
    "LAYOUTS",
    "CostModel",
    "DeviceRates",
    "Layout",
    "Measured",
    "ModelShape",
    "PositionGroup",
    "Segment",
    "common_prefix",
    "find_scored",
    "hosts_of",
    "make_layout",
    "merge_counts",
    "packed_layout",
    "padded_layout",
    "prefix_order",
    "rates_file",
    "rates_of",
    "shared_layout",
    "sharing_keys",
    "spread_to_rows",
    "states_before",
    "tree_segments",
]

__getattr__ = lazily(__name__)
