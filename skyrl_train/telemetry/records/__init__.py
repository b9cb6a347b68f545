"""Rollouts and timelines on disk."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.telemetry.records.columns import FAILED as FAILED, KINDS as KINDS, arrow_schema as arrow_schema
    from skyrl_train.telemetry.records.log import (
        decode_answer as decode_answer,
        decode_trajectory as decode_trajectory,
        encode_trajectory as encode_trajectory,
        read_json_lines as read_json_lines,
    )
    from skyrl_train.telemetry.records.parts import (
        read_parts as read_parts,
        remove_rollouts as remove_rollouts,
        rollouts_sum as rollouts_sum,
        write_parts as write_parts,
    )
    from skyrl_train.telemetry.records.store import (
        FloatColumns as FloatColumns,
        TurnValues as TurnValues,
        pairs_of as pairs_of,
        read_columns as read_columns,
        read_facts as read_facts,
        read_failed_rollouts as read_failed_rollouts,
        read_rollouts as read_rollouts,
        write_failed_rollouts as write_failed_rollouts,
        write_rollouts as write_rollouts,
    )
    from skyrl_train.telemetry.records.timeline import (
        Line as Line,
        Timeline as Timeline,
        draw_timeline as draw_timeline,
        kind_of as kind_of,
        read_timeline as read_timeline,
    )

__getattr__ = lazily(__name__)
