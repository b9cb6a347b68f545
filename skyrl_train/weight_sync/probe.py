"""Does an engine compute what the trainer computes? A fixed prompt, some sampled tokens, and both log-probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from skyrl_train.batch.boundaries import offsets_of
from skyrl_train.batch.training_batch import BatchMetadata, TrainingInputBatch
from skyrl_train.config.schema import Config
from skyrl_train.errors import EngineError
from skyrl_train.interfaces import Learner
from skyrl_train.learner.architectures import read_config
from skyrl_train.seeding import derive_seed
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams

_MAX_PROMPT_TOKENS = 256
"""More than a block of the prefix cache, so that keys and values of older weights would be found."""
_NEW_TOKENS = 16
ROUNDED_TOLERANCE = 0.5
"""Above what 16-bit types and fused kernels make of a log-probability (0.2 was seen), far below that of wrong weights."""


Ask = Callable[[GenerationRequest], Sequence[tuple[str, GenerationOutput]]]
"""Has each engine answer, in its turn on the devices: what to call it in a message, and its answer."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncProbe:
    """Compares each engine with the trainer; call it after a sync."""

    ask: Ask
    policy: Callable[[], Learner | None]
    """None before it is loaded, and where nothing is trained: then there is nothing to compare with."""
    config: Config
    vocabulary: int
    """Token ids to draw a prompt from."""

    def __call__(self, version: int) -> float | None:
        """Largest difference of a log-probability. Raises EngineError where it exceeds the tolerance."""
        policy = self.policy()
        if policy is None:
            return None
        request = self._request(version)
        worst = 0.0
        for name, output in self.ask(request):
            difference = _difference(policy, request, output)
            limit = tolerance(self.config)
            if not difference <= limit:
                raise EngineError(
                    f"{name}: after the sync to version {version} its log-probabilities differ from the trainer's by up "
                    f"to {difference:.3g}, more than {limit:g} (generator.weight_sync_tolerance). It does not compute with "
                    f"the trainer's weights of {self._model()}, or in another type (generator.vllm.dtype). Try "
                    "generator=hf, or another version of vLLM"
                )
            worst = max(worst, difference)
        return worst

    def _model(self) -> str:
        """Its path and architecture."""
        path = self.config.model.path
        return f"{path} ({read_config(path, revision=self.config.model.revision).get('model_type', 'of unknown type')})"

    def _request(self, version: int) -> GenerationRequest:
        numbers = random.Random(derive_seed(self.config.seed, "weight_sync_probe"))
        room = self.config.generator.max_context_length - _NEW_TOKENS
        return GenerationRequest(
            request_id=f"weight-sync-probe-{version}",
            prompt_token_ids=tuple(
                numbers.randrange(self.vocabulary) for _ in range(max(1, min(room, _MAX_PROMPT_TOKENS)))
            ),
            sampling=SamplingParams(
                temperature=self.config.generator.sampling.temperature, max_generate_length=_NEW_TOKENS
            ),
            seed=derive_seed(self.config.seed, "weight_sync_probe", version),
        )


def _difference(policy: Learner, request: GenerationRequest, output: GenerationOutput) -> float:
    scores = policy.forward(probe_row(request.prompt_token_ids, output))
    return float((scores[-len(output.token_ids) :].double() - torch.tensor(output.logprobs).double()).abs().max())


def tolerance(config: Config) -> float:
    """Largest difference that is accepted. Where each sync is verified it is `generator.weight_sync_tolerance`; the probe
    of the first one alone, which nobody asked for, allows as much as rounding to 16 bits makes, and what is quantized is
    measured and not refused."""
    generator = config.generator
    if generator.verify_weight_sync:
        return generator.weight_sync_tolerance
    if any("quant" in name or name == "kv_cache_dtype" for name in generator.vllm.engine_args):
        return math.inf
    engine_dtype = config.model.dtype if generator.vllm.dtype == "auto" else generator.vllm.dtype
    exact = engine_dtype == config.model.dtype == "float32" and config.platform.name == "cpu"
    return generator.weight_sync_tolerance if exact else max(generator.weight_sync_tolerance, ROUNDED_TOLERANCE)


def probe_row(prompt: tuple[int, ...], output: GenerationOutput) -> TrainingInputBatch:
    """The row that a trainer scores: the prompt, and what an engine sampled after it."""
    num_tokens = len(prompt) + len(output.token_ids)
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.tensor([*prompt, *output.token_ids], dtype=torch.int32),
            "loss_mask": torch.arange(num_tokens) >= len(prompt),
            "rewards": torch.zeros(num_tokens),
        },
        row_columns={
            "prompt_index": torch.zeros(1, dtype=torch.int32),
            "trajectory_index": torch.zeros(1, dtype=torch.int32),
            "step_index": torch.zeros(1, dtype=torch.int32),
            "is_last_step": torch.ones(1, dtype=torch.bool),
            "is_padding": torch.zeros(1, dtype=torch.bool),
        },
        row_offsets=offsets_of(torch.tensor([num_tokens])),
        metadata=BatchMetadata(uids=("probe",), global_step=0, weight_version=output.weight_version),
    )
