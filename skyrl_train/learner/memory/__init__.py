"""Memory of a device: predicted, probed, measured; and rows that did not fit computed again in parts."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.learner.memory.fit import MemoryProbe, fit_memory_model, probes_at_the_limit
    from skyrl_train.learner.memory.meter import GIB, CountingMeter
    from skyrl_train.learner.memory.predict import Effort, Phase, PredictedPasses
    from skyrl_train.learner.memory.probe import Probed, Prober, probe_rows
    from skyrl_train.learner.memory.share import DeviceShare
    from skyrl_train.learner.memory.sizing import (
        WORTH_A_TRIAL,
        PhaseReport,
        SizingLimits,
        SizingReport,
        hold_everything,
        make_meter,
        read_reports,
        size_micro_batches,
        size_run,
    )
    from skyrl_train.learner.memory.trace import StepTrace
    from skyrl_train.learner.memory.xla import CompiledProbe

__all__ = [
    "GIB",
    "WORTH_A_TRIAL",
    "CompiledProbe",
    "CountingMeter",
    "DeviceShare",
    "Effort",
    "MemoryProbe",
    "Phase",
    "PhaseReport",
    "PredictedPasses",
    "Probed",
    "Prober",
    "SizingLimits",
    "SizingReport",
    "StepTrace",
    "fit_memory_model",
    "hold_everything",
    "make_meter",
    "probe_rows",
    "probes_at_the_limit",
    "read_reports",
    "size_micro_batches",
    "size_run",
]

__getattr__ = lazily(__name__)
