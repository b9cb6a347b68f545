"""`python -m skyrl_train.main_sft +experiment=sft_gsm8k`: supervised fine-tuning of a language model.

    command line --preflight--> every problem with it at once, before torch is imported
                 --Hydra-->     one composed config (conf/sft.yaml), one run folder
                 --run-->       resolved, data, plan (runs/drive.py), parts (runs/sft.py), steps (trainers/sft.py)

Exit status as of `main.py`.
"""

from __future__ import annotations

from skyrl_train.system.processes import TYPE_CHECKING, end_at_once_on_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """The console script `skyrl-sft`."""
    end_at_once_on_signals()  # first of all: what is imported next takes a second
    from skyrl_train.runs.cli import start

    start(_train, config_name="sft")


def _train(node: DictConfig) -> float | None:
    from skyrl_train.config import SFTConfig
    from skyrl_train.runs import swept_metric, train_sft
    from skyrl_train.runs.cli import exit_on_errors, load_node

    with exit_on_errors(node) as ending:
        config = load_node(node, SFTConfig)
        train_sft(config, on_end=ending.begins)
        return swept_metric(config)


if __name__ == "__main__":
    main()
