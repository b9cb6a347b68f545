"""A machine without a network: an image of torch and transformers, and the wheels of requirements/bare.txt beside it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
BARE = REPOSITORY / "requirements" / "bare.txt"
IMAGE = ("torch", "transformers", "numpy", "rich", "peft", "safetensors")
HIDES = """
import os, sys
from importlib.machinery import PathFinder
hidden = set(os.environ["HIDDEN"].split(","))
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)
    find_distributions, invalidate_caches = PathFinder.find_distributions, PathFinder.invalidate_caches
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
TINY_RL = (
    *("+experiment=gsm8k_multiturn", "platform=cpu", "trainer.total_steps=1", "trainer.train_batch_size=2"),
    *("trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2", "data.max_validation_prompts=2"),
    "generator.sampling.max_generate_length=4",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("main", TINY_RL),
        ("main_sft", ("sft_platform=cpu", "trainer.num_steps=1")),
        pytest.param("plan", ("+experiment=gsm8k_multiturn", "platform=cpu"), marks=pytest.mark.nightly),
    ],
)
def test_nothing_else_is_needed(tmp_path: Path, module: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    folder = () if module == "plan" else (f"output_dir={tmp_path / 'run'}",)
    done = subprocess.run(
        [sys.executable, "-m", f"skyrl_train.{module}", *arguments, *folder],
        env={**os.environ, "PYTHONPATH": path, "HIDDEN": ",".join(hidden_modules())},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert module == "plan" or (tmp_path / "run" / "export" / "model.safetensors").is_file()


def hidden_modules() -> set[str]:
    """Everything that is installed here and neither of the image, nor of the file, nor needed by one of those."""
    named = [Requirement(line).name for line in BARE.read_text().splitlines() if line and not line.startswith("#")]
    present = needed_by({*IMAGE, *named})
    of_distributions = importlib.metadata.packages_distributions()
    return {
        module
        for module, owners in of_distributions.items()
        if re.fullmatch(r"\w+", module) and not present & {canonicalize_name(owner) for owner in owners}
    } - {"skyrl_train"}


def needed_by(names: set[str]) -> set[str]:
    found, waiting = set[str](), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        each = [Requirement(text) for text in requirements]
        waiting += [
            canonicalize_name(one.name) for one in each if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found


def test_the_ranges_are_those_of_the_package() -> None:
    declared = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, importlib.metadata.requires("one-gradient-skyrl-train") or [])
        if requirement.marker is None
    }
    for line in BARE.read_text().splitlines():
        if line and not line.startswith("#") and (wanted := Requirement(line)).name in declared:
            assert wanted.specifier == declared[wanted.name], line
    assert {"ray", "wandb", "datasets", "skyrl_gym", "matplotlib", "msgpack", "jsonschema"} <= hidden_modules()
