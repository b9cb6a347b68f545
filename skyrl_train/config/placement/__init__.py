"""Settings of devices, ranks and meshes, and the bundles that they ask a cluster for."""

from skyrl_train.config.placement.bundles import (
    Bundle,
    Layout,
    Role,
    count_engines,
    leaves_devices,
    missing_room,
    num_cpus,
    plan_layout,
    shares_devices,
)

__all__ = [
    "Bundle",
    "Layout",
    "Role",
    "count_engines",
    "leaves_devices",
    "missing_room",
    "num_cpus",
    "plan_layout",
    "shares_devices",
]
