"""What a plan predicts of a model's passes is what the run's passes take, and no weights are read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.config import Config
from skyrl_train.config.models import CriticConfig, StrategyConfig
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory import predict
from skyrl_train.learner.memory.predict import Effort, PredictedPasses
from skyrl_train.learner.memory.share import DeviceShare
from skyrl_train.model.sizes import ParameterCounts
from skyrl_train.plan import head_violations, models_of, peak_on_cpu, plan_memory
from tests.support.learner_cases import save_tiny_model

LONGEST = 24
COUNTS = ParameterCounts(total=1000, trained=1000, block=300, root=100)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def on_a_cpu(folder: Path, **changes: object) -> Config:
    config = Config()
    return replace(
        config,
        platform=replace(config.platform, name="cpu", device="cpu"),
        model=replace(config.model, path=str(folder)),
        critic=replace(CriticConfig(), model=replace(CriticConfig().model, path="policy")),
        generator=replace(config.generator, max_context_length=LONGEST),
        **changes,  # type: ignore[arg-type]
    )


def predicted(folder: Path, effort: Effort | None = None, **changes: object) -> PredictedPasses:
    return models_of(on_a_cpu(folder, **changes), effort or Effort())["policy"]


@pytest.mark.parametrize(
    "name",
    [
        "bundled",
        "tiny mixture of experts",
        pytest.param("30M dense", marks=pytest.mark.slow),
        pytest.param("30M dense, adapter", marks=pytest.mark.nightly),
    ],
)
def test_predicted_peaks_are_within_a_few_percent_of_measured_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))
    from memory import CASES, predictions

    (case,) = (case for case in CASES if case.name == name)
    for found in predictions(replace(case, rows=(3,)), tmp_path / "model"):
        assert abs(found.error) < 0.05, found


@pytest.mark.slow
def test_what_was_traced_once_is_remembered_and_needs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model")
    first, second = Effort(), Effort()
    estimate = predicted(folder, first).estimate("training", 5)
    assert first.num_pieces > 0
    again = predicted(folder, second)
    monkeypatch.setattr(PredictedPasses, "_tracer", lambda *_: pytest.fail("traced again"))
    assert again.estimate("training", 5) == estimate
    assert second.line() == "traced by an earlier plan, nothing was run"


@pytest.mark.slow
def test_a_prediction_that_was_cut_off_goes_on_with_the_piece_that_it_was_at(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    told: list[str] = []

    def stop_at_the_fourth(text: str) -> None:
        told.append(text)
        if len(told) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predicted(folder, Effort(announce=stop_at_the_fourth)).estimate("training", 5)
    rest = Effort(announce=told.append)
    predicted(folder, rest).estimate("training", 5)
    assert told[3].partition(" is traced")[0] == told[4].partition(" is traced")[0]
    assert len({text.partition(" is traced")[0] for text in told}) == len(told) - 1, "no other piece twice"


def test_another_model_another_setting_and_another_version_are_traced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    files = {predicted(folder)._file}
    longer = predicted(folder, trainer=replace(Config().trainer, layout="packed"))
    files.add(longer._file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 128}), encoding="utf-8")
    files.add(predicted(folder)._file)
    monkeypatch.setattr("skyrl_train.model.sizes.counts.version", lambda _: "0")
    files.add(predicted(folder)._file)
    assert len(files) == 4


@pytest.mark.slow
def test_layers_that_are_alike_are_traced_as_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    types = {"layer_types": ["full_attention"] * 7} if config.get("layer_types") else {}
    content = json.dumps({**config, "num_hidden_layers": 7, **types})
    (folder / "config.json").write_text(content, encoding="utf-8")
    few = predicted(folder)
    assert few._depths == (2, 3)
    found = few.estimate("training", 4)
    monkeypatch.setattr(predict, "_DEPTHS", (7, 7))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    whole = predicted(folder).estimate("training", 4)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.001)
    assert found.moment == whole.moment


@pytest.mark.slow
def test_a_budget_is_what_fits_and_a_row_that_does_not_is_named(tmp_path: Path) -> None:
    passes = predicted(save_tiny_model(tmp_path / "model"))
    limit = passes.estimate("training", 6).peak_bytes + 1
    budget = passes.token_budget("training", limit)
    assert passes.estimate("training", budget // LONGEST).peak_bytes <= limit
    assert 6 * LONGEST <= budget < 7 * LONGEST
    with pytest.raises(MemoryLimitError, match=rf"one row of {LONGEST} tokens takes \d+ bytes in training"):
        passes.token_budget("training", 1000)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plan_asks_xla_where_it_is_told_to(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="the extra `jax` is not installed")
    folder = save_tiny_model(tmp_path / "model")
    effort = Effort(how="compiled by XLA")
    compiled, traced = predicted(folder, effort), predicted(folder)
    assert compiled._file != traced._file
    for phase in ("training", "scoring"):
        resident = traced.resident_bytes(phase)  # type: ignore[arg-type]
        assert compiled.resident_bytes(phase) == resident  # type: ignore[arg-type]
        growing = [each.estimate(phase, 16).peak_bytes - resident for each in (compiled, traced)]  # type: ignore[arg-type]
        assert 0.3 < growing[0] / growing[1] < 3.0, phase
    assert "compiled by XLA in" in effort.line()


# What does not depend on a micro-batch, by hand


def test_what_lies_there_all_the_time() -> None:
    assert DeviceShare().resident(COUNTS, training=True) == {
        "parameters": 4000,
        "gradients": 4000,
        "optimizer state": 8000,
    }
    scored = replace(COUNTS, trained=0)
    assert DeviceShare(state_bytes=0).resident(scored, training=False) == {"parameters": 4000}


def test_shards_are_equal_parts_and_may_lie_in_host_memory() -> None:
    shares = DeviceShare(num_shards=4, sharded=True)
    assert shares.resident(COUNTS, training=False) == {"parameters": 1000, "optimizer state": 2000}
    assert replace(shares, cpu_offload=True).resident(COUNTS, training=True) == {}
    whole = replace(shares, gradient_sync="step").resident(COUNTS, training=True)
    assert whole["gradients"] == 4000, "kept whole until the last micro-batch of a step"


def test_state_in_the_host_is_on_the_device_in_part_while_the_optimizer_steps() -> None:
    share = DeviceShare(state_at_once=3000)
    assert share.resident(COUNTS, training=True) == {"parameters": 4000, "gradients": 4000}
    assert share.stepping(COUNTS) == {"parameters": 4000, "gradients": 4000, "optimizer state": 3000}
    assert DeviceShare().stepping(COUNTS) == {}
    shards = replace(share, num_shards=4, sharded=True, gradient_sync="step")
    assert shards.resident(COUNTS, training=True)["gradients"] == 4000, "whole while passes go on"
    assert shards.stepping(COUNTS) == {"parameters": 1000, "gradients": 1000, "optimizer state": 2000}


@pytest.mark.slow
def test_a_step_that_holds_more_than_its_passes_is_the_peak(tmp_path: Path) -> None:
    passes = predicted(save_tiny_model(tmp_path / "model"), strategy=StrategyConfig(cpu_offload="optimizer"))
    parameters = passes.counts.total
    assert passes.state_in_host_bytes == 8 * parameters
    small = replace(passes, share=replace(passes.share, state_at_once=1), _probers=passes._probers)
    assert passes.estimate("scoring", 1) == small.estimate("scoring", 1)
    in_pass, in_step = small.estimate("training", 1), passes.estimate("training", 1)
    assert "optimizer state" not in in_pass.kinds
    assert in_step.moment == "in the optimizer's step"
    assert in_step.peak_bytes == 16 * parameters > in_pass.peak_bytes
    with pytest.raises(MemoryLimitError, match="one row of"):
        passes.token_budget("training", in_step.peak_bytes - 1)


def test_ranks_of_a_sharded_model_exchange_layers_and_gradients() -> None:
    shares = DeviceShare(num_shards=4, sharded=True, compute_bytes=2)
    assert shares.exchanged(COUNTS, training=True) == {
        "gathered parameters": 2 * (100 + 2 * 300),
        "gradients in flight": 4 * 300 + 4 * 75,
    }
    assert "gradients in flight" not in shares.exchanged(replace(COUNTS, trained=10), training=True)
    assert DeviceShare().exchanged(COUNTS, training=True) == {}


@pytest.mark.slow
def test_ranks_that_share_a_row_hold_their_positions_of_it_and_what_they_exchange(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    alone = predicted(folder)
    shared = replace(alone, share=replace(alone.share, sequence=4), _probers={})
    short = replace(alone, longest=LONGEST // 4, _probers={})
    # A row of 24 tokens over four ranks takes what one of 6 takes, and the heads that are on their way.
    sizes = alone.sizes
    features = sizes.num_heads + 2 * math.lcm(sizes.num_kv_heads, 4)
    found = shared.estimate("training", 1).kinds
    assert found["exchanged heads"] == 3 * features * sizes.head_dim * 6 * 4
    del found["exchanged heads"]
    assert found == short.estimate("training", 1).kinds
    limit = short.estimate("training", 3).peak_bytes
    assert LONGEST <= shared.token_budget("training", limit) <= 4 * short.token_budget("training", limit)


def test_a_plan_refuses_ranks_that_do_not_divide_the_heads() -> None:
    config = replace(
        Config(),
        model=replace(Config().model, path="Qwen/Qwen2.5-7B-Instruct"),
        strategy=StrategyConfig(name="fsdp2", sequence_parallel_size=8),
    )
    (found,) = head_violations(config)
    assert found.rule == "must divide the 28 attention heads of Qwen/Qwen2.5-7B-Instruct (policy)"
    assert found.remedy == "try strategy.sequence_parallel_size=7 or strategy.sequence_parallel_size=14"
    for size, path in ((7, "Qwen/Qwen2.5-7B"), (8, "meta-llama/Llama-3.1-8B"), (1, "Qwen/Qwen2.5-7B")):
        strategy = replace(config.strategy, sequence_parallel_size=size)
        assert not list(head_violations(replace(config, strategy=strategy, model=replace(config.model, path=path))))


@pytest.mark.slow
def test_a_row_of_131072_tokens_is_planned_for_eight_ranks_that_share_it() -> None:
    config = Config()
    config = replace(
        config,
        platform=replace(config.platform, name="gpu", device="cuda"),
        model=replace(config.model, path="meta-llama/Llama-3.1-8B", dtype="bfloat16", gradient_checkpointing=True),
        strategy=StrategyConfig(name="fsdp2", sequence_parallel_size=8),
        placement=replace(config.placement, backend="ray", policy_num_workers=8),
        generator=replace(config.generator, max_context_length=131_072),
        trainer=replace(config.trainer, layout="packed"),
        plan=replace(config.plan, device_memory_gb=80.0),
    )
    memory = plan_memory(config, one_row=True)
    assert memory is not None
    assert not memory.violations()
    kinds = memory.passes[0].kinds
    assert kinds["parameters"] == -(-4 * 8_030_261_248 // 8)
    # Inputs of 32 layers of 4,096 in bfloat16, of 16,384 positions on each rank, and what else is kept.
    assert 1.0 < kinds["activations"] / (32 * 4096 * 2 * 16_384) < 1.5
    small = plan_memory(replace(config, plan=replace(config.plan, device_memory_gb=24.0)), one_row=True)
    assert small is not None
    (refused,) = small.violations()
    assert (refused.field, refused.value) == ("generator.max_context_length", "131072")


@pytest.mark.slow
def test_the_process_of_a_run_on_a_cpu_holds_model_engine_and_the_largest_pass(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = on_a_cpu(folder)
    assert peak_on_cpu(config, {"policy": LONGEST}) is None, "the process without a model takes more"
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 2_000_000}))
    weights = 4 * models_of(config, Effort())["policy"].counts.total
    one, many = (peak_on_cpu(config, {"policy": rows * LONGEST}) for rows in (1, 4))
    assert one is not None
    assert many is not None
    parameters_gradients_state_and_engine = 5 * weights
    assert (
        0 < one - parameters_gradients_state_and_engine - 550e6 < many - parameters_gradients_state_and_engine - 550e6
    )
    apart = replace(config, generator=replace(config.generator, backend="vllm"))
    assert peak_on_cpu(apart, {"policy": LONGEST}) is None
