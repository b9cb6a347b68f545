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
from skyrl_train.config.data.sources import DataConfig
from skyrl_train.config.environment.rewards import REWARD_RULES
from skyrl_train.config.fields.fields import Rule, is_refused, parts_of, recorded
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.config.placement.bundles import shares_devices
from skyrl_train.config.rules.algorithm_rules import ALGORITHM_RULES
from skyrl_train.config.rules.argument_rules import kind_violations, value_violations
from skyrl_train.config.rules.validate_engines import ENGINE_RULES
from skyrl_train.config.rules.validate_models import MODEL_RULES, lora_targets, quantization
from skyrl_train.config.rules.validate_placement import ENGINE_PLACEMENT_RULES, PLACEMENT_RULES, PROCESS_RULES
from skyrl_train.config.schema import LoopConfig, TrainerConfig
from skyrl_train.errors import Violation
from skyrl_train.registry import did_you_mean, part_name, split_spec
from skyrl_train.system import install_command


def _apart(
    trainer: TrainerConfig, generator: GeneratorConfig, placement: PlacementConfig, platform: PlatformConfig
) -> Iterator[Violation]:
    """With `trainer.max_staleness` engines compute while the learner does."""
    if trainer.max_staleness and generator.has_own_devices and shares_devices(placement, generator, platform):
        name, apart = "backend", "add placement=ray"
        if placement.colocate_all:
            name, apart = "colocate_all", "set placement.colocate_all=false"
        rule = (
            "has models and engines share devices, where one of them waits while the other computes: nothing would overlap "
            f"with trainer.max_staleness={trainer.max_staleness}"
        )
        where = "with devices for both: placement=auto and placement=gpu_8_split have them apart"
        remedy = f"{apart}, {where}, or set trainer.max_staleness=0"
        yield Violation.of(f"placement.{name}", getattr(placement, name), rule, remedy)


def _too_many(trainer: TrainerConfig) -> Iterator[Violation]:
    in_order = trainer.take_groups == "in_order"
    if trainer.max_staleness and trainer.oversample > 1 and not in_order and trainer.stale_groups == "wait":
        rule = f"must be drop with trainer.oversample={trainer.oversample:g}: prompts that are too many cannot be waited for"
        remedy = "set trainer.stale_groups=drop, or trainer.take_groups=in_order, or trainer.max_staleness=0"
        yield Violation.of("trainer.stale_groups", "wait", rule, remedy)


def rule_violations(config: object, rules: Iterable[Rule], refused: Collection[str] = ()) -> list[Violation]:
    """What breaks rules between fields, declared ones first. Of a setting that nothing reads, no rule says more."""
    unread = list(kind_violations(config, refused))
    of_rules = [each for each in run_rules(config, rules, refused) if each.field not in {one.field for one in unread}]
    return [*unread, *of_rules, *part_violations(config, refused)]


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
        rule = f"must leave room for a prompt in generator.max_context_length={room}"
        remedy = f"try {field}={max(room // 2, 1)} or generator.max_context_length={2 * length}"
        yield Violation.of(field, length, rule, remedy)


def _prompt_length(generator: GeneratorConfig, data: DataConfig) -> Iterator[Violation]:
    room = generator.max_context_length
    if data.max_prompt_length >= room:
        rule = f"must be less than generator.max_context_length={room}, or nothing is left for a response"
        remedy = f"try data.max_prompt_length={max(room // 2, 1)}"
        yield Violation.of("data.max_prompt_length", data.max_prompt_length, rule, remedy)


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
        rule, remedy = f"must be at least 2: {single}", f"try generator.n_samples_per_prompt=8, or {instead}"
        yield Violation.of("generator.n_samples_per_prompt", generator.n_samples_per_prompt, rule, remedy)


