"""Fakes of what surrounds a rollout: an engine that says what it is told to, an environment that does, a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, StopReason

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant"]
_WORDS += [*"0123456789", *(f" {digit}" for digit in range(10)), "####", " ####", "+", " +", "-", "=", "?", "."]
_WORDS += ["Wrong", "Try", " Try", " again", "STOP", " STOP"]


def make_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """Words and digits are one token each, with the space before them; ends turns with `<|im_end|>` and a newline."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r" ?[A-Za-z]+| ?[0-9]| ?#+|\n| ?[^\sA-Za-z0-9]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = chat_template
    return fast


def make_tiny_model(*, seed: int = 0, vocab_size: int = len(_WORDS), **changes: Any) -> PreTrainedModel:
    """A random Qwen2 of 2 layers with grouped keys and values, and logits far enough apart to choose among."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes}))
    return model.eval()


def make_prompts(count: int, **extras: Any) -> list[Prompt]:
    return [
        Prompt(uid=f"p{index}", messages=({"role": "user", "content": f"{index} + 1?"},), extras=extras)
        for index in range(count)
    ]


class FakeEngine:
    """Implements `InferenceEngine`: `answer` maps a request to token ids, to an output, or to an error to raise."""

    def __init__(
        self,
        answer: Callable[[GenerationRequest], Sequence[int] | GenerationOutput | Exception],
        *,
        delay_s: float = 0.0,
    ) -> None:
        self._answer = answer
        self._delay_s = delay_s
        self.weight_version = 7
        self.requests: list[GenerationRequest] = []
        self.num_leases = 0
        self.leases_at_first_request: int | None = None

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        self.num_leases += 1
        try:
            yield
        finally:
            self.num_leases -= 1

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        if self.leases_at_first_request is None:
            self.leases_at_first_request = self.num_leases
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        answer = self._answer(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, GenerationOutput):
            return answer
        return make_output(answer)

    def close(self) -> None: ...


def make_output(token_ids: Sequence[int], **changes: Any) -> GenerationOutput:
    fields: dict[str, Any] = {
        "token_ids": tuple(token_ids),
        "logprobs": tuple(-0.5 for _ in token_ids),
        "stop_reason": StopReason.STOP,
        "weight_version": 7,
    }
    return GenerationOutput(**{**fields, **changes})
