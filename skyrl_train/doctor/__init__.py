"""What is wrong with a run, and which rows prove it: rules over a run's folder."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.doctor.findings import Finding, Row, Rule, diagnose
    from skyrl_train.doctor.report import examine
    from skyrl_train.doctor.rules import CAUSES, RULES
    from skyrl_train.doctor.tables import Series, Tables, Trajectory, Turn

__all__ = ["CAUSES", "RULES", "Finding", "Row", "Rule", "Series", "Tables", "Trajectory", "Turn", "diagnose", "examine"]

__getattr__ = lazily(__name__)
