"""Facts of single fields: ranges, choices, resume classes, names of other trainers; and what was meant by a wrong one."""

from skyrl_train.config.fields.facts import ForksWhere, Interchangeable, LayoutChoice, LayoutName, Range, Resume
from skyrl_train.config.fields.fields import (
    Rule,
    SchemaField,
    defaults,
    fact,
    is_refused,
    meant_by,
    nearest,
    parts_of,
    remedy_for_unknown,
    seam_of,
    strip,
    unusual_values,
    walk,
)
from skyrl_train.config.fields.peers import PEER_NAMES, ROWS, TRAINERS, Here, peer_name, peer_setting

__all__ = [
    "PEER_NAMES",
    "ROWS",
    "TRAINERS",
    "ForksWhere",
    "Here",
    "Interchangeable",
    "LayoutChoice",
    "LayoutName",
    "Range",
    "Resume",
    "Rule",
    "SchemaField",
    "defaults",
    "fact",
    "is_refused",
    "meant_by",
    "nearest",
    "parts_of",
    "peer_name",
    "peer_setting",
    "remedy_for_unknown",
    "seam_of",
    "strip",
    "unusual_values",
    "walk",
]
