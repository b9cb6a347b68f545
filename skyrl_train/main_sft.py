"""`python -m skyrl_train.main_sft +experiment=sft_gsm8k`: supervised fine-tuning of a language model.

    command line --preflight--> every problem with it at once, before torch is imported
                 --Hydra-->     one composed config (conf/sft.yaml), one run folder
                 --run-->       plan, parts (build_sft.py), training (trainers/sft.py)

Exit status as of `main.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hydra

from skyrl_train.cli import HYDRA_VERSION_BASE, preflight, register_resolvers
from skyrl_train.cli.exits import exit_on_known_errors
from skyrl_train.config.load import load_root
from skyrl_train.config.paths import conf_dir
from skyrl_train.config.sft import SFTConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "sft"


def main() -> None:
    """The console script `skyrl-sft`."""
    register_resolvers()
    preflight(sys.argv[1:], config_name=CONFIG_NAME)
    _train_under_hydra()


@hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name=CONFIG_NAME)
def _train_under_hydra(node: DictConfig) -> None:
    from skyrl_train.run_sft import train

    with exit_on_known_errors(node):
        train(load_root(node, SFTConfig))


if __name__ == "__main__":
    main()
