"""The least time that generating a wave can take on one core, by what must be computed and read (`core_rates.py`).

    prefill     2 * weights of the layers * tokens of the distinct prompts, 4 * query size * layers * pairs, a head a prompt
    a step      2 * weights * rows that still run, 4 * query size * layers * tokens that they see
                weights read once; keys and values of a row's own tokens once, those of a prompt once for all its samples

    least time = prefill / rate  +  for each step the larger of (operations / rate) and (bytes / memory)

A row runs until its own answer ends and no step longer. Bytes count where weights do not fit the last cache, from which they
are read faster than any copy of memory says. Sampling, norms, the softmax and all that Python does are left out, as if free.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from core_rates import CoreRates
from update_work import ModelSize

_NUMBER_BYTES = 4
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cache_bytes() -> int:
    """Return the size of the largest cache of this processor; 0 where the system does not say."""
    found = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError, KeyError):
            text = file.read_text(encoding="ascii").strip()
            found.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(found)


def least_s(wave: Sequence[tuple[Sequence[int], int]], size: ModelSize, rates: CoreRates, caches: int) -> float:
    """Return the least seconds of a wave of (prompt, tokens of its answer) in float32, on a core of these rates with so many
    bytes of cache."""
    query, kv = size.heads * size.head, size.kv_heads * size.head
    layer = 2 * size.hidden * (query + kv) + 3 * size.hidden * size.intermediate
    layers, head = size.layers * layer, size.vocabulary * size.hidden
    prompts = {tuple(prompt) for prompt, _ in wave}
    operations = sum(
        2.0 * layers * len(prompt) + 2.0 * query * size.layers * len(prompt) * (len(prompt) + 1) + 2.0 * head
        for prompt in prompts
    )
    total = operations / rates.float32
    weight_bytes = _NUMBER_BYTES * (layers + head)
    for step in range(1, max(wanted for _, wanted in wave)):  # the first token of an answer is of the prefill
        running = [(prompt, wanted) for prompt, wanted in wave if wanted > step]
        seen = sum(len(prompt) + step for prompt, _ in running)
        operations = 2.0 * (layers + head) * len(running) + 4.0 * query * size.layers * seen
        read = step * len(running) + sum(len(prompt) for prompt in {tuple(prompt) for prompt, _ in running})
        moved = weight_bytes + 2.0 * _NUMBER_BYTES * kv * size.layers * read if weight_bytes > caches else 0.0
        total += max(operations / rates.float32, moved / rates.bytes)
    return total
