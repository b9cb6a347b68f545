"""The dry run: sizes, memory and time of a run before it starts."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.plan.batch_plan import (
        BatchPlan as BatchPlan,
        SFTPlan as SFTPlan,
        make_batch_plan as make_batch_plan,
    )
    from skyrl_train.plan.dry_run import (
        expected_peak_bytes as expected_peak_bytes,
        expected_step_seconds as expected_step_seconds,
        head_violations as head_violations,
        make_plan_report as make_plan_report,
        models_of as models_of,
        peak_on_cpu as peak_on_cpu,
        placement_report as placement_report,
        plan_batches as plan_batches,
        plan_memory as plan_memory,
        positions_that_fit as positions_that_fit,
    )
    from skyrl_train.plan.estimate import RowLengths as RowLengths, recorded_lengths as recorded_lengths
    from skyrl_train.plan.machine import machine_rates as machine_rates
    from skyrl_train.plan.report import (
        optimizer_steps_text as optimizer_steps_text,
        placement_lines as placement_lines,
        render_text as render_text,
        to_json as to_json,
    )
    from skyrl_train.plan.time import (
        NO_TIME as NO_TIME,
        PhaseTimes as PhaseTimes,
        duration as duration,
        measured_phases as measured_phases,
        rates_of as rates_of,
    )

__getattr__ = lazily(__name__)
