"""Sampling in vLLM whose noise is a pure function of the request's seed and the token's position, for a whole batch at once.

vLLM's runner "V2", which it takes on GPUs, does so by itself for requests with a seed. Its runner "V1" (on CPUs, and on
GPUs for what V2 lacks) gives each such request a random generator of its own and loops over them; on a CPU it also breaks
where a prefill is cut in two. There `KeyedSampler` takes the place of the part that draws. It adds Gumbel noise from a
counter-based generator to the logits that are left after temperature, min_p, top_k and top_p, and takes the largest: a draw
from their softmax. The noise of a token is a hash of (seed of the request, position, token), in kernels that vLLM itself
brings. Since the request's seed is one of (run's seed, step, prompt, sample, turn), a response does not depend on what else
is in the batch, on how often the request was interrupted, or on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SEED_KEY = "skyrl_train_seed"
"""In a request's `extra_args`. `SamplingParams.seed` would have vLLM make a generator for it."""

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens, int64 [rows], from float32 logits [rows, vocabulary], int64 seeds [rows] and int64 positions [rows]."""

_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class KeyedSampler(nn.Module):
    """In place of vLLM's `TopKTopPSampler`: truncates, reports what is asked for, and draws."""

    def __init__(self, runner: Any, logprobs_mode: str, draw: Draw) -> None:
        super().__init__()
        self._runner, self._logprobs_mode, self._draw = runner, logprobs_mode, draw

    def forward(
        self, logits: Tensor, generators: Any, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens, int64 [rows], and the scores that `logprobs_mode` wants where those are of truncated logits.

        `logits`: [rows, vocabulary], after temperature and min_p. `generators`: vLLM's, of which there are none.
        """
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        del generators
        logits = apply_top_k_top_p(logits, top_k, top_p)
        reported = None
        if self._logprobs_mode == "processed_logits":
            reported = logits
        elif self._logprobs_mode == "processed_logprobs":
            reported = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds, positions = self._keys(len(logits))
        device = logits.device
        return self._draw(logits.float(), seeds.to(device), positions.to(device)), reported

    def _keys(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Seed of each row's request and number of tokens before the one that is drawn, int64 [rows]. A row without a seed,
        such as those of vLLM's trial runs, draws one."""
        batch, requests = self._runner.input_batch, self._runner.requests
        if batch.num_reqs != num_rows:
            return torch.randint(2**62, (num_rows,)), torch.zeros(num_rows, dtype=torch.int64)
        given = [requests[name].sampling_params.extra_args or {} for name in batch.req_ids]
        seeds = torch.tensor([each.get(SEED_KEY, 0) for each in given], dtype=torch.int64)
        without = torch.tensor([SEED_KEY not in each for each in given])
        if without.any():
            seeds[without] = torch.randint(2**62, (int(without.sum()),))
        return seeds, self._runner.optimistic_seq_lens_cpu[:num_rows].to(torch.int64)


def use_keyed_sampler(runner: Any) -> bool:
    """Puts a `KeyedSampler` into vLLM's model runner where it is needed and possible; whether requests say their seed in
    `extra_args` from now on. Otherwise `SamplingParams.seed` does it."""
    from vllm.v1.sample.sampler import Sampler

    sampler = getattr(runner, "sampler", None)
    # Tokens that are guessed ahead are accepted or refused by draws of another kind.
    if not isinstance(sampler, Sampler) or runner.speculative_config is not None:
        return False
    draw = _kernel(runner.device.type)
    if draw is None:
        return False
    sampler.topk_topp_sampler = KeyedSampler(runner, sampler.logprobs_mode, draw)
    return True


def _kernel(device: str) -> Draw | None:
    """vLLM's own for this kind of device; None where it brings none."""
    if device == "cpu" and hasattr(torch.ops._C, "fused_gumbel_argmax"):
        return _draw_on_cpu
    from vllm.triton_utils import HAS_TRITON

    return _draw_on_gpu if device == "cuda" and HAS_TRITON else None


def _draw_on_cpu(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    tokens: Tensor = torch.ops._C.fused_gumbel_argmax(logits, row_keys(seeds, positions))
    return tokens


def _draw_on_gpu(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows = torch.arange(len(logits), device=logits.device)
    tokens: Tensor = gumbel_sample(
        logits,
        rows,
        torch.ones(len(logits), device=logits.device),
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
    )
    return tokens


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One int64 key per row: SplitMix64 (Steele, Lea and Flood 2014) of the seed at its `positions`-th step."""
    state = seeds.numpy().astype(np.uint64) + positions.numpy().astype(np.uint64) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return torch.from_numpy((state ^ (state >> np.uint64(31))).view(np.int64))
