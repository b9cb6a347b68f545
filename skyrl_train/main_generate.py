"""`python -m skyrl_train.main_generate model.path=FOLDER`: evaluates a model and keeps its rollouts; trains nothing.

The configuration is that of training, so `+experiment=gsm8k_multiturn` evaluates with that experiment's data,
environment and sampling. `trainer.resume_mode=from_path trainer.resume_path=RUN_OR_CHECKPOINT` takes
the weights of a checkpoint in place of `model.path`'s.
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
    """The console script `skyrl-generate`."""
    register_resolvers()
    preflight(sys.argv[1:], config_name=CONFIG_NAME)
    _generate_under_hydra()


@hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name=CONFIG_NAME)
def _generate_under_hydra(node: DictConfig) -> None:
    from skyrl_train.run import evaluate

    with exit_on_known_errors(node):
        evaluate(load_config(node))


if __name__ == "__main__":
    main()
