"""Sizes, rates and threads that nobody stated: they follow from the model's size, from the machine, and from what is stated.

    stated settings + Situation --derive--> the other settings, which break no rule between them

A stated size moves the others: `train_batch_size=8` makes mini-batches of 4. Where no sizes go with those that are stated,
the rules of `validate_batch.py` refuse these and offer some that do. A run records what was derived as if it had been
typed, so that what is written here may change without a run noticing that goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import lcm
from typing import Any, TypeGuard

from skyrl_train.config.rules.batch_rules import Sizes, divisors, problems
from skyrl_train.errors import counted

Settings = Mapping[str, Any]
"""By dotted name; a setting that is not stated is absent."""

LAYOUT, RATES, COMPILE, THREADS, LR, SFT_LR = (
    "trainer.layout",
    "platform.rates",
    "model.compile",
    "platform.num_threads",
    "trainer.policy.optimizer.lr",
    "trainer.optimizer.lr",
)
CONTEXT, MICRO_BATCHING = "generator.max_context_length", "trainer.micro_batching"
TOKENS, FORWARD_TOKENS = "trainer.max_tokens_per_microbatch", "trainer.max_tokens_per_forward_microbatch"
VALIDATION, BACKGROUND = "data.max_validation_prompts", "trainer.background_checkpoints"
ENGINE_ROWS = "generator.max_batch_size"
_SIZES = (
    "train_batch_size",
    "policy_mini_batch_size",
    "critic_mini_batch_size",
    "micro_train_batch_size_per_gpu",
)
_FORWARD_ROWS = "trainer.micro_forward_batch_size_per_gpu"
RL_DERIVED = (
    *(f"trainer.{name}" for name in _SIZES),
    _FORWARD_ROWS,
    MICRO_BATCHING,
    TOKENS,
    FORWARD_TOKENS,
    LR,
    VALIDATION,
    ENGINE_ROWS,
    BACKGROUND,
    LAYOUT,
    THREADS,
    RATES,
    COMPILE,
)
"""What is derived in reinforcement learning, beside `generator.max_context_length`, for which data sets state a base."""
SFT_DERIVED = ("trainer.batch_size", TOKENS, FORWARD_TOKENS, SFT_LR, BACKGROUND, LAYOUT, THREADS, RATES, COMPILE)
READ = (
    "model.lora.rank",
    "data.max_length",
    "trainer.pad_to_multiple_of",
    "trainer.batch_validation",
    "trainer.auto_micro_batch_size",
    "generator.n_samples_per_prompt",
    "placement.backend",
    "placement.policy_num_workers",
    "placement.policy_num_nodes",
    "placement.critic_num_workers",
    "critic.model.path",
    "generator.vllm.num_engines",
    "model.quantization",
    "strategy.tensor_parallel_size",
    "strategy.expert_parallel_size",
    "trainer.moe_routing_replay",
)
"""What else is read."""

_MANY = 20_000_000
"""Parameters from which on a model gains by several threads, and fills the memory of a small machine."""
_RATES = ((_MANY, 5e-5, 1e-3), (300_000_000, 1e-5, 1e-4), (1_000_000_000, 3e-6, 2e-5), (float("inf"), 1e-6, 1e-5))
"""Parameters below which a model gets the learning rate of reinforcement learning, and of supervised training."""
_ADAPTER_RATE, _SFT_ADAPTER_RATE = 20, 10
"""How many times the rate of all weights an adapter gets."""
_COMPILED_GAIN = 1.05
"""How many times as fast compiled layers must have been where they are chosen."""
_UNCOMPILED = {
    "model.lora.rank": 0,
    "model.quantization": "none",
    "strategy.tensor_parallel_size": 1,
    "strategy.expert_parallel_size": 1,
    "trainer.moe_routing_replay": False,
}
"""With other values nothing was measured, or layers cannot be compiled."""
_MOST_TRIED = 64
"""Training batch sizes that are tried."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The model and the machine that a run meets, as far as values are derived from them."""

    parameters: int
    """Of the policy's model; 0 where nothing tells."""
    on_gpu: bool
    num_cores: int
    """Cores of this machine that the process may use."""
    rates: Mapping[str, Any] | None = None
    """What was measured of its device; None where nothing was."""
    compiled_gain: Mapping[str, float] = field(default_factory=dict)
    """How many times as fast an update of such a model was with compiled layers, by layout."""

    @property
    def is_small(self) -> bool:
        """Whether the model is one for development, such as the bundled one."""
        return 0 < self.parameters < _MANY

    @property
    def is_bounded(self) -> bool:
        """Whether the sizes are those of a whole model on a machine without an accelerator."""
        return not self.on_gpu and not self.is_small

    def __str__(self) -> str:
        size = f"{_short(self.parameters)} parameters" if self.parameters else "a model of unknown size"
        return f"{size} on a {'GPU' if self.on_gpu else 'CPU'}"


