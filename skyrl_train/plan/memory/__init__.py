"""Memory of devices and hosts that a run will take."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.plan.memory.device import (
        head_violations,
        memory_lines,
        models_of,
        optimizer_state_bytes,
        peak_on_cpu,
        plan_memory,
    )
    from skyrl_train.plan.memory.fitting import (
        WANTED,
        kept_together,
        positions_that_fit,
        recomputing,
        shares_gpus,
        wanted_positions,
        without_recomputing,
    )

__all__ = [
    "WANTED",
    "head_violations",
    "kept_together",
    "memory_lines",
    "models_of",
    "optimizer_state_bytes",
    "peak_on_cpu",
    "plan_memory",
    "positions_that_fit",
    "recomputing",
    "shares_gpus",
    "wanted_positions",
    "without_recomputing",
]

__getattr__ = lazily(__name__)
