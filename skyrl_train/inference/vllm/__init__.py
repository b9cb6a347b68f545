"""vLLM as an engine, in processes of its own."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.inference.vllm import core as core
    from skyrl_train.inference.vllm.core import COLLECTS_AFTER as COLLECTS_AFTER, Running as Running
    from skyrl_train.inference.vllm.distributions import Ranked as Ranked, prompt_distributions as prompt_distributions
    from skyrl_train.inference.vllm.engine import VLLMEngine as VLLMEngine
    from skyrl_train.inference.vllm.processes import EngineProcesses as EngineProcesses
    from skyrl_train.inference.vllm.settings import (
        sampling_arguments as sampling_arguments,
        vllm_arguments as vllm_arguments,
        vllm_environment as vllm_environment,
    )
    from skyrl_train.inference.vllm.tools import (
        make_tool_parser as make_tool_parser,
        vllm_tool_parser as vllm_tool_parser,
    )

__getattr__ = lazily(__name__)
