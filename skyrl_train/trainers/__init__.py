"""The training loops: PPO and SFT, step by step."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.trainers import sft as sft, steps as steps
    from skyrl_train.trainers.loop import TrainingLoop as TrainingLoop
    from skyrl_train.trainers.observers import Observers as Observers, RunEvent as RunEvent, StepFacts as StepFacts
    from skyrl_train.trainers.ppo import PPOTrainer as PPOTrainer, TrainingResult as TrainingResult
    from skyrl_train.trainers.resume import (
        Start as Start,
        checkpointed_models as checkpointed_models,
        find_start as find_start,
        prepare_run_folder as prepare_run_folder,
    )
    from skyrl_train.trainers.rollout_sink import RolloutLog as RolloutLog, columns_by_turn as columns_by_turn
    from skyrl_train.trainers.sft import (
        SFTResult as SFTResult,
        SFTTrainer as SFTTrainer,
        named_metrics as named_metrics,
    )
    from skyrl_train.trainers.step_metrics import (
        batch_metrics as batch_metrics,
        document_metrics as document_metrics,
        equal_groups as equal_groups,
        rollout_metrics as rollout_metrics,
    )
    from skyrl_train.trainers.steps import (
        Learners as Learners,
        PromptBatches as PromptBatches,
        sampling_params as sampling_params,
    )

__getattr__ = lazily(__name__)
