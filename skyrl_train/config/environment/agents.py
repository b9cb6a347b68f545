"""`generator=agent`, or `generator.agent_loop={_target_: agent, ...}`: which program plays, and the rules on what is said
of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.parts import AGENT_LOOPS, LAUNCHERS
from skyrl_train.registry import TARGET, PartSpec, import_attr, part_name, split_spec

AGENT = "agent"
"""The agent loop in which a program asks for the turns."""
REPORTED = "reported"
"""The environment that stands for rewards which programs report."""
RUN_SETTING = f"{AGENT_LOOPS.setting}.run"
PROGRAMS = ("run", "command", "url")
_EXAMPLE = f"write generator={AGENT} {RUN_SETTING}=my_code:play"
UNSUPPORTED = ("ignore", "refuse")
_LAUNCHER = "skyrl_train.rollout.agents.launchers:Launcher"
OF_TASK = ("base_url", "session_url", "api_key", "model", "task_file", "report_file", "time_limit_s")
"""Placeholders that are known once there is a task."""
OF_SANDBOX = ("name", "folder")


def _program(generator: GeneratorConfig) -> Iterator[Violation]:
    if AGENT_LOOPS.name_of(generator.agent_loop) != AGENT:
        return
    _, arguments = split_spec(generator.agent_loop)
    setting = AGENT_LOOPS.setting
    given = [name for name in PROGRAMS if arguments.get(name)]
    if len(given) != 1:
        rule = "needs one of run (a function), command (a list of words) and url (a service)"
        yield Violation.of(setting, ", ".join(given) or "none", rule, _EXAMPLE)
        return
    limit = arguments.get("time_limit_s", 1.0)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not (0 < limit < math.inf):
        yield Violation.of(f"{setting}.time_limit_s", limit, "must be seconds above 0", "write time_limit_s: 600")
    unsupported = arguments.get("unsupported", UNSUPPORTED[0])
    if unsupported not in UNSUPPORTED:
        rule = f"must be one of {', '.join(UNSUPPORTED)}: what becomes of a request that asks for what is not done"
        yield Violation.of(f"{setting}.unsupported", unsupported, rule, "write unsupported: ignore")
    if "run" in given:
        try:
            function = import_attr(split_spec(arguments["run"])[0], field=RUN_SETTING)
            if not callable(function):
                yield Violation.of(RUN_SETTING, arguments["run"], "must name a function", _EXAMPLE)
        except ConfigError as error:
            yield from error.violations
    command = arguments.get("command", [])
    if not isinstance(command, (list, tuple)) or not all(isinstance(word, str) for word in command):
        rule = "must be a list of words, as no shell reads it"
        yield Violation.of(f"{setting}.command", command, rule, "write command: [python, agent.py, '{task_file}']")
        return
    yield from placeholder_violations(f"{setting}.command", command, (*OF_SANDBOX, *OF_TASK))
    url = arguments.get("url", "")
    if not isinstance(url, str) or (url and not re.fullmatch(r"https?://\S+", url)):
        rule = "must be the address that a task is posted to"
        yield Violation.of(f"{setting}.url", url, rule, "write url: http://127.0.0.1:9000/play")


def placeholder_violations(field: str, words: Sequence[str], known: Sequence[str]) -> Iterator[Violation]:
    """What is wrong with the placeholders among the words of a command."""
    for name in (name for word in words for name in re.findall(r"\{([a-z_]+)\}", word)):
        if name not in known:
            there_are = f"there are {', '.join(known)}" if known else "there are none"
            rule = f"has a placeholder that there is not here; {there_are}"
            remedy = "put it into enter: a sandbox is started before its task is known" if name in OF_TASK else ""
            yield Violation.of(field, f"{{{name}}}", rule, remedy or "correct its name")


def launcher_of(spec: PartSpec | None) -> Any:
    """Return the `Launcher` of `rollout/agents/launchers.py` that a command runs in: nothing but itself unless `spec` says
    so. Raises ConfigError."""
    kind: Any = import_attr(_LAUNCHER, field=LAUNCHERS.setting)
    if spec is None:
        return kind()
    made: object = LAUNCHERS.resolve(with_target(spec))()
    if not isinstance(made, kind):
        rule, remedy = f"must give a {_LAUNCHER.replace(':', '.')}", "have it return one"
        raise ConfigError([Violation.of(LAUNCHERS.setting, type(made).__name__, rule, remedy)])
    return made


def with_target(spec: PartSpec) -> PartSpec:
    """Words without a name are those of a template."""
    return {TARGET: "template", **spec} if isinstance(spec, Mapping) and TARGET not in spec else spec


def _launcher(generator: GeneratorConfig) -> Iterator[Violation]:
    _, arguments = split_spec(generator.agent_loop)
    spec, setting = arguments.get("launcher"), LAUNCHERS.setting
    if AGENT_LOOPS.name_of(generator.agent_loop) != AGENT or spec is None:
        return
    if not isinstance(spec, (str, Mapping)):
        remedy = "write launcher: {_target_: docker, image: NAME}"
        yield Violation.of(setting, spec, "must name a launcher, or be one with its words", remedy)
        return
    if not arguments.get("command"):
        yield Violation.of(setting, part_name(with_target(spec)), "is for command, which it runs", "drop it")
    found = LAUNCHERS.violations(with_target(spec))
    if found:
        yield from found
        return
    try:
        launcher = launcher_of(spec)
    except ConfigError as error:
        yield from error.violations
        return
    host = str(arguments.get("host", "127.0.0.1"))
    yield from launcher.violations(host=host, waits_for_all=generator.backend == "hf")


AGENT_RULES: tuple[Rule, ...] = (_program, _launcher)
