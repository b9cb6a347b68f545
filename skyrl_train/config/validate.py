"""Rules between fields, without torch and without a model: each names the field, what must hold, and what to type.

`RULES` lists them all, one function for what is decided together. Where values were refused, a rule that reads one of them
has nothing to go by, so that one wrong value is reported once; all others are reported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.config.algorithm import estimator_reads
from skyrl_train.config.algorithm_rules import ALGORITHM_RULES, AlgorithmRule
from skyrl_train.config.engine_args import ENGINE_ARGUMENT_RULES
from skyrl_train.config.fields import is_refused, parts_of, recorded
from skyrl_train.config.parts import BATCH_RULES
from skyrl_train.config.passes import sizes_micro_batches
from skyrl_train.config.schema import Config
from skyrl_train.config.sequence_parallel import sequence_parallel_violations
from skyrl_train.config.validate_cluster import CLUSTER_RULES
from skyrl_train.config.validate_models import MODEL_RULES, value_of, violation_of
from skyrl_train.config.validate_placement import PROCESS_RULES
from skyrl_train.errors import Violation
from skyrl_train.registry import Seam, did_you_mean, part_name

T = TypeVar("T")


def validate_config(config: Config, *, refused: Collection[str] = ()) -> list[Violation]:
    """Every rule between fields that does not hold.

    Args:
        refused: fields whose value was refused before (they carry their defaults): nothing is said that follows from one.
    """
    found = [*run_rules(config, RULES, refused)]
    for spec in config.trainer.batch_rules:
        if not BATCH_RULES.violations(spec):  # else it is among those found
            found += BATCH_RULES.resolve(spec)(config, refused)
    return found


def run_rules(
    config: T, rules: Iterable[Callable[[T], Iterable[Violation]]], refused: Collection[str]
) -> Iterator[Violation]:
    """What `rules` find, but for what a rule says after it has read a setting that was refused."""
    for rule in rules:
        read: set[str] = set()
        for violation in rule(recorded(config, read.add) if refused else config):
            if not any(is_refused(path, refused) for path in read):
                yield violation


def _response_length(config: Config, name: str) -> Iterator[Violation]:
    """Of `generator.sampling` or `generator.eval_sampling`."""
    room, length = config.generator.max_context_length, getattr(config.generator, name).max_generate_length
    field = f"generator.{name}.max_generate_length"
    if length >= room:
        yield violation_of(
            config,
            field,
            f"must leave room for a prompt in generator.max_context_length={room}",
            f"try {field}={max(room // 2, 1)} or generator.max_context_length={2 * length}",
        )


def _prompt_length(config: Config) -> Iterator[Violation]:
    room = config.generator.max_context_length
    if config.data.max_prompt_length >= room:
        yield violation_of(
            config,
            "data.max_prompt_length",
            f"must be less than generator.max_context_length={room}, or nothing is left for a response",
            f"try data.max_prompt_length={max(room // 2, 1)}",
        )


def _part(config: Config, field: str, seam: Seam) -> Iterator[Violation]:
    """Of a setting that chooses a part: there is none of that name, or it does not take the arguments beside it."""
    value: Any = value_of(config, field)
    chosen = (
        {f"{field}[{index}]": spec for index, spec in enumerate(value)} if isinstance(value, tuple) else {field: value}
    )
    for setting, spec in chosen.items():
        yield from seam.violations(spec, setting)


def _why_not_equal(config: Config) -> tuple[str, str, str] | None:
    """Why a prompt's samples may not be equal, why there may not be a single one, and what to set instead."""
    algorithm = config.trainer.algorithm
    estimator, filters = part_name(algorithm.advantage_estimator), algorithm.filters
    if estimator_reads(algorithm).whole_groups:
        single = f"{estimator} compares a prompt's samples, so a single one has advantage 0"
        equal = f"{estimator} gives equal samples advantage 0"
        return equal, single, "another trainer.algorithm.advantage_estimator"
    if filters.zero_variance or filters.dynamic_sampling != "none":
        name, off = ("zero_variance", "false") if filters.zero_variance else ("dynamic_sampling", "none")
        equal = f"filters.{name} leaves prompts out whose samples have equal rewards, so that nothing is trained"
        return equal, f"{equal} with one sample", f"trainer.algorithm.filters.{name}={off}"
    return None


