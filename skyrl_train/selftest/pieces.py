"""Pieces of `python -m skyrl_train.selftest --measure`: what a device does in a second, by the code that a run uses.

Each body returns `figure`, a line for a person, and numbers. Models have the width, the heads and the vocabulary of real
ones, a few of their layers, and random weights. On a CPU everything is tiny and in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import ATTENTION_BACKWARD, ModelShape, Segment
from skyrl_train.batch.planner import facts_of
from skyrl_train.batch.steps import LossDenominators, MiniBatch
from skyrl_train.config.fields import LayoutName
from skyrl_train.distributed import is_out_of_memory
from skyrl_train.errors import ModelError
from skyrl_train.learner import PolicyLearner, Profiler
from skyrl_train.learner.memory import GIB, Prober, SizingLimits, StepTrace, hold_everything, make_meter, probe_rows
from skyrl_train.model.layers import Segments, beyond_index, segment_attention, widest_activation
from skyrl_train.model.sizes import read_architecture
from skyrl_train.selftest.cases import Context, SkipCase
from skyrl_train.selftest.fixtures import BUILTIN, make_learner, save_tokenizer
from skyrl_train.selftest.runs import hf_opened, make_requests, vllm_opened

Found = dict[str, Any]
_LAYERS = 4
_ROWS = 8
"""Of an update: samples of one prompt, of half to all of the longest length."""
_NO_LOSS = LossDenominators(num_tokens=0, num_sequences=0, num_rows=0, num_prompts=0)


def products(context: Context, *, side: int, read_numbers: int) -> Found:
    """A large matrix product, starting a kernel, and reading memory."""
    left, right = (torch.randn(side, side, device=context.device, dtype=_dtype(context)) for _ in range(2))
    read, one = (torch.ones(count, device=context.device, dtype=_dtype(context)) for count in (read_numbers, 1))
    flops = 2.0 * side**3 / _best_s(context, lambda: left @ right, rounds=7)
    kernel_s = _best_s(context, lambda: [one.add(one) for _ in range(500)]) / 500
    read_bytes = read.nbytes / _best_s(context, read.sum)
    figure = f"{flops / 1e12:.3g} TFLOP/s, {read_bytes / 1e9:.3g} GB/s read, {kernel_s * 1e6:.1f} us to start a kernel"
    return {"figure": figure, "linear_flops": flops, "kernel_s": kernel_s, "read_bytes": read_bytes}


def attention(context: Context, *, kernel: str, shape: str, positions: int) -> Found:
    """`flash`: rows back to back; `flex`: samples of a prompt of half the positions. Each as a run's layers call it."""
    config, dtype = architecture(shape), _dtype(context)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head, prompt = config["hidden_size"] // heads, positions // 2 if kernel == "flex" else 0
    own = (positions - prompt) // _ROWS
    stop = prompt + _ROWS * own
    rows = [Segment(at, at + own, at + own) for at in range(prompt, stop, own)]
    segments = Segments((Segment(0, prompt, stop), *rows) if prompt else tuple(rows), prompt + own)
    query, key, value = (
        torch.randn(1, count, stop, head, device=context.device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )

    def forward() -> Tensor:
        return segment_attention(torch.nn.Identity(), query, key, value, None, segments=segments)[0]

    pairs = (prompt * (prompt + 1) + _ROWS * own * (2 * prompt + own + 1)) / 2
    flops, weight = 4.0 * heads * head * pairs, torch.randn_like(forward())
    forward_s = _best_s(context, forward)
    # A compiled backward gives the memory of its forward away: it runs once for each.
    both_s = _best_s(context, lambda: torch.autograd.grad(forward(), (query, key, value), weight))
    backward_s = max(both_s - forward_s, both_s / 20)
    rates = flops / forward_s, ATTENTION_BACKWARD * flops / backward_s
    return {
        "figure": f"{rates[0] / 1e12:.3g} TFLOP/s forward, {rates[1] / 1e12:.3g} backward",
        "forward_flops": rates[0],
        "backward_flops": rates[1],
        "flops": (1 + ATTENTION_BACKWARD) * flops / (forward_s + backward_s),
    }


def update(
    context: Context,
    *,
    shape: str,
    layout: LayoutName,
    compiled: bool,
    checkpointing: bool,
    positions: int,
    profiles: str = "",
) -> Found:
    """Forward, backward, clipping and the optimizer's step; the memory of a pass, as it is traced and as it is; and a trace
    of one more update in the folder `profiles`, where that is asked for."""
    learner = _learner(context, shape, layout, compiled=compiled, checkpointing=checkpointing)
    learner_engine, device = learner.engine, torch.device(context.device)
    batch = _rows(positions, learner_engine.model.config.vocab_size)
    computed = positions if layout == "padded" else batch.num_tokens
    if reason := beyond_index(computed, widest_activation(learner_engine.model)):
        raise SkipCase(reason)
    limits = SizingLimits(longest=1, max_rows=1, limit_bytes=0 if context.on_cuda else 1 << 40, margin=0.0, retries=0)
    meter = make_meter(device, limits)
    hold_everything(learner_engine, meter)
    prober = Prober(learner=learner, meter=meter)
    trace = StepTrace(engine=learner_engine, held_bytes=meter.in_use_bytes())
    # the rows of `batch`, whose tokens all have loss
    passed: Found = {"lengths": batch.lengths.tolist(), "training": True, "shared": _prompt(positions)}
    found: Found = {"hidden_size": learner_engine.model.config.hidden_size}
    figure, predicted = "out of memory", "not traced"
    with suppress(ModelError):
        if (traced := replace(prober, trace=trace).probe_lengths(**passed)) is not None:
            found["predicted_bytes"] = traced.peak_bytes
            predicted = f"{traced.peak_bytes / GIB:.3g} GiB"
    try:
        seconds = _best_s(context, lambda: _step(learner, batch))
        found |= {"tokens_per_s": batch.num_tokens / seconds, "flops": _needed_flops(learner, batch) / seconds}
        figure = f"{found['tokens_per_s']:,.0f} tokens/s, {found['flops'] / 1e12:.3g} TFLOP/s"
        if profiles:
            learner_engine.profiler = Profiler((0,), Path(profiles), name=layout, rank=0, device=device)
            _step(learner, batch)
            learner_engine.profiler = None
            figure += f", traced in {Path(profiles).name}/"
        if (run := prober.probe_lengths(**passed)) is not None:
            found["peak_bytes"] = run.peak_bytes
            figure += f", peak {run.peak_bytes / GIB:.3g} GiB"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return found | {"figure": f"{figure}, predicted {predicted}"}


def copies(context: Context, *, num_bytes: int) -> Found:
    """Between pinned memory of the host and the device."""
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=context.on_cuda)
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
    there = num_bytes / _best_s(context, lambda: device.copy_(host, non_blocking=True))
    back = num_bytes / _best_s(context, lambda: host.copy_(device, non_blocking=True))
    figure = f"{there / 1e9:.3g} GB/s to the device, {back / 1e9:.3g} GB/s back"
    return {"figure": figure, "to_device_bytes": there, "to_host_bytes": back}