def derive(stated: Settings, situation: Situation) -> dict[str, Any]:
    """Return every setting of `RL_DERIVED` that is not stated."""
    # Of real models activations fill the memory, so that positions are counted and not rows.
    counts_rows = not situation.is_bounded or bool(stated.get("trainer.auto_micro_batch_size"))
    counts_rows |= f"trainer.{_SIZES[3]}" in stated
    batching = stated.get(MICRO_BATCHING, "fixed" if counts_rows and TOKENS not in stated else "token_budget")
    sizes = _solve(
        _sizes(stated, situation, batching), frozenset(name for name in _SIZES if f"trainer.{name}" in stated)
    )
    rows = sizes.micro_train_batch_size_per_gpu
    found: dict[str, Any] = {f"trainer.{name}": getattr(sizes, name) for name in _SIZES}
    found["trainer.critic_mini_batch_size"] = sizes.critic_mini_batch_size or sizes.policy_mini_batch_size
    found |= {
        _FORWARD_ROWS: rows * (4 if situation.on_gpu else 2),
        MICRO_BATCHING: batching,
        **_token_caps(situation, longest=0),
        LR: _rate(stated, situation),
        VALIDATION: 200 if situation.is_bounded else 0,
        # More, and the keys and values of an evaluation take more than a step.
        ENGINE_ROWS: 64 if situation.is_bounded else 256,
        BACKGROUND: not situation.is_bounded,  # the copy that is written from would be a third of what a run holds
        **_of_the_device(stated, situation),
    }
    return {name: value for name, value in found.items() if name not in stated}


