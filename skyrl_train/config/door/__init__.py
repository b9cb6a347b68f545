"""How a mapping becomes a configuration, every problem told at once; and the reference that documents it."""

from skyrl_train.config.door.load import (
    MISSING,
    Loaded,
    NotStated,
    Unresolved,
    as_typed,
    load_config,
    load_root,
    read_root,
)

__all__ = [
    "MISSING",
    "Loaded",
    "NotStated",
    "Unresolved",
    "as_typed",
    "load_config",
    "load_root",
    "read_root",
]
