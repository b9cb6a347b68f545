"""vLLM in a process of its own: updates under way, deaths and orphans, on any device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, PlatformConfig
from skyrl_train.errors import EngineDeadError
from skyrl_train.inference import EngineSettings
from skyrl_train.inference.vllm import VLLMEngine, core as vllm_core
from skyrl_train.model import load_causal_lm
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.process_trees import command_line, descendants, is_running
from tests.support.weight_cases import in_buckets

CONFIG = replace(Config(), generator=GeneratorConfig(max_context_length=1024))
NUM_UPDATES = 20
NUM_REQUESTS = 4
NUM_TOKENS = 900
"""Of each response."""
ORPHAN = """
import sys, time
from tests.support.vllm_apart import settings_apart
from skyrl_train.inference.vllm.engine import VLLMEngine

if __name__ == "__main__":
    engine = VLLMEngine(settings_apart(sys.argv[1]))
    print("ready", flush=True)
    time.sleep(600)
"""


def settings_apart(device: str = "cpu") -> EngineSettings:
    name: Literal["cpu", "gpu"] = "cpu" if device == "cpu" else "gpu"
    settings = engine_settings(replace(CONFIG, platform=PlatformConfig(name=name, device=device)))
    return replace(settings, in_actor=False)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the limit ends a response."""
    original = vllm_core.sampling_arguments

    def without_end(*given: Any, **named: Any) -> Any:
        arguments = original(*given, **named)
        arguments.ignore_eos = True
        arguments.stop_token_ids = []
        return arguments

    monkeypatch.setattr(vllm_core, "sampling_arguments", without_end)


def request(name: str, num_tokens: int) -> GenerationRequest:
    prompt = tuple(5 + (index + len(name)) % 50 for index in range(100))
    sampling = SamplingParams(max_generate_length=num_tokens)
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, seed=len(name))


def moved(weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: weight + 0.02 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


def logprobs_by_version(versions: Sequence[Mapping[str, Tensor]], asked: GenerationRequest, output: Any) -> Tensor:
    """`[versions, tokens]`: of the response's tokens, under a Hugging Face model with each of the weights."""
    model = load_causal_lm(CONFIG.model, "cpu")
    ids = torch.tensor([[*asked.prompt_token_ids, *output.token_ids]])
    start, found = len(asked.prompt_token_ids), []
    for weights in versions:
        model.load_state_dict(dict(weights), strict=False)
        model.tie_weights()
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
        found.append(scores[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1))
    return torch.stack(found)


def wait_for_tokens(engine: VLLMEngine, number: int) -> None:
    """Until every request has so many."""
    assert engine._thread.core is not None
    while sum(len(running.token_ids) >= number for running in engine._thread.core._requests.values()) < NUM_REQUESTS:
        time.sleep(0.005)


def boundaries(reported: Tensor, by_version: Tensor, tolerance: float) -> list[int]:
    """Where each version begins to have sampled, if each token is of one version and versions only grow; else fails."""
    version, begins = 0, [0]
    for position in range(len(reported)):
        while abs(reported[position] - by_version[version, position]) > tolerance:
            version += 1
            begins.append(position)
            assert version < len(by_version), f"token {position} is of no version after {begins}"
    return begins


def check_updates_under_way(engine: VLLMEngine, *, tolerance: float) -> None:
    """`tolerance`: of a log-probability."""
    first = {name: parameter.detach() for name, parameter in load_causal_lm(CONFIG.model, "cpu").named_parameters()}
    versions = [first, *(moved(first, version) for version in range(1, NUM_UPDATES + 1))]
    asked = [request("x" * (index + 1), NUM_TOKENS) for index in range(NUM_REQUESTS)]
    futures = [engine.submit(each) for each in asked]
    for version, weights in enumerate(versions[1:], start=1):
        wait_for_tokens(engine, version * (NUM_TOKENS - 100) // NUM_UPDATES)
        assert not any(future.done() for future in futures), f"requests ended before update {version}"
        engine.begin_update()
        time.sleep(0.05)  # a transport that takes its time: a core that did not wait would step on half of the layers
        for bucket in in_buckets(iter(weights.items())):
            engine.update(bucket)
        assert engine.finish_update(version, len(weights)) == version
    for each, output in zip(asked, [future.result(120) for future in futures]):
        assert len(output.token_ids) == NUM_TOKENS
        reported, by_version = torch.tensor(output.logprobs), logprobs_by_version(versions, each, output)
        assert [run.version for run in output.weight_versions] == [-1, *range(1, NUM_UPDATES + 1)]
        starts = torch.tensor([run.start for run in output.weight_versions])
        named = torch.searchsorted(starts, torch.arange(NUM_TOKENS), right=True) - 1
        of_named = by_version.gather(0, named.unsqueeze(0)).squeeze(0)
        assert float((reported - of_named).abs().max()) < tolerance, (
            "a token is not of the version that the answer names"
        )
        found = boundaries(reported, by_version, tolerance)
        print(f"\n{each.request_id}: weights changed at tokens {found[1:]}")
        assert len(set(found)) == NUM_UPDATES + 1, "each update came while it was generated"


def check_death(engine: VLLMEngine) -> None:
    core = engine._thread.core
    assert core is not None
    victim = core._client.processes[0]
    waiting = engine.submit(request("over-which-it-dies", 1500))
    time.sleep(0.3)
    for name, expected in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        os.kill(victim.pid, name)
        deadline = time.monotonic() + 5.0
        while engine.suspended is not expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.suspended is expected
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"pid {victim.pid}.* killed by signal 9"):
        waiting.result(5)
    with pytest.raises(EngineDeadError, match="died"):
        engine.submit(request("after", 10)).result(5)
    with pytest.raises(EngineDeadError, match="died"):
        engine.begin_update()
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        engine.receivers()


def check_orphans(tmp_path: Path, when: str, *, device: str) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN, encoding="utf-8")
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script), device],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert parent.stdout is not None
        if when == "while it serves":
            assert any(line == "ready\n" for line in parent.stdout)
        while len(family := descendants(parent.pid)[1:]) < 2:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5.0
    while (left := [pid for pid in family if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, list(map(command_line, left))
