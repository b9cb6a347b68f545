"""From a training batch to optimizer steps: mini-batches, their denominators, stages, schedules and ages."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.batch.steps.minibatch import (
        Ages,
        LossDenominators,
        MiniBatch,
        RowCounts,
        StagedBatch,
        Together,
        ages_in,
        behind_updates,
        check_staleness,
        close_mini_batch,
        computed_together,
        mini_batches,
        rows_with_loss,
        stage,
        token_ages,
        tokens_with_loss,
    )
    from skyrl_train.batch.steps.schedule import learning_rate, schedule_position
    from skyrl_train.batch.steps.targets import TargetRows, Targets, rows_of_targets

__all__ = [
    "Ages",
    "LossDenominators",
    "MiniBatch",
    "RowCounts",
    "StagedBatch",
    "TargetRows",
    "Targets",
    "Together",
    "ages_in",
    "behind_updates",
    "check_staleness",
    "close_mini_batch",
    "computed_together",
    "learning_rate",
    "mini_batches",
    "rows_of_targets",
    "rows_with_loss",
    "schedule_position",
    "stage",
    "token_ages",
    "tokens_with_loss",
]

__getattr__ = lazily(__name__)