def _equal_samples(generator: GeneratorConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    sampling = generator.sampling
    if not (why := _why_not_equal(algorithm)) or generator.backend == "replay":
        return
    if sampling.temperature == 0 or sampling.top_k == 1:
        field = "temperature" if sampling.temperature == 0 else "top_k"
        rule = f"makes all samples of a prompt equal, and {why[0]}"
        remedy = f"try generator.sampling.{field}={1.0 if field == 'temperature' else -1}"
        yield Violation.of(f"generator.sampling.{field}", getattr(sampling, field), rule, remedy)


def _evaluation(generator: GeneratorConfig) -> Iterator[Violation]:
    if generator.eval_n_samples_per_prompt > 1 and generator.eval_sampling.temperature == 0:
        rule = "must be 1 with generator.eval_sampling.temperature=0: greedy answers are all the same"
        remedy = "try generator.eval_n_samples_per_prompt=1 or generator.eval_sampling.temperature=1.0"
        yield Violation.of("generator.eval_n_samples_per_prompt", generator.eval_n_samples_per_prompt, rule, remedy)


def _resume(trainer: LoopConfig) -> Iterator[Violation]:
    mode, path = trainer.resume_mode, trainer.resume_path
    reads_path = mode in ("from_path", "fork")
    if reads_path and not path:
        rule = f"must be given with trainer.resume_mode={mode}"
        remedy = "set trainer.resume_path to a checkpoint folder or a run's output folder"
        yield Violation.of("trainer.resume_path", path, rule, remedy)
    elif reads_path and "://" in path:
        yield from _url("trainer.resume_path", path)
        own = trainer.checkpoint_url.rstrip("/")
        if mode == "fork" and own and f"{path}/".startswith(f"{own}/"):
            rule = "must be another than that of the run that is forked: a fork is a new run"
            remedy = "give the fork a trainer.checkpoint_url of its own"
            yield Violation.of("trainer.checkpoint_url", trainer.checkpoint_url, rule, remedy)
    elif reads_path and not Path(path).expanduser().is_dir():
        yield Violation.of("trainer.resume_path", path, "must be an existing folder", near_path(path))


def _checkpoint_url(trainer: LoopConfig) -> Iterator[Violation]:
    if trainer.checkpoint_url:
        yield from _url("trainer.checkpoint_url", trainer.checkpoint_url)


def _url(field: str, url: str) -> Iterator[Violation]:
    """Refuses what fsspec does not know, and what it lacks a package for."""
    if find_spec("fsspec") is None:
        yield Violation.of(field, url, "needs fsspec, which is not installed here", install_command("remote"))
        return
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
        rule = "must be given with generator.backend=replay"
        remedy = "set generator.replay_path to a run's `rollouts` or `journal` folder, or a JSON-lines file in it"
        yield Violation.of("generator.replay_path", path, rule, remedy)
    elif backend == "replay" and not Path(path).expanduser().exists():
        yield Violation.of("generator.replay_path", path, "must be an existing file or folder", near_path(path))


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


def _micro_batching(trainer: TrainerConfig) -> Iterator[Violation]:
    if trainer.auto_micro_batch_size and trainer.micro_batching != "auto":
        rule = f"means trainer.micro_batching=auto, but that is {part_name(trainer.micro_batching)}"
        yield Violation.of("trainer.auto_micro_batch_size", trainer.auto_micro_batch_size, rule, "drop one of the two")


def _memory_budget(trainer: LoopConfig, platform: PlatformConfig) -> Iterator[Violation]:
    if trainer.sizes_itself and platform.name == "cpu" and not trainer.memory_budget_gb:
        rule = (
            f"must be given with trainer.micro_batching={part_name(trainer.micro_batching)} on a CPU, where no device "
            "states a limit"
        )
        remedy = "try trainer.memory_budget_gb=1, the GiB that models, optimizer and activations may hold together"
        yield Violation.of("trainer.memory_budget_gb", trainer.memory_budget_gb, rule, remedy)


def _memory_probe(trainer: LoopConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    field, probe = "trainer.memory_probe", trainer.memory_probe
    if not trainer.sizes_itself or probe == "measure":
        return
    if probe == "xla" and find_spec("jax") is None:
        rule = "needs JAX, which is not installed"
        yield Violation.of(field, probe, rule, f"{install_command('jax')}, or set trainer.memory_probe=trace")
    if strategy.ranks_per_share > 1:
        rule = f"must be measure with {strategy.stated_sharing}: ranks that share a forward are not predicted"
        yield Violation.of(field, probe, rule, "set trainer.memory_probe=measure")


def _steps_of_documents(trainer: LoopConfig) -> Iterator[Violation]:
    """Micro-batches that size themselves do not close steps."""
    if trainer.micro_batching == "auto" and trainer.docs_per_step:
        rule = (
            "must be 0 with trainer.micro_batching=auto: it closes steps at micro-batches, so that another device would "
            "take other steps"
        )
        remedy = "set trainer.docs_per_step=0, or trainer.micro_batching=token_budget"
        yield Violation.of("trainer.docs_per_step", trainer.docs_per_step, rule, remedy)


def _trajectory_rows(generator: GeneratorConfig) -> Iterator[Violation]:
    if generator.step_wise_trajectories and generator.trajectory_rows not in ("per_trajectory", "per_turn"):
        rule = "excludes generator.step_wise_trajectories=true, which means per_turn"
        remedy = "drop generator.step_wise_trajectories"
        yield Violation.of("generator.trajectory_rows", generator.trajectory_rows, rule, remedy)


def _data(data: DataConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    if not data.train and not data.mix and generator.backend != "replay":
        yield Violation.of("data.train", data.train, "must name at least one source", "try data=word_problems")


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
    _memory_budget,
    _memory_probe,
    _steps_of_documents,
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
    _micro_batching,
    _trajectory_rows,
    _data,
    *ALGORITHM_RULES,
    _apart,
    _too_many,
    *REWARD_RULES,
)
"""Every rule between fields of reinforcement learning, but for those of batch sizes."""
