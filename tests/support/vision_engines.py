"""Engines that are shown images, against the trainer's forward of the same rows.

`python -m tests.support.vision_engines KIND` prints the largest differences of vLLM's log-probabilities, as JSON: `vllm` for
an engine in this process, `http` for a server. It is a process of its own: where there is no torchvision a stand-in for it
must be on PYTHONPATH, and no other test may see that.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from skyrl_train.batch import batch_of_lengths
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import GeneratorConfig, HTTPConfig, ModelConfig, OptimizerConfig
from skyrl_train.images import Image, ImageSpan, ImageSpans
from skyrl_train.inference import build_http_engine
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm
from skyrl_train.runs.construction import engine_settings, sync_within_process
from skyrl_train.types import GenerationRequest, SamplingParams
from skyrl_train.weight_sync import UpdatableEngine
from tests.support.learner_cases import fixed_rows
from tests.support.vision_cases import MERGE, PATCH, PLACEHOLDER, VOCABULARY, make_image, make_vlm

WIDE, SMALL = make_image(1, rows=1, columns=4), make_image(2)
WIDE_HEADS: dict[str, Any] = {
    "hidden_size": 128,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}
"""Heads of 32 numbers, the fewest that vLLM computes on a CPU."""
Prompt: TypeAlias = tuple[tuple[int, ...], ImageSpans]
Answer: TypeAlias = Callable[[Sequence[GenerationRequest]], Sequence[Any]]
_NAMED = {
    0: "<pad>",
    1: "<bos>",
    2: "<eos>",
    46: "<|vision_end|>",
    47: "<|vision_start|>",
    48: "<|video_pad|>",
    PLACEHOLDER: "<|image_pad|>",
}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": 16, "longest_edge": 1024},
}
_SERVER = (
    *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048", "--max-model-len", "100"),
    *("--kv-cache-memory-bytes", "67108864", "--enable-scale-out", "--skip-mm-profiling"),
    *("--limit-mm-per-prompt", '{"video": 0}'),
    *("--worker-extension-cls", "skyrl_train.inference.vllm.worker.WorkerExtension"),
    *("--weight-transfer-config", '{"backend": "skyrl_train_buckets"}'),
)


def save_vlm(folder: Path) -> Path:
    """Write a random Qwen2.5-VL of vocabulary 50, its tokenizer and its image processor."""
    make_vlm(text=WIDE_HEADS).save_pretrained(folder)
    words = {_NAMED.get(number, f"w{number}"): number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")),
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=[_NAMED[number] for number in (46, 47, 48, PLACEHOLDER)],
    )
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return folder


def image_prompt(image: Any, *, before: int, after: int) -> Prompt:
    """So many tokens, the image, and so many tokens."""
    ids = (*range(3, 3 + before), *[PLACEHOLDER] * image.num_tokens, *range(20, 20 + after))
    return ids, (ImageSpan(before, image),)


def requests_of(prompts: Sequence[Prompt], name: str = "r") -> list[GenerationRequest]:
    """One for each, of six tokens at most."""
    return [
        GenerationRequest(
            request_id=f"{name}{number}",
            prompt_token_ids=ids,
            sampling=SamplingParams(max_generate_length=6),
            seed=number,
            images=images,
        )
        for number, (ids, images) in enumerate(prompts)
    ]


def later_turns(prompts: Sequence[Prompt], answers: Sequence[Any], image: Image = SMALL) -> list[Prompt]:
    """What was asked and answered, then an observation with another image."""
    found: list[Prompt] = []
    for (ids, images), answer in zip(prompts, answers):
        whole = (*ids, *answer.token_ids, 9, *[PLACEHOLDER] * image.num_tokens, 10)
        found.append((whole, (*images, ImageSpan(len(whole) - 1 - image.num_tokens, image))))
    return found


def learner_of(model: Any) -> PolicyLearner:
    """The learner that holds this model."""
    engine = ModelEngine(model, name="policy", micro_batching=fixed_rows(1), optimizer=OptimizerConfig())
    return PolicyLearner(engine, model=ModelConfig(), algorithm=AlgorithmConfig(), temperature=1.0)


def difference(learner: PolicyLearner, prompt: Prompt, answer: Any) -> float:
    """The largest one of a log-probability between an answer and the learner's forward."""
    ids = [*prompt[0], *answer.token_ids]
    batch = batch_of_lengths([len(ids)])
    mask = torch.tensor([False] * len(prompt[0]) + [True] * len(answer.token_ids))
    batch = batch.with_columns(input_ids=torch.tensor(ids, dtype=torch.int32), loss_mask=mask)
    batch = replace(batch, metadata=replace(batch.metadata, images=(prompt[1],)))
    return float(np.abs(learner.forward(batch)[mask].numpy() - np.array(answer.logprobs)).max())


