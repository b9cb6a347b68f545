"""Processes: started, heard, and ended with everything that stems from them; signals."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.system.processes.host import (
        PACKAGE_PARENT as PACKAGE_PARENT,
        DirectProcess as DirectProcess,
        ProcessHost as ProcessHost,
        StartedProcess as StartedProcess,
        manner as manner,
        start_directly as start_directly,
    )
    from skyrl_train.system.processes.messages import Frames as Frames, frame as frame, parse as parse
    from skyrl_train.system.processes.process_tree import (
        adopt_orphans as adopt_orphans,
        end_with_parent as end_with_parent,
        kill as kill,
        marked as marked,
        start_time as start_time,
        state as state,
    )
    from skyrl_train.system.processes.signals import (
        STOP_SIGNALS as STOP_SIGNALS,
        answer as answer,
        end_at_once_on_signals as end_at_once_on_signals,
        log_descriptors as log_descriptors,
        say as say,
        terminal_descriptors as terminal_descriptors,
    )
    from skyrl_train.system.processes.supervisor import FIRST_OWN_FD as FIRST_OWN_FD, Supervisor as Supervisor

__getattr__ = lazily(__name__)
