"""Code that nobody trusts, in a process of its own with nothing around it."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.system.sandbox import sandbox as sandbox
    from skyrl_train.system.sandbox.sandbox import (
        START_WITHIN_S as START_WITHIN_S,
        Level as Level,
        Limits as Limits,
        SandboxUnavailable as SandboxUnavailable,
        made as made,
        missing as missing,
        programs as programs,
        readable as readable,
        run as run,
        system_words as system_words,
        violations as violations,
    )

__getattr__ = lazily(__name__)
