"""Parts of a run, built from its configuration."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.runs.construction.engines import engine_settings, probe_settings, sync_within_process, tolerance
    from skyrl_train.runs.construction.on_ray import cluster_settings
    from skyrl_train.runs.construction.parts import build_host, build_learners
    from skyrl_train.runs.construction.sft_data import SFTData, build_loader, plan_sft

__all__ = [
    "SFTData",
    "build_host",
    "build_learners",
    "build_loader",
    "cluster_settings",
    "engine_settings",
    "plan_sft",
    "probe_settings",
    "sync_within_process",
    "tolerance",
]

__getattr__ = lazily(__name__)
