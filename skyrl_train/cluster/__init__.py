"""Ray: its session, placement, and learners, engines and environments as actors. The only importer of ray."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.cluster.calls import RemoteActor as RemoteActor
    from skyrl_train.cluster.endpoints import ActorGroup as ActorGroup, Served as Served
    from skyrl_train.cluster.engine_group import EngineGroup as EngineGroup, GroupEngine as GroupEngine
    from skyrl_train.cluster.environment_workers import RayWorkers as RayWorkers
    from skyrl_train.cluster.group_rollouts import GroupRollouts as GroupRollouts
    from skyrl_train.cluster.images import SentImages as SentImages
    from skyrl_train.cluster.learner_worker import LearnerRank as LearnerRank, pack as pack, unpack as unpack
    from skyrl_train.cluster.learners import RayLearner as RayLearner, start_learner as start_learner
    from skyrl_train.cluster.placement import Placement as Placement, Slot as Slot
    from skyrl_train.cluster.reward_model import RayScorer as RayScorer
    from skyrl_train.cluster.rollouts import MakesRollouts as MakesRollouts
    from skyrl_train.cluster.served_models import RayModels as RayModels
    from skyrl_train.cluster.session import (
        RaySession as RaySession,
        gpus_of_cluster as gpus_of_cluster,
        wait_for_room as wait_for_room,
    )
    from skyrl_train.cluster.stored import RayPlane as RayPlane, put_arrays as put_arrays

__getattr__ = lazily(__name__)
