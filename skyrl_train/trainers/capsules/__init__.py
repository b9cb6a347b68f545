"""Capsules: a step with all that it read, to be computed again and compared."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.trainers.capsules.compare import (
        BFLOAT16 as BFLOAT16,
        EXACT as EXACT,
        FLOAT32 as FLOAT32,
        Bounds as Bounds,
        Comparison as Comparison,
        compare_batches as compare_batches,
        compare_metrics as compare_metrics,
        compare_tensors as compare_tensors,
        table as table,
    )
    from skyrl_train.trainers.capsules.record import (
        BATCH_FILE as BATCH_FILE,
        CONFIG_FILE as CONFIG_FILE,
        STATES as STATES,
        Capsule as Capsule,
        find_capsule as find_capsule,
        read_batch as read_batch,
        steps_in as steps_in,
        write_batch as write_batch,
    )
    from skyrl_train.trainers.capsules.writer import CapsuleWriter as CapsuleWriter

__getattr__ = lazily(__name__)
