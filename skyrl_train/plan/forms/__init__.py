"""The search for the form of a run: meshes, engines and where they stand."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.plan.forms.scale import (
        ENGINE_OVERHEAD_BYTES as ENGINE_OVERHEAD_BYTES,
        Device as Device,
        EngineRates as EngineRates,
        ScaledModel as ScaledModel,
        StreamedSync as StreamedSync,
        Update as Update,
        Work as Work,
        devices_per_engine as devices_per_engine,
        engine_rates as engine_rates,
        engine_room as engine_room,
        rollout_s as rollout_s,
        streamed_sync as streamed_sync,
        update_on as update_on,
    )
    from skyrl_train.plan.forms.search import (
        LAYOUT_SETTINGS as LAYOUT_SETTINGS,
        Allocation as Allocation,
        EngineOptions as EngineOptions,
        Form as Form,
        StepWork as StepWork,
        allocations as allocations,
        best_update as best_update,
        layouts as layouts,
        micro_batch_sizes as micro_batch_sizes,
        rank_forms as rank_forms,
        step_work as step_work,
    )

__getattr__ = lazily(__name__)
