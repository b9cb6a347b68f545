"""The machine under a run: threads, installed packages, its platform; and seeds that are derived."""

from skyrl_train.system.lazy import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.system.installed import (
        DISTRIBUTION,
        find_modules_here,
        find_programs,
        install_command,
        missing_program,
        requirements,
    )
    from skyrl_train.system.lazy import lazily
    from skyrl_train.system.platform import (
        DetectedPlatform,
        Devices,
        detect_platform,
        gpu_name,
        host_bytes,
        local_devices,
        multiplies_bfloat16,
        usable_cores,
    )
    from skyrl_train.system.seeding import derive_seed
    from skyrl_train.system.threads import WorkerThread, in_time, map_in_time

__all__ = [
    "DISTRIBUTION",
    "DetectedPlatform",
    "Devices",
    "WorkerThread",
    "derive_seed",
    "detect_platform",
    "find_modules_here",
    "find_programs",
    "gpu_name",
    "host_bytes",
    "in_time",
    "install_command",
    "lazily",
    "local_devices",
    "map_in_time",
    "missing_program",
    "multiplies_bfloat16",
    "requirements",
    "usable_cores",
]

__getattr__ = lazily(__name__)
