"""Rules between fields, without torch and without a model: each names the field, what must hold, and what to type.

A rule is a function of the sections that it reads, one for what is decided together; `RULES` lists them all. Where values
were refused, a rule that reads one of them has nothing to go by, so that one wrong value is reported once; all others are
reported beside it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skyrl_train.config.algorithm.settings import AlgorithmConfig, estimator_reads
from skyrl_train.config.environment.rewards import REWARD_RULES
from skyrl_train.config.fields.fields import Rule, is_refused, parts_of, recorded
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.placement import PlatformConfig, StrategyConfig
from skyrl_train.config.rules.algorithm_rules import ALGORITHM_RULES
from skyrl_train.config.rules.argument_rules import value_violations
from skyrl_train.config.rules.async_rules import ASYNC_RULES
from skyrl_train.config.rules.mix import mixed_datasets
from skyrl_train.config.rules.validate_engines import ENGINE_RULES
from skyrl_train.config.rules.validate_models import MODEL_RULES, lora_targets, quantization
from skyrl_train.config.rules.validate_placement import ENGINE_PLACEMENT_RULES, PLACEMENT_RULES, PROCESS_RULES
from skyrl_train.config.schema import Config, DataConfig, LoopConfig, TrainerConfig
from skyrl_train.errors import Violation
from skyrl_train.parts import BATCH_RULES
from skyrl_train.registry import PartSpec, did_you_mean, part_name, split_spec
from skyrl_train.system import install_command


def validate_config(config: Config, *, refused: Collection[str] = ()) -> list[Violation]:
    """Every rule between fields that does not hold.

    Args:
        refused: fields whose value was refused before (they carry their defaults): nothing is said that follows from one.
    """
    found = [*run_rules(config, RULES, refused), *part_violations(config, refused)]
    if config.data.mix and not is_refused("data.mix", refused):
        found += mixed_datasets(config.data, config.environment, config.generator.sampling)[1]
    for spec in config.trainer.batch_rules:
        if not BATCH_RULES.violations(spec):  # else it is among those found
            found += BATCH_RULES.resolve(spec)(config, refused)
    return found


def run_rules(root: object, rules: Iterable[Rule], refused: Collection[str] = ()) -> Iterator[Violation]:
    """What `rules` find, but for what a rule says after it has read a setting that was refused.

    Args:
        root: The configuration, of any kind of run whose sections the rules read.
    """
    read: set[str] = set()
    # One copy for all rules: they are frozen, as `root` is, so that no rule changes what the next one reads.
    seen = recorded(root, read.add) if refused else root
    for rule in rules:
        read.clear()
        for violation in rule(**{name: _section(seen, name) for name in _sections_of(rule)}):
            if not any(is_refused(path, refused) for path in read):
                yield violation


@cache
def _sections_of(rule: Rule) -> tuple[str, ...]:
    parameters = inspect.signature(rule).parameters.values()
    return tuple(one.name for one in parameters if one.default is one.empty)


def _section(root: Any, name: str) -> Any:
    return root.trainer.algorithm if name == "algorithm" else getattr(root, name)


def part_violations(root: object, refused: Collection[str] = ()) -> Iterator[Violation]:
    """What is wrong with settings that choose a part: there is none of that name, or it does not take the arguments
    beside it."""
    for field, seam in parts_of(type(root)).items():
        if seam.names_elsewhere or is_refused(field, refused):
            continue
        value: Any = functools.reduce(getattr, field.split("."), root)
        many = isinstance(value, tuple)
        specs = {f"{field}[{index}]": spec for index, spec in enumerate(value)} if many else {field: value}
        for setting, spec in specs.items():
            yield from seam.violations(spec, setting)
            yield from value_violations(seam, spec, setting)


def _response_length(generator: GeneratorConfig, name: str) -> Iterator[Violation]:
    """A response of `generator.sampling` or `generator.eval_sampling` leaves room for a prompt."""
    room, length = generator.max_context_length, getattr(generator, name).max_generate_length
    field = f"generator.{name}.max_generate_length"
    if length >= room:
        yield Violation.of(
            field,
            length,
            f"must leave room for a prompt in generator.max_context_length={room}",
            f"try {field}={max(room // 2, 1)} or generator.max_context_length={2 * length}",
        )


def _prompt_length(generator: GeneratorConfig, data: DataConfig) -> Iterator[Violation]:
    room = generator.max_context_length
    if data.max_prompt_length >= room:
        yield Violation.of(
            "data.max_prompt_length",
            data.max_prompt_length,
            f"must be less than generator.max_context_length={room}, or nothing is left for a response",
            f"try data.max_prompt_length={max(room // 2, 1)}",
        )


def _why_not_equal(algorithm: AlgorithmConfig) -> tuple[str, str, str] | None:
    """Why a prompt's samples may not be equal, why there may not be a single one, and what to set instead."""
    estimator, filters = split_spec(algorithm.advantage_estimator)[0], algorithm.filters
    if estimator_reads(algorithm).whole_groups:
        single = f"{estimator} compares a prompt's samples, so a single one has advantage 0"
        equal = f"{estimator} gives equal samples advantage 0"
        return equal, single, "another trainer.algorithm.advantage_estimator"
    if filters.zero_variance or filters.dynamic_sampling != "none":
        name, off = ("zero_variance", "false") if filters.zero_variance else ("dynamic_sampling", "none")
        equal = f"filters.{name} leaves prompts out whose samples have equal rewards, so that nothing is trained"
        return equal, f"{equal} with one sample", f"trainer.algorithm.filters.{name}={off}"
    return None


