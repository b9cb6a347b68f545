"""Memory of a function that a compiler has to plan anyway: asked of the compiler, with no run (extra `jax`).

XLA lays out every buffer when it compiles. `jax.jit(f).lower(shapes).compile().memory_analysis()` therefore tells what
(rows, length) will take before anything is computed, and gives the same probes as a measurement does, for users who train
models in JAX: `fit_memory_model(compiled_probes(...)).token_budget(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyrl_train.batch.memory_model import MemoryProbe
from skyrl_train.errors import BatchError, MemoryLimitError, SkyrlTrainError

MakeArguments = Callable[[int, int], Sequence[Any]]
"""`(rows, length)` to the function's arguments: arrays, or `jax.ShapeDtypeStruct`s, which need no memory either."""
_MAX_ROWS = 1 << 20


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


def compiled_probes(
    probe: Callable[[int, int], MemoryProbe], lengths: Sequence[int], limit_bytes: int, *, max_rows: int = _MAX_ROWS
) -> list[MemoryProbe]:
    """For each length, from the longest to the shortest, the most rows that fit, and where there are such one row more.

    Each length starts where the longer one ended: rows that fit at a length fit at any shorter one, and as many tokens as
    fit in long rows are the first guess for short ones. Raises MemoryLimitError where one row of the longest does not
    fit, BatchError for lengths that are none.
    """
    if not lengths or min(lengths) < 1:
        raise BatchError(f"lengths to probe are positive numbers of tokens; got {list(lengths)}")
    found: list[MemoryProbe] = []
    fitting, before = 1, max(lengths)
    for length in sorted(set(lengths), reverse=True):
        guess, _ = divmod(fitting * before, length)
        fitting, probes = _most_rows(probe, length, limit_bytes, low=fitting, guess=min(guess, max_rows), most=max_rows)
        found += probes
        before = length
    return found


def _most_rows(
    probe: Callable[[int, int], MemoryProbe], length: int, limit_bytes: int, *, low: int, guess: int, most: int
) -> tuple[int, list[MemoryProbe]]:
    """The most rows that fit, of which `low` are known to, unless that is 1; and what was probed at the border."""
    at: dict[int, MemoryProbe] = {}

    def fits(rows: int) -> bool:
        if rows not in at:
            at[rows] = probe(rows, length)
        return at[rows].peak_bytes <= limit_bytes

    if low == 1 and not fits(1):
        raise MemoryLimitError(
            f"one row of {length} tokens takes {at[1].peak_bytes} bytes as compiled; {limit_bytes} bytes are there"
        )
    high = max(guess, low + 1)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle, _ = divmod(low + high, 2)
        low, high = (middle, high) if fits(middle) else (low, middle)
    fits(low)
    return low, [at[rows] for rows in (low, high) if rows in at]
