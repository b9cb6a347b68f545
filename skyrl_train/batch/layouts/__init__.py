"""How rows lie in one forward (padded, packed, shared prefixes), and what it costs to compute them."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.batch.layouts.cost import (
        ATTENTION_BACKWARD as ATTENTION_BACKWARD,
        CostModel as CostModel,
        DeviceRates as DeviceRates,
        Measured as Measured,
        ModelShape as ModelShape,
        rates_file as rates_file,
        rates_of as rates_of,
    )
    from skyrl_train.batch.layouts.layout import (
        LAYOUTS as LAYOUTS,
        Layout as Layout,
        PositionGroup as PositionGroup,
        find_scored as find_scored,
        make_layout as make_layout,
        packed_layout as packed_layout,
        padded_layout as padded_layout,
        shared_layout as shared_layout,
        spread_to_rows as spread_to_rows,
        states_before as states_before,
    )
    from skyrl_train.batch.layouts.prefix_tree import (
        Segment as Segment,
        common_prefix as common_prefix,
        hosts_of as hosts_of,
        merge_counts as merge_counts,
        prefix_order as prefix_order,
        sharing_keys as sharing_keys,
        tree_segments as tree_segments,
    )

__getattr__ = lazily(__name__)
