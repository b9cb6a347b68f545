"""What is wrong with a run, and which rows prove it: rules over a run's folder."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.doctor.all_rules import RULES as RULES
    from skyrl_train.doctor.findings import MAX_FINDINGS as MAX_FINDINGS, Finding as Finding, custom_rule as custom_rule
    from skyrl_train.doctor.limits import LIMITS as LIMITS
    from skyrl_train.doctor.report import (
        as_json as as_json,
        as_text as as_text,
        examine as examine,
        problems_of as problems_of,
    )
    from skyrl_train.doctor.rules.engines import engine_drift as engine_drift
    from skyrl_train.doctor.rules.rewards import silence_pays_text as silence_pays_text
    from skyrl_train.doctor.tables import Tables as Tables
    from skyrl_train.doctor.trajectories import Trajectory as Trajectory

__getattr__ = lazily(__name__)
