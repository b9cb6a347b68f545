"""Evaluation, and what is told of it."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.trainers.evaluation.evaluate import (
        EvaluationFigures,
        EvaluationResult,
        Evaluator,
        evaluation_table,
        groups_of,
        read_evaluations,
        write_evaluation,
    )
    from skyrl_train.trainers.evaluation.sft_evaluate import SampleWriter, SFTEvaluator, cut_samples_after

__all__ = [
    "EvaluationFigures",
    "EvaluationResult",
    "Evaluator",
    "SFTEvaluator",
    "SampleWriter",
    "cut_samples_after",
    "evaluation_table",
    "groups_of",
    "read_evaluations",
    "write_evaluation",
]

__getattr__ = lazily(__name__)
