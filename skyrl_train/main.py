"""`python -m skyrl_train.main +experiment=gsm8k_multiturn`: reinforcement learning of a language model.

    command line --preflight--> every problem with it at once, before torch is imported
                 --Hydra-->     one composed config, one run folder
                 --run-->       plan, parts (build.py), training (trainers/ppo.py)

Exit status: 0 done; 2 something the user can mend; 130 or 143 stopped by Ctrl-C or SIGTERM with a checkpoint written.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import hydra

from skyrl_train.cli import HYDRA_VERSION_BASE, preflight, register_resolvers
from skyrl_train.cli.exits import exit_on_known_errors
from skyrl_train.config.load import load_config
from skyrl_train.config.paths import conf_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "config"


def main() -> None:
    """The console script `skyrl-train`."""
    register_resolvers()
    preflight(sys.argv[1:], config_name=CONFIG_NAME)
    _train_under_hydra()


@hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name=CONFIG_NAME)
def _train_under_hydra(node: DictConfig) -> None:
    from skyrl_train.run import train

    with exit_on_known_errors(node):
        train(load_config(node))


if __name__ == "__main__":
    main()
