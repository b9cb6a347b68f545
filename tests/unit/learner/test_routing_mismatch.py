"""What an engine in bfloat16 and a trainer in bfloat16 make of the same tokens and weights, with and without its experts."""

from __future__ import annotations

import numpy as np
import torch

from skyrl_train.batch import ROUTED, TrainingInputBatch, batch_of_lengths
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.inference import Decoder
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model.parallel import follow_routing, record_routing
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.learner_cases import VOCABULARY, fixed_rows
from tests.support.moe_cases import make_moe

SIZES = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4}
PROMPT = 6


def sampled() -> TrainingInputBatch:
    """16 rows as the engine answered them, with its log-probabilities and experts."""
    model = make_moe(**SIZES).to(torch.bfloat16)
    record_routing(model, name="m")
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            request_id=f"r{seed}",
            prompt_token_ids=tuple(rng.integers(3, VOCABULARY, PROMPT).tolist()),
            sampling=SamplingParams(max_generate_length=20),
            seed=seed,
        )
        for seed in range(16)
    ]
    decoder = Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=str)
    responses = decoder.run(requests)
    unknown = np.full((1, 4 * 4), -1, np.int16)
    rows = batch_of_lengths([PROMPT + len(response.token_ids) for response in responses])
    tokens = [(*request.prompt_token_ids, *response.token_ids) for request, response in zip(requests, responses)]
    experts = [np.concatenate([each.routed_experts.reshape(-1, 4 * 4), unknown]) for each in responses]
    logprobs = [(*(0.0,) * PROMPT, *response.logprobs) for response in responses]
    return rows.with_columns(
        input_ids=torch.tensor(np.concatenate(tokens), dtype=torch.int32),
        loss_mask=torch.tensor([place >= PROMPT for row in tokens for place in range(len(row))]),
        rollout_logprobs=torch.tensor(np.concatenate(logprobs), dtype=torch.float32),
        **{ROUTED: torch.tensor(np.concatenate(experts))},
    )


def test_the_engines_experts_bring_the_trainers_log_probabilities_nearer_to_its_own() -> None:
    model = make_moe(**SIZES)
    follow_routing(model, name="m")
    engine = ModelEngine(model, name="policy", micro_batching=fixed_rows(16), dtype=torch.bfloat16)
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=AlgorithmConfig(), temperature=1.0)
    rows = sampled()
    mask = rows["loss_mask"]
    replayed, chosen = (
        (learner.forward(batch) - rows["rollout_logprobs"])[mask].abs()
        for batch in (rows, rows.without_columns(ROUTED))
    )
    assert 0 < float(replayed.mean()) < float(chosen.mean())
    assert float(replayed.max()) < float(chosen.max())
