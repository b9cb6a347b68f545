"""`python -m skyrl_train.main +experiment=gsm8k_multiturn`: reinforcement learning of a language model.

    command line --preflight--> every problem with it at once, before torch is imported
                 --Hydra-->     one composed config, one run folder
                 --run-->       resolved, data, plan (runs/drive.py), parts (runs/rl.py), steps (trainers/ppo.py)

Exit status: 0 done; 2 something the user can fix; 1 a defect, with its traceback; 128 and the number of the signal where
one stopped the run (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1), in its steps with a checkpoint written.
"""

from __future__ import annotations

from skyrl_train import config, runs
from skyrl_train.runs import cli
from skyrl_train.system import TYPE_CHECKING
from skyrl_train.system.processes import end_at_once_on_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """The console script `skyrl-train`."""
    end_at_once_on_signals()  # first of all: what is imported next takes a second
    if not cli.answers_help(config_name="config"):
        cli.start(_train, config_name="config", look=_look)


def _look(node: DictConfig) -> None:
    """`--look`: what two prompts make of the run, and nothing else."""
    _train(node, only_looks=True)


def _train(node: DictConfig, *, only_looks: bool = False) -> float | None:
    with cli.exit_on_errors(node) as ending:
        loaded = cli.load_node(node, config.Config)
        runs.train(loaded, on_end=ending.begins, only_looks=only_looks)
        return None if only_looks else runs.swept_metric(loaded)


if __name__ == "__main__":
    main()
