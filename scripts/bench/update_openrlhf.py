"""OpenRLHF's actor, policy loss and division into micro-batches, on the rollouts of `update_work.py`.

Its trainer needs CUDA (DeepSpeed, FlashAttention). What it computes in an update does not: `Actor.forward`, `PolicyLoss`
and `get_seqlen_balanced_partitions` are the installed package's, called as its trainer calls them. Stand-ins are given
for what the package imports from FlashAttention (four functions that move rows to and fro) and DeepSpeed, and
`torch.compile` of its entropy is left out. `packed`: its `--packing_samples`, one row of all sequences, which without
FlashAttention gets its block mask from transformers.
"""

from __future__ import annotations

import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from update_work import PAD, Conversation, ModelSize, build_model


def run(
    size: ModelSize,
    conversations: list[Conversation],
    *,
    packed: bool,
    steps: int,
    untimed: int,
    tokens: int,
    bf16: bool = False,
    keep_gradients: bool = False,
) -> dict[str, Any]:
    """`cpu_s` of each timed update, `positions` computed, and `gradients` of the first where asked for."""
    _stand_in()
    from openrlhf.models.actor import Actor
    from openrlhf.models.loss import PolicyLoss
    from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

    rows = [(context + response, len(context), c.advantage) for c in conversations for context, response in c.rows()]
    lengths = [len(ids) for ids, _, _ in rows]
    num_scored = float(sum(len(ids) - prompt for ids, prompt, _ in rows))
    actor = Actor(build_model(size))
    actor.packing_samples = packed
    actor.model.config.use_cache = (
        False  # as it does where it loads a model itself; with a cache, packed rows are not told apart
    )
    actor.train()
    optimizer = torch.optim.AdamW(actor.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    loss_of = PolicyLoss()
    seconds: list[float] = []
    gradients: dict[str, Tensor] = {}
    positions = 0
    for number in range(untimed + steps):
        start = time.process_time()
        positions = 0
        count = get_minimum_num_micro_batch_size(lengths, tokens, 1, 1)
        for part in get_seqlen_balanced_partitions(lengths, count, equal_size=False):
            ids, attended, scored, advantages = _padded([rows[index] for index in part])
            positions += int(attended.sum()) if packed else ids.numel()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logprobs, _ = actor(ids, scored, attention_mask=attended, return_output=True, return_entropy=True)
            loss = loss_of(logprobs, logprobs.detach(), advantages, action_mask=scored, batch_num_tokens=num_scored)
            loss[0].backward()
        if keep_gradients and not gradients:
            gradients = {n: p.grad.detach().clone() for n, p in actor.model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(actor.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number >= untimed:
            seconds.append(time.process_time() - start)
    return {"cpu_s": seconds, "positions": positions, "gradients": gradients}


def _padded(rows: list[tuple[list[int], int, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and attention mask `[rows, longest]`; scored and advantages `[rows, longest - 1]`, where t predicts t + 1."""
    longest = max(len(ids) for ids, _, _ in rows)
    tokens = torch.full((len(rows), longest), PAD)
    attended = torch.zeros(len(rows), longest, dtype=torch.int64)
    scored = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    for place, (ids, prompt, _) in enumerate(rows):
        tokens[place, : len(ids)] = torch.tensor(ids)
        attended[place, : len(ids)] = 1
        scored[place, prompt - 1 : len(ids) - 1] = True
    return tokens, attended, scored, scored * torch.tensor([[advantage] for _, _, advantage in rows])


def _stand_in() -> None:
    """For modules that the package imports and that have no build without CUDA."""
    from transformers import AutoModelForCausalLM  # noqa: F401  (looks for the real ones, before they are stood in for)

    def named(name: str, **members: Any) -> None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        sys.modules[name] = module

    def flat(tensor: Tensor, _pattern: str) -> Tensor:
        return tensor.flatten(0, 1)

    def choose(tensor: Tensor, indices: Tensor) -> Tensor:
        return tensor[indices]

    def unpad(tensor: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        lengths = mask.sum(1, dtype=torch.int32)
        indices = mask.flatten().nonzero()[:, 0]
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        return tensor.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths

    def pad(tensor: Tensor, indices: Tensor, rows: int, longest: int) -> Tensor:
        whole = tensor.new_zeros(rows * longest, *tensor.shape[1:]).index_put((indices,), tensor)
        return whole.unflatten(0, (rows, longest))

    named("deepspeed")
    named("flash_attn")
    named("flash_attn.bert_padding", index_first_axis=choose, pad_input=pad, rearrange=flat, unpad_input=unpad)
    named("flash_attn.utils")
    named("flash_attn.utils.distributed", all_gather=lambda tensor, _group=None: tensor)
    torch.compile = lambda function=None, **_: function if function else lambda inner: inner
