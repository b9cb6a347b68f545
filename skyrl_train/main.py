"""`python -m skyrl_train.main +experiment=gsm8k_multiturn`: reinforcement learning of a language model.

    command line --preflight--> every problem with it at once, before torch is imported
                 --Hydra-->     one composed config, one run folder
                 --run-->       data, plan, parts (runs/rl.py), training (trainers/ppo.py)

Exit status: 0 done; 2 something the user can fix; 130 or 143 stopped by Ctrl-C or SIGTERM with a checkpoint written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.cli import start
from skyrl_train.cli.composition import load_node
from skyrl_train.cli.exits import exit_on_known_errors
from skyrl_train.config.schema import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """The console script `skyrl-train`."""
    start(_train, config_name="config")


def _train(node: DictConfig) -> None:
    from skyrl_train.runs.rl import train

    with exit_on_known_errors(node):
        train(load_node(node, Config))


if __name__ == "__main__":
    main()