def engine(context: Context, *, name: str, shape: str, requests: int, new_tokens: int) -> Found:
    """An engine of the whole model: tokens, weights that it takes, and how fast vLLM sleeps and wakes on CUDA."""
    model, dtype = save_shape(context.device, shape, context.folder), "bfloat16" if context.on_cuda else "float32"
    sent = model.cpu() if name == "vllm" else model
    weights = {parameter: each.detach() for parameter, each in sent.named_parameters()}
    asked = make_requests([tuple(20 + (7 * row + at) % 250 for at in range(32)) for row in range(requests)], new_tokens)
    path, found = str(context.folder), Found()
    with (
        vllm_opened(path, context) if name == "vllm" else hf_opened(path, context.device, dtype=dtype, rows=requests)
    ) as opened:
        tokens = sum(len(output.token_ids) for output in opened.answers(asked))
        found["engine_tokens_per_s"] = tokens / _best_s(context, lambda: opened.answers(asked), rounds=1)
        size = sum(each.nbytes for each in weights.values())
        found["sync_bytes"] = size / _best_s(context, lambda: opened.sync(weights), rounds=1)
        figure = f"{found['engine_tokens_per_s']:,.0f} tokens/s, takes weights at {found['sync_bytes'] / 1e9:.3g} GB/s"
        if name == "vllm" and context.on_cuda:
            found["sleep_s"] = _seconds(context, opened.engine.sleep)
            found["wake_s"] = _seconds(context, lambda: [opened.engine.wake_up(tag) for tag in ("weights", "kv_cache")])
            figure += f", sleeps in {found['sleep_s']:.2f} s, wakes in {found['wake_s']:.2f} s"
    return found | {"figure": figure}


