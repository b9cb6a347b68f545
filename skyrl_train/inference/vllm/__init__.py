"""vLLM as an engine, in processes of its own."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.inference.vllm import core
    from skyrl_train.inference.vllm.core import COLLECTS_AFTER, Running
    from skyrl_train.inference.vllm.engine import VLLMEngine
    from skyrl_train.inference.vllm.processes import EngineProcesses
    from skyrl_train.inference.vllm.settings import sampling_arguments, vllm_settings
    from skyrl_train.inference.vllm.tools import make_tool_parser, vllm_tool_parser

__all__ = [
    "COLLECTS_AFTER",
    "EngineProcesses",
    "Running",
    "VLLMEngine",
    "core",
    "make_tool_parser",
    "sampling_arguments",
    "vllm_settings",
    "vllm_tool_parser",
]

__getattr__ = lazily(__name__)
