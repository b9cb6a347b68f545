"""Tools that a model calls."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.rollout.tools.formats import (
        TOOL_FORMATS as TOOL_FORMATS,
        VLLM_PARSER as VLLM_PARSER,
        Calls as Calls,
        ToolCall as ToolCall,
        ToolParser as ToolParser,
        call_from_value as call_from_value,
        make_parser as make_parser,
    )
    from skyrl_train.rollout.tools.toolbox import (
        Toolbox as Toolbox,
        ToolUnavailable as ToolUnavailable,
        tool_schemas as tool_schemas,
    )

__getattr__ = lazily(__name__)