def _single_samples(generator: GeneratorConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if (why := _why_not_equal(algorithm)) and generator.n_samples_per_prompt == 1:
        _, single, instead = why
        yield Violation.of(
            "generator.n_samples_per_prompt",
            generator.n_samples_per_prompt,
            f"must be at least 2: {single}",
            f"try generator.n_samples_per_prompt=8, or {instead}",
        )


def _equal_samples(generator: GeneratorConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    sampling = generator.sampling
    if not (why := _why_not_equal(algorithm)) or generator.backend == "replay":
        return
    if sampling.temperature == 0 or sampling.top_k == 1:
        field = "temperature" if sampling.temperature == 0 else "top_k"
        yield Violation.of(
            f"generator.sampling.{field}",
            getattr(sampling, field),
            f"makes all samples of a prompt equal, and {why[0]}",
            f"try generator.sampling.{field}={1.0 if field == 'temperature' else -1}",
        )


def _evaluation(generator: GeneratorConfig) -> Iterator[Violation]:
    if generator.eval_n_samples_per_prompt > 1 and generator.eval_sampling.temperature == 0:
        yield Violation.of(
            "generator.eval_n_samples_per_prompt",
            generator.eval_n_samples_per_prompt,
            "must be 1 with generator.eval_sampling.temperature=0: greedy answers are all the same",
            "try generator.eval_n_samples_per_prompt=1 or generator.eval_sampling.temperature=1.0",
        )


def _resume(trainer: LoopConfig) -> Iterator[Violation]:
    mode, path = trainer.resume_mode, trainer.resume_path
    reads_path = mode in ("from_path", "fork")
    if reads_path and not path:
        yield Violation.of(
            "trainer.resume_path",
            path,
            f"must be given with trainer.resume_mode={mode}",
            "set trainer.resume_path to a checkpoint folder or a run's output folder",
        )
    elif reads_path and "://" in path:
        yield from _url("trainer.resume_path", path)
        own = trainer.checkpoint_url.rstrip("/")
        if mode == "fork" and own and f"{path}/".startswith(f"{own}/"):
            yield Violation.of(
                "trainer.checkpoint_url",
                trainer.checkpoint_url,
                "must be another than that of the run that is forked: a fork is a new run",
                "give the fork a trainer.checkpoint_url of its own",
            )
    elif reads_path and not Path(path).expanduser().is_dir():
        yield Violation.of("trainer.resume_path", path, "must be an existing folder", near_path(path))
    elif not reads_path and path:
        yield Violation.of(
            "trainer.resume_path",
            path,
            f"is not read with trainer.resume_mode={mode}",
            "add trainer.resume_mode=from_path (or fork), or drop trainer.resume_path",
        )


def _checkpoint_url(trainer: LoopConfig) -> Iterator[Violation]:
    if trainer.checkpoint_url:
        yield from _url("trainer.checkpoint_url", trainer.checkpoint_url)


def _url(field: str, url: str) -> Iterator[Violation]:
    """Refuses what fsspec does not know, and what it lacks a package for."""
    from fsspec.registry import get_filesystem_class, known_implementations

    protocol, _, place = url.partition("://")
    try:
        if not place.strip("/") or protocol == "memory":
            raise ValueError("it names no place")
        get_filesystem_class(protocol)
    except ValueError:
        near = did_you_mean(protocol, list(known_implementations)) if place and protocol != "memory" else ""
        rule = "must be a URL that fsspec knows, of a place that outlives the run"
        yield Violation.of(field, url, rule, near or "try s3://BUCKET/RUN, or file:///FOLDER")
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        remedy = f"pip install {package}" if package != "fsspec" else f"{error}"
        yield Violation.of(field, url, f"needs a package for {protocol}:// that is not installed", remedy)


def _replay(generator: GeneratorConfig) -> Iterator[Violation]:
    backend, path = generator.backend, generator.replay_path
    if backend == "replay" and not path:
        yield Violation.of(
            "generator.replay_path",
            path,
            "must be given with generator.backend=replay",
            "set generator.replay_path to a run's `rollouts` or `journal` folder, or a JSON-lines file in it",
        )
    elif backend == "replay" and not Path(path).expanduser().exists():
        yield Violation.of("generator.replay_path", path, "must be an existing file or folder", near_path(path))
    elif backend != "replay" and path:
        yield Violation.of(
            "generator.replay_path",
            path,
            f"is not read with generator.backend={part_name(backend)}",
            "add generator=replay, or drop generator.replay_path",
        )


def near_path(path: str) -> str:
    """What exists instead: the nearest name in the deepest existing folder."""
    wanted = Path(path).expanduser()
    while wanted.parent != wanted and not wanted.parent.is_dir():
        wanted = wanted.parent
    if wanted.parent.absolute() == wanted.absolute().parent.parent:  # names in the root have nothing to do with it
        return f"there is no folder {wanted}"
    names = sorted(entry.name for entry in wanted.parent.iterdir()) if wanted.parent.is_dir() else []
    near = did_you_mean(wanted.name, names)
    folder = wanted.parent.resolve()
    return f"in {folder}: {near}" if near else f"{folder} has nothing like {wanted.name}"


def _strategy(strategy: StrategyConfig) -> Iterator[Violation]:
    if strategy.offloads_all and strategy.kind != "fsdp2" and not strategy.is_custom:
        yield Violation.of(
            "strategy.cpu_offload",
            strategy.cpu_offload,
            f"needs strategy=fsdp2 and does nothing with {strategy.kind}",
            "add strategy=fsdp2, or try strategy.cpu_offload=optimizer",
        )


def _docs_per_step(trainer: TrainerConfig) -> Iterator[Violation]:
    if trainer.docs_per_step_exact and not trainer.docs_per_step:
        yield Violation.of(
            "trainer.docs_per_step_exact",
            trainer.docs_per_step_exact,
            "does nothing with trainer.docs_per_step=0",
            "set trainer.docs_per_step, or drop trainer.docs_per_step_exact",
        )


def _micro_batching(trainer: TrainerConfig) -> Iterator[Violation]:
    if trainer.auto_micro_batch_size and trainer.micro_batching != "auto":
        yield Violation.of(
            "trainer.auto_micro_batch_size",
            trainer.auto_micro_batch_size,
            f"means trainer.micro_batching=auto, but that is {part_name(trainer.micro_batching)}",
            "drop one of the two",
        )


def _memory_budget(trainer: LoopConfig, platform: PlatformConfig) -> Iterator[Violation]:
    if not trainer.sizes_itself and trainer.memory_budget_gb:
        yield Violation.of(
            "trainer.memory_budget_gb",
            trainer.memory_budget_gb,
            f"does nothing with trainer.micro_batching={part_name(trainer.micro_batching)}",
            'add trainer.micro_batching=auto (a custom planner declares @reads("memory_budget")), or drop '
            "trainer.memory_budget_gb",
        )
    elif trainer.sizes_itself and platform.name == "cpu" and not trainer.memory_budget_gb:
        yield Violation.of(
            "trainer.memory_budget_gb",
            trainer.memory_budget_gb,
            f"must be given with trainer.micro_batching={part_name(trainer.micro_batching)} on a CPU, where no device "
            "states a limit",
            "try trainer.memory_budget_gb=1, the GiB that models, optimizer and activations may hold together",
        )


def _memory_probe(trainer: LoopConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    field, probe = "trainer.memory_probe", trainer.memory_probe
    if not trainer.sizes_itself or probe == "measure":
        return
    if probe == "xla" and find_spec("jax") is None:
        yield Violation.of(
            field,
            probe,
            "needs JAX, which is not installed",
            f"{install_command('jax')}, or set trainer.memory_probe=trace",
        )
    if strategy.ranks_per_share > 1:
        yield Violation.of(
            field,
            probe,
            f"must be measure with {strategy.stated_sharing}: ranks that share a forward are not predicted",
            "set trainer.memory_probe=measure",
        )


def _steps_of_documents(trainer: TrainerConfig) -> Iterator[Violation]:
    yield from steps_at_micro_batches(trainer.micro_batching, trainer.docs_per_step)


def steps_at_micro_batches(micro_batching: PartSpec, docs_per_step: int) -> Iterator[Violation]:
    """Micro-batches that size themselves do not close steps."""
    if micro_batching == "auto" and docs_per_step:
        yield Violation.of(
            "trainer.docs_per_step",
            docs_per_step,
            "must be 0 with trainer.micro_batching=auto: it closes steps at micro-batches, so that another device would "
            "take other steps",
            "set trainer.docs_per_step=0, or trainer.micro_batching=token_budget",
        )


def _trajectory_rows(generator: GeneratorConfig) -> Iterator[Violation]:
    if generator.step_wise_trajectories and generator.trajectory_rows not in ("per_trajectory", "per_turn"):
        yield Violation.of(
            "generator.trajectory_rows",
            generator.trajectory_rows,
            "excludes generator.step_wise_trajectories=true, which means per_turn",
            "drop generator.step_wise_trajectories",
        )


def _data(data: DataConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    if not data.train and not data.mix and generator.backend != "replay":
        yield Violation.of("data.train", data.train, "must name at least one source", "try data=word_problems")
    if generator.backend == "replay" and (data.mix or data.curriculum.enabled):
        field = "data.mix" if data.mix else "data.curriculum.enabled"
        yield Violation.of(field, True, "is not read with generator=replay: recordings hold prompts", f"drop {field}")


def _run_name(run_name: str) -> Iterator[Violation]:
    yield from _not_empty("run_name", run_name)


def _output_dir(output_dir: str) -> Iterator[Violation]:
    yield from _not_empty("output_dir", output_dir)


def _not_empty(field: str, value: str) -> Iterator[Violation]:
    if not value.strip():
        yield Violation.of(field, value, "must not be empty", f"drop {field}, or give it a name")


SHARED_RULES: tuple[Rule, ...] = (
    _run_name,
    _output_dir,
    _resume,
    _checkpoint_url,
    *PROCESS_RULES,
    *PLACEMENT_RULES,
    _strategy,
    _memory_budget,
    _memory_probe,
    lora_targets,
    quantization,
)
"""The rules of settings that every kind of run has."""
RULES: tuple[Rule, ...] = (
    *SHARED_RULES,
    *(partial(_response_length, name=name) for name in ("sampling", "eval_sampling")),
    _prompt_length,
    _single_samples,
    _equal_samples,
    _evaluation,
    _replay,
    *ENGINE_PLACEMENT_RULES,
    *ENGINE_RULES,
    *MODEL_RULES,
    _docs_per_step,
    _micro_batching,
    _steps_of_documents,
    _trajectory_rows,
    _data,
    *ALGORITHM_RULES,
    *ASYNC_RULES,
    *REWARD_RULES,
)
"""Every rule between fields of reinforcement learning, but for those of batch sizes."""
