"""Does an engine compute what the trainer computes? A fixed prompt, some sampled tokens, and both log-probabilities."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.endpoints import Endpoint
from skyrl_train.errors import EngineError
from skyrl_train.rollout import check_answer
from skyrl_train.system import derive_seed
from skyrl_train.types import GenerationRequest, SamplingParams
from skyrl_train.weight_sync.device_sharing import DeviceSharing
from skyrl_train.weight_sync.receiver import UpdatableEngine
from skyrl_train.weight_sync.transport import Probed
from skyrl_train.weights import ModelWeights, Scores

logger = logging.getLogger(__name__)

_MAX_PROMPT_TOKENS = 256
"""More than a block of the prefix cache, so that keys and values of older weights would be found."""
_NEW_TOKENS = 16
_LEAST_NOISE = 1e-5
"""What float32 may make of a log-probability, in nats, where an engine happens to agree to the bit."""
_TIMES_NOISE = 6.0
"""Of what rounding makes as loaded is accepted later."""
_SHARE = 0.002
"""And of the trainer's movement; what comes late in the model, such as its last norm, is 0.005 to 0.03 of it."""
_TOLD_AFTER = 10


class _Answer(NamedTuple):
    """What an engine sampled after the probe's prompt."""

    token_ids: tuple[int, ...]
    scores: Tensor
    """What the trainer's weights of then say of each token."""
    distance: float
    """Of the engine's log-probabilities from that."""


