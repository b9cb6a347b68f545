"""Signals, and trees of processes that end with their parent."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.system.processes.process_tree import (
        adopt_orphans,
        children,
        end_with_parent,
        kill,
        prefer_for_memory,
        start_time,
    )
    from skyrl_train.system.processes.signals import (
        STOP_SIGNALS,
        answer,
        end_at_once_on_signals,
        log_descriptors,
        say,
        terminal_descriptors,
    )

__all__ = [
    "STOP_SIGNALS",
    "TYPE_CHECKING",
    "adopt_orphans",
    "answer",
    "children",
    "end_at_once_on_signals",
    "end_with_parent",
    "kill",
    "log_descriptors",
    "prefer_for_memory",
    "say",
    "start_time",
    "terminal_descriptors",
]

__getattr__ = lazily(__name__)
