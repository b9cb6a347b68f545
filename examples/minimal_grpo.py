"""GRPO in one file: sample, score, compare, update. No trainer, no configuration files, one device.

    python examples/minimal_grpo.py                       # the bundled model and problems, on a CPU
    python examples/minimal_grpo.py --steps 60 --model Qwen/Qwen2.5-0.5B-Instruct --device cuda

Each step is what `skyrl_train/trainers/ppo.py` does, with one turn, one process and a padded batch:

    prompts --sample--> responses --reward--> scores --grpo--> advantages --policy_loss--> gradient --> new weights

What a run has beside it, and this file does not: resuming, evaluation, several turns and environments in processes of their
own, micro-batches, sharded models, engines, and a record of every trajectory. `python -m skyrl_train.main` has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from skyrl_train.algorithms import AdvantageInputs, grpo
from skyrl_train.algorithms.losses import PolicyLossInputs, policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.data import PromptSource, load_prompts
from skyrl_train.model import load_causal_lm, load_tokenizer
from skyrl_train.rollout.envs import WordProblemsEnv
from skyrl_train.types import Prompt

ALGORITHM = AlgorithmConfig(advantage_estimator="grpo", policy_loss="regular", eps_clip_low=0.2, eps_clip_high=0.2)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Rows of one step, padded on the right; position t of a column belongs to token t. Rows of a prompt are adjacent."""

    ids: Tensor
    """`[rows, len]` int64: prompt, response, padding."""
    mask: Tensor
    """`[rows, len]` bool: tokens that the model sampled."""
    rewards: Tensor
    """`[rows]` float."""
    prompt_index: Tensor
    """`[rows]` int64: rows of one prompt form a group."""


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, num_samples: int, max_new_tokens: int, temperature: float
) -> Samples:
    """Return `num_samples` responses to each prompt, and what each earns."""
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    encoded = tokenizer.apply_chat_template(
        [list(prompt.messages) for prompt in repeated],
        add_generation_prompt=True,
        padding=True,
        padding_side="left",  # so that responses begin at the same position
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    generated = model.generate(
        **encoded, max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature, top_k=0, top_p=1.0
    )
    width = encoded["input_ids"].shape[1]
    ends = set(_as_list(model.generation_config.eos_token_id)) | {tokenizer.eos_token_id}
    rows, masks, rewards = [], [], []
    for prompt, whole, is_prompt in zip(repeated, generated, encoded["attention_mask"].bool()):
        question, response = whole[:width][is_prompt], _until_end(whole[width:], ends)
        rows.append(torch.cat([question, response]))
        masks.append(torch.cat([torch.zeros_like(question), torch.ones_like(response)]).bool())
        rewards.append(reward(prompt, tokenizer.decode(response, skip_special_tokens=True)))
    return Samples(
        ids=pad_sequence(rows, batch_first=True),
        mask=pad_sequence(masks, batch_first=True),
        rewards=torch.tensor(rewards),
        prompt_index=torch.arange(len(prompts)).repeat_interleave(num_samples),
    )


def _as_list(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _until_end(response: Tensor, ends: set[int]) -> Tensor:
    """Return the tokens up to the first end of a turn, which is one of them."""
    found = [place for place, token in enumerate(response.tolist()) if token in ends]
    return response[: found[0] + 1] if found else response


def reward(prompt: Prompt, response: str) -> float:
    """1 for the right number after `#### `, else 0."""
    environment = WordProblemsEnv(extras={**prompt.extras, "max_turns": 1})
    environment.init(list(prompt.messages))
    return float(environment.step(response)["reward"])


def advantages_of(samples: Samples) -> Tensor:
    """`[rows, len]`: `(r - mean) / std` of the rewards of each prompt, at every sampled token."""
    num_rows = len(samples.rewards)
    last = samples.mask.float().cumsum(1).argmax(1)  # a reward sits on the last token of its response
    rewards = torch.zeros(samples.ids.shape)
    rewards[torch.arange(num_rows), last.cpu()] = samples.rewards
    inputs = AdvantageInputs(
        rewards=rewards,
        loss_mask=samples.mask.cpu(),
        prompt_index=samples.prompt_index,
        trajectory_index=torch.arange(num_rows),
        step_index=torch.zeros(num_rows, dtype=torch.int64),
        is_last_step=torch.ones(num_rows, dtype=torch.bool),
        is_padding=torch.zeros(num_rows, dtype=torch.bool),
    )
    return grpo(inputs, ALGORITHM).advantages.to(samples.ids.device)


def logprobs_of(model: Any, ids: Tensor, temperature: float) -> Tensor:
    """`[rows, len]`: the log-probability of each token after those before it; 0 for the first. Attention is causal and
    padding on the right, so that no mask is needed."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / temperature
    found = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))


def update(
    model: Any, optimizer: torch.optim.Optimizer, samples: Samples, *, num_updates: int, temperature: float
) -> float:
    """Make `num_updates` optimizer steps on shares of the prompts; return the mean norm of their gradients."""
    advantages = advantages_of(samples)
    with torch.no_grad():
        old_logprobs = logprobs_of(model, samples.ids, temperature)
    norms = []
    for rows in torch.arange(len(samples.ids), device=samples.ids.device).chunk(num_updates):
        mask = samples.mask[rows]
        inputs = PolicyLossInputs(
            logprobs=logprobs_of(model, samples.ids[rows], temperature),
            old_logprobs=old_logprobs[rows],
            advantages=advantages[rows],
            loss_mask=mask,
        )
        loss = policy_loss(inputs, ALGORITHM).token_losses.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return sum(norms) / len(norms)


def train(options: argparse.Namespace) -> list[float]:
    """Return the mean reward of each step, by the model before its update."""
    torch.manual_seed(options.seed)
    config = ModelConfig(path=options.model)
    tokenizer, model = load_tokenizer(config), load_causal_lm(config, options.device, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.01)
    prompts = PromptSource(load_prompts([options.data]), options.prompts, shuffle=True, seed=options.seed)
    curve = []
    for step in range(options.steps):
        samples = sample(
            model,
            tokenizer,
            prompts.batch(step),
            num_samples=options.samples,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
        )
        norm = update(model, optimizer, samples, num_updates=2, temperature=options.temperature)
        curve.append(float(samples.rewards.mean()))
        sys.stdout.write(f"step {step + 1}/{options.steps}  reward {curve[-1]:.3f}  grad {norm:.2f}\n")
    return curve


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, each with its default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny_qwen2", help="folder or hub name")
    parser.add_argument("--data", default="builtin:word_problems/train", help="rows with a prompt and a whole number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
