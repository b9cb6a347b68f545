"""One probe among others: what XLA plans for a step, asked of the compiler with no run (extra `jax`).

XLA lays out every buffer when it compiles. `jax.jit(f).lower(shapes).compile().memory_analysis()` therefore says what
(rows, length) will take before anything is computed, and gives the same probes as a measurement does. `CompiledModel` asks
it of a model of the run's sizes, written in JAX (`trainer.memory_probe=xla`); `CompiledProbe` of any function:
`fit_memory_model(probes_at_the_limit(...)).token_budget(...)`. Importing this module imports JAX, and raises SkyrlTrainError
where that is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.learner.memory.fit import MemoryProbe
from skyrl_train.model.sizes import ModelSizes
from skyrl_train.system import install_command

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    raise SkyrlTrainError(f"JAX is not installed, which compiles what is probed: {install_command('jax')}") from None

MakeArguments = Callable[[int, int], Sequence[Any]]
"""`(rows, length)` to the function's arguments: arrays, or `jax.ShapeDtypeStruct`s, which need no memory either."""
WRITTEN_IN_JAX = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers `CompiledModel` has: norm, attention with rotary positions, norm, gated product."""
_QUERIES_PER_BLOCK, _TOKENS_PER_TILE = 16, 128
"""Of attention, and of the output head."""


class CompiledProbe:
    """Probes a function by compiling it.

    Args of the constructor:
        function: takes parameters and a micro-batch; with a backward pass in it, e.g. `jax.value_and_grad(loss)`.
        arguments: of a micro-batch, e.g. shapes of parameters and of tokens `[rows, length]`.
        training: whether there is a backward pass in `function`.
        resident_bytes: what lies on the device beside the arguments, e.g. the optimizer's state.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: MakeArguments, *, training: bool, resident_bytes: int = 0
    ) -> None:
        self._jitted = jax.jit(function)
        self._arguments = arguments
        self._training = training
        self._resident_bytes = resident_bytes

    def __call__(self, rows: int, length: int) -> MemoryProbe:
        """Compiles for `rows` rows of `length` tokens. Raises SkyrlTrainError for a back end that tells nothing."""
        compiled = self._jitted.lower(*self._arguments(rows, length)).compile()
        stats = compiled.memory_analysis()
        if stats is None:
            raise SkyrlTrainError("this back end of JAX does not tell what a compiled function takes (memory_analysis)")
        # An output that aliases an argument is there once.
        peak = (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes
            + stats.generated_code_size_in_bytes
        )
        return MemoryProbe(
            rows=rows,
            longest=length,
            positions=rows * length,
            training=self._training,
            peak_bytes=self._resident_bytes + int(peak),
        )


