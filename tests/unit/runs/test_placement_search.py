"""The form that `placement=auto` chooses: by model and nodes, of what is stated, and against all forms that there are."""

from __future__ import annotations

import functools
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import Config
from skyrl_train.config.models import StrategyConfig, mesh_sizes
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import ConfigError, ModelError
from skyrl_train.model.sizes import known_architectures
from skyrl_train.plan import plan_memory, positions_that_fit
from skyrl_train.plan.forms import (
    Device,
    ScaledModel,
    StepWork,
    Update,
    allocations,
    best_update,
    engine_rates,
    layouts,
    micro_batch_sizes,
    rollout_s,
    streamed_sync,
    update_on,
)
from skyrl_train.runs.cli.placement import place
from skyrl_train.runs.cli.placement_search import Search, even_nodes, recomputing, sizes_of
from skyrl_train.runs.planning import main as plan_main
from skyrl_train.system import Devices
from skyrl_train.trainers.checkpoints import flat_config, settings_of
from tests.support.auto_placement_cases import gpu_config, gpus

pytestmark = pytest.mark.slow  # models are traced

CLUSTER = "placement.ray_address=auto"
PLAIN = StrategyConfig(name="fsdp2", cpu_offload=False)
NODES = {1: gpus(8), 2: gpus(8, 8), 4: gpus(8, 8, 8, 8)}


def placed(model: str, devices: Devices, *overrides: str) -> Config:
    return place(gpu_config(f"model.path={model}", *overrides), devices)


def form_of(config: Config) -> str:
    """The line that is printed, without its name."""
    return config.derived[-1].partition(" ")[2].strip()


@pytest.mark.parametrize(
    ("model", "nodes", "strategy"),
    [
        ("Qwen2.5-7B", 1, PLAIN),
        ("Qwen2.5-7B", 2, replace(PLAIN, fsdp_size=8)),
        ("Qwen3-30B-A3B", 1, replace(PLAIN, expert_parallel_size=8)),
        ("Qwen3-30B-A3B", 4, replace(PLAIN, expert_parallel_size=8, fsdp_size=8)),
        ("Llama-3.1-70B", 4, replace(PLAIN, tensor_parallel_size=2, cpu_offload="optimizer")),
    ],
)
def test_two_nodes_shard_within_each_mixtures_divide_experts_and_70b_cuts_matrices(
    model: str, nodes: int, strategy: StrategyConfig
) -> None:
    found = placed(model, NODES[nodes], CLUSTER)
    assert found.strategy == strategy
    assert found.placement.colocate_all
    assert validate_config(found) == []


def test_the_line_says_what_was_chosen_and_beside_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert form_of(placed("Qwen3-30B-A3B", NODES[1])).startswith("fsdp_size 8, EP 8, engines TP ")
    overrides = ["placement.num_gpus=16", "placement.num_nodes=2", CLUSTER, "model.path=Qwen2.5-7B"]
    assert plan_main(["+experiment=gsm8k_multiturn", "platform=gpu", *overrides]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: form")]
    assert line.startswith("note: form fsdp_size 8 x 2 replicas, engines TP ")
    assert "s a step on paper; fsdp_size 16, engines TP 1, shared: " in line


@pytest.mark.parametrize(
    ("override", "setting", "value"),
    [
        ("strategy.fsdp_size=16", "fsdp_size", 16),
        pytest.param("strategy.tensor_parallel_size=4", "tensor_parallel_size", 4, marks=pytest.mark.nightly),
        pytest.param("strategy.sequence_parallel_size=2", "sequence_parallel_size", 2, marks=pytest.mark.nightly),
        ("strategy.cpu_offload=true", "cpu_offload", True),
    ],
)
def test_what_is_stated_of_the_strategy_is_kept(override: str, setting: str, value: object) -> None:
    assert getattr(placed("Qwen2.5-7B", NODES[2], CLUSTER, override).strategy, setting) == value


def test_what_is_stated_of_engines_and_another_strategy_is_kept() -> None:
    found = placed("Qwen2.5-7B", NODES[2], CLUSTER, "generator.vllm.tensor_parallel_size=2")
    assert (found.generator.vllm.tensor_parallel_size, found.generator.vllm.num_engines) == (2, 8)
    assert placed("Qwen2.5-0.5B", NODES[1], "strategy=ddp").strategy == StrategyConfig(name="ddp")


@pytest.mark.nightly
def test_a_default_that_is_typed_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"Try strategy.cpu_offload=true"):
        placed("Qwen2.5-7B", gpus(1), "placement.stated=[strategy.cpu_offload]")
    typed = ["strategy.cpu_offload=false", "placement.num_gpus=1", "model.path=Qwen2.5-7B"]
    assert plan_main(["+experiment=gsm8k_multiturn", "platform=gpu", *typed]) == 2
    assert "Try strategy.cpu_offload=true" in capsys.readouterr().out


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_asynchronous_runs_have_engines_apart(nodes: int) -> None:
    found = placed("Qwen2.5-7B", NODES[nodes], CLUSTER, "trainer.max_staleness=1", "algorithm=tis")
    assert not found.placement.colocate_all
    assert found.generator.vllm.num_engines + found.placement.policy_num_workers == 8 * nodes
    assert validate_config(found) == []