def _single_samples(config: Config) -> Iterator[Violation]:
    if (why := _why_not_equal(config)) and config.generator.n_samples_per_prompt == 1:
        _, single, instead = why
        yield violation_of(
            config,
            "generator.n_samples_per_prompt",
            f"must be at least 2: {single}",
            f"try generator.n_samples_per_prompt=8, or {instead}",
        )


def _equal_samples(config: Config) -> Iterator[Violation]:
    sampling = config.generator.sampling
    if not (why := _why_not_equal(config)) or config.generator.backend == "replay":
        return
    if sampling.temperature == 0 or sampling.top_k == 1:
        field = "temperature" if sampling.temperature == 0 else "top_k"
        yield violation_of(
            config,
            f"generator.sampling.{field}",
            f"makes all samples of a prompt equal, and {why[0]}",
            f"try generator.sampling.{field}={1.0 if field == 'temperature' else -1}",
        )


def _evaluation(config: Config) -> Iterator[Violation]:
    if config.generator.eval_n_samples_per_prompt > 1 and config.generator.eval_sampling.temperature == 0:
        yield violation_of(
            config,
            "generator.eval_n_samples_per_prompt",
            "must be 1 with generator.eval_sampling.temperature=0: greedy answers are all the same",
            "try generator.eval_n_samples_per_prompt=1 or generator.eval_sampling.temperature=1.0",
        )


def _resume(config: Config) -> Iterator[Violation]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_path
    reads_path = mode in ("from_path", "fork")
    if reads_path and not path:
        yield violation_of(
            config,
            "trainer.resume_path",
            f"must be given with trainer.resume_mode={mode}",
            "set trainer.resume_path to a checkpoint folder or a run's output folder",
        )
    elif reads_path and not Path(path).expanduser().is_dir():
        yield violation_of(config, "trainer.resume_path", "must be an existing folder", near_path(path))
    elif not reads_path and path:
        yield violation_of(
            config,
            "trainer.resume_path",
            f"is not read with trainer.resume_mode={mode}",
            "add trainer.resume_mode=from_path (or fork), or drop trainer.resume_path",
        )


def _replay(config: Config) -> Iterator[Violation]:
    backend, path = config.generator.backend, config.generator.replay_path
    if backend == "replay" and not path:
        yield violation_of(
            config,
            "generator.replay_path",
            "must be given with generator.backend=replay",
            "set generator.replay_path to a run's `rollouts` folder or a JSON-lines file in it",
        )
    elif backend == "replay" and not Path(path).expanduser().exists():
        yield violation_of(config, "generator.replay_path", "must be an existing file or folder", near_path(path))
    elif backend != "replay" and path:
        yield violation_of(
            config,
            "generator.replay_path",
            f"is not read with generator.backend={part_name(backend)}",
            "add generator=replay, or drop generator.replay_path",
        )


def near_path(path: str) -> str:
    """What exists instead: the nearest name in the deepest existing folder."""
    wanted = Path(path).expanduser()
    while wanted.parent != wanted and not wanted.parent.is_dir():
        wanted = wanted.parent
    names = sorted(entry.name for entry in wanted.parent.iterdir()) if wanted.parent.is_dir() else []
    near = did_you_mean(wanted.name, names)
    folder = wanted.parent.resolve()
    return f"in {folder}: {near}" if near else f"{folder} has nothing like {wanted.name}"


def _strategy(config: Config) -> Iterator[Violation]:
    if config.strategy.cpu_offload and config.strategy.name != "fsdp2":
        yield violation_of(
            config,
            "strategy.cpu_offload",
            f"needs strategy=fsdp2 and does nothing with {config.strategy.name}",
            "add strategy=fsdp2, or drop strategy.cpu_offload",
        )


def _docs_per_step(config: Config) -> Iterator[Violation]:
    if config.trainer.docs_per_step_exact and not config.trainer.docs_per_step:
        yield violation_of(
            config,
            "trainer.docs_per_step_exact",
            "does nothing with trainer.docs_per_step=0",
            "set trainer.docs_per_step, or drop trainer.docs_per_step_exact",
        )


