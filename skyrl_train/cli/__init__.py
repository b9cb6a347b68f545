"""The command line that every entry point shares. Imports hydra, never torch."""

from skyrl_train.cli.preflight import preflight, start
from skyrl_train.cli.resolvers import HYDRA_VERSION_BASE, register_resolvers

__all__ = ["HYDRA_VERSION_BASE", "preflight", "register_resolvers", "start"]
