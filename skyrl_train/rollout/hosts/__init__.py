"""Where environments run: in threads, in processes, with deadlines that hold."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.hosts.local import (
        IMPORT_DEADLINE_S,
        LocalWorker,
        LocalWorkers,
        WorkerSettings,
        violations_in_process,
    )
    from skyrl_train.rollout.hosts.processes import Imported, ProcessEnvironments, WorkerEnded, WorkerHost
    from skyrl_train.rollout.hosts.scoring import (
        facts_of,
        held_rewards,
        reward_problems,
        row_columns,
        server_problems,
        trajectory_facts,
    )
    from skyrl_train.rollout.hosts.threads import ThreadEnvironments

__all__ = [
    "IMPORT_DEADLINE_S",
    "Imported",
    "LocalWorker",
    "LocalWorkers",
    "ProcessEnvironments",
    "ThreadEnvironments",
    "WorkerEnded",
    "WorkerHost",
    "WorkerSettings",
    "facts_of",
    "held_rewards",
    "reward_problems",
    "row_columns",
    "server_problems",
    "trajectory_facts",
    "violations_in_process",
]

__getattr__ = lazily(__name__)
