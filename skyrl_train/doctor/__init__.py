"""What is wrong with a run, and which rows prove it: rules over a run's folder."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.doctor.findings import MAX_FINDINGS, Finding, custom_rule
    from skyrl_train.doctor.report import as_json, as_text, examine
    from skyrl_train.doctor.tables import Tables, Trajectory

__all__ = ["MAX_FINDINGS", "Finding", "Tables", "Trajectory", "as_json", "as_text", "custom_rule", "examine"]

__getattr__ = lazily(__name__)