class WeightSyncProbe:
    """Asks engines the same before the first sync, as version -1, and after syncs. That an engine agrees with the trainer
    says nothing while both are as loaded: it has to move as the trainer does. The trainer's movement is counted from the
    engine's last answer that showed it, so that small steps add up until they exceed what rounding makes."""

    def __init__(
        self,
        engines: Callable[[], Endpoint[UpdatableEngine]],
        sharing: DeviceSharing,
        generator: GeneratorConfig,
        *,
        seed: int,
        vocabulary: int,
        vocabulary_size: int,
        tolerance: float,
        model: str,
    ) -> None:
        """
        Args:
            engines: Gives those that live.
            vocabulary: Token ids to draw a prompt from.
            vocabulary_size: Rows of the model's embedding, one for each token id that may be answered.
            tolerance: Largest difference of a log-probability that is accepted after the first sync; after each one with
                `generator.verify_weight_sync=true`.
            model: Path and architecture, for messages.
        """
        self._engines, self._sharing, self._generator, self._model = engines, sharing, generator, model
        self._seed, self._vocabulary, self._vocabulary_size = seed, vocabulary, vocabulary_size
        self._tolerance = tolerance
        self._loaded: dict[str, _Answer] = {}
        """Of each engine before the first sync; empty where engines quantize what they are sent."""
        self._shown: dict[str, _Answer] = {}
        self._noise, self._num_unseen = _LEAST_NOISE, 0

    def __call__(self, weights: ModelWeights, version: int) -> Probed | None:
        """Return what was measured; None for weights of no model, with which nothing can be compared. Raises EngineError
        where an engine is further from the trainer than the tolerance, or did not move as it did."""
        if weights.scores is None:
            return None
        request = self._request(version)
        scores = _scores(weights.scores, request.prompt_token_ids)
        answers, worst = self._ask(request, version, scores)
        if version < 0:
            # Where engines quantize, how far they are off as loaded says nothing of the weights that they are sent.
            self._loaded = answers if math.isfinite(self._tolerance) else {}
            return Probed(probe_difference=worst)
        is_first = not self._shown
        largest, unseen = 0.0, False
        for name, answer in answers.items():
            # The tokens of the older answer, scored with the weights
            # of then and of now: the trainer alone moves that number.
            before = self._shown.setdefault(name, answer)
            moved = _size(scores(before.token_ids) - before.scores)
            if is_first:
                # The first sync brings what was loaded: an engine has to be as near to the trainer as it was before.
                self._require_moved(name, answer, 0.0, max(_LEAST_NOISE, self._loaded.get(name, answer).distance))
                self._noise = max(self._noise, answer.distance)
            self._require_moved(name, answer, moved, self._noise)
            # An engine that took nothing is about `moved` from the trainer, less its own
            # rounding. It is refused for certain where moved - noise > _TIMES_NOISE * noise
            # + _SHARE * moved; in other cases the answer shows nothing and `moved` goes on.
            if moved * (1 - _SHARE) > (_TIMES_NOISE + 1) * self._noise:
                self._shown[name] = answer
            else:
                unseen = not is_first
            largest = max(largest, moved)
        self._num_unseen = self._num_unseen + 1 if unseen else 0
        if self._num_unseen == _TOLD_AFTER:
            logger.warning(
                f"in {_TOLD_AFTER} probed weight syncs the trainer's log-probabilities moved by {largest:.2g} nats a token, "
                f"which rounding ({self._noise:.2g}) may hide: whether engines get the weights cannot be seen yet. Is the "
                "learning rate as it should be? float32 shows smaller steps"
            )
        return Probed(
            probe_difference=worst, probe_moved=largest, probe_noise=self._noise, probe_unseen=self._num_unseen
        )

    def _ask(
        self, request: GenerationRequest, version: int, scores: Callable[[tuple[int, ...]], Tensor]
    ) -> tuple[dict[str, _Answer], float]:
        """Return the answer of each engine, by its name, and the largest difference of a log-probability."""
        limit = self._tolerance if self._generator.verify_weight_sync or not self._shown else math.inf
        self._sharing.engines()
        engines = self._engines()
        answers, worst = {}, 0.0
        # All answers are there before any is scored: scoring may put engines to sleep for the model's turn.
        for name, answer in zip(engines.names, engines.ask(UpdatableEngine.generate, "sync", request)):
            output = check_answer(answer, request, vocabulary_size=self._vocabulary_size, versions=(version, version))
            own = scores(output.token_ids)
            residual = torch.tensor(output.logprobs).double() - own
            difference = float(residual.abs().max())
            # `not <=`, so that a NaN is refused. Before the first sync an engine may have any weights.
            if version >= 0 and not difference <= limit:
                raise EngineError(
                    f"{name}: after the sync to version {version} its log-probabilities differ from the trainer's by up "
                    f"to {difference:.3g}, more than {limit:g} (generator.weight_sync_tolerance). It does not compute with "
                    f"the trainer's weights of {self._model}, or in another type (generator.vllm.dtype). Try "
                    "generator=hf, or another version of vLLM"
                )
            worst = max(worst, difference)
            answers[name] = _Answer(output.token_ids, own, _size(residual))
        return answers, worst

    def _require_moved(self, name: str, answer: _Answer, moved: float, noise: float) -> None:
        # `not <=`, so that a NaN is refused.
        if not answer.distance <= _TIMES_NOISE * noise + _SHARE * moved:
            raise EngineError(
                f"{name}: after a weight sync its log-probabilities are {answer.distance:.2g} nats a token from the "
                f"trainer's, which moved by {moved:.2g}, and rounding makes {noise:.2g}. It does not take all weights or "
                f"the adapter, or some in the wrong place ({self._model}), or its prefix cache older keys. "
                "Try generator.vllm.lora_sync=merged, generator.full_sync_every=1, generator.vllm.engine_args="
                "{enable_prefix_caching: false}, or another version of vLLM; generator.verify_weight_sync=false looks once"
            )

    def _request(self, version: int) -> GenerationRequest:
        # The same prompt and seed each time, so that a prefix cache that was not emptied is hit.
        seed = derive_seed(self._seed, "weight_sync_probe")
        numbers = random.Random(seed)
        room = self._generator.max_context_length - _NEW_TOKENS
        return GenerationRequest(
            request_id=f"weight-sync-probe-{version}",
            prompt_token_ids=tuple(
                numbers.randrange(self._vocabulary) for _ in range(max(1, min(room, _MAX_PROMPT_TOKENS)))
            ),
            sampling=SamplingParams(temperature=self._generator.sampling.temperature, max_generate_length=_NEW_TOKENS),
            seed=seed,
        )


def _scores(scores_of: Scores, prompt: tuple[int, ...]) -> Callable[[tuple[int, ...]], Tensor]:
    """Return what gives the trainer's log-probabilities of an answer, and scores equal ones once."""
    # A probe scores an answer for its distance, and the older one of each engine, which are often the same.
    return cache(lambda answer: scores_of(probe_row(prompt, answer))[-len(answer) :].double().cpu())


def _size(values: Tensor) -> float:
    """Mean size without the largest eighth: where rounding decides between experts, a token moves by much."""
    sizes = values.abs().sort().values
    return float(sizes[: len(sizes) - len(sizes) // 8].mean())


def probe_row(prompt: tuple[int, ...], answer: tuple[int, ...]) -> TrainingInputBatch:
    """Return the row that a trainer scores: the prompt, and what an engine sampled after it."""
    num_tokens = len(prompt) + len(answer)
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.tensor([*prompt, *answer], dtype=torch.int32),
            # Only what has loss is scored. Rewards, and what rows are of, are there since the schema asks for them.
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
        metadata=BatchMetadata(uids=("probe",), global_step=0, weight_version=0),
    )
