"""New weights on their way into running engines."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.weight_sync import topology, transports
    from skyrl_train.weight_sync.cuda_ipc import Export, device_name, import_copy
    from skyrl_train.weight_sync.device_sharing import DeviceSharing
    from skyrl_train.weight_sync.parts import Arrivals, Entry, SentWeights, pack_part
    from skyrl_train.weight_sync.probe import WeightSyncProbe
    from skyrl_train.weight_sync.receiver import Receiver, UpdatableEngine, updatable
    from skyrl_train.weight_sync.rounding import Rounding, rounded
    from skyrl_train.weight_sync.sender import RankSender
    from skyrl_train.weight_sync.stream import StreamEnd, WeightGroup
    from skyrl_train.weight_sync.transport import NoTransport, Probed, SyncRecords, WeightSync
    from skyrl_train.weight_sync.transports import Route, RouteSettings

__all__ = [
    "Arrivals",
    "DeviceSharing",
    "Entry",
    "Export",
    "NoTransport",
    "Probed",
    "RankSender",
    "Receiver",
    "Rounding",
    "Route",
    "RouteSettings",
    "SentWeights",
    "StreamEnd",
    "SyncRecords",
    "UpdatableEngine",
    "WeightGroup",
    "WeightSync",
    "WeightSyncProbe",
    "device_name",
    "import_copy",
    "pack_part",
    "rounded",
    "topology",
    "transports",
    "updatable",
]

__getattr__ = lazily(__name__)