def conversation(learner: PolicyLearner, answer: Answer, name: str) -> float:
    """Of two turns with images, one beside them without, prompts of the same tokens and other images, and one in which the
    placeholder stands for itself."""
    prompts = [
        image_prompt(WIDE, before=2, after=3),
        image_prompt(SMALL, before=5, after=1),
        image_prompt(make_image(7), before=5, after=1),
        ((5, 6, 7), ()),
        ((5, PLACEHOLDER, 6, *[PLACEHOLDER] * 4, 7), (ImageSpan(3, SMALL),)),
    ]
    first = answer(requests_of(prompts, f"{name}-first-"))
    later = later_turns(prompts, first)
    second = answer(requests_of(later, f"{name}-later-"))
    return max(difference(learner, *each) for each in [*zip(prompts, first), *zip(later, second)])


def _move(learner: PolicyLearner, version: int) -> None:
    """Change all weights, those of the tower among them, as a long training would."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in learner.engine.parameters.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def synced_outcome(learner: PolicyLearner, engine: UpdatableEngine, answer: Answer, folder: Path) -> dict[str, float]:
    """Largest differences of an engine: as loaded, and after each of two syncs of other weights."""
    found = {"loaded": conversation(learner, answer, "loaded")}
    for version in (1, 2):
        _move(learner, version)
        sync_within_process(engine, folder).sync(learner.weights(), version)
        found[f"sync_{version}"] = conversation(learner, answer, f"sync-{version}")
    return found


def vllm_outcome(folder: Path) -> dict[str, float]:
    """Of an engine in this process; `many`: of so many images at once that the tower computes them in several steps."""
    config = config_of(folder, "vllm")
    learner = learner_of(load_causal_lm(config.model, "cpu"))
    engine = VLLMEngine(replace(engine_settings(config), in_actor=True))

    def answer(requests: Sequence[GenerationRequest]) -> list[Any]:
        return [each.result(60) for each in [engine.submit(request) for request in requests]]

    try:
        found = synced_outcome(learner, engine, answer, folder / "weights")
        prompts = [image_prompt(make_image(number, 5, 5), before=9, after=9) for number in range(90)]
        answers = answer(requests_of(prompts, "many"))
        return {**found, "many": max(difference(learner, *each) for each in zip(prompts, answers))}
    finally:
        engine.close()


def http_outcome(folder: Path) -> dict[str, float]:
    """Of a server of vLLM."""
    config = config_of(folder, "http")
    learner = learner_of(load_causal_lm(config.model, "cpu"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, *_SERVER, "--model", str(folder), "--port", str(port)]
    loop = asyncio.new_event_loop()
    server = subprocess.Popen(command, stdout=sys.stderr, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(server, url)
        generator = replace(config.generator, http=HTTPConfig(url=url))
        engine = build_http_engine(engine_settings(replace(config, generator=generator)))

        def answer(requests: Sequence[GenerationRequest]) -> list[Any]:
            async def all_of_them() -> list[Any]:
                return await asyncio.gather(*(engine.generate(request) for request in requests))

            return loop.run_until_complete(all_of_them())

        return synced_outcome(learner, engine, answer, folder / "weights")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)


def config_of(folder: Path, backend: str) -> Config:
    """The configuration of a run of the model in `folder`."""
    generator = GeneratorConfig(backend=backend, max_context_length=100)
    return Config(model=ModelConfig(path=str(folder)), generator=generator)


def _wait_until_it_answers(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 600.0
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError("the server does not answer")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        measure = {"vllm": vllm_outcome, "http": http_outcome}[sys.argv[1]]
        print(json.dumps(measure(save_vlm(Path(place)))))
