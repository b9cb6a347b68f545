"""Rules between fields, without torch and without a model: each names the field, what must hold, and what to type.

`RULES` lists them all. A rule runs only where none of the fields that it reads was refused, so that one wrong value is
reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config.algorithm import (
    REFERENCE_ESTIMATORS,
    SELF_TAUGHT_ESTIMATORS,
    needs_critic,
    needs_reference,
)
from skyrl_train.config.algorithm_rules import algorithm_violations
from skyrl_train.config.engine_args import engine_argument_violations, seeds_violations
from skyrl_train.config.registered import REGISTRIES, module_exists, registered_names
from skyrl_train.config.schema import Config
from skyrl_train.config.sequence_parallel import sequence_parallel_violations
from skyrl_train.config.validate_batch import BATCH_SIZE_FIELDS, validate_batch_sizes
from skyrl_train.config.validate_cluster import cluster_violations
from skyrl_train.config.validate_placement import process_violations
from skyrl_train.errors import Violation
from skyrl_train.registry import did_you_mean

GROUP_ESTIMATORS = (
    "grpo",
    "rloo",
    "reinforce++_baseline",
    "maxrl",
    "opo",
    "grpo_pass_at_k",
    "gpg",
    "optimal_token_baseline",
    "gdpo",
)
"""Advantage estimators that compare the trajectories of one prompt with each other."""

LORA_DROPOUT = "model.lora.dropout"


@dataclass(frozen=True)
class Rule:
    """A check and the fields, or sections, that it reads."""

    reads: tuple[str, ...]
    check: Callable[[Config], Iterator[Violation]]


def validate_config(config: Config, *, refused: Collection[str] = ()) -> list[Violation]:
    """Every rule between fields that does not hold.

    Args:
        refused: fields whose value was refused before (they carry their defaults); rules that read them are left out.
    """
    return [
        violation
        for rule in RULES
        if not any(_touches(read, field) for read in rule.reads for field in refused)
        for violation in rule.check(config)
    ]


def _touches(read: str, field: str) -> bool:
    return field == read or field.startswith((f"{read}.", f"{read}["))


def _value(config: Config, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _violation(config: Config, field: str, rule: str, remedy: str) -> Violation:
    return Violation(field=field, rule=rule, value=repr(_value(config, field)), remedy=remedy)


def _lengths(config: Config) -> Iterator[Violation]:
    generator, room = config.generator, config.generator.max_context_length
    for name, sampling in (("sampling", generator.sampling), ("eval_sampling", generator.eval_sampling)):
        field, length = f"generator.{name}.max_generate_length", sampling.max_generate_length
        if length >= room:
            yield _violation(
                config,
                field,
                f"must leave room for a prompt in generator.max_context_length={room}",
                f"try {field}={max(room // 2, 1)} or generator.max_context_length={2 * length}",
            )
    if config.data.max_prompt_length >= room:
        yield _violation(
            config,
            "data.max_prompt_length",
            f"must be less than generator.max_context_length={room}, or nothing is left for a response",
            f"try data.max_prompt_length={max(room // 2, 1)}",
        )


def _names(config: Config) -> Iterator[Violation]:
    for field, file, dictionary in REGISTRIES:
        name = str(_value(config, field))
        known = registered_names(file, dictionary)
        if ":" in name:
            if not module_exists(name):
                yield _violation(
                    config,
                    field,
                    "must name a module that can be imported",
                    "install the package, or put its folder on PYTHONPATH",
                )
        elif known and name not in known:
            remedy = did_you_mean(name, list(known)) or "write package.module:attr for your own"
            yield _violation(config, field, f"must be one of {', '.join(known)}", remedy)


def _groups(config: Config) -> Iterator[Violation]:
    algorithm = config.trainer.algorithm
    estimator, filters = algorithm.advantage_estimator, algorithm.filters
    if estimator in GROUP_ESTIMATORS:
        single = f"{estimator} compares a prompt's samples, so a single one has advantage 0"
        equal, instead = f"{estimator} gives equal samples advantage 0", "another trainer.algorithm.advantage_estimator"
    elif filters.zero_variance or filters.dynamic_sampling != "none":
        name, off = ("zero_variance", "false") if filters.zero_variance else ("dynamic_sampling", "none")
        equal = f"filters.{name} leaves prompts out whose samples have equal rewards, so that nothing is trained"
        single, instead = f"{equal} with one sample", f"trainer.algorithm.filters.{name}={off}"
    else:
        return
    if config.generator.n_samples_per_prompt == 1:
        yield _violation(
            config,
            "generator.n_samples_per_prompt",
            f"must be at least 2: {single}",
            f"try generator.n_samples_per_prompt=8, or {instead}",
        )
    sampling = config.generator.sampling
    if config.generator.backend != "replay" and (sampling.temperature == 0 or sampling.top_k == 1):
        field = "temperature" if sampling.temperature == 0 else "top_k"
        yield _violation(
            config,
            f"generator.sampling.{field}",
            f"makes all samples of a prompt equal, and {equal}",
            f"try generator.sampling.{field}={1.0 if field == 'temperature' else -1}",
        )


def _evaluation(config: Config) -> Iterator[Violation]:
    if config.generator.eval_n_samples_per_prompt > 1 and config.generator.eval_sampling.temperature == 0:
        yield _violation(
            config,
            "generator.eval_n_samples_per_prompt",
            "must be 1 with generator.eval_sampling.temperature=0: greedy answers are all the same",
            "try generator.eval_n_samples_per_prompt=1 or generator.eval_sampling.temperature=1.0",
        )


def _resume(config: Config) -> Iterator[Violation]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_path
    if mode == "from_path" and not path:
        yield _violation(
            config,
            "trainer.resume_path",
            "must be given with trainer.resume_mode=from_path",
            "set trainer.resume_path to a checkpoint folder or a run's output folder",
        )
    elif mode == "from_path" and not Path(path).expanduser().is_dir():
        yield _violation(config, "trainer.resume_path", "must be an existing folder", near_path(path))
    elif mode != "from_path" and path:
        yield _violation(
            config,
            "trainer.resume_path",
            f"is not read with trainer.resume_mode={mode}",
            "add trainer.resume_mode=from_path, or drop trainer.resume_path",
        )


def _replay(config: Config) -> Iterator[Violation]:
    backend, path = config.generator.backend, config.generator.replay_path
    if backend == "replay" and not path:
        yield _violation(
            config,
            "generator.replay_path",
            "must be given with generator.backend=replay",
            "set generator.replay_path to a run's `rollouts` folder or a JSON-lines file in it",
        )
    elif backend == "replay" and not Path(path).expanduser().exists():
        yield _violation(config, "generator.replay_path", "must be an existing file or folder", near_path(path))
    elif backend != "replay" and path:
        yield _violation(
            config,
            "generator.replay_path",
            f"is not read with generator.backend={backend}",
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
        yield _violation(
            config,
            "strategy.cpu_offload",
            f"needs strategy=fsdp2 and does nothing with {config.strategy.name}",
            "add strategy=fsdp2, or drop strategy.cpu_offload",
        )


def _optimizers(config: Config) -> Iterator[Violation]:
    for section in ("trainer.policy.optimizer", "critic.optimizer"):
        field = f"{section}.betas"
        betas = _value(config, field)
        if isinstance(betas, tuple) and not all(0.0 <= beta < 1.0 for beta in betas):
            yield _violation(config, field, "must each be at least 0 and below 1", f"try {field}=[0.9,0.999]")


def _critic(config: Config) -> Iterator[Violation]:
    if needs_critic(config.trainer.algorithm) and not config.critic.model.path:
        yield _violation(
            config,
            "critic.model.path",
            f"must be given: advantage_estimator={config.trainer.algorithm.advantage_estimator} needs a value model",
            "try critic.model.path=policy, a copy of the policy with a new value head",
        )


def _reference(config: Config) -> Iterator[Violation]:
    algorithm, path = config.trainer.algorithm, config.reference.model.path
    if not path.strip():
        yield _violation(config, "reference.model.path", "must not be empty", "try reference.model.path=policy")
    if algorithm.advantage_estimator in REFERENCE_ESTIMATORS and path in ("policy", config.model.path):
        yield _violation(
            config,
            "reference.model.path",
            f"must name another model than the policy: {algorithm.advantage_estimator} learns from where the two differ",
            "set reference.model.path to the folder or hub name of a teacher",
        )
    context = config.generator.privileged_context
    if (algorithm.advantage_estimator in SELF_TAUGHT_ESTIMATORS) != bool(context):
        yield _violation(
            config,
            "generator.privileged_context",
            "names what the teacher of algorithm=self_distillation is shown, and of no other",
            "try algorithm=self_distillation, or generator.privileged_context=''"
            if context
            else "try generator.privileged_context=reward_spec.ground_truth",
        )
    if algorithm.ref_update_interval and not needs_reference(algorithm):
        yield _violation(
            config,
            "trainer.algorithm.ref_update_interval",
            "does nothing without a reference, which this algorithm does not read",
            "set trainer.algorithm.kl_loss_coef above 0, or trainer.algorithm.ref_update_interval=0",
        )
    elif algorithm.ref_update_interval and path != "policy":
        yield _violation(
            config,
            "trainer.algorithm.ref_update_interval",
            f"would replace reference.model.path={path} by the policy",
            "set trainer.algorithm.ref_update_interval=0, or reference.model.path=policy",
        )


def _lora(config: Config) -> Iterator[Violation]:
    for prefix, lora in (("model.lora", config.model.lora), ("critic.model.lora", config.critic.model.lora)):
        if lora.rank and lora.dropout:
            yield _violation(
                config,
                f"{prefix}.dropout",
                "must be 0 in reinforcement learning: it would move the ratios of new and old probabilities, and values",
                f"set {prefix}.dropout=0",
            )
        if lora.rank and not lora.targets:
            yield _violation(config, f"{prefix}.targets", "must name a layer", f"try {prefix}.targets=[all-linear]")
    if config.critic.model.lora.rank and not config.critic.model.path:
        yield _violation(
            config,
            "critic.model.lora.rank",
            "needs a critic, and critic.model.path is empty",
            "set critic.model.path=policy, or critic.model.lora.rank=0",
        )


def _docs_per_step(config: Config) -> Iterator[Violation]:
    if config.trainer.docs_per_step_exact and not config.trainer.docs_per_step:
        yield _violation(
            config,
            "trainer.docs_per_step_exact",
            "does nothing with trainer.docs_per_step=0",
            "set trainer.docs_per_step, or drop trainer.docs_per_step_exact",
        )


def _memory(config: Config) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.auto_micro_batch_size and trainer.micro_batching != "auto":
        yield _violation(
            config,
            "trainer.auto_micro_batch_size",
            f"means trainer.micro_batching=auto, but that is {trainer.micro_batching}",
            "drop one of the two",
        )
    elif trainer.micro_batching == "auto" and config.platform.name == "cpu" and not trainer.memory_budget_gb:
        yield _violation(
            config,
            "trainer.memory_budget_gb",
            "must be given with trainer.micro_batching=auto on a CPU, where no device states a limit",
            "try trainer.memory_budget_gb=1, the GiB that models, optimizer and activations may hold together",
        )
    elif trainer.micro_batching == "auto" and trainer.docs_per_step:
        yield _violation(
            config,
            "trainer.docs_per_step",
            "must be 0 with trainer.micro_batching=auto: it closes steps at micro-batches, so that another device would "
            "take other steps",
            "set trainer.docs_per_step=0, or trainer.micro_batching=token_budget",
        )
    elif trainer.micro_batching != "auto" and trainer.memory_budget_gb:
        yield _violation(
            config,
            "trainer.memory_budget_gb",
            f"does nothing with trainer.micro_batching={trainer.micro_batching}",
            "add trainer.micro_batching=auto, or drop trainer.memory_budget_gb",
        )


def _data(config: Config) -> Iterator[Violation]:
    if not config.data.train and config.generator.backend != "replay":
        yield _violation(config, "data.train", "must name at least one source", "try data=word_problems")


def _output(config: Config) -> Iterator[Violation]:
    for field in ("run_name", "output_dir"):
        if not str(_value(config, field)).strip():
            yield _violation(config, field, "must not be empty", f"drop {field}, or give it a name")


def _algorithm(config: Config) -> Iterator[Violation]:
    yield from algorithm_violations(config.trainer.algorithm)


def _batch_sizes(config: Config) -> Iterator[Violation]:
    yield from validate_batch_sizes(config)


RULES = (
    Rule(("generator.max_context_length", "generator.sampling", "generator.eval_sampling", "data"), _lengths),
    Rule(("trainer.algorithm", "trainer.micro_batching"), _names),
    Rule(("generator", "trainer.algorithm"), _groups),
    Rule(("generator",), _evaluation),
    Rule(("trainer.resume_mode", "trainer.resume_path"), _resume),
    Rule(("generator.backend", "generator.replay_path"), _replay),
    Rule(("placement", "strategy", "generator.backend"), process_violations),
    Rule(("strategy",), _strategy),
    Rule(("strategy", "model.attention"), sequence_parallel_violations),
    Rule(("placement", "generator", "platform"), cluster_violations),
    Rule(("generator", "placement"), engine_argument_violations),
    Rule(("generator",), seeds_violations),
    Rule(("trainer.policy.optimizer.betas", "critic.optimizer.betas"), _optimizers),
    Rule(("trainer.algorithm.advantage_estimator", "critic.model"), _critic),
    Rule(("trainer.algorithm", "reference", "model.path"), _reference),
    Rule(("model.lora", "critic.model"), _lora),
    Rule(("trainer.docs_per_step", "trainer.docs_per_step_exact"), _docs_per_step),
    Rule(("trainer", "platform"), _memory),
    Rule(("data.train", "generator.backend"), _data),
    Rule(("run_name", "output_dir"), _output),
    Rule(("trainer.algorithm",), _algorithm),
    Rule((*BATCH_SIZE_FIELDS, "trainer.algorithm", "placement", "strategy"), _batch_sizes),
)
"""Every rule between fields."""