def _micro_batching(config: Config) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.auto_micro_batch_size and trainer.micro_batching != "auto":
        yield violation_of(
            config,
            "trainer.auto_micro_batch_size",
            f"means trainer.micro_batching=auto, but that is {part_name(trainer.micro_batching)}",
            "drop one of the two",
        )


def _memory_budget(config: Config) -> Iterator[Violation]:
    trainer = config.trainer
    if not sizes_micro_batches(trainer) and trainer.memory_budget_gb:
        yield violation_of(
            config,
            "trainer.memory_budget_gb",
            f"does nothing with trainer.micro_batching={part_name(trainer.micro_batching)}",
            'add trainer.micro_batching=auto (a custom planner declares @reads("memory_budget")), or drop '
            "trainer.memory_budget_gb",
        )
    elif sizes_micro_batches(trainer) and config.platform.name == "cpu" and not trainer.memory_budget_gb:
        yield violation_of(
            config,
            "trainer.memory_budget_gb",
            f"must be given with trainer.micro_batching={part_name(trainer.micro_batching)} on a CPU, where no device "
            "states a limit",
            "try trainer.memory_budget_gb=1, the GiB that models, optimizer and activations may hold together",
        )


def _memory_probe(config: Config) -> Iterator[Violation]:
    field, probe = "trainer.memory_probe", config.trainer.memory_probe
    if not sizes_micro_batches(config.trainer) or probe == "measure":
        return
    if probe == "xla" and find_spec("jax") is None:
        yield violation_of(
            config,
            field,
            "needs JAX, which is not installed",
            "pip install 'skyrl_train[jax]', or set trainer.memory_probe=trace",
        )
    if config.strategy.sequence_parallel_size > 1:
        yield violation_of(
            config,
            field,
            "must be measure with strategy.sequence_parallel_size > 1: ranks that share a forward are not predicted",
            "set trainer.memory_probe=measure",
        )


def _steps_of_documents(config: Config) -> Iterator[Violation]:
    if config.trainer.micro_batching == "auto" and config.trainer.docs_per_step:
        yield violation_of(
            config,
            "trainer.docs_per_step",
            "must be 0 with trainer.micro_batching=auto: it closes steps at micro-batches, so that another device would "
            "take other steps",
            "set trainer.docs_per_step=0, or trainer.micro_batching=token_budget",
        )


def _trajectory_rows(config: Config) -> Iterator[Violation]:
    generator = config.generator
    if generator.step_wise_trajectories and generator.trajectory_rows not in ("per_trajectory", "per_turn"):
        yield violation_of(
            config,
            "generator.trajectory_rows",
            "excludes generator.step_wise_trajectories=true, which means per_turn",
            "drop generator.step_wise_trajectories",
        )


def _data(config: Config) -> Iterator[Violation]:
    if not config.data.train and config.generator.backend != "replay":
        yield violation_of(config, "data.train", "must name at least one source", "try data=word_problems")


def _not_empty(config: Config, field: str) -> Iterator[Violation]:
    if not str(value_of(config, field)).strip():
        yield violation_of(config, field, "must not be empty", f"drop {field}, or give it a name")


def _algorithm(config: Config, rule: AlgorithmRule) -> Iterator[Violation]:
    yield from rule(config.trainer.algorithm)


CHECKED_PARTS = {field: seam for field, seam in parts_of(Config).items() if not seam.names_elsewhere}
RULES: tuple[Callable[[Config], Iterator[Violation]], ...] = (
    *(partial(_response_length, name=name) for name in ("sampling", "eval_sampling")),
    _prompt_length,
    *(partial(_part, field=field, seam=seam) for field, seam in CHECKED_PARTS.items()),
    _single_samples,
    _equal_samples,
    _evaluation,
    _resume,
    _replay,
    *PROCESS_RULES,
    _strategy,
    sequence_parallel_violations,
    *CLUSTER_RULES,
    *ENGINE_ARGUMENT_RULES,
    *MODEL_RULES,
    _docs_per_step,
    _micro_batching,
    _memory_budget,
    _memory_probe,
    _steps_of_documents,
    _trajectory_rows,
    _data,
    *(partial(_not_empty, field=field) for field in ("run_name", "output_dir")),
    *(partial(_algorithm, rule=rule) for rule in ALGORITHM_RULES),
)
"""Every rule between fields, but for those of batch sizes."""
