"""Memory of devices and hosts that a run will take."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.plan.batch_plan import optimizer_state_bytes as optimizer_state_bytes
    from skyrl_train.plan.memory.device import (
        WANTED as WANTED,
        memory_lines as memory_lines,
        wanted_positions as wanted_positions,
    )

__getattr__ = lazily(__name__)
