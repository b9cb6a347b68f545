"""Capsules: a step with all that it read, to be computed again and compared."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.trainers.capsules.compare import (
        BFLOAT16,
        EXACT,
        FLOAT32,
        Bounds,
        Comparison,
        compare_batches,
        compare_metrics,
        compare_tensors,
        table,
    )
    from skyrl_train.trainers.capsules.record import (
        BATCH_FILE,
        CONFIG_FILE,
        STATES,
        Capsule,
        find_capsule,
        read_batch,
        steps_in,
        write_batch,
    )
    from skyrl_train.trainers.capsules.writer import CapsuleWriter

__all__ = [
    "BATCH_FILE",
    "BFLOAT16",
    "CONFIG_FILE",
    "EXACT",
    "FLOAT32",
    "STATES",
    "Bounds",
    "Capsule",
    "CapsuleWriter",
    "Comparison",
    "compare_batches",
    "compare_metrics",
    "compare_tensors",
    "find_capsule",
    "read_batch",
    "steps_in",
    "table",
    "write_batch",
]

__getattr__ = lazily(__name__)
