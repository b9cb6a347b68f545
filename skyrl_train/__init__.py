"""A PPO/GRPO trainer for language models. Start reading at `main.py`, then `trainers/ppo.py`.

What is in `__all__` is the Python API (`docs/python_api.md`), loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import, and every entry point comes by here
if TYPE_CHECKING:
    from skyrl_train.api import evaluate, load_config, train, train_sft
    from skyrl_train.runs import RunResult

    __version__: str

__all__ = ["RunResult", "__version__", "evaluate", "load_config", "train", "train_sft"]


_load = lazily(__name__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        distribution = import_module("skyrl_train.system").DISTRIBUTION
        version: str = import_module("importlib.metadata").version(distribution)
        return version
    return _load(name)


MOVED = {
    "skyrl_train.config.launchers": "skyrl_train.rollout.agents.launchers",
}
"""Modules that users' code names by the paths of before; for one release."""


class _Moved:
    """Finds a module by its path of before, and warns."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """As `sys.meta_path` has it."""
        return ModuleSpec(name, self) if name in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python, whose module `exec_module` replaces."""

    def exec_module(self, module: object) -> None:
        """Puts the module of today in its place."""
        name: str = module.__name__  # type: ignore[attr-defined]
        import_module("warnings").warn(f"{name} is {MOVED[name]} now", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(MOVED[name])


sys.meta_path.append(_Moved())
