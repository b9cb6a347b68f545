"""`python -m skyrl_train.main_generate model.path=FOLDER`: evaluates a model and keeps its rollouts; trains nothing.

An export or a checkpoint of a run is evaluated with that run's data, environment and sampling, less what the command states;
any other model with what the command states, so `+experiment=gsm8k_multiturn` takes those of that experiment.
`trainer.resume_mode=from_path trainer.resume_path=RUN_OR_CHECKPOINT` takes the weights of a checkpoint in place of
`model.path`'s.
"""

from __future__ import annotations

from skyrl_train.system.processes import TYPE_CHECKING, end_at_once_on_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """The console script `skyrl-generate`."""
    end_at_once_on_signals()  # first of all: what is imported next takes a second
    from skyrl_train.runs.cli import start

    start(_generate, config_name="config", trains=False)


def _generate(node: DictConfig) -> None:
    from skyrl_train.config import Config
    from skyrl_train.runs import evaluate
    from skyrl_train.runs.cli import exit_on_errors, load_node

    with exit_on_errors(node) as ending:
        evaluate(load_node(node, Config), on_end=ending.begins)


if __name__ == "__main__":
    main()
