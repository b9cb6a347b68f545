"""Log-probabilities of tokens that are given rather than sampled, in one forward pass without a `[tokens, vocabulary]`
tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.model import last_hidden_state, output_head
from skyrl_train.model.layers import token_scores


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """Of each token of a sequence but the first, which nothing comes before."""

    logprobs: NDArray[np.float32]
    """`[num_tokens - 1]`"""
    top_token_ids: NDArray[np.int32]
    """`[num_tokens - 1, k]`, the likeliest first."""
    top_logprobs: NDArray[np.float32]
    """`[num_tokens - 1, k]`"""
    target_logprobs: NDArray[np.float32]
    """`[num_tokens - 1, t]`, of the tokens that were asked for there."""

    def behind(self, count: int) -> ScoredSequence:
        """Return the scores of the tokens behind the first `count` scored ones."""
        return ScoredSequence(
            logprobs=self.logprobs[count:],
            top_token_ids=self.top_token_ids[count:],
            top_logprobs=self.top_logprobs[count:],
            target_logprobs=self.target_logprobs[count:],
        )


@torch.inference_mode()
def score_sequence(
    model: PreTrainedModel, token_ids: Sequence[int], *, top_k: int = 0, targets: NDArray[np.int64] | None = None
) -> ScoredSequence:
    """Score a sequence of at least one token at temperature 1; `top_k`: how many of the likeliest tokens to name at each;
    `targets` `[num_tokens - 1, t]`: other tokens to score in the place of the sequence's own."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    head = output_head(model)
    top_k = min(top_k, head.weight.shape[0])
    hidden = last_hidden_state(model, ids)[0, :-1]
    logprobs, _ = token_scores(hidden, ids[0, 1:], head, with_entropy=False)

    asked = np.zeros((len(hidden), 0), np.int64) if targets is None else targets
    waiting, num_targets = torch.from_numpy(asked).to(model.device), asked.shape[1]

    def looked_up(log_p: Tensor) -> Tensor:
        nonlocal waiting  # tiles come one after the other
        here, waiting = waiting[: len(log_p)], waiting[len(log_p) :]
        values, tokens = log_p.topk(top_k, dim=-1)
        return torch.cat((values.double(), tokens.double(), log_p.gather(1, here).double()), dim=-1)

    if (top_k or num_targets) and len(hidden):
        found, _ = token_scores(hidden, ids[0, 1:], head, with_entropy=False, of_distribution=looked_up)
    else:
        found = hidden.new_zeros((len(hidden), 2 * top_k + num_targets))
    return ScoredSequence(
        logprobs=logprobs.float().cpu().numpy(),
        top_logprobs=found[:, :top_k].float().cpu().numpy(),
        top_token_ids=found[:, top_k : 2 * top_k].to(torch.int32).cpu().numpy(),
        target_logprobs=found[:, 2 * top_k :].float().cpu().numpy(),
    )
