"""`python -m skyrl_train.main_generate model.path=FOLDER`: evaluates a model and keeps its rollouts; trains nothing.

An export or a checkpoint of a run is evaluated with that run's data, environment and sampling, less what the command states;
any other model with what the command states, so `+experiment=gsm8k_multiturn` takes those of that experiment.
`trainer.resume_mode=from_path trainer.resume_path=RUN_OR_CHECKPOINT` takes the weights of a checkpoint in place of
`model.path`'s.
"""

from __future__ import annotations

from skyrl_train import config, runs
from skyrl_train.runs import cli
from skyrl_train.system import TYPE_CHECKING
from skyrl_train.system.processes import end_at_once_on_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """The console script `skyrl-generate`."""
    end_at_once_on_signals()  # first of all: what is imported next takes a second
    if not cli.answers_help(config_name="config"):
        cli.start(_generate, config_name="config", trains=False)


def _generate(node: DictConfig) -> None:
    with cli.exit_on_errors(node) as ending:
        runs.evaluate(cli.load_node(node, config.Config), on_end=ending.begins)


if __name__ == "__main__":
    main()
