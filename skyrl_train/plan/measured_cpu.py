"""What a CPU does in a second: the learner's and the engine's own code, timed on small models made up for it.

    narrow models of two depths   operators: of a pass, of a layer, of a step of decoding, of a token
    a wide layer                  products, the head, the optimizer, and weights that come from memory

A call counts its wall time, or its processor time where that is less, since a thread on busy cores mostly waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import ModelShape
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.batch.steps import LossDenominators, MiniBatch
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.inference import Decoder, use_grouped_attention
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.learner.memory import probe_rows
from skyrl_train.plan.forms.scale import MachineRates
from skyrl_train.types import GenerationRequest, SamplingParams

_NARROW, _WIDE = 128, 640
"""Hidden sizes."""
_DEPTHS = (2, 6)
"""Decoder layers of the narrow models."""
_VOCABULARY = {_NARROW: 256, _WIDE: 8192}
_ROWS, _LENGTH = 8, 48
_NEW_TOKENS = 16
_ROUNDS = 2


class _Clock:
    """Takes the time of calls, on the same cores as others do."""

    def __init__(self) -> None:
        self.wall_s = self.counted_s = 0.0

    def least(self, call: Callable[[], object], rounds: int = _ROUNDS) -> float:
        """Return the seconds of the fastest of some calls, after one that makes what later ones find."""
        call()
        found = []
        for _ in range(rounds):
            wall, own = time.perf_counter(), time.process_time()
            call()
            wall, own = time.perf_counter() - wall, time.process_time() - own
            found.append(min(wall, own))
            self.wall_s += wall
            self.counted_s += found[-1]
        return min(found)


def measured(num_threads: int, dtype: str) -> tuple[MachineRates, float]:
    """Return the rates of this machine, and how many times what counts the measurement took: more than 1 where others used
    its cores."""
    clock, before = _Clock(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = _measure(clock, getattr(torch, dtype))
    finally:
        torch.set_num_threads(before)
    return found, clock.wall_s / clock.counted_s


def _measure(clock: _Clock, dtype: torch.dtype) -> MachineRates:
    shallow, deep = (_Timed(_NARROW, depth, dtype, clock) for depth in _DEPTHS)
    wide = _Timed(_WIDE, 1, dtype, clock)
    narrow_shape, shape = deep.shape, wide.shape
    more = _DEPTHS[1] - _DEPTHS[0]
    few, positions = _ROWS * 2, _ROWS * _LENGTH
    starting = [each.update(2, predicted=1) for each in (shallow, deep)]
    layer_s = _beyond(starting[1], starting[0]) / more
    narrow_s = _beyond(deep.update(_LENGTH, predicted=1), starting[1]) / (positions - few)
    wide_s = wide.update(_LENGTH, predicted=1)
    # Of few positions a pass waits for memory, and half of them would take as long.
    positions_s = _beyond(wide_s, wide.update(_LENGTH // 2, predicted=1)) / (positions // 2)
    head_s = _beyond(wide.update(_LENGTH, predicted=_LENGTH - 1), wide_s) / (_ROWS * (_LENGTH - 2))
    score_s = wide.score(_LENGTH)
    decoded = [each.decode(rows) for each, rows in ((shallow, 1), (deep, 1), (deep, _ROWS), (wide, 1), (wide, _ROWS))]
    decoded_layer_s = _beyond(decoded[1], decoded[0]) / more
    step_s = _beyond(decoded[0], _DEPTHS[0] * decoded_layer_s)
    token_s = _beyond(decoded[2], decoded[1]) / (_ROWS - 1)
    read_s = _beyond(decoded[3], decoded_layer_s + step_s)
    product_s = _beyond(decoded[4], decoded[3] + (_ROWS - 1) * token_s) / (_ROWS - 1)
    query = torch.randn(1, _WIDE // 64, 512, 64, dtype=dtype, requires_grad=True)
    attention_s = clock.least(
        lambda: torch.autograd.grad(scaled_dot_product_attention(query, query, query, is_causal=True).sum(), query)
    )
    pass_s = _beyond(starting[0], _DEPTHS[0] * layer_s)
    gradients_s = _beyond(wide_s, positions * positions_s + pass_s + layer_s)
    return MachineRates(
        source=f"measured on this machine on {date.today().isoformat()}",
        widths=(_NARROW, _WIDE),
        trained_flops=(
            3 * narrow_shape.linear_flops_per_token / narrow_s,
            3 * shape.linear_flops_per_token / positions_s,
        ),
        decoded_flops=2 * shape.parameters / product_s,
        head_flops=3 * shape.head_flops_per_token / head_s,
        attention_flops=3.5 * 4 * _WIDE * 512 * 513 / 2 / attention_s,
        pass_s=pass_s,
        layer_s=layer_s,
        decoded_step_s=step_s,
        decoded_layer_s=decoded_layer_s,
        token_s=token_s,
        read_bytes=dtype.itemsize * shape.parameters / read_s,
        parameter_s=(gradients_s + wide.optimizer_step()) / shape.parameters,
        forward_share=wide_s / score_s,
    )


def _beyond(more_s: float, less_s: float) -> float:
    """Return the difference, at least a twentieth: what is less drowns in what calls vary by."""
    return max(more_s - less_s, more_s / 20)


def _model(width: int, depth: int) -> PreTrainedModel:
    """A decoder with random weights."""
    config = Qwen2Config(
        vocab_size=_VOCABULARY[width],
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=depth,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    made: Any = Qwen2ForCausalLM
    model: PreTrainedModel = made(config)
    model.train()
    return model


class _Timed:
    """One of the models, in a learner and in an engine."""

    def __init__(self, width: int, depth: int, dtype: torch.dtype, clock: _Clock) -> None:
        self._clock, self._vocabulary = clock, _VOCABULARY[width]
        engine = ModelEngine(
            _model(width, depth),
            name="policy",
            micro_batching=make_micro_batch_strategy(TrainerConfig(layout="packed", micro_batching="token_budget")),
            dtype=dtype,
            optimizer=OptimizerConfig(lr=0.0),
        )
        self.shape = ModelShape.of_config(engine.model.config.to_dict())
        self._learner = PolicyLearner(engine, model=ModelConfig(), algorithm=AlgorithmConfig(), temperature=1.0)
        generating: Any = _model(width, depth)
        use_grouped_attention(generating)
        generating.to(dtype).requires_grad_(False)
        self._decoder = Decoder(generating, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda _: "")

    def update(self, length: int, *, predicted: int) -> float:
        """Return the seconds of a forward and backward of rows of `length`, of which the last `predicted` have loss."""
        nothing = LossDenominators(num_tokens=0, num_sequences=0, num_rows=0, num_prompts=0)
        batch = MiniBatch(batch=self._rows(length, predicted), denominators=nothing)
        return self._clock.least(lambda: self._forward_backward(batch))

    def score(self, length: int) -> float:
        """Return the seconds of a forward alone, of rows of which one token has loss."""
        batch = self._rows(length, 1)
        return self._clock.least(lambda: self._learner.forward(batch))

    def optimizer_step(self) -> float:
        """Return the seconds of an optimizer step, after a backward."""
        return self._clock.least(self._step)

    def _forward_backward(self, batch: MiniBatch) -> None:
        self._learner.engine.zero_grad()
        self._learner.forward_backward(batch)

    def _step(self) -> None:
        engine = self._learner.engine
        for parameter in engine.parameters.values():
            parameter.grad = parameter.detach()
        self._learner.optim_step()

    def _rows(self, length: int, predicted: int) -> TrainingInputBatch:
        batch = probe_rows([length] * _ROWS, vocabulary=self._vocabulary)
        mask = batch["loss_mask"].view(_ROWS, length).clone()
        mask[:, :-predicted] = False
        return batch.with_columns(loss_mask=mask.flatten())

    def decode(self, rows: int) -> float:
        """Return the seconds of a step of decoding for so many sequences."""
        sampling = SamplingParams(max_generate_length=_NEW_TOKENS)
        requests = [
            GenerationRequest(request_id=str(row), prompt_token_ids=(row, 1, 2, 3), sampling=sampling, seed=row)
            for row in range(rows)
        ]
        return self._clock.least(lambda: self._decoder.run(requests)) / _NEW_TOKENS