@pytest.mark.nightly
def test_a_host_with_little_memory_has_fewer_engines_asleep_or_engines_apart() -> None:
    plain, fewer, apart = (
        placed("Qwen2.5-7B", NODES[1], f"placement.host_memory_gb={size}") for size in (1000, 250, 150)
    )
    assert (plain.generator.vllm.num_engines, plain.placement.colocate_all) == (8, True)
    assert (fewer.generator.vllm.num_engines, fewer.placement.colocate_all) == (2, True)
    assert not apart.placement.colocate_all


def test_a_run_that_goes_on_keeps_its_form_and_one_on_other_gpus_has_another(tmp_path: Path) -> None:
    def config(*overrides: str) -> Config:
        composed = gpu_config("model.path=Qwen2.5-7B", CLUSTER, *overrides)
        return replace(composed, output_dir=str(tmp_path))

    first = place(replace(config("strategy.fsdp_size=4"), output_dir="/elsewhere"), NODES[2])
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"config": flat_config(settings_of(first))}), encoding="utf-8"
    )
    again = place(config(), NODES[2])
    assert (again.strategy, again.placement, again.generator) == (first.strategy, first.placement, first.generator)
    assert place(config(), NODES[4]).placement.policy_num_workers == 32
    assert place(config("trainer.resume_mode=none"), NODES[2]).strategy.fsdp_size == 8
    assert place(config("strategy.fsdp_size=16"), NODES[2]).strategy.fsdp_size == 16


