"""An engine whose answers are known, for tasks that the bundled model is too small for; and a check of what was trained on.

A subclass says what is answered. The log-probabilities are those that the model gives to these tokens, so that a run trains
as it would on sampled ones.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer

from skyrl_train.model import load_causal_lm
from skyrl_train.telemetry.records import encode_trajectory, pairs_of, read_rollouts
from skyrl_train.types import GenerationOutput, StopReason


class Scripted:
    """`generator.backend`: answers with `text`."""

    def __init__(self, settings, tokenizer):
        self.model = load_causal_lm(settings.model, settings.device).requires_grad_(False)
        self.tokenizer = tokenizer
        self.weight_version = -1

    def text(self, prompt: str, sample: int, turn: int) -> str:
        """The answer to a prompt, of which only the special tokens are left out."""
        raise NotImplementedError

    def lease(self):
        return contextlib.nullcontext()

    async def generate(self, request):
        sample, turn = map(int, request.request_id.split("-")[-2:])
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
        response = [*self.tokenizer.encode(self.text(prompt, sample, turn)), self.tokenizer.eos_token_id]
        tokens = torch.tensor([[*request.prompt_token_ids, *response]])
        log_p = torch.log_softmax(self.model(tokens).logits[0, -len(response) - 1 : -1].float(), dim=-1)
        return GenerationOutput(
            token_ids=tuple(response),
            logprobs=tuple(log_p.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()),
            stop_reason=StopReason.STOP,
            weight_version=self.weight_version,
        )

    def load_weights(self, weights, version):
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)
        self.weight_version = version

    def close(self):
        pass


def check(folder: Path, tokenizer_path: str, steps: int, expected: Callable[[dict], tuple[list[str], float]]) -> None:
    """Compares the rollouts of a run, token by token, with the texts and the reward that are expected of each."""
    from pyarrow.parquet import read_table

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    end = tokenizer.eos_token_id
    for step in range(1, steps + 1):
        file = folder / "rollouts" / f"train_step_{step:06d}.parquet"
        rows = read_table(file, columns=["uid", "sample", "advantages"]).to_pylist()
        learned = {(row["uid"], row["sample"]) for row in rows if any(row["advantages"])}
        for prompt, trajectory in pairs_of(read_rollouts(file)[step]):
            rollout = encode_trajectory(prompt, trajectory)
            texts, reward = expected(rollout)
            assert [turn["response_token_ids"] for turn in rollout["turns"]] == [
                [*tokenizer.encode(text), end] for text in texts
            ], "the tokens that are trained on are not the sampled ones"
            parents = [None, *range(len(texts) - 1)]
            assert [turn["parent"] for turn in rollout["turns"]] == parents, "a prompt was rewritten"
            assert rollout["reward"] == reward, "the reward is not that of the script"
            assert (rollout["uid"], rollout["sample"]) in learned, "no gradient"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    norms = [record["policy/grad_norm"] for record in metrics if "policy/grad_norm" in record]
    assert len(norms) == steps, norms
    assert min(norms) > 0, norms
    print(  # noqa: T201
        f"{steps} steps: trained tokens are the sampled ones, rewards are the script's, gradient norms {norms}"
    )
