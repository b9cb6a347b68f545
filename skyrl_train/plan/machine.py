"""How long a step takes on a machine on which no run was made: from what its processors do in a second.

    narrow models of two depths   operators: of a pass, of a layer, of a step of decoding, of a token
    a wide layer                  products, the head, the optimizer, and weights that come from memory
    MachineRates of these x what a model computes --> Rates of tokens, for `plan/time.py`

What a CPU does is measured: the learner's and the engine's own code is timed on small models made up for it. That takes a
few seconds once, and is remembered by processor, threads, type, versions and this package's sources. A call counts its wall
time, or its processor time where that is less, since a thread on busy cores mostly waits.

An update is each position's products, attention's pairs, the head of each sampled token, the operators of each layer and
micro-batch, and the optimizer. A step of decoding reads all weights and starts each layer's operators, however many
sequences run. Environments, tools, rewards and checkpoints are not in it. Imports torch only to measure.
"""

from __future__ import annotations

import json
import os
import platform as host
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_train.batch.layouts import CostModel, DeviceRates, ModelShape, rates_of
from skyrl_train.config import Config
from skyrl_train.config.models import PlatformConfig
from skyrl_train.config.placement import count_engines
from skyrl_train.model.sizes import remember, remembered_file, source_stamps
from skyrl_train.plan.batch_plan import BatchPlan
from skyrl_train.plan.estimate import PassEstimate, RowLengths
from skyrl_train.plan.forms.scale import EngineRates
from skyrl_train.plan.time import FORWARD_SHARE, Rates, Work, sampled_share
from skyrl_train.system import gpu_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from skyrl_train.batch import TrainingInputBatch
    from skyrl_train.batch.steps import MiniBatch

