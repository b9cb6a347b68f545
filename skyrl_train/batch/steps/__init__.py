"""From a training batch to optimizer steps: mini-batches, their denominators, stages, schedules and ages."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.batch.steps.minibatch import (
        Ages as Ages,
        LossDenominators as LossDenominators,
        MiniBatch as MiniBatch,
        RowCounts as RowCounts,
        StagedBatch as StagedBatch,
        Together as Together,
        ages_in as ages_in,
        behind_updates as behind_updates,
        check_staleness as check_staleness,
        close_mini_batch as close_mini_batch,
        computed_together as computed_together,
        copies_of_tokens as copies_of_tokens,
        mini_batches as mini_batches,
        rows_with_loss as rows_with_loss,
        stage as stage,
        token_ages as token_ages,
        tokens_with_loss as tokens_with_loss,
    )
    from skyrl_train.batch.steps.schedule import learning_rate as learning_rate, schedule_position as schedule_position
    from skyrl_train.batch.steps.targets import (
        TargetRows as TargetRows,
        Targets as Targets,
        rows_of_targets as rows_of_targets,
    )

__getattr__ = lazily(__name__)
