"""The only place that constructs a run: RL, SFT, evaluation, capsules."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.runs.capsule import open_capsule as open_capsule, run_again as run_again
    from skyrl_train.runs.capsule_bisect import bisect as bisect, refuse_again as refuse_again
    from skyrl_train.runs.construction.parts import assembler as assembler, trainer_of as trainer_of
    from skyrl_train.runs.drive import evaluate as evaluate, train as train, train_sft as train_sft
    from skyrl_train.runs.resolving import for_server as for_server, resolve as resolve
    from skyrl_train.runs.result import RunResult as RunResult, run_logged as run_logged, swept_metric as swept_metric
    from skyrl_train.runs.rl import load_data as load_data
    from skyrl_train.runs.server import serve as serve
    from skyrl_train.runs.sft import (
        SFTData as SFTData,
        build_loader as build_loader,
        build_sft_evaluator as build_sft_evaluator,
        open_best as open_best,
        plan_sft as plan_sft,
    )
    from skyrl_train.runs.task import (
        Attempt as Attempt,
        build_trackers as build_trackers,
        open_checkpoints as open_checkpoints,
    )

__getattr__ = lazily(__name__)