@dataclass(frozen=True, kw_only=True)
class CompiledModel:
    """A model's step in JAX: the layers of `WRITTEN_IN_JAX`, of the same sizes and types as the torch model's.

    Attention runs by blocks of queries, which are computed anew in the backward pass as fused kernels do; log-probabilities
    run by tiles. The loss is the clipped one with KL and entropy terms.
    """

    model: ModelSizes
    compute_bytes: int
    """Of a number in the forward: 2 (bfloat16) or 4."""
    checkpointing: bool

    def probe(self, *, training: bool, resident_bytes: int) -> CompiledProbe:
        """Of micro-batches beside `resident_bytes`, which hold parameters and, in training, gradients.

        Raises ModelError for another family.
        """
        if self.model.family not in WRITTEN_IN_JAX:
            raise ModelError(
                f"trainer.memory_probe=xla: layers of model_type={self.model.family!r} are not written in JAX (only "
                f"{', '.join(WRITTEN_IN_JAX)}). Set trainer.memory_probe=trace"
            )
        # They are arguments of the function, and their gradients results of it: both would count twice.
        parameters = self._shapes()
        size = sum(math.prod(each.shape) * 4 for each in jax.tree.leaves(parameters))
        function = jax.value_and_grad(self._loss) if training else self._logprobs
        return CompiledProbe(
            function,
            lambda rows, length: (parameters, *_columns(rows, length)),
            training=training,
            resident_bytes=resident_bytes - size * (1 + training),
        )

    def _shapes(self) -> dict[str, Any]:
        facts, layers = self.model, self.model.num_layers  # stacked, as a scan over layers takes them
        sizes = {
            "query": (facts.hidden_size, facts.query_size),
            "key": (facts.hidden_size, facts.kv_size),
            "value": (facts.hidden_size, facts.kv_size),
            "output": (facts.query_size, facts.hidden_size),
            "gate": (facts.hidden_size, facts.intermediate_size),
            "up": (facts.hidden_size, facts.intermediate_size),
            "down": (facts.intermediate_size, facts.hidden_size),
            "norm_before": (facts.hidden_size,),
            "norm_after": (facts.hidden_size,),
        }
        stacked = {name: (layers, *size) for name, size in sizes.items()}
        whole = {"embedding": (facts.vocabulary_size, facts.hidden_size), "norm": (facts.hidden_size,)}
        if not facts.tied:
            whole["head"] = (facts.vocabulary_size, facts.hidden_size)
        return {name: jax.ShapeDtypeStruct(size, "float32") for name, size in {**stacked, **whole}.items()}

    def _hidden(self, parameters: dict[str, Any], tokens: Any) -> Any:
        layers = {name: value for name, value in parameters.items() if name not in ("embedding", "norm", "head")}
        # A scan compiles one layer, however many there are, and keeps what each needs for its backward pass.
        layer = jax.checkpoint(self._layer) if self.checkpointing else self._layer
        hidden, _ = jax.lax.scan(
            lambda carried, each: (layer(carried, each), None), parameters["embedding"][tokens], layers
        )
        return _normalised(hidden, parameters["norm"])

    def _layer(self, hidden: Any, weights: dict[str, Any]) -> Any:
        facts = self.model
        product = self._product
        states = _normalised(hidden, weights["norm_before"])
        rows, length, _ = hidden.shape
        query, key, value = (
            product(states, weights[name]).reshape(rows, length, -1, facts.head_dim)
            for name in ("query", "key", "value")
        )
        attended = _attention(_rotated(query), _rotated(key), value)
        hidden = hidden + product(attended.reshape(rows, length, -1), weights["output"])
        states = _normalised(hidden, weights["norm_after"])
        inner = jax.nn.silu(product(states, weights["gate"])) * product(states, weights["up"])
        return hidden + product(inner, weights["down"])

    def _product(self, states: Any, weight: Any) -> Any:
        kind = "bfloat16" if self.compute_bytes == 2 else "float32"
        return states.astype(kind) @ weight.astype(kind)

    def _scores(self, parameters: dict[str, Any], tokens: Any) -> tuple[Any, Any]:
        """Log-probability and entropy of each token but the first of a row, `[rows, length - 1]`."""
        head = parameters.get("head", parameters["embedding"])
        hidden = self._hidden(parameters, tokens)[:, :-1]
        states, targets = hidden.reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)

        # Of whole logits, as the learner's head never forms them either, most of the memory would be.
        def tile(part: tuple[Any, Any]) -> tuple[Any, Any]:
            state, target = part
            log_p = jax.nn.log_softmax(self._product(state, head.T).astype("float32"))
            return log_p[target], -(jnp.exp(log_p) * log_p).sum()

        logprobs, entropy = jax.lax.map(
            jax.checkpoint(tile), (states, targets), batch_size=min(_TOKENS_PER_TILE, len(targets))
        )
        return logprobs.reshape(hidden.shape[:2]), entropy.reshape(hidden.shape[:2])

    def _logprobs(self, parameters: dict[str, Any], tokens: Any, *columns: Any) -> Any:  # noqa: ARG002
        return self._scores(parameters, tokens)[0]

    def _loss(self, parameters: dict[str, Any], tokens: Any, old: Any, reference: Any, advantages: Any) -> Any:
        logprobs, entropy = self._scores(parameters, tokens)
        ratio = jnp.exp(logprobs - old)
        clipped = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return (-clipped + 0.1 * (jnp.exp(reference - logprobs) - 1 - reference + logprobs) - 0.01 * entropy).mean()


def _columns(rows: int, length: int) -> tuple[Any, ...]:
    """Shapes of tokens, and of old log-probabilities, the reference's and advantages."""
    floats = jax.ShapeDtypeStruct((rows, length - 1), "float32")
    return jax.ShapeDtypeStruct((rows, length), "int32"), floats, floats, floats


def _normalised(states: Any, weight: Any) -> Any:
    return states * jax.lax.rsqrt((states * states).mean(-1, keepdims=True) + 1e-6) * weight


def _rotated(states: Any) -> Any:
    """By its position, in halves."""
    length, half = states.shape[1], states.shape[-1] >> 1
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (each(angles)[:, None].astype(states.dtype) for each in (jnp.cos, jnp.sin))
    first, second = states[..., :half], states[..., half : 2 * half]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, states[..., 2 * half :]], -1)


def _attention(query: Any, key: Any, value: Any) -> Any:
    """Causal, `[rows, length, heads, size]`; keys and values may have fewer heads. Scores are never kept."""
    length, repeats = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(each, repeats, axis=2) for each in (key, value))

    # Query by query: a fused kernel holds a block of scores, and computes it anew for the backward pass.
    def of_query(part: tuple[Any, Any]) -> Any:
        states, position = part
        scores = jnp.einsum("rhd,rkhd->rhk", states, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.arange(length) <= position, scores, -jnp.inf)
        return jnp.einsum("rhk,rkhd->rhd", jax.nn.softmax(scores.astype("float32")).astype(value.dtype), value)

    found = jax.lax.map(
        jax.checkpoint(of_query), (query.swapaxes(0, 1), jnp.arange(length)), batch_size=min(_QUERIES_PER_BLOCK, length)
    )
    return found.swapaxes(0, 1)
