"""The generator: conversations with an engine, turn by turn, token in and token out."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.rollout.admission import (
        Admission as Admission,
        ConsumedPrompts as ConsumedPrompts,
    )
    from skyrl_train.rollout.agent_loop import (
        Episode as Episode,
        Job as Job,
        Limits as Limits,
        multi_turn as multi_turn,
    )
    from skyrl_train.rollout.chat_tokens import (
        ChatTokens as ChatTokens,
        check_tools as check_tools,
        with_context as with_context,
    )
    from skyrl_train.rollout.checked_engine import (
        CheckedEngine as CheckedEngine,
        Listener as Listener,
        check_answer as check_answer,
        check_failures as check_failures,
        listener as listener,
        listening as listening,
    )
    from skyrl_train.rollout.generator import (
        Place as Place,
        RolloutGenerator as RolloutGenerator,
        places_of as places_of,
    )
    from skyrl_train.rollout.journal import FILE as FILE, Journal as Journal, journal_lines as journal_lines
    from skyrl_train.rollout.loop_thread import LoopThread as LoopThread
    from skyrl_train.rollout.row_checks import check_all_rows as check_all_rows, checked_prompts as checked_prompts

__getattr__ = lazily(__name__)
