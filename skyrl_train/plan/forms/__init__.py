"""The search for the form of a run: meshes, engines and where they stand."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.plan.forms.scale import (
        Device,
        EngineRates,
        ScaledModel,
        StreamedSync,
        Update,
        Work,
        devices_per_engine,
        engine_rates,
        engine_room,
        rollout_s,
        streamed_sync,
        update_on,
    )
    from skyrl_train.plan.forms.search import (
        LAYOUT_SETTINGS,
        Allocation,
        EngineOptions,
        Form,
        StepWork,
        allocations,
        best_update,
        layouts,
        micro_batch_sizes,
        rank_forms,
        step_work,
    )

__all__ = [
    "LAYOUT_SETTINGS",
    "Allocation",
    "Device",
    "EngineOptions",
    "EngineRates",
    "Form",
    "ScaledModel",
    "StepWork",
    "StreamedSync",
    "Update",
    "Work",
    "allocations",
    "best_update",
    "devices_per_engine",
    "engine_rates",
    "engine_room",
    "layouts",
    "micro_batch_sizes",
    "rank_forms",
    "rollout_s",
    "step_work",
    "streamed_sync",
    "update_on",
]

__getattr__ = lazily(__name__)
