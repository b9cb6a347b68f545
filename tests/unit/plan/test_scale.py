"""Arithmetic of `docs/scale.md`: by hand where it is simple, and the page against what its script prints."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from scripts.studies.simulated_runs import Latency, stated_lengths
from scripts.studies.simulation import LearnerRates, Schedule, simulate
from skyrl_train.config.models import MeshSizes
from skyrl_train.plan.forms.scale import (
    Device,
    Rollouts,
    ScaledModel,
    Work,
    devices_per_engine,
    engine_rates,
    rollout_s,
    streamed_sync,
    update_on,
)

ROOT = Path(__file__).resolve().parents[3]
B7 = ScaledModel.named("Qwen2.5-7B")
WORK = Work(tokens=1e6, mean_length=2000.0, longest=16_000)


@pytest.fixture(name="script", scope="module")
def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_scale_tables", ROOT / "scripts" / "studies" / "make_scale_tables.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_sizes_of_a_model_follow_from_its_config() -> None:
    # Queries and outputs of 3584 x 3584, keys and values of 3584 x 512, three products of 3584 x 18944.
    assert B7.counts.block == 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    assert B7.counts.root == pytest.approx(2 * 3584 * 152_064, rel=1e-3)  # embedding and head
    assert B7.kv_bytes == 2 * 2 * 28 * 512
    experts = ScaledModel.named("Qwen3-30B-A3B")
    assert experts.counts.block_experts == 128 * 3 * 2048 * 768
    assert experts.counts.total / 30.5e9 == pytest.approx(1.0, rel=0.01)
    assert experts.active_flops / 2 < 4e9
    config = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    plain = ScaledModel.of_config("plain", config, parameters=10**6)
    assert plain.counts.block == 4 * 64 * 64 + 3 * 64 * 256, (
        "features are four times the hidden size where nothing is said"
    )
    sparse = {**config, "num_experts": 8, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
    assert ScaledModel.of_config("sparse", sparse, parameters=10**6).counts.experts == 10**6


def test_bytes_of_a_step_by_hand() -> None:
    found = update_on(B7, MeshSizes(shard=8, replicate=4), WORK, Device(), micro_batch=16_000)
    total = B7.counts.total
    assert found.micro_batches == 2  # 31,250 tokens of each rank
    assert found.memory["parameters"] == found.memory["gradients"] == -(-4 * total // 8)
    assert found.moved["gathered parameters"] == pytest.approx(2 * 2 * 2 * total * 7 / 8)
    assert found.moved["summed gradients"] == pytest.approx(2 * 4 * total * 7 / 8)
    assert found.moved["replicas"] == pytest.approx(2 * 2 * 4 * total / 8 * 3 / 4)
    assert found.seconds["gathered parameters"] == pytest.approx(found.moved["gathered parameters"] / 3.6e11)
    assert found.seconds["replicas"] == pytest.approx(found.moved["replicas"] / 4e10)


def test_ranks_that_share_rows_hold_parts_of_them_and_make_as_many_micro_batches_more() -> None:
    alone, shared = (
        update_on(B7, MeshSizes(shard=8, sequence=size), WORK, Device(), micro_batch=16_000) for size in (1, 4)
    )
    assert shared.memory["activations"] == alone.memory["activations"] // 4
    assert shared.micro_batches == 4 * alone.micro_batches


def test_divided_experts_are_gathered_from_those_that_have_the_same_and_tokens_travel() -> None:
    model = ScaledModel.named("Qwen3-30B-A3B")
    gathered, divided = (
        update_on(model, MeshSizes(shard=64, expert=size), WORK, Device(), micro_batch=16_000) for size in (1, 8)
    )
    counts = model.counts
    dense = counts.total - counts.experts
    assert gathered.moved["states"] == 0
    assert gathered.moved["gathered parameters"] == pytest.approx(2 * 2 * counts.total * 63 / 64)
    assert divided.moved["gathered parameters"] == pytest.approx(2 * 2 * (dense * 63 / 64 + counts.experts / 8 * 7 / 8))
    # Of each token, 8 experts in 48 layers, there and back, in three passes; one in eight is there already.
    assert divided.moved["states"] == pytest.approx(6 * 2 * 2048 * 8 * 48 * WORK.tokens / 64 * 7 / 8)
    assert divided.memory["gathered parameters"] < gathered.memory["gathered parameters"]
    assert divided.memory["parameters"] == gathered.memory["parameters"]


def test_ranks_with_parts_of_matrices_gather_parts_and_sum_what_each_half_of_a_layer_makes() -> None:
    whole, parts = (
        update_on(B7, MeshSizes(shard=8 // size, tensor=size), WORK, Device(), micro_batch=16_000) for size in (1, 2)
    )
    total, tokens = B7.counts.total, 2 * WORK.tokens / 8
    assert parts.micro_batches == 16  # of 250,000 tokens that two ranks compute together
    assert parts.memory["parameters"] == pytest.approx(whole.memory["parameters"], rel=1e-6)
    assert parts.memory["gathered parameters"] == pytest.approx(whole.memory["gathered parameters"] / 2, rel=1e-6)
    assert parts.moved["gathered parameters"] == pytest.approx(2 * 16 * 2 * total / 2 * 3 / 4)
    # Two sums in each of 28 layers in three passes, of bfloat16 numbers; one of two ranks receives as much as it sends.
    assert parts.moved["partial sums"] == pytest.approx(2 * 3584 * (6 * 28 + 2) * tokens)
    assert whole.moved["partial sums"] == 0
    assert parts.seconds["products"] == whole.seconds["products"]
    assert parts.step_s == pytest.approx(
        parts.seconds["products"] + 0.1 * parts.links_s + parts.moved["partial sums"] / 3.6e11
    )


def test_ranks_that_share_rows_exchange_positions_for_heads() -> None:
    found = update_on(B7, MeshSizes(shard=8, sequence=4), WORK, Device(), micro_batch=16_000)
    # Of queries, outputs, keys and values, in 28 layers and three passes; one in four is there already.
    each = (2 * 3584 + 2 * 512) * 28 * 3 * WORK.tokens / 8
    assert found.moved["exchanged heads"] == pytest.approx(2 * each * 3 / 4)
    assert found.step_s > found.seconds["products"] + found.seconds["exchanged heads"]


def test_layers_that_are_not_recomputed_keep_what_they_make_and_save_a_pass() -> None:
    again, kept = (
        update_on(B7, MeshSizes(shard=8), WORK, Device(), micro_batch=16_000, recomputed=each) for each in (True, False)
    )
    assert kept.memory["activations"] > 9 * again.memory["activations"]
    assert kept.seconds["products"] / again.seconds["products"] == pytest.approx(
        3 / 4, rel=0.03
    )  # of the layers' products


def test_an_optimizer_in_the_host_is_felt_and_an_adapter_has_next_to_no_state() -> None:
    away = update_on(B7, MeshSizes(shard=8), WORK, Device(), micro_batch=16_000, offloaded=True)
    assert away.host_bytes == pytest.approx(16 * B7.counts.total / 8, rel=1e-6)
    # A parameter, its gradient and two averages are read, all but the gradient written.
    assert away.seconds["host optimizer"] == pytest.approx(28 * B7.counts.total / 8 / 5e9)
    adapter = replace(B7, counts=replace(B7.counts, trained=0))
    found = update_on(adapter, MeshSizes(shard=8), WORK, Device(), micro_batch=16_000)
    assert found.memory["parameters"] == -(-2 * B7.counts.total // 8)
    assert (found.moved["summed gradients"], found.memory.get("optimizer state")) == (0, None)


def test_engines_have_the_devices_that_automatic_placement_gives_them() -> None:
    names = ("Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-70B")
    assert [devices_per_engine(ScaledModel.named(name), Device()) for name in names] == [1, 2, 4]
    one = engine_rates(B7, 1, Device(), mean_length=2000.0)
    assert one.step_s == pytest.approx(2 * B7.counts.total / 2.68e12 + 2e-3)
    assert one.slots == 256
    four = engine_rates(B7, 4, Device(), mean_length=2000.0)
    assert four.step_s == pytest.approx(2 * B7.counts.total / 4 / 2.68e12 + 2e-3 + 2 * 28 * 1.5e-5)


@pytest.mark.parametrize("num_engines", [2, 8])
def test_rollouts_on_paper_take_what_simulated_ones_do(num_engines: int) -> None:
    lengths = stated_lengths(prompt=300, median=500, sigma=0.9, longest=4000)
    rates = engine_rates(B7, 1, Device(), mean_length=1000.0)
    samples = [sample[-1] for prompt in lengths.prompts for sample in prompt]
    responses = [each[2] for each in samples]
    rollouts = Rollouts(
        samples=64 * 8,
        response_tokens=sum(responses) / len(responses),
        longest_response=max(responses),
        prompt_tokens=300,
        context_tokens=sum(each * (300 + each / 2) for each in responses) / len(responses),
    )
    whole, busy = rollout_s(rates, rollouts, num_engines)
    simulated = simulate(
        Schedule(batch_size=64, max_staleness=0, num_engines=num_engines),
        engine=rates,
        learner=LearnerRates(token_s=0.0),
        make_group=lengths.groups(samples=8, seed=0, latency=Latency()),
        num_steps=3,
    )
    assert whole == pytest.approx(simulated.mean_step_s(0), rel=0.2)
    assert busy < whole


def test_the_page_has_what_the_script_prints_of_an_update(script: ModuleType) -> None:
    page, work = script.PAGE.read_text(encoding="utf-8"), script.work_of(script.lengths_of())
    assert script.put(page, "update", script.update_table(work)) == page
    assert script.put(page, "sync", script.sync_table(work)) == page
    assert script.put(page, "tensor", script.tensor_table(work)) == page


def test_a_streamed_sync_is_counted_link_by_link() -> None:
    """Eight ranks on a node, sixteen workers on two: each rank has an eighth, and a lane brings one to both."""
    device, weights = Device(), int(B7.engine_bytes * B7.counts.total)
    found = streamed_sync(weights, MeshSizes(shard=8), device, ranks_per_node=8, workers=16, workers_per_node=8)
    eighth = pytest.approx(weights / 8)
    assert found.links["enter"].network == eighth, "a rank sends what it has once"
    assert found.links["enter"].node_network == pytest.approx(weights), "all of it leaves the ranks' node"
    assert found.links["across"].network == eighth, "in each lane one of two leaders has it, and the other wants it"
    assert found.links["within"].local == pytest.approx(7 / 8 * weights)
    buckets = -(-weights // (256 * 2**20))
    assert found.num_calls == 2 * buckets * (1 + 1 + 8)
    moving = 2 * weights / 8 / device.network_rate + 7 / 8 * weights / device.node_rate
    assert found.seconds == pytest.approx(moving + 1.5e-5 * found.num_calls)


def test_replicas_send_nothing_and_engines_beside_the_ranks_need_no_network() -> None:
    sizes = {"ranks_per_node": 4, "workers": 4, "workers_per_node": 4}
    replicated = streamed_sync(10**9, MeshSizes(shard=4, replicate=2), Device(), **sizes)
    assert replicated.links == streamed_sync(10**9, MeshSizes(shard=4), Device(), **sizes).links
    beside = streamed_sync(10**9, MeshSizes(shard=4), Device(), **sizes, together=True)
    assert all(each.network == 0 for each in beside.links.values())


@pytest.mark.nightly
def test_the_page_has_what_the_script_simulates(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.put(page, "schedule", script.schedule_table(script.lengths_of())) == page