def test_rows_of_a_small_mini_batch_divide_over_the_ranks_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Config] = []
    broken = Search._broken

    def counted(config: Config) -> set[str]:
        checked.append(config)
        return broken(config)

    monkeypatch.setattr(Search, "_broken", staticmethod(counted))
    strict = ("batching=fixed", "trainer.batch_validation=strict", "trainer.policy_mini_batch_size=1")
    config = gpu_config("model.path=Qwen2.5-7B", CLUSTER, "trainer.train_batch_size=7", *strict)
    for nodes, most in ((1, 10), (16, 100)):  # of thousands of forms; sizes that do not divide are refused once
        checked.clear()
        found = place(config, gpus(*[8] * nodes))
        assert validate_config(found) == []
        assert 8 % (found.placement.policy_num_workers // found.strategy.ranks_per_share) == 0
        assert len(checked) < most, len(checked)


def test_recomputing_is_left_out_where_all_layers_fit() -> None:
    model, strategy = ScaledModel.named("Qwen2.5-0.5B"), StrategyConfig(name="fsdp2")
    work = Search(gpu_config("model.path=Qwen2.5-0.5B"), Devices()).work
    again, kept = (best_update(model, strategy, 8, work, Device(), recomputed=each) for each in (True, False))
    assert again is not None
    assert kept is not None
    assert kept.step_s < again.step_s


def test_layouts_hold_to_what_divides_a_model_and_its_ranks() -> None:
    (place_of_14,) = allocations(2, 7, shares=True, apart=False)
    free = ("fsdp_size", "tensor_parallel_size", "expert_parallel_size", "sequence_parallel_size")
    found = [*layouts(ScaledModel.named("Qwen2.5-7B"), place_of_14, StrategyConfig(name="fsdp2"), free)]
    assert found == [StrategyConfig(name="fsdp2"), StrategyConfig(name="fsdp2", fsdp_size=7)]
    assert micro_batch_sizes(3000, 10_000) == (3000, 6000)
    assert micro_batch_sizes(30_000, 10_000) == (30_000,)


@pytest.mark.parametrize("nodes", [1, 16])
def test_a_choice_takes_less_than_five_seconds_where_the_model_was_traced(nodes: int) -> None:
    devices, config = gpus(*[8] * nodes), gpu_config("model.path=Llama-3.1-70B", CLUSTER)
    place(config, devices)
    began = time.process_time()
    place(config, devices)
    assert time.process_time() - began < 5.0


# All forms


@functools.cache
def work() -> StepWork:
    """Of the one task that all cases have."""
    return Search(gpu_config(CLUSTER), Devices()).work


MODELS = (
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Qwen2.5-7B",
    "Qwen3-8B",
    "Qwen2.5-14B",
    "Qwen2.5-32B",
    "Llama-3.1-70B",
    "Qwen3-30B-A3B",
)
DEVICES = {
    "1 x 8": gpus(8),
    "1 x 4, 40 GB": gpus(4, memory_gb=40.0),
    "1 x 8, 24 GB": gpus(8, memory_gb=24.0),
    "2 x 8": gpus(8, 8),
    "4 x 8": gpus(8, 8, 8, 8),
}
QUICK = {("Qwen2.5-0.5B", "1 x 8"), ("Qwen2.5-7B", "1 x 8"), ("Qwen3-30B-A3B", "1 x 8")}


@pytest.mark.parametrize(
    ("model", "devices"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.nightly)
        for case in itertools.product(MODELS, DEVICES)
    ],
)
def test_no_form_that_fits_is_better_than_the_one_that_is_chosen(model: str, devices: str) -> None:
    assert model in known_architectures()
    config = gpu_config(f"model.path={model}", CLUSTER)
    found = best_of_all(config, DEVICES[devices])
    try:
        chosen = place(config, DEVICES[devices])
    except ConfigError:
        assert found is None
    else:
        assert found is not None
        assert found[0] == pytest.approx(score_of(chosen, config, DEVICES[devices]), rel=1e-6)


