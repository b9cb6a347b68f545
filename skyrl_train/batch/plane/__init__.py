"""The data plane: arrays of rollouts and rows by reference, and what computes with them where they are."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.batch.plane.plane import DataPlane as DataPlane, added_columns as added_columns
    from skyrl_train.batch.plane.rollouts import (
        PlacedRollouts as PlacedRollouts,
        StoredTurn as StoredTurn,
        arrays_of as arrays_of,
        facts_in as facts_in,
        is_storable as is_storable,
        placed as placed,
        trajectories_of as trajectories_of,
    )
    from skyrl_train.batch.references import (
        Layer as Layer,
        Piece as Piece,
        ReferencedColumns as ReferencedColumns,
        RowSharing as RowSharing,
    )
    from skyrl_train.batch.training_batch import by_reference as by_reference

__getattr__ = lazily(__name__)
