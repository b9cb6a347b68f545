"""How a mapping becomes a configuration, every problem told at once; and the reference that documents it."""

from skyrl_train.config.door.load import (
    EARLIER,
    MISSING,
    Loaded,
    NotStated,
    Unresolved,
    as_now,
    as_typed,
    for_hydra,
    in_parts,
    load_config,
    load_root,
    read_root,
)

__all__ = [
    "EARLIER",
    "MISSING",
    "Loaded",
    "NotStated",
    "Unresolved",
    "as_now",
    "as_typed",
    "for_hydra",
    "in_parts",
    "load_config",
    "load_root",
    "read_root",
]
