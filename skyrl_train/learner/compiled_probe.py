"""Memory of a function that a compiler has to plan anyway: asked of the compiler, with no run (extra `jax`).

XLA lays out every buffer when it compiles. `jax.jit(f).lower(shapes).compile().memory_analysis()` therefore tells what
(rows, length) will take before anything is computed, and gives the same probes as a measurement does, for users who train
models in JAX: `fit_memory_model(probes_at_the_limit(...)).token_budget(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyrl_train.batch.memory_model import MemoryProbe
from skyrl_train.errors import SkyrlTrainError

MakeArguments = Callable[[int, int], Sequence[Any]]
"""`(rows, length)` to the function's arguments: arrays, or `jax.ShapeDtypeStruct`s, which need no memory either."""


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
        """Raises SkyrlTrainError where JAX is not installed."""
        try:
            import jax
        except ImportError:
            raise SkyrlTrainError(
                "JAX is not installed, which compiles what is probed: pip install 'skyrl_train[jax]'"
            ) from None
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
