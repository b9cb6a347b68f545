"""Programs of the user as agents: an endpoint they talk to, and sandboxes they run in."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.agents import sandbox
    from skyrl_train.rollout.agents.endpoint import Address, opened
    from skyrl_train.rollout.agents.launchers import Launcher
    from skyrl_train.rollout.agents.session import Origin, Session
    from skyrl_train.rollout.agents.wires import ChatReply, ChatRequest

__all__ = ["Address", "ChatReply", "ChatRequest", "Launcher", "Origin", "Session", "opened", "sandbox"]

__getattr__ = lazily(__name__)
