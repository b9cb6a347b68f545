"""Rollouts and timelines on disk."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.telemetry.records.columns import FAILED, KINDS, arrow_schema
    from skyrl_train.telemetry.records.log import decode_answer, decode_trajectory, encode_trajectory, read_json_lines
    from skyrl_train.telemetry.records.store import (
        FloatColumns,
        TurnValues,
        pairs_of,
        read_facts,
        read_failed_rollouts,
        read_rollouts,
        write_failed_rollouts,
        write_rollouts,
    )
    from skyrl_train.telemetry.records.timeline import Line, Timeline, draw_timeline, kind_of, read_timeline

__all__ = [
    "FAILED",
    "KINDS",
    "FloatColumns",
    "Line",
    "Timeline",
    "TurnValues",
    "arrow_schema",
    "decode_answer",
    "decode_trajectory",
    "draw_timeline",
    "encode_trajectory",
    "kind_of",
    "pairs_of",
    "read_facts",
    "read_failed_rollouts",
    "read_json_lines",
    "read_rollouts",
    "read_timeline",
    "write_failed_rollouts",
    "write_rollouts",
]

__getattr__ = lazily(__name__)
