"""The machine under a run: threads, installed packages, its platform; and seeds that are derived."""

from skyrl_train.system.lazy import TYPE_CHECKING as TYPE_CHECKING, lazily as lazily

if TYPE_CHECKING:
    from skyrl_train.system.installed import (
        DISTRIBUTION as DISTRIBUTION,
        find_modules_here as find_modules_here,
        find_programs as find_programs,
        install_command as install_command,
        lacking as lacking,
        missing_program as missing_program,
        require as require,
        requirements as requirements,
    )
    from skyrl_train.system.platform import (
        LARGE_PAGES as LARGE_PAGES,
        Devices as Devices,
        detect_platform as detect_platform,
        gpu_name as gpu_name,
        has_bfloat16_instructions as has_bfloat16_instructions,
        host_bytes as host_bytes,
        local_devices as local_devices,
        multiplies_bfloat16 as multiplies_bfloat16,
        resident_bytes as resident_bytes,
        return_free_memory as return_free_memory,
        usable_cores as usable_cores,
    )
    from skyrl_train.system.seeding import derive_seed as derive_seed
    from skyrl_train.system.threads import WorkerThread as WorkerThread, in_time as in_time, map_in_time as map_in_time

__getattr__ = lazily(__name__)
