"""Cases of whole parts: rollout engines in this process, and the commands that a user types, three steps each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlacementConfig, PlatformConfig, VLLMConfig
from skyrl_train.inference import HFEngine
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model import load_causal_lm, load_tokenizer
from skyrl_train.runs.construction import engine_settings
from skyrl_train.selftest.cases import Context
from skyrl_train.selftest.fixtures import BUILTIN
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from skyrl_train.weights import stored_weights

_PROMPTS = tuple(tuple(20 + (7 * row + index) % 300 for index in range(40 + 25 * row)) for row in range(4))
_NEW_TOKENS = 24
_LOGPROB_BOUNDS = {"float32": 2e-3, "bfloat16": 0.5}
"""Largest difference of a sampled token's log-probability between an engine and transformers in float32 on the CPU."""
_STEPS = 3
_RUN_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Opened:
    """An engine that serves, and what a case does with it."""

    engine: Any
    answers: Callable[[Sequence[GenerationRequest]], list[GenerationOutput]]
    sync: Callable[[Mapping[str, Tensor]], int]
    """Takes new weights; the version that is served then, 1."""


@contextmanager
def hf_opened(path: str, device: str, *, dtype: str = "float32", rows: int = 8) -> Iterator[Opened]:
    """`generator=hf`, which takes so many `rows` at once."""
    model = ModelConfig(path=path)
    loaded = load_causal_lm(model, device, dtype=getattr(torch, dtype))
    engine = HFEngine(loaded, load_tokenizer(model), max_batch_size=rows)

    async def answers(requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    def sync(weights: Mapping[str, Tensor]) -> int:
        engine.load_weights(iter(weights.items()), 1)
        return engine.weight_version

    try:
        yield Opened(engine, lambda requests: asyncio.run(answers(requests)), sync)
    finally:
        engine.close()


@contextmanager
def vllm_opened(path: str, context: Context, tensor_parallel_size: int = 1) -> Iterator[Opened]:
    """`generator=vllm`, in bfloat16 on CUDA."""
    engine = VLLMEngine(engine_settings(_engine_config(path, context, tensor_parallel_size)))

    def answers(requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        return [future.result(120) for future in [engine.submit(request) for request in requests]]

    def sync(weights: Mapping[str, Tensor]) -> int:
        stored = stored_weights(weights)
        engine.begin_update()
        for pending in stored.handed_over(stored.buckets()):
            engine.update(pending.passed_on())
        return engine.finish_update(1, len(weights))

    try:
        yield Opened(engine, answers, sync)
    finally:
        engine.close()


def hf_engine(context: Context) -> str:
    """`generator=hf`: log-probabilities of sampled tokens, before and after new weights."""
    with hf_opened(BUILTIN, context.device) as opened:
        return _before_and_after_sync(opened, dtype="float32")


def vllm_engine(context: Context, *, tensor_parallel_size: int) -> str:
    """Start, generate, take new weights, sleep, wake and generate again; the probe is transformers' own result."""

    def sleep_and_wake(engine: Any, sync: Callable[[], int]) -> str:
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - awake
        engine.wake_up("weights")
        engine.wake_up("kv_cache")
        engine.sleep_without_weights()
        engine.wake_up("weights")
        sync()
        engine.wake_up("kv_cache")
        assert freed > 0, "sleeping freed no memory"
        return f"sleep frees {freed / 2**30:.1f} GiB, and without weights takes those of a sync"

    with vllm_opened(BUILTIN, context, tensor_parallel_size) as opened:
        if context.on_cuda:
            return _before_and_after_sync(opened, dtype="bfloat16", rest=sleep_and_wake)
        return f"{_before_and_after_sync(opened, dtype='float32')}; sleep and wake need CUDA"


def _engine_config(path: str, context: Context, tensor_parallel_size: int) -> Config:
    config = Config(model=ModelConfig(path=path), generator=GeneratorConfig(backend="vllm"))
    if not context.on_cuda:
        return config
    vllm = VLLMConfig(gpu_memory_utilization=0.3, tensor_parallel_size=tensor_parallel_size)
    return replace(
        config,
        platform=PlatformConfig(name="gpu", device=context.device),
        model=ModelConfig(path=path, dtype="bfloat16"),
        placement=PlacementConfig(backend="ray", colocate_all=True),
        generator=replace(config.generator, vllm=vllm),
    )


def make_requests(
    prompts: Sequence[tuple[int, ...]] = _PROMPTS, new_tokens: int = _NEW_TOKENS
) -> list[GenerationRequest]:
    """Return a request for each prompt, with its row as seed."""
    sampling = SamplingParams(temperature=1.0, max_generate_length=new_tokens)
    return [
        GenerationRequest(request_id=f"request-{row}", prompt_token_ids=prompt, sampling=sampling, seed=row)
        for row, prompt in enumerate(prompts)
    ]


def _before_and_after_sync(
    opened: Opened, *, dtype: str, rest: Callable[[Any, Callable[[], int]], str] | None = None
) -> str:
    """Compare sampled tokens' log-probabilities with transformers on the CPU, with the first weights, with others, and
    with those after `rest`, which is given the engine and what syncs the others again."""
    model = load_causal_lm(ModelConfig(path=BUILTIN), "cpu")
    before = _largest_difference(model, opened.answers(make_requests()))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    stale = _largest_difference(model, opened.answers(make_requests()))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    version = opened.sync(weights)
    outputs = opened.answers(make_requests())
    after = _largest_difference(model, outputs)
    assert version == 1, f"the engine serves version {version} after a sync of version 1"
    assert all(output.weight_versions == ((0, 1),) for output in outputs), "answers name another version of the weights"
    bound = _LOGPROB_BOUNDS[dtype]
    assert max(before, after) < bound, f"{before:.1e} off before the sync, {after:.1e} after; at most {bound} is right"
    assert after < stale, f"the sync changed nothing: {stale:.1e} off before it, {after:.1e} after it"
    figure = f"log-probabilities {before:.1e} off, {after:.1e} after a sync ({stale:.1e} with the old weights)"
    if rest is None:
        return figure
    rested = rest(opened.engine, lambda: opened.sync(weights))
    again = _largest_difference(model, opened.answers(make_requests()))
    assert again < bound, f"{again:.1e} off afterwards ({rested}); at most {bound} is right"
    return f"{figure}; {rested}, {again:.1e} after it"


def _largest_difference(model: Any, outputs: Sequence[GenerationOutput]) -> float:
    largest = 0.0
    for prompt, output in zip(_PROMPTS, outputs):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        assert len(output.token_ids) > 0, "a request was answered with no tokens"
        largest = max(largest, float((torch.tensor(output.logprobs) - expected).abs().max()))
    return largest


def grpo(context: Context, *, generator: str) -> str:
    """Three steps of `python -m skyrl_train.main` on the bundled model and problems."""
    on_cuda = context.on_cuda
    overrides = [
        f"generator={generator}",
        "model=tiny_qwen2",
        "data=word_problems",
        "environment=word_problems",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "trainer.critic_mini_batch_size=8",
        "trainer.micro_train_batch_size_per_gpu=8",
        f"trainer.total_steps={_STEPS}",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "data.max_validation_prompts=8",
        f"model.dtype={'bfloat16' if on_cuda else 'float32'}",
    ]
    if generator == "vllm":
        overrides += [
            "generator.verify_weight_sync=true",
            f"generator.weight_sync_tolerance={0.5 if on_cuda else 0.001}",
        ]
        overrides += [] if on_cuda else ["placement=ray", "strategy=fsdp2", "placement.policy_num_workers=2"]
    elif on_cuda:
        overrides += ["placement=inline", "strategy=single"]
    records = _run("skyrl_train.main", "+experiment=gsm8k_multiturn", context, overrides, platform="platform")
    differences = [record[name] for record in records for name in _DIFFERENCES if record.get(name) is not None]
    difference = max(differences, default=float("nan"))
    bound = 1.0 if on_cuda else 0.002
    assert difference < bound, f"log-probabilities of engine and trainer differ by {difference:.1e}"
    assert max(record["policy/grad_norm"] for record in records) > 0, "no step had a gradient"
    rewards = ", ".join(f"{record['reward/mean']:.2f}" for record in records)
    return f"rewards {rewards}; engine and trainer differ by {difference:.1e}"


_DIFFERENCES = ("policy/rollout_logprob_diff_max", "mismatch/logprob_diff_max")


def sft(context: Context) -> str:
    """Three steps of `python -m skyrl_train.main_sft` on packed rows."""
    overrides = [
        "model=tiny_qwen2",
        "sft_data=word_problems",
        f"model.dtype={'bfloat16' if context.on_cuda else 'float32'}",
        f"trainer.num_steps={_STEPS}",
        "trainer.eval_interval=0",
        "trainer.eval_samples=0",
        "trainer.optimizer.lr=1e-3",
        "trainer.optimizer.warmup_steps=0",
    ]
    records = _run("skyrl_train.main_sft", "+experiment=sft_gsm8k", context, overrides, platform="sft_platform")
    losses = [record["train/loss"] for record in records]
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    return f"loss {', '.join(f'{loss:.3f}' for loss in losses)}"


def _run(
    module: str, experiment: str, context: Context, overrides: Sequence[str], *, platform: str
) -> list[dict[str, Any]]:
    """The records of the run's steps. Raises AssertionError where the command fails."""
    output = context.folder / "run"
    chosen = f"{platform}={'gpu' if context.on_cuda else 'cpu'}"
    command = [sys.executable, "-m", module, experiment, chosen, f"hydra.run.dir={output}", *overrides]
    # What it says goes where this process writes: to the report, if the case fails.
    status = subprocess.run(command, cwd=context.folder, check=False, timeout=_RUN_TIMEOUT_S).returncode
    assert status == 0, f"{' '.join(command[1:])} ended with status {status}"
    lines = Path(output, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    trained = [record for record in records if "policy/grad_norm" in record]
    assert len(trained) == _STEPS, f"{len(trained)} of {_STEPS} steps have metrics"
    assert not any("metrics/non_finite" in record for record in trained), "a metric is not finite"
    return trained
