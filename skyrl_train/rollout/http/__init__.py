"""One request over HTTP, answered or given up with the reason."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.http import replies
    from skyrl_train.rollout.http.replies import (
        CONNECT_TIMEOUT_S,
        MAX_BODY_BYTES,
        Reply,
        UnreadableReply,
        ask_until_answered,
        client_arguments,
        send,
    )

__all__ = [
    "CONNECT_TIMEOUT_S",
    "MAX_BODY_BYTES",
    "Reply",
    "UnreadableReply",
    "ask_until_answered",
    "client_arguments",
    "replies",
    "send",
]

__getattr__ = lazily(__name__)
