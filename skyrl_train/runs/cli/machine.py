"""What a config needs of this machine: data, model, environment and device, looked for without loading any of them."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from skyrl_train.config import SFTDataConfig
from skyrl_train.config.data import DataConfig, EnvironmentConfig
from skyrl_train.config.environment import AGENT, launcher_of, with_target
from skyrl_train.config.fields import Rule
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.config.rules import EXPERT_PARALLEL, near_path, num_experts
from skyrl_train.data import find_sources
from skyrl_train.data.sources import endpoint, is_cached, is_reachable
from skyrl_train.errors import ConfigError, DataError, ModelError, Violation
from skyrl_train.model import check_gguf
from skyrl_train.model.sizes import read_config
from skyrl_train.parts import AGENT_LOOPS, LAUNCHERS
from skyrl_train.registry import did_you_mean, part_name, split_spec
from skyrl_train.rollout.envs import (
    environment_violations,
    is_adapter,
    model_code,
    playing_itself_violations,
    split_environment,
    uses_processes,
)
from skyrl_train.rollout.hosts import IMPORT_DEADLINE_S, reward_problems, server_problems, violations_in_process
from skyrl_train.rollout.tools import TOOL_FORMATS, VLLM_PARSER, tool_schemas
from skyrl_train.system import detect_platform, in_time, missing_program

_LAUNCHER_WITHIN_S = 60.0
_ASSETS = Path(__file__).resolve().parents[2] / "data" / "assets"


def _folder(output_dir: str) -> Iterator[Violation]:
    folder = Path(output_dir).expanduser().absolute()
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryDirectory(prefix=".skyrl_train", dir=existing):  # root may all, but not write to /proc
            return
    except NotADirectoryError:
        why = f"{existing} is a file"
    except OSError as error:
        why = f"{error.strerror}: {Path(error.filename).parent}"
    yield Violation.of(
        "output_dir", output_dir, "must be a folder that can be written to", f"{why}: set output_dir=FOLDER"
    )


def _data(data: DataConfig | SFTDataConfig, name: str) -> Iterator[Violation]:
    field = f"data.{name}"
    for spec in data.held_out if name == "validation" else data.train:
        try:
            sources = find_sources([spec], data.reader)
            if any(source.on_hub for source in sources):
                yield from _of_hub(field, spec)
        except DataError as error:
            remedy = str(error).removeprefix(f"{spec}: ")
            if Path(spec).parent.name == "gsm8k":
                remedy += " scripts/prepare_gsm8k.py makes the GSM8K files; SKYRL_TRAIN_DATA says where they are."
            yield Violation.of(field, spec, "must be data that can be found", remedy)


def _of_hub(field: str, spec: str) -> Iterator[Violation]:
    """A data set that can neither be fetched nor is in the cache."""
    name = "/".join(spec.partition(":")[0].split("/")[:2])
    if is_reachable() or is_cached(name, dataset=True):
        return
    remedy = f"on a machine with a network: hf download {name} --repo-type dataset --local-dir FOLDER; copy it here"
    remedy += f" and set {field}=[FILES IN IT]"
    if name == "openai/gsm8k":
        remedy = "on a machine with a network: python scripts/prepare_gsm8k.py --download --output data/gsm8k; copy it "
        remedy += "here, and say where it is: SKYRL_TRAIN_DATA=FOLDER THAT HOLDS gsm8k"
    yield Violation.of(field, spec, f"must be data that can be had, and {endpoint()} does not answer", remedy)


def _models(model: ModelConfig, name: str) -> Iterator[Violation]:
    path = getattr(model, name)
    if path and (problem := _model_problem(path)) is not None:
        yield Violation.of(f"model.{name}", path, *problem)


def _model_problem(path: str) -> tuple[str, str] | None:
    """Rule and remedy for a path that cannot be a model; a hub name passes."""
    if path.startswith("builtin:"):
        known = sorted(f"builtin:{file.parent.name}" for file in _ASSETS.glob("*/config.json"))
        return None if path in known else (f"must be one of {', '.join(known)}", did_you_mean(path, known))
    try:
        if check_gguf(path):
            return None
    except (ModelError, OSError) as error:
        return "must be a model that can be read", str(error).removeprefix(f"model path {path!r}: ")
    folder = Path(path).expanduser()
    if folder.is_dir():
        missing = not any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json"))
        return ("must be a folder in Hugging Face format", "there is no config.json in it") if missing else None
    if folder.is_file():
        return "must be a folder or a GGUF file", f"try {folder.parent}"
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or folder.suffix == ".gguf":
        return "must be an existing folder, a GGUF file, a hub name or builtin:NAME", near_path(path)
    if not is_reachable() and not is_cached(path, dataset=False):
        return (
            f"must be a model that can be had, and {endpoint()} does not answer",
            f"on a machine with a network: hf download {path} --local-dir FOLDER; copy it here and set it to the FOLDER",
        )
    return None


def _environment(environment: EnvironmentConfig) -> Iterator[Violation]:
    """In worker processes where those are to run it, so that its code is not run here."""
    chosen = {"environment.env_class": environment.env_class} if environment.env_class is not None else {}
    listed = {f"environment.allowed[{index}]": name for index, name in enumerate(environment.allowed)}
    for field, spec in {**chosen, **listed}.items():
        apart = uses_processes(environment) and ":" in split_environment(spec)[0]
        where = (environment.python or "", environment.variables)
        for violation in violations_in_process([spec], *where) if apart else environment_violations(spec):
            yield replace(violation, field=violation.field.replace("environment.env_class", field, 1))
    yield from model_code.violations(environment)


def task_violations(environment: EnvironmentConfig) -> Iterator[Violation]:
    """What is wrong with an environment, its rewards and its tools, whatever machine will run them."""
    yield from _environment(environment)
    yield from reward_problems(environment)
    yield from _tools(environment)


def _rewards(environment: EnvironmentConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    """Recorded rollouts have their rewards, so that nobody is asked for them."""
    found = reward_problems(environment)
    yield from found
    if not found and generator.backend != "replay":
        # on a thread: a notebook has an event loop on this one
        yield from in_time(
            lambda: list(asyncio.run(server_problems(environment))),
            what="servers of rewards",
            timeout_s=IMPORT_DEADLINE_S,
        )


def _tools(environment: EnvironmentConfig) -> Iterator[Violation]:
    """Functions that are no tools, servers that do not answer, an unknown format of calls."""
    if environment.tool_format not in TOOL_FORMATS and not environment.tool_format.startswith(VLLM_PARSER):
        rule = f"must be one of {', '.join(TOOL_FORMATS)}, or {VLLM_PARSER}NAME"
        remedy = did_you_mean(environment.tool_format, list(TOOL_FORMATS)) or "auto reads the chat template"
        yield Violation.of("environment.tool_format", environment.tool_format, rule, remedy)
    if environment.tools and environment.env_class is not None and is_adapter(environment.env_class):
        yield from playing_itself_violations(environment.env_class)
    try:
        tool_schemas(environment.tools)
    except ConfigError as error:
        yield from error.violations


def _engine(generator: GeneratorConfig, placement: PlacementConfig, platform: PlatformConfig) -> Iterator[Violation]:
    """vLLM, where it is started on this machine; the nodes of another cluster have it."""
    if _is_here(placement) and generator.backend == "vllm" and find_spec("vllm") is None:
        extra = "cpu" if platform.name == "cpu" else "vllm"
        remedy = f"install the extra `{extra}` as docs/vllm.md says, or add generator=hf"
        yield Violation.of("generator.backend", generator.backend, "needs vLLM, which is not installed here", remedy)


def _launcher(generator: GeneratorConfig) -> Iterator[Violation]:
    """A command of agents that is not here; a launcher that is not installed, is not running, or lacks its image."""
    arguments = split_spec(generator.agent_loop)[1]
    spec, command = arguments.get("launcher"), arguments.get("command", ())
    if AGENT_LOOPS.name_of(generator.agent_loop) != AGENT or not isinstance(spec, (str, Mapping, type(None))):
        return  # of what is no launcher the rules on settings tell, and of one that cannot be made
    try:
        launcher = launcher_of(spec)
    except ConfigError:
        return
    commands = {f"{LAUNCHERS.setting}.{name}": getattr(launcher, name) for name in ("start", "enter", "cleanup")}
    if spec is None and isinstance(command, (list, tuple)):
        commands = {f"{AGENT_LOOPS.setting}.command": tuple(command)}
    for field, words in ({} if launcher.check else commands).items():
        if (missing := missing_program(words)) is not None:
            rule = f"must be a program on PATH or a file, which is looked for from {Path.cwd()}"
            yield Violation.of(field, missing, rule, f"correct its path or install it: {near_path(missing)}")
    if spec is None:
        return
    check = launcher.check
    try:
        done = subprocess.run(check or ("true",), capture_output=True, timeout=_LAUNCHER_WITHIN_S, check=False)
        said = " ".join((done.stderr or done.stdout).decode(errors="replace").split())[-300:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"{type(error).__name__}: {error}"
    if said or done.returncode:
        remedy = (
            f"install or start it, pull its image, or drop {LAUNCHERS.setting}: the command then runs without a sandbox"
        )
        rule = f"must work here, and `{' '.join(check)}` fails: {said}"
        yield Violation.of(LAUNCHERS.setting, part_name(with_target(spec)), rule, remedy)


def _device(placement: PlacementConfig, platform: PlatformConfig) -> Iterator[Violation]:
    machine = detect_platform()
    if placement.backend == "inline" and platform.device.startswith("cuda") and machine.name == "cpu":
        rule = f"cannot be used here: {machine.reason}"
        yield Violation.of("platform.device", platform.device, rule, "try platform=cpu")


def _attention(model: ModelConfig, placement: PlacementConfig, platform: PlatformConfig) -> Iterator[Violation]:
    """flash-attn, of which transformers says that it is missing once it has loaded everything else."""
    if model.attention != "flash_attention_2" or not _is_here(placement):
        return
    found = any(find_spec(name) is not None for name in ("flash_attn", "kernels"))
    if platform.name == "cpu" or not found:
        yield Violation.of(
            "model.attention",
            model.attention,
            "needs a GPU" if platform.name == "cpu" else "needs the package flash-attn, which is not installed here",
            "set model.attention=auto" + ("" if platform.name == "cpu" else ", or pip install flash-attn"),
        )


def _divided_experts(model: ModelConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    """Whether the model has experts, and in groups of equal size; of a config that cannot be had nothing is known."""
    size = strategy.expert_parallel_size
    if size == 1:
        return
    try:
        architecture = read_config(model.path, revision=model.revision)
    except ModelError:
        return
    count = num_experts(architecture)
    if count and not count % size:
        return
    what = f"{model.path} ({architecture.get('model_type')})"
    rule = f"must divide the {count} experts of {what}" if count else f"is for mixtures of experts, and {what} is dense"
    fitting = " or ".join(
        f"{EXPERT_PARALLEL}={each}" for each in range(2, count + 1) if each <= size and not count % each
    )
    yield Violation.of(EXPERT_PARALLEL, size, rule, f"try {fitting}" if fitting else f"set {EXPERT_PARALLEL}=1")


def _is_here(placement: PlacementConfig) -> bool:
    """Whether every process of the run is on this machine."""
    return not placement.auto and not placement.ray_address


MACHINE_RULES: tuple[Rule, ...] = (
    _folder,
    *(partial(_data, name=name) for name in ("train", "validation")),
    *(partial(_models, name=name) for name in ("path", "tokenizer_path")),
    _device,
    _attention,
    _divided_experts,
)
"""What any kind of run needs of this machine."""
RL_MACHINE_RULES: tuple[Rule, ...] = (*MACHINE_RULES, _environment, _tools, _rewards, _engine, _launcher)
"""What reinforcement learning needs of it."""
