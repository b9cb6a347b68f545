"""What other trainers call a setting, and what does the same here: read where somebody types a name that this project lacks.

`docs/migrating.md` has a row for each of these names; `tests/unit/test_migration_page.py` holds that it says the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Here:
    """What a name of other trainers is here."""

    settings: str
    """Dotted names, separated by spaces; which one is meant depends on what was typed before the name. Or a choice of a
    group, `tracker=wandb`."""
    convert: str = ""
    """A sentence on the value, where it is not the same."""


_IN_PROMPTS = "It counts prompts: divide a number of samples by generator.n_samples_per_prompt"
_LENGTH = Here(
    "generator.sampling.max_generate_length generator.eval_sampling.max_generate_length "
    "trainer.eval_sampling.max_generate_length"
)
_LEARNING_RATE = Here("trainer.policy.optimizer.lr critic.optimizer.lr trainer.optimizer.lr")
_SAMPLES = Here("generator.n_samples_per_prompt")
_STEPS = Here("trainer.total_steps trainer.num_steps")
_EPOCHS = Here("trainer.epochs trainer.num_epochs")
_FOLDER = Here("output_dir")
_MODEL = Here("model.path")
_WANDB = Here("tracker=wandb", "More than one: tracker=[console,wandb]")

PEER_NAMES: Mapping[str, Here] = {
    "max_new_tokens": _LENGTH,
    "max_completion_length": _LENGTH,
    "max_response_length": _LENGTH,
    "max_tokens": _LENGTH,
    "learning_rate": _LEARNING_RATE,
    "lr": _LEARNING_RATE,
    "num_generations": _SAMPLES,
    "rollout.n": _SAMPLES,
    "batch_size": Here("trainer.train_batch_size trainer.batch_size", _IN_PROMPTS),
    "generation_batch_size": Here("trainer.train_batch_size", _IN_PROMPTS),
    "per_device_train_batch_size": Here("trainer.micro_train_batch_size_per_gpu"),
    "max_steps": _STEPS,
    "max_training_steps": _STEPS,
    "total_training_steps": _STEPS,
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "num_iterations": Here("trainer.update_epochs_per_batch"),
    "run_dir": _FOLDER,
    "default_local_dir": _FOLDER,
    "model_name_or_path": _MODEL,
    "beta": Here("trainer.algorithm.kl_loss_coef"),
    "reward_funcs": Here("environment.rewards"),
    "wandb": _WANDB,
    "report_to": _WANDB,
    "logger": _WANDB,
}
"""By the last part of a dotted name, whatever stands before it, or by its last two parts."""


def peer_name(path: str) -> Here | None:
    """Return what other trainers' name at the end of a dotted `path` is here; None for a name that they lack, too."""
    parts = path.split(".")
    return PEER_NAMES.get(".".join(parts[-2:])) or PEER_NAMES.get(parts[-1])


def peer_setting(path: str, settings: Iterable[str]) -> tuple[str, str]:
    """Return what an unknown `path` is among `settings`, and how to convert its value; empty where nothing is known of it.

    Of several the one that shares most parts with `path`, then the first.
    """
    here, parts = peer_name(path), path.split(".")
    existing = {*settings}
    meant = [each for each in here.settings.split(" ") if each in existing or "=" in each] if here else []
    if here is None or not meant:
        return "", ""
    name = max(meant, key=lambda each: len({*parts} & {*each.split(".")}))
    return name, here.convert if name == here.settings.split(" ")[0] else ""
