"""Facts of single fields: ranges, choices, resume classes, names of other trainers; and what was meant by a wrong one."""

from skyrl_train.config.fields.documentation import documentation as documentation
from skyrl_train.config.fields.fields import (
    ForksWhere as ForksWhere,
    Interchangeable as Interchangeable,
    LayoutChoice as LayoutChoice,
    LayoutName as LayoutName,
    Range as Range,
    Resume as Resume,
    Rule as Rule,
    SchemaField as SchemaField,
    defaults as defaults,
    fact as fact,
    is_refused as is_refused,
    kind_sentences as kind_sentences,
    kinds_of as kinds_of,
    parts_of as parts_of,
    seam_of as seam_of,
    strip as strip,
    unusual_values as unusual_values,
    walk as walk,
)
from skyrl_train.config.fields.names import (
    TRAINERS as TRAINERS,
    Here as Here,
    meant_by as meant_by,
    nearest as nearest,
    peer_name as peer_name,
    peer_rows as peer_rows,
    remedy_for_unknown as remedy_for_unknown,
)