def best_of_all(config: Config, devices: Devices) -> tuple[float, Config] | None:
    """The best score of any form that rules and memory allow: every size of everything, with no thought for memory on
    paper, and engines anywhere."""
    nodes, per_node = even_nodes(devices)
    facts = sizes_of(config)
    assert facts is not None
    forms: list[tuple[float, int, Config]] = []
    shapes = [(nodes, per_node, True)] + [(nodes, ranks, False) for ranks in range(1, per_node)]
    shapes += [(training, per_node, False) for training in range(1, nodes)]
    for (training, ranks, shared), size in itertools.product(shapes, (1, 2, 4, 8)):
        own = not shared and ranks == per_node
        hosts, room = (nodes - training, per_node) if own else (nodes, per_node if shared else per_node - ranks)
        kv_heads = facts.num_kv_heads
        if size > room or facts.num_heads % size or (kv_heads % size and size % kv_heads):
            continue
        lie: dict[str, Any] = {f"{role}_num_nodes": training for role in ("policy", "critic", "ref")}
        lie |= {f"{role}_num_gpus_per_node": ranks for role in ("policy", "critic", "ref")}
        lie |= {"inference_num_nodes": hosts, "inference_num_gpus_per_node": per_node} if own else {}
        plain: dict[str, Any] = {"auto": False, "backend": "ray", "colocate_all": shared, "stated": ()}
        placement = replace(config.placement, **plain, **lie)
        vllm = replace(config.generator.vllm, num_engines=hosts * (room // size), tensor_parallel_size=size)
        own_engines = replace(config, placement=placement, generator=replace(config.generator, vllm=vllm))
        for strategy, recomputed in itertools.product(
            strategies(training * ranks, facts.num_heads, kv_heads, config), (True, False)
        ):
            form = replace(recomputing(own_engines, recomputed), strategy=strategy)
            forms.append((score_of(form, config, devices), len(forms), form))
    for score, _, form in sorted(forms):
        if not validate_config(form) and Search(config, devices)._problem(form, facts) is None and fits(form, devices):
            return score, form
    return None


def strategies(ranks: int, heads: int, kv_heads: int, config: Config) -> list[StrategyConfig]:
    experts = int(known_architectures()[config.model.path].get("num_experts", 0))
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    found = []
    for tensor, rows, expert in itertools.product((1, 2, 4, 8), sizes, (1, 2, 4, 8)):
        legal = ranks % tensor == 0 and heads % rows == 0 and (expert == 1 or experts) and (tensor == 1 or not experts)
        if not legal or (tensor > 1 and rows > 1) or rows > 8 or ranks % expert or kv_heads % tensor:
            continue
        if rows > 1 and config.generator.max_context_length < 16_384:
            continue
        for shard, offload in itertools.product([0, *sizes], (False, "optimizer", True)):
            if shard in (1, ranks // tensor) or (tensor > 1 and ranks == tensor):
                continue
            found.append(
                StrategyConfig(
                    name="fsdp2",
                    fsdp_size=shard,
                    tensor_parallel_size=tensor,
                    sequence_parallel_size=rows,
                    expert_parallel_size=expert,
                    cpu_offload=offload,
                )
            )
    return [each for each in found if not each.fsdp_size or (ranks // each.tensor_parallel_size) % each.fsdp_size == 0]


def score_of(form: Config, config: Config, devices: Devices) -> float:
    """Seconds of a step with what it has to be shorter by for what it changes."""
    placement, strategy, vllm = form.placement, form.strategy, form.generator.vllm
    nodes, per_node = even_nodes(devices)
    model = replace(ScaledModel.named(config.model.path), state_bytes=8)
    whole = Device(memory_bytes=devices.memory_gb * 1e9)
    device = replace(whole, node_size=placement.policy_num_gpus_per_node)
    of_step = work()
    recomputed = bool(form.model.gradient_checkpointing)
    update = quickest(model, strategy, placement.policy_num_workers, of_step, device, recomputed)
    size, shared = vllm.tensor_parallel_size, placement.colocate_all
    rates = engine_rates(model, size, whole, mean_length=of_step.update.mean_length, max_seqs=1024)
    assert of_step.rollouts is not None
    rollouts, _ = rollout_s(rates, of_step.rollouts, vllm.num_engines)
    weights = 2 * model.counts.total
    kept = sum(update.memory.get(kind, 0) for kind in ("parameters", "optimizer state"))
    moves = 2 * (kept + weights / size) / device.host_rate if shared else 0.0
    engine_gpus = size * vllm.num_engines
    own_nodes = nodes - placement.policy_num_nodes
    sync = (
        update.seconds["weight sync"] + weights / device.node_rate
        if shared
        else streamed_sync(
            int(weights),
            update.mesh,
            device,
            ranks_per_node=placement.policy_num_gpus_per_node,
            workers=engine_gpus,
            workers_per_node=engine_gpus // (own_nodes or nodes),
            together=not own_nodes,
        ).seconds
    )
    step = rollouts + moves + of_step.num_updates * update.step_s + sync
    default = StrategyConfig(name="fsdp2", cpu_offload=False)
    cuts = ("tensor_parallel_size", "sequence_parallel_size")
    changed = [name for name, value in vars(strategy).items() if value != vars(default)[name]]
    least_gain = sum(0.15 if name in cuts else 0.01 for name in changed) + 0.01 * (not shared)
    facts = sizes_of(config)
    assert facts is not None
    search = Search(config, devices)
    plain = search._engine_size(search._engine_sizes(per_node, facts), facts, nodes * per_node)
    score: float = step * (1 + least_gain + 0.25 * (size != plain))
    return round(score, 6)


@functools.cache
def quickest(
    model: ScaledModel, strategy: StrategyConfig, ranks: int, work: StepWork, device: Device, recomputed: bool
) -> Update:
    """The same of any engines."""
    mesh, offload = mesh_sizes(strategy, ranks), strategy.cpu_offload
    ways = {"offloaded": offload is True, "state_in_host": offload == "optimizer", "recomputed": recomputed}
    updates = [update_on(model, mesh, work.update, device, micro_batch=size, **ways) for size in work.micro_batches]
    return min([each for each in updates if each.fits(device)] or updates[:1], key=lambda each: round(each.step_s, 6))


def fits(form: Config, devices: Devices) -> bool:
    plan = replace(form.plan, device_memory_gb=devices.memory_gb)
    try:
        memory = plan_memory(replace(form, plan=plan), one_row=True)
        wanted = 0 if form.model.gradient_checkpointing else 16_384
        if memory is None or memory.violations():
            return False
        return not wanted or positions_that_fit(form, devices.memory_gb) >= wanted
    except ModelError:
        return False


# Published forms

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"
RECIPES = {
    "SkyRL, Qwen2.5-Math-7B": ("Qwen2.5-7B", 1, 512, 32, 16, 2048, 8192, ()),
    "SkyRL, Qwen2.5-32B, GSM8K": ("Qwen2.5-32B", 2, 32, 32, 4, 512, 1024, ()),
    "SkyRL, Qwen2.5-32B, DAPO": ("Qwen2.5-32B", 2, 512, 32, 16, 2048, 20480, ()),
    "verl, Qwen2.5-32B, GSM8K": ("Qwen2.5-32B", 2, 1024, 128, 5, 1024, 1024, ()),
    "verl, Qwen2.5-32B, DAPO": ("Qwen2.5-32B", 16, 512, 32, 16, 2048, 20480, ()),
    "verl, Qwen2.5-72B, DAPO": ("Qwen2.5-72B", 16, 512, 32, 16, 2048, 20480, ()),
    "verl, Qwen3-30B-A3B": ("Qwen3-30B-A3B", 1, 512, 128, 8, 2048, 4096, ()),
    "NeMo RL, Qwen2.5-32B": ("Qwen2.5-32B", 32, 64, 64, 32, 1024, 15360, ()),
    "NeMo RL, Qwen3-30B-A3B": ("Qwen3-30B-A3B", 4, 64, 64, 32, 1024, 3072, ()),
    "NeMo RL, Llama-3.3-70B": ("Llama-3.1-70B", 4, 64, 64, 32, 1024, 3072, ()),
    "prime-rl, Qwen3-30B-A3B": (
        "Qwen3-30B-A3B",
        4,
        64,
        64,
        8,
        1024,
        31744,
        ("trainer.max_staleness=8", "algorithm=tis"),
    ),
}
"""Model, nodes of 8, prompts of a batch and of a mini-batch, samples, tokens of a prompt and of a response, and more."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_what_is_chosen_for_published_recipes(name: str) -> None:
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert form_of(recipe(name)).partition(":")[0] == row.split(" | ")[3]


def recipe(name: str) -> Config:
    model, nodes, batch, mini, samples, prompt, response, more = RECIPES[name]
    settings = {
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": mini,
        "generator.n_samples_per_prompt": samples,
        "generator.max_turns": 1,
        "data.max_prompt_length": prompt,
        "generator.sampling.max_generate_length": response,
        "generator.max_context_length": prompt + response,
    }
    return placed(model, gpus(*[8] * nodes), CLUSTER, *(f"{key}={value}" for key, value in settings.items()), *more)
