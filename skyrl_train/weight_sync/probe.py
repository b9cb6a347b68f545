"""Does an engine compute what the trainer computes? A fixed prompt, some sampled tokens, and both log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from skyrl_train.batch.boundaries import offsets_of
from skyrl_train.batch.training_batch import BatchMetadata, TrainingInputBatch
from skyrl_train.endpoints import Endpoint
from skyrl_train.errors import EngineError
from skyrl_train.rollout.checked_engine import check_answer
from skyrl_train.seeding import derive_seed
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from skyrl_train.weight_sync.device_sharing import DeviceSharing
from skyrl_train.weight_sync.receiver import UpdatableEngine
from skyrl_train.weights import ModelWeights, Scores

_MAX_PROMPT_TOKENS = 256
"""More than a block of the prefix cache, so that keys and values of older weights would be found."""
_NEW_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What a probe is made from."""

    seed: int
    vocabulary: int
    """Token ids to draw a prompt from."""
    vocabulary_size: int
    """Rows of the model's embedding, one for each token id that may be answered."""
    max_context_length: int
    """Tokens of the prompt and the answer together."""
    temperature: float
    """Temperature of training rollouts."""
    tolerance: float
    """Largest difference of a log-probability that is accepted."""
    model: str
    """Path and architecture, for messages."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncProbe:
    """Compares each engine with the trainer; call it after a sync."""

    engines: Callable[[], Endpoint[UpdatableEngine]]
    """Gives those that live."""
    sharing: DeviceSharing
    settings: ProbeSettings

    def __call__(self, weights: ModelWeights, version: int) -> float | None:
        """Return the largest difference of a log-probability; None for weights of no model, with which nothing can be
        compared. Raises EngineError where it exceeds the tolerance."""
        if weights.scores is None:
            return None
        request = self._request(version)
        worst = 0.0
        limit = self.settings.tolerance
        self.sharing.engines()
        engines = self.engines()
        for name, answer in zip(engines.names, engines.ask(UpdatableEngine.generate, "sync", request)):
            rows = self.settings.vocabulary_size
            output = check_answer(answer, request, vocabulary_size=rows, versions=(version, version))
            difference = _difference(weights.scores, request, output)
            if not difference <= limit:
                raise EngineError(
                    f"{name}: after the sync to version {version} its log-probabilities differ from the trainer's by up "
                    f"to {difference:.3g}, more than {limit:g} (generator.weight_sync_tolerance). It does not compute with "
                    f"the trainer's weights of {self.settings.model}, or in another type (generator.vllm.dtype). Try "
                    "generator=hf, or another version of vLLM"
                )
            worst = max(worst, difference)
        return worst

    def _request(self, version: int) -> GenerationRequest:
        numbers = random.Random(derive_seed(self.settings.seed, "weight_sync_probe"))
        room = self.settings.max_context_length - _NEW_TOKENS
        return GenerationRequest(
            request_id=f"weight-sync-probe-{version}",
            prompt_token_ids=tuple(
                numbers.randrange(self.settings.vocabulary) for _ in range(max(1, min(room, _MAX_PROMPT_TOKENS)))
            ),
            sampling=SamplingParams(temperature=self.settings.temperature, max_generate_length=_NEW_TOKENS),
            seed=derive_seed(self.settings.seed, "weight_sync_probe", version),
        )


def _difference(scores_of: Scores, request: GenerationRequest, output: GenerationOutput) -> float:
    scores = scores_of(probe_row(request.prompt_token_ids, output))
    return float((scores[-len(output.token_ids) :].double() - torch.tensor(output.logprobs).double()).abs().max())


def probe_row(prompt: tuple[int, ...], output: GenerationOutput) -> TrainingInputBatch:
    """Return the row that a trainer scores: the prompt, and what an engine sampled after it."""
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
        metadata=BatchMetadata(uids=("probe",), global_step=0, weight_version=output.weight_versions[-1].version),
    )
