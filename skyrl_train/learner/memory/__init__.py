"""Memory of a device: predicted, probed, measured; and rows that did not fit computed again in parts."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.learner.memory.fit import (
        MemoryProbe as MemoryProbe,
        fit_memory_model as fit_memory_model,
        probes_at_the_limit as probes_at_the_limit,
    )
    from skyrl_train.learner.memory.meter import GIB as GIB, CountingMeter as CountingMeter
    from skyrl_train.learner.memory.predict import Effort as Effort, Phase as Phase, PredictedPasses as PredictedPasses
    from skyrl_train.learner.memory.probe import Probed as Probed, Prober as Prober, probe_rows as probe_rows
    from skyrl_train.learner.memory.share import DeviceShare as DeviceShare
    from skyrl_train.learner.memory.sizing import (
        WORTH_A_TRIAL as WORTH_A_TRIAL,
        PhaseReport as PhaseReport,
        SizingLimits as SizingLimits,
        SizingReport as SizingReport,
        hold_everything as hold_everything,
        make_meter as make_meter,
        read_reports as read_reports,
        size_micro_batches as size_micro_batches,
        size_run as size_run,
    )
    from skyrl_train.learner.memory.trace import StepTrace as StepTrace
    from skyrl_train.learner.memory.xla import CompiledProbe as CompiledProbe

__getattr__ = lazily(__name__)
