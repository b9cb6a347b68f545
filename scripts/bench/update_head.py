"""Log-probabilities, entropies and gradients of an output head: full logits, tiles, and one pass per tile."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.model.layers import OutputHead, token_scores


def measure(way: str, tokens: int, hidden_size: int, vocabulary: int) -> None:
    """Print a row: CPU seconds, and MiB above inputs and the weight's gradient. `way`: full, tiled or fused."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) * 0.02).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    targets = torch.randint(vocabulary, (tokens,))
    advantages = torch.randn(tokens)
    base = _resident_mib()
    start = time.process_time()
    if way == "full":
        log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight), dim=-1)
        logprobs, entropy = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    else:

        def foresee(tile: slice, _logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
            return -advantages[tile], torch.zeros_like(entropy)

        logprobs, entropy = token_scores(
            hidden, targets, OutputHead(weight=weight), foresee=foresee if way == "fused" else None
        )
    (-(logprobs * advantages).sum() + 0.0 * entropy.sum()).backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{way} {tokens:,} {vocabulary:,} {seconds:.2f} {peak - base:,.0f}")


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20
