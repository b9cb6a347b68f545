"""Tools that a model calls."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.tools.formats import (
        TOOL_FORMATS,
        VLLM_PARSER,
        Calls,
        ToolCall,
        ToolParser,
        call_from_value,
        make_parser,
    )
    from skyrl_train.rollout.tools.toolbox import Toolbox, ToolUnavailable, tool_schemas

__all__ = [
    "TOOL_FORMATS",
    "VLLM_PARSER",
    "Calls",
    "ToolCall",
    "ToolParser",
    "ToolUnavailable",
    "Toolbox",
    "call_from_value",
    "make_parser",
    "tool_schemas",
]

__getattr__ = lazily(__name__)
