"""Parts of a run, built from its configuration."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.runs.construction.engines import build_probe, sync_within_process, tolerance
    from skyrl_train.runs.construction.on_ray import with_time_to_load
    from skyrl_train.runs.construction.parts import build_host, build_learners, engine_settings, loaded_models

__all__ = [
    "build_host",
    "build_learners",
    "build_probe",
    "engine_settings",
    "loaded_models",
    "sync_within_process",
    "tolerance",
    "with_time_to_load",
]

__getattr__ = lazily(__name__)
