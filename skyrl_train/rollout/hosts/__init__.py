"""Where environments run: in threads, in processes, with deadlines that hold."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.rollout.hosts.local import (
        IMPORT_DEADLINE_S as IMPORT_DEADLINE_S,
        LocalWorker as LocalWorker,
        LocalWorkers as LocalWorkers,
        violations_in_process as violations_in_process,
    )
    from skyrl_train.rollout.hosts.processes import (
        Imported as Imported,
        ProcessEnvironments as ProcessEnvironments,
        WorkerEnded as WorkerEnded,
        WorkerHost as WorkerHost,
    )
    from skyrl_train.rollout.hosts.scoring import (
        facts_of as facts_of,
        held_rewards as held_rewards,
        reward_problems as reward_problems,
        row_columns as row_columns,
        server_problems as server_problems,
        trajectory_facts as trajectory_facts,
    )
    from skyrl_train.rollout.hosts.threads import ThreadEnvironments as ThreadEnvironments

__getattr__ = lazily(__name__)
