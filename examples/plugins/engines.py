"""An inference engine: token ids in, token ids and their log-probabilities out."""

import contextlib

import torch

from skyrl_train.model import load_causal_lm
from skyrl_train.registry import reads
from skyrl_train.types import GenerationOutput, StopReason


class OneByOne:
    """One request at a time, recomputing the whole sequence for each token: 40 lines, and slow."""

    def __init__(self, settings, tokenizer, *, repetition_penalty=0.0):
        self.model = load_causal_lm(settings.model, settings.device).requires_grad_(False)
        self.stop_ids = {tokenizer.eos_token_id}
        self.tokenizer = tokenizer
        self.repetition_penalty = repetition_penalty
        self.weight_version = -1

    def lease(self):
        """Announces a trajectory; an engine that batches waits for those that are announced."""
        return contextlib.nullcontext()

    async def generate(self, request):
        sampling, tokens = request.sampling, list(request.prompt_token_ids)
        generator = torch.Generator().manual_seed(request.seed)
        response, logprobs, reason = [], [], StopReason.LENGTH
        while len(response) < sampling.max_generate_length and reason is StopReason.LENGTH:
            logits = self.model(torch.tensor([tokens])).logits[0, -1].float()
            logits[response] -= self.repetition_penalty
            log_p = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
            greedy = sampling.temperature == 0
            token = int(log_p.argmax() if greedy else torch.multinomial(log_p.exp(), 1, generator=generator))
            tokens.append(token)
            response.append(token)
            logprobs.append(float(log_p[token]))
            text = self.tokenizer.decode(response, skip_special_tokens=False)
            if token in self.stop_ids or any(stop in text for stop in sampling.stop):
                reason = StopReason.STOP
        return GenerationOutput(
            token_ids=tuple(response),
            logprobs=tuple(logprobs),
            stop_reason=reason,
            weight_version=self.weight_version,
        )

    def load_weights(self, weights, version):
        """The policy's weights, under their Hugging Face names."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)
        self.weight_version = version

    def close(self):
        pass


@reads(own_devices=True)
class Apart(OneByOne):
    """The same on devices of its own: on Ray an actor for each of `generator.vllm.num_engines`."""
