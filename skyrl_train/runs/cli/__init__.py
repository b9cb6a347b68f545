"""The command line that every entry point shares. Imports hydra, never torch."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.runs.cli.command_line import checked_config as checked_config, start as start
    from skyrl_train.runs.cli.composition import (
        Composer as Composer,
        as_override as as_override,
        load_node as load_node,
    )
    from skyrl_train.runs.cli.conf_folder import answers_help as answers_help, conf_dir as conf_dir
    from skyrl_train.runs.cli.exits import exit_on_errors as exit_on_errors
    from skyrl_train.runs.cli.machine import MACHINE_RULES as MACHINE_RULES, RL_MACHINE_RULES as RL_MACHINE_RULES
    from skyrl_train.runs.cli.placement import place as place
    from skyrl_train.runs.cli.resolvers import (
        HYDRA_VERSION_BASE as HYDRA_VERSION_BASE,
        register_resolvers as register_resolvers,
    )

__getattr__ = lazily(__name__)
