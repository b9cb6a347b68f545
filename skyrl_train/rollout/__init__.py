"""The generator: conversations with an engine, turn by turn, token in and token out."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.admission import Admission, AdmissionSettings, ConsumedPrompts
    from skyrl_train.rollout.agent_loop import Episode, Job, Limits, multi_turn
    from skyrl_train.rollout.chat_tokens import ChatTokens, check_tools, with_context
    from skyrl_train.rollout.checked_engine import (
        CheckedEngine,
        Listener,
        check_answer,
        check_failures,
        listener,
        listening,
    )
    from skyrl_train.rollout.generator import RolloutGenerator
    from skyrl_train.rollout.journal import FILE, Journal, journal_lines
    from skyrl_train.rollout.loop_thread import LoopThread
    from skyrl_train.rollout.row_checks import check_all_rows, checked_prompts

__all__ = [
    "FILE",
    "Admission",
    "AdmissionSettings",
    "ChatTokens",
    "CheckedEngine",
    "ConsumedPrompts",
    "Episode",
    "Job",
    "Journal",
    "Limits",
    "Listener",
    "LoopThread",
    "RolloutGenerator",
    "check_all_rows",
    "check_answer",
    "check_failures",
    "check_tools",
    "checked_prompts",
    "journal_lines",
    "listener",
    "listening",
    "multi_turn",
    "with_context",
]

__getattr__ = lazily(__name__)
