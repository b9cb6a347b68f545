"""The data plane: arrays of rollouts and rows by reference, and what computes with them where they are."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.batch.plane.plane import DataPlane, added_columns
    from skyrl_train.batch.plane.rollouts import (
        PlacedRollouts,
        StoredTurn,
        arrays_of,
        facts_in,
        is_storable,
        placed,
        trajectories_of,
    )
    from skyrl_train.batch.references import Layer, Piece, ReferencedColumns, RowSharing
    from skyrl_train.batch.training_batch import by_reference

__all__ = [
    "DataPlane",
    "Layer",
    "Piece",
    "PlacedRollouts",
    "ReferencedColumns",
    "RowSharing",
    "StoredTurn",
    "added_columns",
    "arrays_of",
    "by_reference",
    "facts_in",
    "is_storable",
    "placed",
    "trajectories_of",
]

__getattr__ = lazily(__name__)
