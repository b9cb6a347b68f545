"""`trainer_state.json`: what a checkpoint knows beside the models, and what must be the same to go on from it.

Randomness needs no entry: it is derived from the seed and the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from skyrl_train.algorithms import EntropyControllerState, KLControllerState, initial_entropy_state, initial_state
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import CheckpointError
from skyrl_train.registry import code_digests
from skyrl_train.rollout import ConsumedPrompts
from skyrl_train.system import DISTRIBUTION
from skyrl_train.system.files import finite_number, read_json, shown, whole_number, write_json
from skyrl_train.telemetry import STATE_FILE as STATE_FILE
from skyrl_train.types import Prompt

DECLARED_METRICS = """
total/{prompts,trajectories,failed_trajectories,examples,optimizer_steps} | count | Since the run's first step
    (`examples`: supervised).
total/tokens | tokens | Tokens since the run's first step. | | TRL `num_tokens`
"""

FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIBRARIES = ("skyrl_train", "torch", "transformers", "numpy")
_OF_DATA = "reasoning-gym"
"""Makes rows, where it is installed."""
_NOT_INSTALLED = "not installed as a package"


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the run has consumed since its first step."""

    prompts: int = 0
    trajectories: int = 0
    tokens: int = 0
    """Of all rows: prompts, observations and responses."""
    optimizer_steps: int = 0
    failed_trajectories: int = 0

    def plus(self, other: Totals) -> Totals:
        added = {name: value + getattr(other, name) for name, value in dataclasses.asdict(self).items()}
        return Totals(**added)

    def metrics(self) -> dict[str, float]:
        """Return the totals as metrics: `total/prompts`, ..."""
        return {f"total/{name}": float(value) for name, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class DataFingerprint:
    """Which prompts a run trains on, in which order they were loaded."""

    num_prompts: int
    sha256: str

    @staticmethod
    def of(prompts: Sequence[Prompt]) -> DataFingerprint:
        """Over uid, messages, environment and every other column."""
        digest = hashlib.sha256()
        for prompt in prompts:
            row = [prompt.uid, prompt.messages, prompt.env_class, prompt.extras]
            row += [prompt.tools] if prompt.tools else []
            row += [prompt.dataset] if prompt.dataset else []
            digest.update(json.dumps(row, sort_keys=True, default=plain).encode() + b"\n")
        return DataFingerprint(num_prompts=len(prompts), sha256=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """What a loop carries from step to step beside its models."""

    data_position: int
    """Training batches taken from the prompt source; in supervised training, examples of the stream."""
    totals: Totals
    kl_controller: KLControllerState
    """The weight of the KL in the rewards."""
    entropy_controller: EntropyControllerState = field(default_factory=EntropyControllerState)
    """The weight of the entropy bonus."""
    solve_rates: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Of the curriculum (`data/curriculum.py`): by prompt, the estimate and the step that tried it last."""
    settled: ConsumedPrompts | None = None
    """Prompts that need not come again, where a stream of rollouts may train on them in another order; None elsewhere."""

    @staticmethod
    def first(algorithm: AlgorithmConfig | None) -> LoopState:
        """Return the state before the first step, with the weights that `algorithm` states; None stands for supervised
        training."""
        kl = KLControllerState(coef=0.0) if algorithm is None else initial_state(algorithm)
        entropy = EntropyControllerState() if algorithm is None else initial_entropy_state(algorithm)
        return LoopState(data_position=0, totals=Totals(), kl_controller=kl, entropy_controller=entropy)


@dataclass(frozen=True, kw_only=True)
class TrainerState(LoopState):
    """The loop after `global_step` steps, and what it ran with."""

    global_step: int
    weight_version: int
    """Of the policy in the same checkpoint."""
    config: Mapping[str, Any]
    """Every setting by its dotted name, as JSON, secrets redacted."""
    data: DataFingerprint
    versions: Mapping[str, str]
    """Of libraries, by name; SHA-256 sums of files with code of the user's own, by path."""

    @staticmethod
    def at(step: int, state: LoopState, *, config: Mapping[str, Any], data: DataFingerprint) -> TrainerState:
        """The record of a loop with `state` after `step` steps, run with the libraries that are installed."""
        carried = {each.name: getattr(state, each.name) for each in dataclasses.fields(LoopState)}
        versions = {**library_versions(), **code_digests(config)}
        return TrainerState(
            **carried, global_step=step, weight_version=step, config=config, data=data, versions=versions
        )

    def write(self, folder: Path) -> None:
        """Writes `trainer_state.json` into a checkpoint."""
        settled = None if self.settled is None else self.settled.to_json()
        write_json(folder / STATE_FILE, {"format": FORMAT, **dataclasses.asdict(self), "settled": settled})

    @staticmethod
    def read(folder: Path) -> TrainerState:
        """Raises CheckpointError naming the file, and the entry that is missing, unknown, or not what `write` puts there."""
        path = folder / STATE_FILE
        try:
            content = _entries(read_json(path), STATE_FILE)
            if type(content.get("format")) is not int or content.pop("format") != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            missing = {each.name for each in dataclasses.fields(TrainerState)} ^ content.keys()
            if missing:
                raise ValueError(f"{sorted(missing)[0]} is missing, or unknown here")
            return _decoded(content)
        except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error}"
            raise CheckpointError(
                f"{path} cannot be used ({type(error).__name__}: {reason}). Resume from another checkpoint with "
                "trainer.resume_mode=from_path, or start over with trainer.resume_mode=none"
            ) from error


def _decoded(content: Mapping[str, Any]) -> TrainerState:
    """Raises ValueError, KeyError, TypeError or CheckpointError naming the entry that is wrong."""
    data, kl = (_entries(content[name], name) for name in ("data", "kl_controller"))
    totals, entropy = (_entries(content[name], name) for name in ("totals", "entropy_controller"))
    sha256, versions = data["sha256"], _entries(content["versions"], "versions")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise ValueError(f"data.sha256 is {shown(sha256)}")
    if not all(isinstance(version, str) for version in versions.values()):
        raise ValueError("versions must be texts")
    state = TrainerState(
        global_step=whole_number(content, "global_step"),
        weight_version=whole_number(content, "weight_version"),
        data_position=whole_number(content, "data_position"),
        totals=Totals(**{name: whole_number(totals, name) for name in totals}),
        data=DataFingerprint(num_prompts=whole_number(data, "num_prompts"), sha256=sha256),
        kl_controller=KLControllerState.from_json({"coef": finite_number(kl, "coef")}),
        entropy_controller=EntropyControllerState.from_json({**entropy, "coef": finite_number(entropy, "coef")}),
        solve_rates=_solve_rates(content["solve_rates"]),
        settled=None
        if content["settled"] is None
        else ConsumedPrompts.from_json(_entries(content["settled"], "settled")),
        config=_entries(content["config"], "config"),
        versions=versions,
    )
    if state.weight_version != state.global_step:
        raise ValueError(f"weight_version is {state.weight_version}, global_step {state.global_step}")
    return state


def _solve_rates(value: object) -> dict[str, tuple[float, int]]:
    if not isinstance(value, dict):
        raise ValueError(f"solve_rates must be an object; got {shown(value)}")
    found = {}
    for uid, known in value.items():
        if not isinstance(known, list) or len(known) != 2 or type(known[1]) is not int:
            raise ValueError(f"solve_rates[{shown(uid)}] must be [rate, step]; got {shown(known)}")
        rate = finite_number({"rate": known[0]}, "rate")
        if not 0 <= rate <= 1 or known[1] < 0:
            raise ValueError(f"solve_rates[{shown(uid)}] is {shown(known)}")
        found[uid] = (rate, known[1])
    return found


def _entries(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{name} must be an object with entries; got {shown(value)}")
    return value


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries whose arithmetic or randomness a run depends on."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in (*_LIBRARIES, _OF_DATA)}}
    return {name: version for name, version in versions.items() if name != _OF_DATA or version != _NOT_INSTALLED}


@cache
def _version(library: str) -> str:
    try:
        return metadata.version(DISTRIBUTION if library == "skyrl_train" else library)
    except metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def plain(value: Any) -> Any:
    """Turns arrays into lists, immutable mappings into dicts and anything else into its text, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
