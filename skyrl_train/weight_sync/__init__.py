"""New weights on their way into running engines."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.weight_sync import topology as topology, transports as transports
    from skyrl_train.weight_sync.cuda_ipc import (
        Export as Export,
        device_name as device_name,
        import_copy as import_copy,
    )
    from skyrl_train.weight_sync.device_sharing import DeviceSharing as DeviceSharing
    from skyrl_train.weight_sync.parts import (
        Arrivals as Arrivals,
        Entry as Entry,
        SentWeights as SentWeights,
        pack_part as pack_part,
    )
    from skyrl_train.weight_sync.probe import WeightSyncProbe as WeightSyncProbe
    from skyrl_train.weight_sync.receiver import (
        Receiver as Receiver,
        UpdatableEngine as UpdatableEngine,
        updatable as updatable,
    )
    from skyrl_train.weight_sync.rounding import Rounding as Rounding, rounded as rounded
    from skyrl_train.weight_sync.sender import RankSender as RankSender
    from skyrl_train.weight_sync.stream import StreamEnd as StreamEnd, WeightGroup as WeightGroup
    from skyrl_train.weight_sync.transport import (
        NoTransport as NoTransport,
        Probed as Probed,
        SyncRecords as SyncRecords,
        WeightSync as WeightSync,
    )
    from skyrl_train.weight_sync.transports import Route as Route, RouteContext as RouteContext

__getattr__ = lazily(__name__)
