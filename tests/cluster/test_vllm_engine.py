"""A real vLLM engine on the CPU, and each way in which one goes wrong without an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_train.config.models import GeneratorConfig, SamplingConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference.vllm import VLLMEngine, vllm_arguments
from skyrl_train.model import load_causal_lm, quiet_transformers
from skyrl_train.runs.construction import engine_settings
from skyrl_train.weight_sync import Export, SentWeights, StreamEnd
from skyrl_train.weights import Bucket, pack, pack_bucket
from tests.support.vllm_cases import CONFIG, LONG_PROMPT, expected_logprobs, largest_difference, request, sync
from tests.support.weight_cases import in_buckets
from tests.support.weight_streams import CPU, make_plan, place_of, send

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = VLLMEngine(engine_settings(CONFIG))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def hot_engine() -> Iterator[VLLMEngine]:
    """At temperature 1.3, for which vLLM is asked for other log-probabilities."""
    config = replace(CONFIG, generator=GeneratorConfig(sampling=SamplingConfig(temperature=1.3)))
    opened = VLLMEngine(engine_settings(config))
    yield opened
    opened.close()


def trained_weights(seed: int) -> dict[str, Tensor]:
    """The model's own, moved by as much as a long training would."""
    generator = torch.Generator().manual_seed(seed)
    with quiet_transformers():
        model = load_causal_lm(CONFIG.model, "cpu")
    return {
        name: parameter.detach() + 0.02 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def test_log_probabilities_agree_with_the_trainers_model_in_float32(engine: VLLMEngine) -> None:
    output = engine.submit(request("agree")).result(60)
    assert largest_difference(output, expected_logprobs(None, LONG_PROMPT, output)) < 1e-4


def test_after_an_update_neither_the_tied_head_nor_the_prefix_cache_is_stale(engine: VLLMEngine) -> None:
    engine.submit(request("fills-the-cache")).result(60)
    weights = trained_weights(1)
    assert sync(engine, weights, 7) == 7
    output = engine.submit(request("after-update")).result(60)
    assert output.weight_versions == ((0, 7),)
    assert largest_difference(output, expected_logprobs(weights, LONG_PROMPT, output)) < 1e-4


def test_updating_back_gives_the_old_tokens_again(engine: VLLMEngine) -> None:
    first, other = trained_weights(2), trained_weights(3)
    sync(engine, first, 8)
    before = engine.submit(request("before")).result(60)
    sync(engine, other, 9)
    between = engine.submit(request("between")).result(60)
    sync(engine, first, 10)
    after = engine.submit(request("after")).result(60)
    assert after.token_ids == before.token_ids
    assert between.logprobs != before.logprobs


def test_many_seeded_prompts_at_once_do_not_break_it_and_answer_as_if_alone(engine: VLLMEngine) -> None:
    prompts = [tuple(5 + (index + shift) % 50 for index in range(200)) for shift in range(40)]
    futures = [engine.submit(request(f"many-{n}", prompt, seed=n)) for n, prompt in enumerate(prompts)]
    together = [future.result(120) for future in futures]
    alone = engine.submit(request("alone", prompts[17], seed=17)).result(60)
    assert alone.token_ids == together[17].token_ids


def test_requests_during_an_update_wait_for_the_new_weights(engine: VLLMEngine) -> None:
    weights = trained_weights(4)
    engine.begin_update()
    held = engine.submit(request("held"))
    for bucket in in_buckets(iter(weights.items())):
        engine.update(bucket)
    assert not held.done()
    engine.finish_update(11, len(weights))
    output = held.result(60)
    assert output.weight_versions == ((0, 11),)
    assert largest_difference(output, expected_logprobs(weights, LONG_PROMPT, output)) < 1e-4


def test_an_aborted_request_ends_and_the_others_do_not(engine: VLLMEngine) -> None:
    doomed, other = engine.submit(request("doomed")), engine.submit(request("other", seed=2))
    engine.abort("doomed")
    assert doomed.result(60).stop_reason.value in ("abort", "stop", "length")
    assert other.result(60).stop_reason.value in ("stop", "length")


def test_log_probabilities_at_another_temperature_are_those_that_were_sampled_from(hot_engine: VLLMEngine) -> None:
    output = hot_engine.submit(request("hot", temperature=1.3)).result(60)
    assert largest_difference(output, expected_logprobs(None, LONG_PROMPT, output, temperature=1.3)) < 1e-4


def test_a_damaged_or_incomplete_update_leaves_an_engine_that_refuses(hot_engine: VLLMEngine) -> None:
    whole = pack_bucket(iter(trained_weights(5).items()))
    damaged = whole.data.copy()
    damaged[100] ^= 1
    hot_engine.begin_update()
    with pytest.raises(EngineError, match="checksum"):
        hot_engine.update(Bucket(**{**whole.fields(), "data": damaged}))
    with pytest.raises(EngineError, match="half-way"):
        hot_engine.submit(request("refused")).result(60)


def test_engines_compute_on_few_threads() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert torch.get_num_threads() == 1


def test_batches_have_the_sizes_of_vllms_own_class_llm(engine: VLLMEngine) -> None:
    """Named alone, an engine on a CPU would get 128 sequences."""
    assert engine._thread.core._engine.vllm_config.scheduler_config.max_num_seqs == 256


def test_an_h200_batches_16384_tokens_of_1024_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_device_total_memory", classmethod(lambda *_: 141 << 30))
    monkeypatch.setattr(platform, "get_device_name", classmethod(lambda *_: "NVIDIA H200"))
    monkeypatch.setattr(platform, "is_cpu", lambda _: False)
    gpu = replace(CONFIG, platform=replace(CONFIG.platform, name="gpu", device="cuda:0"))
    arguments = vllm_arguments(engine_settings(gpu))
    sizes = {name: arguments[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in arguments}
    found = EngineArgs(model=arguments["model"], enable_chunked_prefill=True, **sizes)
    model = SimpleNamespace(max_model_len=4096, is_multimodal_model=False, is_mm_prefix_lm=False)
    parallel = SimpleNamespace(use_batched_dp_moe=False)
    found._set_default_max_num_seqs_and_batched_tokens_args(UsageContext.LLM_CLASS, model, parallel)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (1024, 16384)


def test_chunked_prefill_is_off_on_a_cpu_and_a_prompt_fits_one_step() -> None:
    arguments = vllm_arguments(engine_settings(CONFIG))
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"]
    assert arguments["dtype"] == "float32"


@pytest.mark.nightly
def test_matrices_rounded_on_their_way_are_what_an_engine_makes_of_whole_ones() -> None:
    model = replace(CONFIG.model, dtype="bfloat16")
    engine = VLLMEngine(engine_settings(replace(CONFIG, model=model)))
    try:
        receivers = engine.receivers()
        assert {receiver.dtype for receiver in receivers} == {"bfloat16"}
        assert [receiver.device for receiver in receivers] == ["cpu"]
        whole, other = trained_weights(8), trained_weights(9)
        rounded = {name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in whole.items()}
        sync(engine, whole, 1)
        expected = engine.submit(request("whole")).result(60)
        sync(engine, other, 2)
        assert engine.submit(request("other")).result(60).logprobs != expected.logprobs
        sync(engine, rounded, 3)
        found = engine.submit(request("rounded")).result(60)
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    finally:
        engine.close()


def test_workers_in_processes_of_their_own_take_buckets_and_broadcasts(tmp_path: Path) -> None:
    """As on a GPU: the engine's core and its worker are apart from this process, which no array crosses by itself."""
    settings = engine_settings(CONFIG)
    apart = replace(settings, in_actor=False)
    engine = VLLMEngine(apart)
    try:
        carried, sent = trained_weights(6), trained_weights(7)
        assert sync(engine, carried, 1) == 1
        output = engine.submit(request("carried")).result(60)
        assert largest_difference(output, expected_logprobs(carried, LONG_PROMPT, output)) < 1e-4

        plan = make_plan(sent, ["rank"], ["worker"], limit_bytes=2**20)
        meeting = str(tmp_path / "meet")
        with ThreadPoolExecutor(1) as beside:
            joining = beside.submit(StreamEnd, plan, place_of(meeting, 0, plan), CPU)
            engine.take_plan(plan)
            engine.meet(place_of(meeting, 1, plan))
            engine.begin_update()
            sending = beside.submit(send, joining.result(60), 0, sent, 2, "", SentWeights())
            engine.receive(2, "")
            sending.result(60)
        assert engine.finish_update(2, len(sent)) == 2
        output = engine.submit(request("sent")).result(60)
        assert largest_difference(output, expected_logprobs(sent, LONG_PROMPT, output)) < 1e-4

        bucket, flat = pack(sent.items(), CPU)
        loan = Export(flat)
        engine.begin_update()
        engine.update(replace(bucket, handles=loan.handles))
        loan.close()
        assert engine.finish_update(3, len(sent)) == 3
    finally:
        engine.close()
