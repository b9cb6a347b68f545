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
    from types import CodeType

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
    "skyrl_train.assets": "skyrl_train.data.assets",
    "skyrl_train.capsules": "skyrl_train.trainers.capsules",
    "skyrl_train.cli": "skyrl_train.runs.cli",
    "skyrl_train.config.launchers": "skyrl_train.rollout.agents.launchers",
    "skyrl_train.data.word_problems": "skyrl_train.data.tasks.word_problems",
    "skyrl_train.inference.vllm_worker": "skyrl_train.inference.vllm.worker",
    "skyrl_train.memory": "skyrl_train.learner.memory",
    "skyrl_train.rollout.environments": "skyrl_train.rollout.envs.environments",
    "skyrl_train.telemetry.declarations": "skyrl_train.telemetry.declared",
    "skyrl_train.telemetry.rollout_log": "skyrl_train.telemetry.records.log",
    "skyrl_train.telemetry.rollout_store": "skyrl_train.telemetry.records.store",
    "skyrl_train.telemetry.run_log": "skyrl_train.telemetry.logs.run_log",
    "skyrl_train.turns": "skyrl_train.types",
    "skyrl_train.user_code": "skyrl_train.registry",
}
"""Modules and packages that users' code and commands name by the paths of before; for one release."""


def _today(name: str) -> str:
    """Return where a module of these paths, or below one, is now; empty for any other."""
    before = next((each for each in MOVED if f"{name}.".startswith(f"{each}.")), "")
    return MOVED[before] + name.removeprefix(before) if before else ""


class _Moved:
    """Finds a module by its path of before, and warns."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """As `sys.meta_path` has it."""
        return ModuleSpec(name, self) if name.startswith("skyrl_train.") and _today(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python, whose module `exec_module` replaces."""

    def exec_module(self, module: object) -> None:
        """Puts the module of today in its place."""
        name: str = module.__name__  # type: ignore[attr-defined]
        import_module("warnings").warn(f"{name} is {_today(name)} now", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(_today(name))

    def get_code(self, name: str) -> CodeType:
        """Run the module of today, for `python -m` with the path of before; what Python then runs does nothing."""
        import_module("runpy").run_module(_today(name), run_name="__main__", alter_sys=True)
        return (lambda: None).__code__


sys.meta_path.insert(0, _Moved())
