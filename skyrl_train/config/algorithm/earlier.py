"""Settings of `trainer.algorithm` that became arguments of the one part that reads them: what was written before goes on.

A command line, a preset, a checkpoint or a recorded configuration may hold them. One that belongs to the part that is
chosen is given to it. Another is left out where it has the value that it had by default or from a preset, and refused
where it has not; in a record of a run, of which nothing read it, it is left out in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.algorithm.settings import AlgorithmConfig
from skyrl_train.errors import Violation
from skyrl_train.parts import ADVANTAGE_ESTIMATORS, CRITIC_LOSSES, POLICY_LOSSES
from skyrl_train.registry import TARGET, Seam, split_spec

_SECTION = "trainer.algorithm"


@dataclass(frozen=True)
class _Moved:
    seam: Seam
    part: str
    argument: str
    default: Any
    """What the setting was by default."""

    @property
    def setting(self) -> str:
        """The setting that chooses the part, within its section."""
        return self.seam.setting.removeprefix(f"{_SECTION}.")

    def written(self, arguments: Mapping[str, Any]) -> str:
        """What to write now."""
        inside = "".join(f", {key}: {value}" for key, value in arguments.items())
        return f"{self.seam.setting}={{{TARGET}: {self.part}{inside}}}"


_MOVED: Mapping[str, _Moved] = {
    "gae_lambda": _Moved(ADVANTAGE_ESTIMATORS, "gae", "gae_lambda", 1.0),
    "clip_ratio_c": _Moved(POLICY_LOSSES, "dual_clip", "clip_ratio_c", 3.0),
    "sapo_tau_pos": _Moved(POLICY_LOSSES, "sapo", "tau_pos", 1.0),
    "sapo_tau_neg": _Moved(POLICY_LOSSES, "sapo", "tau_neg", 1.05),
    "vespo_k_pos": _Moved(POLICY_LOSSES, "vespo", "k_pos", 2.0),
    "vespo_lambda_pos": _Moved(POLICY_LOSSES, "vespo", "lambda_pos", 3.0),
    "vespo_k_neg": _Moved(POLICY_LOSSES, "vespo", "k_neg", 3.0),
    "vespo_lambda_neg": _Moved(POLICY_LOSSES, "vespo", "lambda_neg", 2.0),
    "clip_cov_share": _Moved(POLICY_LOSSES, "clip_cov", "share", 0.0002),
    "clip_cov_low": _Moved(POLICY_LOSSES, "clip_cov", "low", 1.0),
    "clip_cov_high": _Moved(POLICY_LOSSES, "clip_cov", "high", 5.0),
    "kl_cov_share": _Moved(POLICY_LOSSES, "kl_cov", "share", 0.002),
    "kl_cov_coef": _Moved(POLICY_LOSSES, "kl_cov", "coef", 1.0),
    "dppo_divergence": _Moved(POLICY_LOSSES, "dppo", "divergence", "tv"),
    "dppo_max_ratio": _Moved(POLICY_LOSSES, "dppo", "max_ratio", 20.0),
    "value_clip": _Moved(CRITIC_LOSSES, "clipped", "value_clip", 0.2),
}
EARLIER = frozenset(f"{_SECTION}.{name}" for name in _MOVED)
"""Dotted names of these settings."""
_PARTS = frozenset(moved.seam.setting for moved in _MOVED.values())


@dataclass(frozen=True, kw_only=True)
class AsNow:
    """A tree of settings without those of before."""

    tree: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What to write instead of each that was given to its part."""
    violations: tuple[Violation, ...] = ()
    """Of those that the chosen part lacks."""


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Arguments of a command line as Hydra takes them: it refuses to set what there is not, and adds the entries of a
    mapping to those that are there, where a part is meant to take the place of another."""
    found: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key in _PARTS and value.startswith("{") and TARGET in value:
            found.append(f"{key}=null")
        found.append(f"++{text}" if key in EARLIER else text)
    return found


def as_now(tree: Mapping[str, Any]) -> AsNow:
    """The settings of a tree in today's places."""
    trainer = tree.get("trainer")
    algorithm = trainer.get("algorithm") if isinstance(trainer, Mapping) else None
    if not isinstance(algorithm, Mapping) or not algorithm.keys() & _MOVED.keys():
        return AsNow(tree=tree)
    found = in_parts(algorithm)
    assert isinstance(trainer, Mapping), "it has a section"
    return AsNow(
        tree={**tree, "trainer": {**trainer, "algorithm": found.tree}}, notes=found.notes, violations=found.violations
    )


def in_parts(algorithm: Mapping[str, Any]) -> AsNow:
    """The settings of `trainer.algorithm`, each by its name, with those of before in their parts."""
    by_default = AlgorithmConfig()
    now = {name: value for name, value in algorithm.items() if name not in _MOVED}
    given: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {}
    violations = []
    for name, moved in _MOVED.items():
        if name not in algorithm:
            continue
        value, spec = algorithm[name], now.get(moved.setting, getattr(by_default, moved.setting))
        if not isinstance(spec, str) and not (isinstance(spec, Mapping) and TARGET in spec):
            continue  # no part is chosen, which is refused elsewhere
        chosen = moved.seam.name_of(spec)
        if chosen == moved.part:
            now[moved.setting] = {TARGET: chosen, **split_spec(spec)[1], moved.argument: value}
            given.setdefault(chosen, {})[name] = value
            renamed = {_MOVED[old].argument: each for old, each in given[chosen].items()}
            old = ", ".join(f"{_SECTION}.{each}" for each in given[chosen])
            is_one = "is an argument" if len(renamed) == 1 else "are arguments"
            notes[chosen] = f"{old} {is_one} of {chosen} now: write {moved.written(renamed)}"
        elif value != moved.default and not moved.seam.arguments(moved.part)[moved.argument].is_preset(value):
            rule = f"is for {moved.setting}={moved.part}; it is {chosen}"
            remedy = f"drop it, or write {moved.written({moved.argument: value})}"
            violations.append(Violation.of(f"{_SECTION}.{name}", value, rule, remedy))
    return AsNow(tree=now, notes=tuple(notes.values()), violations=tuple(violations))
