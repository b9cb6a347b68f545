"""`python -m skyrl_train.main_sft +experiment=sft_gsm8k`: supervised fine-tuning of a language model.

    command line --preflight--> every problem with it at once, before torch is imported
                 --Hydra-->     one composed config (conf/sft.yaml), one run folder
                 --run-->       resolved, data, plan (runs/drive.py), parts (runs/sft.py), steps (trainers/sft.py)

Exit status as of `main.py`.
"""

from __future__ import annotations

from skyrl_train import config, runs
from skyrl_train.runs import cli
from skyrl_train.system import TYPE_CHECKING
from skyrl_train.system.processes import end_at_once_on_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """The console script `skyrl-sft`."""
    end_at_once_on_signals()  # first of all: what is imported next takes a second
    if not cli.answers_help(config_name="sft"):
        cli.start(_train, config_name="sft")


def _train(node: DictConfig) -> float | None:
    with cli.exit_on_errors(node) as ending:
        loaded = cli.load_node(node, config.SFTConfig)
        runs.train_sft(loaded, on_end=ending.begins)
        return runs.swept_metric(loaded)


if __name__ == "__main__":
    main()
