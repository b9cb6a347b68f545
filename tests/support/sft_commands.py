"""Settings of a small supervised run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_train.config import SFTConfig


def make_config(root: Path, **trainer: Any) -> SFTConfig:
    config = SFTConfig(output_dir=str(root))
    data = replace(
        config.data,
        completion_column="extra_info.answer",
        max_train_rows=10,
        max_validation_rows=4,
        max_length=128,
        cache_dir=str(root.parent / "cache"),
    )
    optimizer = replace(config.trainer.optimizer, lr=1e-3)
    settings = {
        "num_steps": 4,
        "batch_size": 4,
        "eval_interval": 2,
        "ckpt_interval": 2,
        "optimizer": optimizer,
        **trainer,
    }
    return replace(config, data=data, trainer=replace(config.trainer, **settings))
