"""The only place that constructs a run: RL, SFT, evaluation, capsules."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.runs import audit
    from skyrl_train.runs.capsule import open_capsule, run_again
    from skyrl_train.runs.capsule_bisect import bisect, refuse_again
    from skyrl_train.runs.construction.parts import assembly_settings, ppo_settings
    from skyrl_train.runs.drive import evaluate, train, train_sft
    from skyrl_train.runs.resolve import resolve
    from skyrl_train.runs.result import RunResult, run_logged, swept_metric
    from skyrl_train.runs.rl import load_data
    from skyrl_train.runs.server import ServerSettings, serve
    from skyrl_train.runs.sft import SFTData, build_loader, build_sft_evaluator, open_best, plan_sft
    from skyrl_train.runs.task import Attempt, build_trackers, open_checkpoints

__all__ = [
    "Attempt",
    "RunResult",
    "SFTData",
    "ServerSettings",
    "assembly_settings",
    "audit",
    "bisect",
    "build_loader",
    "build_sft_evaluator",
    "build_trackers",
    "evaluate",
    "load_data",
    "open_best",
    "open_capsule",
    "open_checkpoints",
    "plan_sft",
    "ppo_settings",
    "refuse_again",
    "resolve",
    "run_again",
    "run_logged",
    "serve",
    "swept_metric",
    "train",
    "train_sft",
]

__getattr__ = lazily(__name__)
