"""How a mapping becomes a configuration, every problem told at once; and the reference that documents it."""

from skyrl_train.config.door.load import (
    EARLIER as EARLIER,
    MISSING as MISSING,
    Loaded as Loaded,
    NotStated as NotStated,
    Unresolved as Unresolved,
    as_now as as_now,
    as_typed as as_typed,
    for_hydra as for_hydra,
    in_parts as in_parts,
    load_config as load_config,
    load_root as load_root,
    read_root as read_root,
)
