"""How much one reads to follow a training step: from `main` to `optimizer.step`.

    python scripts/studies/step_in_a_sitting.py                    # the quickstart's first optimizer step
    python scripts/studies/step_in_a_sitting.py --checkout FOLDER  # of another checkout

Runs one step of `+experiment=gsm8k_multiturn` and counts whole files of the package, twice: `way` has those with a function
on the stack of the first `loss.backward()` or the first `optimizer.step()`; `update` adds those of which a function is
called from the beginning of the update to that step. Configuration, imports and the package's `__init__` files are left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

OVERRIDES = ("+experiment=gsm8k_multiturn", "data.validation=[]", "trainer.total_steps=1")
TIMEOUT_S = 600.0
LEFT_OUT = ("config/", "runs/cli/", "__init__.py")


class Way:
    """What is on the stack where a gradient is made and where it is applied, and what the update calls before."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self.stacks: dict[str, list[str]] = {}
        self.entered: dict[str, None] = {}

    def note(self, frame: FrameType | None, what: str) -> None:
        """Keep the first stack that ends in `what`, its functions from the outermost on."""
        if what in self.stacks:
            return
        found = []
        while frame is not None:
            if name := self._name(frame):
                found.append(f"{name}:{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}")
            frame = frame.f_back
        self.stacks[what] = found[::-1]

    def watch(self, frame: FrameType, event: str, _: object) -> None:
        """As `sys.setprofile` calls it."""
        if event == "call" and (name := self._name(frame)):
            self.entered.setdefault(name)

    def _name(self, frame: FrameType) -> str:
        """The file of a function of the package, from the package on; empty for any other."""
        name = frame.f_code.co_filename
        inside = name.startswith(self._package) and frame.f_code.co_name != "<module>"
        name = name.removeprefix(self._package)
        return name if inside and not name.startswith(LEFT_OUT) and not name.endswith(LEFT_OUT) else ""


def run_child(folder: Path) -> None:
    """Train one step, and print what its first optimizer step came by."""
    from skyrl_train import main as entry

    package = Path(entry.__file__).resolve().parent
    way = Way(package)
    sys.argv = ["skyrl-train", *OVERRIDES, f"hydra.run.dir={folder / 'run'}"]
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from skyrl_train.trainers import steps

    backward: Callable[..., Any] = torch.Tensor.backward
    update: Callable[..., Any] = steps.update

    def noted_backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        way.note(sys._getframe(1), "loss.backward")
        return backward(tensor, *args, **kwargs)

    def noted_update(*args: Any, **kwargs: Any) -> Any:
        if "optimizer.step" not in way.stacks:
            sys.setprofile(way.watch)
        return update(*args, **kwargs)

    def stepped(*_: object) -> None:
        sys.setprofile(None)
        way.note(sys._getframe(1), "optimizer.step")

    torch.Tensor.backward = noted_backward  # type: ignore[method-assign,assignment]
    steps.update = noted_update
    register_optimizer_step_pre_hook(stepped)
    entry.main()
    _print(way, package)


def _print(way: Way, package: Path) -> None:
    for what, stack in way.stacks.items():
        print(f"{what}:", *(f"  {each}" for each in stack), sep="\n")
    functions = way.stacks["loss.backward"]
    begins = max(index for index, each in enumerate(functions) if each.endswith(":update_learner"))
    print(f"calls from forward_backward to loss.backward: {len(functions) - begins - 2}")
    on_way = {each.partition(":")[0] for stack in way.stacks.values() for each in stack}
    for name, files in (("way", on_way), ("update", on_way | set(way.entered))):
        lines = {each: len((package / each).read_text(encoding="utf-8").splitlines()) for each in files}
        print(f"{name}: {len(lines)} files, {sum(lines.values())} lines")
        for each, count in sorted(lines.items()):
            print(f"  {count:5} {each}")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        run_child(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[2], metavar="FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="step-in-a-sitting-") as scratch:
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--child", scratch],
            cwd=options.checkout,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(options.checkout.resolve())},
            timeout=TIMEOUT_S,
            check=False,
        )
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
