"""Ray: its session, placement, and learners, engines and environments as actors. The only importer of ray."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.cluster.calls import RemoteActor
    from skyrl_train.cluster.endpoints import ActorGroup, Served
    from skyrl_train.cluster.engine_group import EngineGroup, GroupEngine
    from skyrl_train.cluster.environment_workers import RayWorkers
    from skyrl_train.cluster.images import SentImages
    from skyrl_train.cluster.learner_worker import LearnerRank, pack, unpack
    from skyrl_train.cluster.learners import RayLearner, start_learner
    from skyrl_train.cluster.placement import Placement, Slot
    from skyrl_train.cluster.reward_model import RayScorer
    from skyrl_train.cluster.session import RaySession, gpus_of_cluster, wait_for_room
    from skyrl_train.cluster.stored import RayPlane, put_arrays

__all__ = [
    "ActorGroup",
    "EngineGroup",
    "GroupEngine",
    "LearnerRank",
    "Placement",
    "RayLearner",
    "RayPlane",
    "RayScorer",
    "RaySession",
    "RayWorkers",
    "RemoteActor",
    "SentImages",
    "Served",
    "Slot",
    "gpus_of_cluster",
    "pack",
    "put_arrays",
    "start_learner",
    "unpack",
    "wait_for_room",
]

__getattr__ = lazily(__name__)
