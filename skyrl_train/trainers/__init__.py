"""The training loops: PPO and SFT, step by step."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.trainers import sft, steps
    from skyrl_train.trainers.loop import LoopSettings, TrainingLoop
    from skyrl_train.trainers.observers import Observers, RunEvent, StepFacts
    from skyrl_train.trainers.ppo import PPOTrainer, TrainingResult
    from skyrl_train.trainers.resume import Start, checkpointed_models, find_start, prepare_run_folder
    from skyrl_train.trainers.rollout_sink import RolloutLog
    from skyrl_train.trainers.sft import SFTResult, SFTTrainer, named_metrics
    from skyrl_train.trainers.step_metrics import batch_metrics, document_metrics, equal_groups, rollout_metrics
    from skyrl_train.trainers.steps import Learners, PPOSettings, PromptBatches, sampling_params

__all__ = [
    "Learners",
    "LoopSettings",
    "Observers",
    "PPOSettings",
    "PPOTrainer",
    "PromptBatches",
    "RolloutLog",
    "RunEvent",
    "SFTResult",
    "SFTTrainer",
    "Start",
    "StepFacts",
    "TrainingLoop",
    "TrainingResult",
    "batch_metrics",
    "checkpointed_models",
    "document_metrics",
    "equal_groups",
    "find_start",
    "named_metrics",
    "prepare_run_folder",
    "rollout_metrics",
    "sampling_params",
    "sft",
    "steps",
]

__getattr__ = lazily(__name__)
