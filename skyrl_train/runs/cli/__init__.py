"""The command line that every entry point shares. Imports hydra, never torch."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.runs.cli.command_line import checked_config, start
    from skyrl_train.runs.cli.composition import Composer, as_override, load_node
    from skyrl_train.runs.cli.exits import exit_on_errors
    from skyrl_train.runs.cli.machine import MACHINE_RULES, RL_MACHINE_RULES
    from skyrl_train.runs.cli.placement import place, settle, with_memory_settings
    from skyrl_train.runs.cli.plan import main
    from skyrl_train.runs.cli.resolvers import HYDRA_VERSION_BASE, conf_dir, register_resolvers

__all__ = [
    "HYDRA_VERSION_BASE",
    "MACHINE_RULES",
    "RL_MACHINE_RULES",
    "Composer",
    "as_override",
    "checked_config",
    "conf_dir",
    "exit_on_errors",
    "load_node",
    "main",
    "place",
    "register_resolvers",
    "settle",
    "start",
    "with_memory_settings",
]

__getattr__ = lazily(__name__)
