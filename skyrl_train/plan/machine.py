"""How long a step takes on a machine on which no run was made: from what its processors do in a second.

    MachineRates (`measured_cpu.py`, or stated) x what a model computes --> Rates of tokens, for `plan/time.py`

Measuring a CPU takes a few seconds once, and is remembered by processor, threads, type, versions and this package's sources.

An update is each position's products, attention's pairs, the head of each sampled token, the operators of each layer and
micro-batch, and the optimizer. A step of decoding reads all weights and starts each layer's operators, however many
sequences run. Environments, tools, rewards and checkpoints are not in it. Imports torch only to measure.
"""

from __future__ import annotations

import json
import os
import platform as host
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.batch.layouts import ModelShape, rates_of
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlatformConfig
from skyrl_train.model.sizes import remember, remembered_file, source_stamps
from skyrl_train.plan.batch_plan import BatchPlan
from skyrl_train.plan.estimate import PassEstimate, RowLengths, sampled_lengths
from skyrl_train.plan.forms.scale import EngineRates, MachineRates
from skyrl_train.plan.time import Rates, Work, sampled_share
from skyrl_train.system import gpu_name

_BUSY = 1.5
"""Wall time over what counts, from which cores are called busy: what several threads took then is not remembered."""
_OPERATORS = 30
"""Operators of a decoder layer's forward: norms, products, rotation, attention, activation, sums."""
_RECOMPUTED = 4 / 3
"""Of layers, where activations are recomputed: a forward more, beside a forward and a backward of two."""
_OPTIMIZER_BYTES = 7 * 4
"""Read and written of each parameter by AdamW: the parameter, its gradient, two averages."""


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
        """Seconds of a whole step that does not evaluate."""
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
    model: ModelConfig,
    generator: GeneratorConfig,
    plan: BatchPlan,
    lengths: RowLengths,
    estimates: Sequence[PassEstimate],
    work: Work,
    *,
    slots: int,
    num_engines: int,
    num_eval_prompts: int,
) -> Rates:
    """Return how fast one rank with its share of the engines does the `work` of a step.

    Args:
        shapes: By role.
        work: What a step computes, as positions and tokens.
        slots: Sequences that an engine generates together.
    """
    policy, ranks = shapes["policy"], work.num_ranks
    more = _RECOMPUTED if model.recomputes else 1.0
    adapted = 0.0 if model.lora.rank else 1.0
    update_s = sum(
        _optimizer_seconds(machine, shapes[each.role], plan, lengths, each, trained_share=adapted, more=more)
        for each in estimates
        if each.training
    )
    trained = work.trained_positions / ranks / update_s
    number_bytes = 2 if model.dtype == "bfloat16" else 4
    engine = machine.engine(policy, number_bytes=number_bytes, slots=slots)
    made_s = _rollout_seconds(
        engine, lengths, plan.num_samples_per_batch / num_engines, same_prompt=generator.n_samples_per_prompt
    )
    longer = generator.eval_sampling.max_generate_length / generator.sampling.max_generate_length
    evaluated = num_eval_prompts * generator.eval_n_samples_per_prompt / num_engines
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
    prompts, sampled = sampled_lengths(lengths)
    responses = longer * sampled
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
    from skyrl_train.plan.measured_cpu import measured  # and with it torch

    found, busy = measured(threads, dtype)
    if threads > 1 and busy > _BUSY:
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
