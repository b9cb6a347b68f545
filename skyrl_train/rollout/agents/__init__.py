"""Programs of the user as agents: an endpoint they talk to, and sandboxes they run in."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.rollout.agents import sandbox as sandbox
    from skyrl_train.rollout.agents.endpoint import Address as Address, opened as opened
    from skyrl_train.rollout.agents.launchers import Launcher as Launcher
    from skyrl_train.rollout.agents.session import Origin as Origin, Session as Session
    from skyrl_train.rollout.agents.wires import ChatReply as ChatReply, ChatRequest as ChatRequest

__getattr__ = lazily(__name__)
