"""`generator.agent_loop.launcher`: how a command gets a sandbox, as words of other commands with placeholders.

remaining   once, at the start and at the end of a run     tells the names of sandboxes that there are
start       for each sandbox, ahead of its use             returns when it is up; nothing where a sandbox needs no start
enter       in front of the words of agent.command         runs them in the sandbox
cleanup     for each sandbox, however it ended             removes it; what is gone already is no error
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from skyrl_train.config.environment import OF_SANDBOX, OF_TASK, placeholder_violations
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.parts import LAUNCHERS
from skyrl_train.system import find_programs
from skyrl_train.system.sandbox import programs, system_words

LAUNCHER_SETTING = LAUNCHERS.setting
VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "AGENT_SESSION_URL",
    "AGENT_TASK_FILE",
    "AGENT_REPORT_FILE",
)
"""What a command finds in its environment."""
NAME_PREFIX = "skyrl-train-"
"""What the name of a sandbox begins with; `remaining` must tell those that do."""
_OWNER = ("--user", f"{os.getuid()}:{os.getgid()}")
_WORDS = ("start", "enter", "cleanup", "remaining", "check")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A way to run a command in a sandbox. Without any of the words there is none, and the command runs as it is."""

    start: tuple[str, ...] = ()
    enter: tuple[str, ...] = ()
    cleanup: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()
    """Its output has a name in each line; other lines, and names of others, are passed over."""
    check: tuple[str, ...] = ()
    """Run before anything is loaded: it fails where the launcher, or its image, is not there."""
    most: int | None = None
    """How many sandboxes there are at once, those started ahead included; None is as many as trajectories."""
    warm: int = 0
    """How many are started ahead of their use."""
    start_within_s: float = 120.0
    cleanup_within_s: float = 60.0
    wait_s: float = 7200.0
    """How long a trajectory waits for one of `most`."""
    inherits: bool = True
    """Whether the command is given the trainer's environment; if not, PATH and languages alone, and HOME is its folder."""
    loopback: bool = True
    """Whether what runs in it reaches the loopback addresses of this machine."""
    host_inside: str = ""
    """The address of this machine as it is seen from within, where that is not where the endpoint listens."""

    def __post_init__(self) -> None:
        """Raises ConfigError with all that is wrong."""
        if found := list(self._violations()):
            raise ConfigError(found)

    def violations(self, *, host: str, waits_for_all: bool) -> Iterator[Violation]:
        """Why it cannot be used with an endpoint at `host`, or where programs of a batch wait for one another."""
        if not self.loopback and not self.host_inside and _is_of_this_machine_alone(host):
            rule = (
                f"cannot be reached from this launcher's network, which has no loopback of this machine (host={host})"
            )
            remedy = (
                "write network: host; or host: ADDRESS, which this machine has in that network (its gateway, as docker "
                "network inspect tells it); or launcher.host_inside, where it has another one there"
            )
            yield Violation.of(f"{LAUNCHER_SETTING}.network", "not host", rule, remedy)
        if self.most is not None and waits_for_all:
            rule = "cannot be with generator.backend=hf, which waits until every program of a batch asks or has ended"
            remedy = "drop it and have smaller batches, or take vllm"
            yield Violation.of(f"{LAUNCHER_SETTING}.most", self.most, rule, remedy)

    def _violations(self) -> Iterator[Violation]:
        for name in _WORDS:
            words, field = getattr(self, name), f"{LAUNCHER_SETTING}.{name}"
            if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
                rule = "must be a list of words, as no shell reads it"
                yield Violation.of(field, words, rule, f"write {name}: [docker, ...]")
                continue
            object.__setattr__(self, name, tuple(find_programs(words)))
            known = (*OF_SANDBOX, *OF_TASK) if name == "enter" else OF_SANDBOX if name in ("start", "cleanup") else ()
            yield from placeholder_violations(field, words, known)
        if (self.start or self.remaining) and not self.cleanup:
            remedy = "write cleanup: [docker, rm, --force, '{name}']"
            yield Violation.of(f"{LAUNCHER_SETTING}.cleanup", "none", "must say how sandboxes are removed", remedy)
        for name in ("start", "cleanup"):
            words = getattr(self, name)
            if words and not any("{name}" in word or "{folder}" in word for word in words):
                rule, remedy = "must name the sandbox that it is for", "put {name} among its words"
                yield Violation.of(f"{LAUNCHER_SETTING}.{name}", " ".join(words), rule, remedy)
        yield from self._number_violations()

    def _number_violations(self) -> Iterator[Violation]:
        def wrong(name: str, rule: str, remedy: str) -> Violation:
            return Violation.of(f"{LAUNCHER_SETTING}.{name}", getattr(self, name), rule, remedy)

        for name in ("start_within_s", "cleanup_within_s", "wait_s"):
            if not _is_positive(getattr(self, name)):
                yield wrong(name, "must be seconds above 0", f"write {name}: 60")
        for name, least in (("most", 1), ("warm", 0)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_whole and not (value is None and name == "most"):
                yield wrong(name, f"must be a number from {least}", f"write {name}: 8")
                return
        if self.most is not None and self.warm > self.most:
            yield wrong("warm", f"cannot be above most={self.most}", "start fewer ahead, or raise most")
        if self.warm and not self.start:
            rule = "is for launchers that start a sandbox before a command enters it"
            yield wrong("warm", rule, "drop it, or give it start: [...]")
        if not isinstance(self.host_inside, str) or not re.fullmatch(r"[\w.:-]*", self.host_inside):
            rule, remedy = "must be a name or an address, without a port", "write host_inside: host.docker.internal"
            yield wrong("host_inside", rule, remedy)


def docker(*, image: str = "", program: Sequence[str] = ("docker",), **containers: Any) -> Launcher:
    """Return the launcher of containers that `docker` runs. The user of the trainer owns what they write.

    Args:
        image: What they are started from; it needs `sleep`, which they are at until a command enters.
        program: The words that docker begins with: `[sudo, docker]`, `[docker, --context, there]`, `[nerdctl]`.
        containers: What `_containers` takes, and fields of `Launcher`, such as most and warm.
    """
    if not image:
        remedy = "write {_target_: docker, image: NAME}"
        raise ConfigError([Violation.of(f"{LAUNCHER_SETTING}.image", "none", "must be given to docker", remedy)])
    return _containers(program, [image], ["image", "inspect", image], _OWNER, **containers)


def podman(*, image: str = "", rootfs: str = "", program: Sequence[str] = ("podman",), **containers: Any) -> Launcher:
    """Return the launcher of containers that `podman` runs, with or without root; as `docker`, but for

    Args:
        rootfs: A folder that stands in place of an image.
    """
    if bool(image) == bool(rootfs):
        rule, remedy = "needs one of image and rootfs", "write {_target_: podman, image: NAME}"
        raise ConfigError([Violation.of(LAUNCHER_SETTING, image or "none", rule, remedy)])
    # Without root, a user namespace has the files of a container belong to whoever started it.
    owner = _OWNER if os.geteuid() == 0 else ("--userns", "keep-id")
    place, check = ([image], ["image", "inspect", image]) if image else (["--rootfs", rootfs], ["version"])
    return _containers(program, place, check, owner, **containers)


def _containers(
    program: Sequence[str],
    place: Sequence[str],
    check: Sequence[str],
    owner: Sequence[str],
    *,
    network: str = "host",
    memory_gb: float | None = None,
    cpus: float | None = None,
    pids: int | None = 1024,
    options: Sequence[str] = (),
    **sandboxes: Any,
) -> Launcher:
    """Return the launcher of containers that sleep until a command enters. Raises ConfigError.

    Args:
        network: `host` reaches an endpoint on loopback; another one needs `host:` of the agent loop, or `host_inside`.
        memory_gb: Of one container; None is not limited.
        cpus: Of one container; None is not limited.
        pids: Processes and threads of one container.
        options: Further ones of `docker run`, after the launcher's own, which they overrule.
        sandboxes: Fields of `Launcher`.
    """
    found = [
        Violation.of(f"{LAUNCHER_SETTING}.{name}", value, "must be a number above 0", f"write {name}: 4, or drop it")
        for name, value in (("memory_gb", memory_gb), ("cpus", cpus), ("pids", pids))
        if value is not None and not _is_positive(value)
    ]
    if found:
        raise ConfigError(found)
    start = [*program, "run", "--detach", "--rm", "--init", "--stop-timeout", "1", *owner, "--network", network]
    start += ["--security-opt", "no-new-privileges", "--cap-drop", "ALL"]
    if memory_gb is not None:
        # As much with swap: what does not fit is ended, and does not slow down all others.
        start += ["--memory", f"{int(memory_gb * 1e9)}b", "--memory-swap", f"{int(memory_gb * 1e9)}b"]
    if cpus is not None:
        start += ["--cpus", f"{cpus:g}"]
    if pids is not None:
        start += ["--pids-limit", str(pids)]
    mark = "skyrl_train=sandbox"
    start += ["--name", "{name}", "--label", mark, "--volume", "{folder}:{folder}", "--workdir", "{folder}", *options]
    variables = [word for name in VARIABLES for word in ("--env", name)]  # the values are in the client's environment
    return Launcher(
        check=(*program, *check),
        remaining=(*program, "ps", "--all", "--filter", f"label={mark}", "--format", "{{.Names}}"),
        start=(*start, "--entrypoint", "sleep", *place, "infinity"),
        enter=(*program, "exec", *variables, "--env", "HOME={folder}", "--workdir", "{folder}", "{name}"),
        cleanup=(*program, "rm", "--force", "{name}"),
        **{"loopback": network == "host", **_known(sandboxes)},
    )


def bubblewrap(
    *,
    program: Sequence[str] = (),
    read: Sequence[str] = (),
    options: Sequence[str] = (),
    **sandboxes: Any,
) -> Launcher:
    """Return the launcher of `bwrap`: this machine's programs, without its files. Memory and processes are not limited.

    Args:
        program: The words that bwrap begins with; where it is found unless given.
        read: Folders that can be read beside /usr: where an agent's own packages are.
        options: Further ones of `bwrap`.
    """
    program = program or (programs() or ["bwrap"])[:1]
    words = [*program, "--unshare-all", "--share-net", "--new-session", "--die-with-parent", "--proc", "/proc"]
    etc = ("alternatives", "group", "hosts", "ld.so.cache", "nsswitch.conf", "passwd", "resolv.conf", "ssl")
    words += ["--dev", "/dev", "--tmpfs", "/tmp", *system_words(etc)]
    for folder in read:
        words += ["--ro-bind", folder, folder]
    words += ["--bind", "{folder}", "{folder}", "--chdir", "{folder}", *options]
    check = (*program, "--ro-bind", "/", "/", "true")
    return Launcher(enter=tuple(words), check=check, inherits=False, **_known(sandboxes))


def template(**words: Any) -> Launcher:
    """Return a launcher whose words are stated: fields of `Launcher`. It may have start or enter, or both."""
    launcher = Launcher(**_known(words, also=(*_WORDS, "inherits")))
    if not launcher.start and not launcher.enter:
        rule, remedy = "needs start, enter, or both", "write launcher: {enter: [PROGRAM, ...], cleanup: [...]}"
        raise ConfigError([Violation.of(LAUNCHER_SETTING, "neither", rule, remedy)])
    return launcher


def _is_of_this_machine_alone(host: str) -> bool:
    """Whether a host is an address that another network namespace reads as its own: loopback, or any."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _known(sandboxes: dict[str, Any], *, also: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments. Raises ConfigError for what is no field of a launcher, or is not the user's to state."""
    of_template = {*_WORDS, "inherits"} - set(also)
    allowed = [each.name for each in fields(Launcher) if each.name not in of_template]
    found = [
        Violation.of(f"{LAUNCHER_SETTING}.{name}", value, f"is no argument; there are {', '.join(allowed)}", "drop it")
        for name, value in sandboxes.items()
        if name not in allowed
    ]
    if found:
        raise ConfigError(found)
    return sandboxes


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