def architecture(shape: str) -> Found:
    """Return the config of the bundled model (`tiny`), or of Qwen2.5 of that size."""
    return dict(read_architecture(BUILTIN if shape == "tiny" else f"Qwen/Qwen2.5-{shape}"))


def save_shape(device: str, shape: str, folder: str | Path) -> Any:
    """Write a whole model of random weights with the bundled tokenizer, whose tokens each of them has; the model."""
    model = _model(device, shape, layers=None).to(torch.float32 if device == "cpu" else torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(Path(folder))
    return model


def _dtype(context: Context) -> torch.dtype:
    return torch.bfloat16 if context.on_cuda else torch.float32


def _seconds(context: Context, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if context.on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _best_s(context: Context, work: Callable[[], object], rounds: int = 3) -> float:
    """Return the seconds of the fastest round, after one that makes what later ones find."""
    return min([_seconds(context, work) for _ in range(rounds + 1)][1:])


def _model(device: str, shape: str, *, layers: int | None) -> Any:
    sizes = {"eos_token_id": 2, "pad_token_id": 0, **architecture(shape)}
    sizes["num_hidden_layers"] = min(layers or sizes["num_hidden_layers"], sizes["num_hidden_layers"])
    make: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        return make(config, dtype=torch.float32, attn_implementation="sdpa")


def _learner(context: Context, shape: str, layout: LayoutName, *, compiled: bool, checkpointing: bool) -> PolicyLearner:
    return make_learner(
        _model(context.device, shape, layers=_LAYERS),
        context.device,
        layout=layout,
        dtype="bfloat16" if context.on_cuda else "float32",
        checkpointing=checkpointing,
        compiled=compiled,
        rows=_ROWS,
    )


def _prompt(positions: int) -> int:
    return positions // _ROWS * 3 // 8


def _rows(positions: int, vocabulary: int) -> TrainingInputBatch:
    """So many positions where rows are padded; tokens of the prompt have no loss."""
    longest = positions // _ROWS
    lengths = [longest - longest * row // (2 * _ROWS) for row in range(_ROWS)]
    batch = probe_rows(lengths, vocabulary=vocabulary, shared=_prompt(positions))
    mask = batch["loss_mask"].clone()
    mask[batch.row_offsets[:-1, None] + torch.arange(_prompt(positions))] = False
    return batch.with_columns(loss_mask=mask)


def _step(learner: PolicyLearner, batch: TrainingInputBatch) -> None:
    learner.forward_backward(MiniBatch(batch=batch, denominators=_NO_LOSS))
    learner.optim_step()


def _needed_flops(learner: PolicyLearner, batch: TrainingInputBatch) -> float:
    """What the step needs at least, whatever the layout: each distinct prefix once, forward and twice backward."""
    shape = ModelShape.of_config(learner.engine.model.config.to_dict())
    tree = facts_of(batch, layout="prefix_shared", merge_turns=False).sizes([np.arange(batch.num_rows)])
    return 3 * (
        shape.linear_flops_per_token * float(tree.positions[0])
        + shape.attention_flops_per_pair * float(tree.pairs[0])
        + shape.head_flops_per_token * int(batch["loss_mask"].sum())
    )
