"""What was meant by a name that this project lacks: a setting that other trainers call so, that was called so, or is near.

What other trainers call a setting is in `peers.txt`, from which `python scripts/make_migration_page.py` writes the tables of
`docs/migrating.md`; a test compares.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skyrl_train.config.fields.fields import parts_of, walk
from skyrl_train.registry import TARGET

TRAINERS: Mapping[str, str] = {
    "trl": "TRL and transformers",
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "skyrl": "SkyRL",
    "prime": "prime-rl",
    "vllm": "vLLM",
    "any": "anywhere",
}
"""What the table calls a trainer, and its name."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """What names of other trainers are here."""

    settings: tuple[str, ...]
    """Dotted names; which one is meant depends on the kind of run and on what was typed before the name. Or a choice of a
    group, `tracker=wandb`. Empty where nothing is to be set."""
    convert: str
    """A sentence on the value, where it is not the same, or on what to do where there is no setting."""
    names: Mapping[str, tuple[str, ...]]
    """By a key of `TRAINERS`."""


@cache
def peer_rows() -> tuple[Here, ...]:
    """What other trainers call a setting, in the order of the table."""
    lines = Path(__file__).with_name("peers.txt").read_text(encoding="utf-8").splitlines()
    table = "\n".join(line for line in lines if not line.startswith("#"))
    return tuple(_row(*block.split("\r")) for block in table.replace("\n  ", "\r").split("\n"))


def _row(first: str, *below: str) -> Here:
    settings, _, names = first.partition(" | ")
    told = [line for line in below if line.startswith("= ")]
    called: dict[str, tuple[str, ...]] = {}
    for each in "; ".join([names, *(line for line in below if line not in told)]).split("; "):
        trainer, *theirs = each.split()
        called[trainer] = (*called.get(trainer, ()), *theirs)
    return Here(
        settings=tuple(name for name in settings.split() if name != "-"),
        convert=told[0].removeprefix("= ") if told else "",
        names=called,
    )


@cache
def peer_names() -> Mapping[str, Here]:
    """By the last part of a dotted name, whatever stands before it, or by its last two parts."""
    return {name: here for here in peer_rows() for names in here.names.values() for name in names}


def peer_name(path: str) -> Here | None:
    """Return what other trainers' name at the end of a dotted `path` is here; None for a name that they lack, too."""
    parts = path.split(".")
    return peer_names().get(".".join(parts[-2:])) or peer_names().get(parts[-1])


def remedy_for_unknown(path: str, schema: type) -> str:
    """What to write instead of an unknown `path`; empty where nothing is near."""
    for old, now in MOVED.items():
        if path == old or path.startswith(f"{old}."):
            return now.format(key=path.removeprefix(f"{old}.") if path != old else "KEY")
    near, convert = meant_by(path, schema)
    if "=" in near:
        return f"write {near}. {convert}".rstrip(". ")
    return f"did you mean {near}? {convert}".rstrip() if near else convert


def meant_by(path: str, schema: type) -> tuple[str, str]:
    """Return the setting that was most likely meant by an unknown `path`, as other trainers call it or misspelt, and how to
    convert its value; no setting but a sentence where there is nothing to set; both empty where nothing is near.

    Of several that other trainers may mean the one that shares most parts with `path`, then the first.
    """
    here, parts = peer_name(path), {*path.split(".")}
    if here is not None and not here.settings:
        return "", here.convert
    existing = {field.path for field in walk(schema)}
    if here is not None and (meant := [each for each in here.settings if each in existing or "=" in each]):
        name = max(meant, key=lambda each: len(parts & {*each.split(".")}))
        return name, here.convert if name == here.settings[0] else ""
    return _argument(path, schema) or suggest(path, schema) or "", ""


def _argument(path: str, schema: type) -> str:
    """How the argument of a part is written that an unknown setting beside it names, or nearly; empty where another setting
    beside it is nearer."""
    section, _, name = path.rpartition(".")
    written = {}
    for setting, seam in parts_of(schema).items():
        for part in seam if setting.rpartition(".")[0] == section else ():
            for argument in seam.arguments(part):
                written[f"{part}_{argument}"] = written[argument] = f"{setting}={{{TARGET}:{part},{argument}:VALUE}}"
    settings = [field.name for field in walk(schema) if field.path == f"{section}.{field.name}"]
    near = difflib.get_close_matches(name, [*settings, *written], n=1, cutoff=0.75)
    return written.get(near[0], "") if near else ""


MOVED = {
    "environment.kwargs": "settings of an environment stand beside it: write "
    "environment.env_class={{_target_: NAME, {key}: ...}}",
    "environment.max_workers": "write environment.num_workers",
    "trainer.algorithm.use_rollout_logprobs": "write trainer.algorithm.proximal=behaviour for true, recompute for false",
}
"""Settings that there were, and what to write now."""


_SHORTEST_BEGINNING = 4
"""Letters of a name that may be the beginning of another's."""


def suggest(path: str, schema: type) -> str | None:
    """The dotted name that was most likely meant by an unknown `path`, or None.

    Siblings first (a misspelt key), then the same last part anywhere (a key at the wrong level), siblings that begin like
    it (a key cut short, and misspelt), and a similar last part anywhere; anywhere, the one that shares most parts with
    `path`, then the first in the schema.
    """
    paths = [field.path for field in walk(schema)]
    parent, _, name = path.rpartition(".")
    siblings = {field.rpartition(".")[2]: field for field in paths if field.rpartition(".")[0] == parent}
    for near in difflib.get_close_matches(name, list(siblings), n=1, cutoff=0.75):
        return siblings[near]
    by_name: dict[str, list[str]] = {}
    for candidate in paths:
        by_name.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    if name not in by_name and len(name) >= _SHORTEST_BEGINNING:
        longer = sorted((sibling for sibling in siblings if len(sibling) > len(name)), key=len, reverse=True)
        beginnings = {sibling[: len(name)]: sibling for sibling in longer}  # of several the shortest
        for near in difflib.get_close_matches(name, list(beginnings), n=1, cutoff=0.85):
            return siblings[beginnings[near]]
    near_names = [name] if name in by_name else difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.75)
    if near_names:
        given = set(path.split("."))
        return max(by_name[near_names[0]], key=lambda candidate: len(given & set(candidate.split("."))))
    above = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    whole = difflib.get_close_matches(path, [field for field in paths if field not in above], n=1, cutoff=0.75)
    return whole[0] if whole else None


def nearest(name: str, options: Sequence[str]) -> str | None:
    """The option most like `name`, or one that it is a part of."""
    near = difflib.get_close_matches(name, options, n=1) or [option for option in options if name and name in option]
    return near[0] if near else None
