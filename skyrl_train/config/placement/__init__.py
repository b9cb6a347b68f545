"""Settings of devices, ranks and meshes, and the bundles that they ask a cluster for."""

from skyrl_train.config.placement.bundles import (
    Bundle as Bundle,
    Layout as Layout,
    Role as Role,
    count_engines as count_engines,
    leaves_devices as leaves_devices,
    missing_room as missing_room,
    num_cpus as num_cpus,
    plan_layout as plan_layout,
    shares_devices as shares_devices,
)
