"""A PPO/GRPO trainer for language models. Start reading at `main.py`, then `trainers/ppo.py`.

What is in `__all__` is the Python API (`docs/python_api.md`), loaded when it is first used.
"""

from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import, and every entry point comes by here
if TYPE_CHECKING:
    from skyrl_train.api import evaluate, load_config, train, train_sft
    from skyrl_train.runs.result import RunResult

    __version__: str

__all__ = ["RunResult", "__version__", "evaluate", "load_config", "train", "train_sft"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        distribution = import_module("skyrl_train.installed").DISTRIBUTION
        version: str = import_module("importlib.metadata").version(distribution)
        return version
    return getattr(import_module("skyrl_train.api"), name)
