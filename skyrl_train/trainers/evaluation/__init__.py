"""Evaluation, and what is told of it."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.trainers.evaluation.evaluate import (
        EvaluationFigures as EvaluationFigures,
        EvaluationResult as EvaluationResult,
        Evaluator as Evaluator,
        evaluation_table as evaluation_table,
        groups_of as groups_of,
        read_evaluations as read_evaluations,
        write_evaluation as write_evaluation,
    )
    from skyrl_train.trainers.evaluation.sft_evaluate import (
        SampleWriter as SampleWriter,
        SFTEvaluator as SFTEvaluator,
        cut_samples_after as cut_samples_after,
    )

__getattr__ = lazily(__name__)