def derive_sft(stated: Settings, situation: Situation) -> dict[str, Any]:
    """Return every setting of `SFT_DERIVED` that is not stated."""
    multiple = _count(stated, "trainer.pad_to_multiple_of", 1)
    longest = -(-_count(stated, "data.max_length", 1) // multiple) * multiple
    found: dict[str, Any] = {
        "trainer.batch_size": 8 if situation.is_bounded else 32,
        **_token_caps(situation, longest=longest),
        SFT_LR: _rate(stated, situation, supervised=True),
        BACKGROUND: not situation.is_bounded,
        **_of_the_device(stated, situation),
    }
    return {name: value for name, value in found.items() if name not in stated}


def _of_the_device(stated: Settings, situation: Situation) -> dict[str, Any]:
    layout = stated.get(LAYOUT, "auto")
    layouts = ("packed", "prefix_shared") if layout == "auto" else (layout,)
    gain = min(situation.compiled_gain.get(each, 0.0) for each in layouts)
    is_plain = all(stated.get(name, usual) == usual for name, usual in _UNCOMPILED.items())
    return {
        LAYOUT: "auto",
        THREADS: _threads(stated, situation),
        RATES: situation.rates,
        COMPILE: is_plain and gain >= _COMPILED_GAIN,
    }


def context_length(base: int, *, prompt: object, response: object, turns: object) -> int:
    """Return `base`, or where a prompt and a response of the stated lengths do not fit it, room for all turns."""
    lengths = [value for value in (prompt, response, turns) if _is_count(value)]
    if len(lengths) < 3 or lengths[0] + lengths[1] <= base:
        return base
    return lengths[0] + lengths[1] * lengths[2]


def reasons(derived: Settings, stated: Settings, situation: Situation) -> Iterator[str]:
    """Yield lines for a person: what was derived, and why."""
    samples = counted(_count(stated, "generator.n_samples_per_prompt", 8), "sample")
    texts = {
        name: text.format(_typed(derived[name]), samples=samples) for name, text in _TEXTS.items() if derived.get(name)
    }
    if parts := [*texts.values()]:
        yield f"sizes       {', '.join(parts)}: for {situation}; state any to change it"
    if THREADS in derived:
        yield f"threads     {_why_threads(stated, situation, derived[THREADS])}"
    if rates := derived.get(RATES):
        layers = "; compiled layers were faster" if derived.get(COMPILE) else ""
        found = f"of {rates['device']}, measured on {rates['measured_on']}{layers}"
        yield f"rates       {found}; platform.rates=null takes the stated ones"


_TEXTS = {
    "trainer.train_batch_size": "{} prompts x {samples}",
    "trainer.policy_mini_batch_size": "mini-batches of {}",
    "trainer.batch_size": "{} examples a step",
    LR: "lr {}",
    SFT_LR: "lr {}",
    VALIDATION: "at most {} held-out prompts",
}


def _typed(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(parameters: int) -> str:
    """Return a number of parameters as model names have it: `135M`, `1.5B`."""
    return f"{parameters / 1e9:.2g}B" if parameters >= 1e9 else f"{max(1, round(parameters / 1e6))}M"


def _is_count(value: object) -> TypeGuard[int]:
    """Whether a stated value is a number that sizes can follow from; what is none is refused elsewhere."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _count(stated: Settings, name: str, default: int) -> int:
    value = stated.get(name)
    return value if _is_count(value) else default


def _token_caps(situation: Situation, *, longest: int) -> dict[str, int]:
    cap = 512 if situation.is_bounded else 8192
    return {TOKENS: max(cap, longest), FORWARD_TOKENS: max(2 * cap, longest)}


def _rate(stated: Settings, situation: Situation, *, supervised: bool = False) -> float:
    parameters = situation.parameters or 10**9
    _, rl, sft = next(row for row in _RATES if parameters < row[0])
    has_adapter = bool(_count(stated, "model.lora.rank", 0))
    if supervised:
        return sft * (_SFT_ADAPTER_RATE if has_adapter else 1)
    return rl * (_ADAPTER_RATE if has_adapter else 1)


def _num_processes(stated: Settings) -> int:
    """Processes of this machine that compute at the same time: ranks of a model, or engines."""
    if stated.get("placement.backend") != "ray":
        return 1
    nodes = _count(stated, "placement.policy_num_nodes", 1)
    ranks = -(-_count(stated, "placement.policy_num_workers", 1) // nodes)
    return max(ranks, _count(stated, "generator.vllm.num_engines", 1))


def _threads(stated: Settings, situation: Situation) -> int:
    return 1 if situation.is_small else max(1, situation.num_cores // _num_processes(stated))


def _why_threads(stated: Settings, situation: Situation, threads: int) -> str:
    of = f"{threads} of {counted(situation.num_cores, 'core')}"
    if situation.is_small:
        return f"{of}: more slow a model of {_short(situation.parameters)} parameters down"
    processes = _num_processes(stated)
    shared = f", which {processes} processes share" if processes > 1 else ""
    return f"{of}{shared}: for {situation}; platform.num_threads states another number"


def _sizes(stated: Settings, situation: Situation, batching: object) -> Sizes:
    """What is stated, and elsewhere where the search begins."""
    batch, mini, rows = (8, 4, 32) if situation.is_bounded else (32, 16, 32)
    if situation.on_gpu:
        batch, mini, rows = 128, 64, 4
    strict = batching == "fixed" and stated.get("trainer.batch_validation", "strict") == "strict"
    has_critic = bool(stated.get("critic.model.path"))
    return Sizes(
        train_batch_size=_count(stated, "trainer.train_batch_size", batch),
        policy_mini_batch_size=_count(stated, "trainer.policy_mini_batch_size", mini),
        critic_mini_batch_size=_count(stated, "trainer.critic_mini_batch_size", mini) if has_critic else None,
        micro_train_batch_size_per_gpu=_count(stated, "trainer.micro_train_batch_size_per_gpu", rows),
        n_samples_per_prompt=_count(stated, "generator.n_samples_per_prompt", 8),
        policy_num_workers=_count(stated, "placement.policy_num_workers", 1),
        critic_num_workers=_count(stated, "placement.critic_num_workers", 1) if has_critic else None,
        ref_num_workers=None,
        ranks_per_share=1,
        num_train_prompts=None,
        equal_ranks=strict,
        equal_micro_batches=strict,
    )


@cache
def _solve(start: Sizes, stated: frozenset[str]) -> Sizes:
    """Return the sizes nearest to `start` that break no rule, the stated ones as they are; `start` where there are none. A
    critic's mini-batch that contradicts the other sizes changes none of them.

    A training batch is as large as it begins or as little larger as what is stated allows, and has two optimizer steps or
    one, where that can be: later ones are further off the policy that sampled.
    """
    pairs = [(batch, mini) for batch in _batches(start, stated) for mini in divisors(batch)]
    if "policy_mini_batch_size" in stated:
        pairs = [(batch, start.policy_mini_batch_size) for batch in _batches(start, stated)]
    for batch, mini in sorted(pairs, key=lambda pair: 2 * pair[1] < pair[0]):
        critic = start.critic_mini_batch_size
        if critic is not None and "critic_mini_batch_size" not in stated:
            critic = mini if batch % mini == 0 else batch
        sizes = replace(start, train_batch_size=batch, policy_mini_batch_size=mini, critic_mini_batch_size=critic)
        if (found := _with_rows(sizes, stated)) is not None:
            return found
    if "critic_mini_batch_size" in stated:
        without = _solve(start, stated - {"critic_mini_batch_size"})
        return replace(without, critic_mini_batch_size=start.critic_mini_batch_size)
    return start


def _batches(start: Sizes, stated: frozenset[str]) -> Iterator[int]:
    if "train_batch_size" in stated:
        yield start.train_batch_size
        return
    minis = [("policy_mini_batch_size", start.policy_mini_batch_size)]
    minis += [("critic_mini_batch_size", start.critic_mini_batch_size or 1)]
    step = lcm(*(size for name, size in minis if name in stated))
    first = -(-start.train_batch_size // step)
    yield from ((first + more) * step for more in range(_MOST_TRIED))


def _with_rows(sizes: Sizes, stated: frozenset[str]) -> Sizes | None:
    """Return `sizes` with the most rows of a micro-batch that divide those of each rank; None where a rule stays broken."""
    rows = sizes.micro_train_batch_size_per_gpu
    if not problems(sizes):
        return sizes
    if "micro_train_batch_size_per_gpu" in stated or not sizes.equal_micro_batches:
        return None
    options = (replace(sizes, micro_train_batch_size_per_gpu=fewer) for fewer in range(rows - 1, 0, -1))
    return next((each for each in options if not problems(each)), None)
