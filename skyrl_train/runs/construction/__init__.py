"""Parts of a run, built from its configuration."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.runs.construction.engines import (
        build_probe as build_probe,
        sync_within_process as sync_within_process,
        tolerance as tolerance,
    )
    from skyrl_train.runs.construction.on_ray import with_time_to_load as with_time_to_load
    from skyrl_train.runs.construction.parts import (
        build_host as build_host,
        build_learners as build_learners,
        engine_settings as engine_settings,
        loaded_models as loaded_models,
        rollouts_beside as rollouts_beside,
    )

__getattr__ = lazily(__name__)
