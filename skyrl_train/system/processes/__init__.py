"""Processes: started, heard, and ended with everything that stems from them; signals."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.system.processes.host import (
        PACKAGE_PARENT,
        DirectProcess,
        ProcessHost,
        StartedProcess,
        manner,
        start_directly,
    )
    from skyrl_train.system.processes.messages import Frames, frame, parse
    from skyrl_train.system.processes.process_tree import (
        adopt_orphans,
        end_with_parent,
        kill,
        marked,
        start_time,
        state,
    )
    from skyrl_train.system.processes.signals import (
        STOP_SIGNALS,
        answer,
        end_at_once_on_signals,
        log_descriptors,
        say,
        terminal_descriptors,
    )
    from skyrl_train.system.processes.supervisor import FIRST_OWN_FD, Supervisor

__all__ = [
    "FIRST_OWN_FD",
    "PACKAGE_PARENT",
    "STOP_SIGNALS",
    "TYPE_CHECKING",
    "DirectProcess",
    "Frames",
    "ProcessHost",
    "StartedProcess",
    "Supervisor",
    "adopt_orphans",
    "answer",
    "end_at_once_on_signals",
    "end_with_parent",
    "frame",
    "kill",
    "log_descriptors",
    "manner",
    "marked",
    "parse",
    "say",
    "start_directly",
    "start_time",
    "state",
    "terminal_descriptors",
]

__getattr__ = lazily(__name__)