_NARROW, _WIDE = 128, 640
"""Hidden sizes."""
_DEPTHS = (2, 6)
"""Decoder layers of the narrow models."""
_VOCABULARY = {_NARROW: 256, _WIDE: 8192}
_ROWS, _LENGTH = 8, 48
_NEW_TOKENS = 16
_ROUNDS = 2
_BUSY = 1.5
"""Wall time over what counts, from which cores are called busy: what several threads took then is not remembered."""
_OPERATORS = 30
"""Operators of a decoder layer's forward: norms, products, rotation, attention, activation, sums."""
_RECOMPUTED = 4 / 3
"""Of layers, where activations are recomputed: a forward more, beside a forward and a backward of two."""
_OPTIMIZER_BYTES = 7 * 4
"""Read and written of each parameter by AdamW: the parameter, its gradient, two averages."""


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """What one rank does in a second; operations are floating-point ones."""

    source: str
    """Where they are from, for the reader of the plan."""
    widths: tuple[float, ...]
    """Hidden sizes of the models for which the next one holds; between them is interpolated."""
    trained_flops: tuple[float, ...]
    """Of the layers' products, forward and backward, with all that is computed beside them."""
    decoded_flops: float
    """Of a forward of one token for each sequence."""
    head_flops: float
    attention_flops: float
    pass_s: float
    """Of a micro-batch, however small."""
    layer_s: float
    """Of one in each layer: operators that are started, forward and backward."""
    decoded_step_s: float
    """Of a step of decoding, layers aside."""
    decoded_layer_s: float
    """Of a step of decoding in each layer, weights aside."""
    token_s: float
    """Of each token that is sampled, beside the model."""
    read_bytes: float
    """Of weights, and of keys and values."""
    parameter_s: float
    """Of an optimizer step, for each parameter: its gradient is made, and it is updated."""
    forward_share: float = FORWARD_SHARE
    """How much faster a position is scored than trained."""

    def cost(self, shape: ModelShape, *, more: float = 1.0) -> CostModel:
        """What a forward and backward of the model costs, in seconds; `more`: how often that of its layers."""
        linear = self._at(self.trained_flops, shape)
        layers = DeviceRates(
            linear_flops=linear,
            attention_flops=self.attention_flops,
            kernel_s=0.0,
            read_bytes=self.read_bytes,
        )
        cost = CostModel.of_model(shape, layers)
        return replace(
            cost,
            per_position=cost.per_position * more,
            per_pair=cost.per_pair * more,
            per_loss_token=cost.per_loss_token * linear / self.head_flops,
            per_call=self.pass_s + shape.num_layers * self.layer_s * more,
        )

    def engine(self, shape: ModelShape, *, number_bytes: int, slots: int) -> EngineRates:
        """What an engine of the model takes, `number_bytes` for each weight."""
        return EngineRates(
            step_s=self.decoded_step_s
            + shape.num_layers * self.decoded_layer_s
            + number_bytes * shape.parameters / self.read_bytes,
            sequence_s=self.token_s + 2 * shape.parameters / self.decoded_flops,
            context_token_s=number_bytes * shape.kv_numbers_per_token / self.read_bytes,
            prompt_token_s=self.cost(shape).per_position / self.forward_share,
            slots=slots,
        )

    def _at(self, rates: Sequence[float], shape: ModelShape) -> float:
        return float(np.interp(np.log(shape.hidden_size), np.log(self.widths), rates))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one step of a run is expected to take, in seconds."""

    source: str
    """What is known of the machine: reckoned from stated rates, or measured."""
    generate_s: float
    score_s: float
    update_s: float
    sync_s: float
    evaluate_s: float
    """Of one evaluation, which not every step has; 0 where the number of held-out prompts is not known."""

    @property
    def step_s(self) -> float:
        """Without an evaluation."""
        return self.generate_s + self.score_s + self.update_s + self.sync_s


def stated_rates(device: str, *, num_threads: int = 1, recorded: Mapping[str, Any] | None = None) -> MachineRates:
    """Return what follows from the rates that `batch/layouts/cost.py` states of a device, or that are `recorded` with
    the run; of a CPU with so many threads."""
    stated, threads = rates_of(device, recorded), num_threads if device == "cpu" else 1
    linear, read = stated.linear_flops * threads, stated.read_bytes * threads
    source = f"stated rates of {f'a CPU with {threads} threads' if device == 'cpu' else device or 'a GPU'}"
    if recorded:
        source = f"rates of {recorded.get('device', 'the device')} measured on {recorded.get('measured_on', 'a day')}"
    return MachineRates(
        source=f"reckoned from {source}",
        widths=(1.0,),
        trained_flops=(linear,),
        decoded_flops=linear,
        head_flops=linear,
        attention_flops=stated.attention_flops * threads,
        pass_s=_OPERATORS * stated.kernel_s,
        layer_s=3 * _OPERATORS * stated.kernel_s,
        decoded_step_s=_OPERATORS * stated.kernel_s,
        decoded_layer_s=_OPERATORS * stated.kernel_s,
        token_s=stated.kernel_s,
        read_bytes=read,
        parameter_s=_OPTIMIZER_BYTES / read,
    )


def predicted_rates(
    machine: MachineRates,
    shapes: Mapping[str, ModelShape],
    config: Config,
    plan: BatchPlan,
    lengths: RowLengths,
    estimates: Sequence[PassEstimate],
    work: Work,
    *,
    num_eval_prompts: int,
) -> Rates:
    """Return how fast one rank with its share of the engines does the `work` of a step.

    Args:
        shapes: By role.
        work: What a step computes, as positions and tokens.
    """
    policy, ranks = shapes["policy"], work.num_ranks
    more = _RECOMPUTED if config.model.recomputes else 1.0
    adapted = 0.0 if config.model.lora.rank else 1.0
    update_s = sum(
        _optimizer_seconds(machine, shapes[each.role], plan, lengths, each, trained_share=adapted, more=more)
        for each in estimates
        if each.training
    )
    trained = work.trained_positions / ranks / update_s
    generator = config.generator
    slots = generator.max_batch_size
    if generator.backend == "vllm":
        slots = generator.vllm.most_sequences(on_gpu=config.platform.on_gpu)
    number_bytes = 2 if config.model.dtype == "bfloat16" else 4
    engine = machine.engine(policy, number_bytes=number_bytes, slots=slots)
    engines = count_engines(generator, config.placement) if generator.has_own_devices else 1
    made_s = _rollout_seconds(
        engine, lengths, plan.num_samples_per_batch / engines, same_prompt=generator.n_samples_per_prompt
    )
    longer = generator.eval_sampling.max_generate_length / generator.sampling.max_generate_length
    evaluated = num_eval_prompts * generator.eval_n_samples_per_prompt / engines
    sync_s = 2 * number_bytes * policy.parameters / machine.read_bytes
    return Rates(
        source=f"{machine.source}; without environments, rewards and checkpoints",
        generated=work.sampled_tokens / ranks / made_s,
        scored=trained * more * machine.forward_share,
        trained=trained,
        every_step_s=sync_s,
        sync_s=sync_s,
        each_time_s=(0.0, _rollout_seconds(engine, lengths, evaluated, same_prompt=1, longer=longer)),
    )


def _rollout_seconds(
    engine: EngineRates, lengths: RowLengths, samples: float, *, same_prompt: int, longer: float = 1.0
) -> float:
    """Of so many samples on one engine, in waves of its slots; `longer`: how much so their responses are than `lengths`."""
    prompts = np.array([float(shared[0]) for shared in lengths.shared] or [0.0])
    responses = longer * (np.array([float(rows[-1]) for rows in lengths.trajectories]) - prompts)
    together = min(samples, engine.slots)
    # The longest of n draws is the quantile n / (n + 1), nearly.
    steps = samples / max(1.0, together) * float(np.quantile(responses, together / (together + 1)))
    read = float((responses * (prompts + responses / 2)).mean())
    of_a_sample = (
        prompts.mean() * engine.prompt_token_s / same_prompt
        + responses.mean() * engine.sequence_s
        + read * engine.context_token_s
    )
    return float(steps * engine.step_s + samples * of_a_sample)


def _optimizer_seconds(
    machine: MachineRates,
    shape: ModelShape,
    plan: BatchPlan,
    lengths: RowLengths,
    estimate: PassEstimate,
    *,
    trained_share: float,
    more: float,
) -> float:
    """Of the optimizer steps of one model and training batch, on the rank with the most."""
    learner = next(each for each in plan.learners if each.role == estimate.role)
    steps = {"policy": plan.optimizer_steps_per_batch, "critic": plan.critic_optimizer_steps_per_batch}[estimate.role]
    own = estimate.load_max_over_mean / learner.num_ranks
    # Of a prefix that rows share, pairs are computed once, too.
    computed = min(1.0, estimate.computed_tokens / estimate.num_tokens)
    pairs = estimate.num_rows * float((lengths.all_rows.astype(float) ** 2).mean()) / 2 * computed
    seconds = machine.cost(shape, more=more).of(
        np.float64(own * estimate.computed_tokens),
        np.float64(own * pairs),
        np.float64(estimate.micro_batches_per_rank),
        loss_tokens=int(own * estimate.num_tokens * sampled_share(lengths)),
    )
    return steps * (float(seconds) + machine.parameter_s * trained_share * shape.parameters / learner.num_ranks)


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


def machine_rates(
    platform: PlatformConfig, dtype: str, *, announce: Callable[[str], object] | None = None
) -> MachineRates:
    """Return the rates of a CPU as they were measured, now or by an earlier process; those of a GPU as they are stated, or
    as the self-test measured them.

    Args:
        dtype: In which models compute.
        announce: Told before measuring, which takes seconds. None: nothing is measured, and what no earlier process did
            is stated.
    """
    threads = platform.num_threads
    if platform.on_gpu:
        return stated_rates(gpu_name(), recorded=platform.rates)
    file = _file(threads, dtype)
    with suppress(OSError, ValueError, TypeError, KeyError):
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return MachineRates(**known | {name: tuple(known[name]) for name in ("widths", "trained_flops")})
    if announce is None:
        return stated_rates("cpu", num_threads=threads)
    announce(
        "how fast this machine computes is measured for the plan's times, once: seconds (plan.rates=none: not at all)"
    )
    import torch

    clock, before = _Clock(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = _measure(clock, getattr(torch, dtype))
    finally:
        torch.set_num_threads(before)
    if threads > 1 and clock.wall_s > _BUSY * clock.counted_s:
        return replace(
            found, source=f"{found.source}, while others used its cores, so that the next plan measures again"
        )
    remember(file, asdict(found))
    return found


def _file(num_threads: int, dtype: str) -> Path:
    name = host.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    sources = source_stamps(("inference", "learner", "model", "plan"))
    return remembered_file("machine", [name, os.cpu_count(), num_threads, dtype, sources])


def _measure(clock: _Clock, dtype: torch.dtype) -> MachineRates:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

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
    from transformers import Qwen2Config, Qwen2ForCausalLM

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
        from skyrl_train.batch.planner import make_micro_batch_strategy
        from skyrl_train.config import TrainerConfig
        from skyrl_train.config.algorithm import AlgorithmConfig
        from skyrl_train.config.models import ModelConfig, OptimizerConfig
        from skyrl_train.inference import Decoder, use_grouped_attention
        from skyrl_train.learner import ModelEngine, PolicyLearner

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
        from skyrl_train.batch.steps import LossDenominators, MiniBatch

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
        from skyrl_train.learner.memory import probe_rows

        batch = probe_rows([length] * _ROWS, vocabulary=self._vocabulary)
        mask = batch["loss_mask"].view(_ROWS, length).clone()
        mask[:, :-predicted] = False
        return batch.with_columns(loss_mask=mask.flatten())

    def decode(self, rows: int) -> float:
        """Return the seconds of a step of decoding for so many sequences."""
        from skyrl_train.types import GenerationRequest, SamplingParams

        sampling = SamplingParams(max_generate_length=_NEW_TOKENS)
        requests = [
            GenerationRequest(request_id=str(row), prompt_token_ids=(row, 1, 2, 3), sampling=sampling, seed=row)
            for row in range(rows)
        ]
        return self._clock.least(lambda: self._decoder.run(requests)) / _NEW_TOKENS
