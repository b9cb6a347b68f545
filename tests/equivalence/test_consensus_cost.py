"""What it costs that ranks learn of memory that ran out: agreements of a pass over micro-batches, and seconds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from skyrl_train.batch.steps import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import close
from tests.support.learner_cases import fixed_rows, make_batch, save_tiny_model
from tests.support.memory_cases import FailingMeter, size_itself, spread

LENGTHS = [9, 14, 7, 12, 16, 8, 10, 11]
NUM_LAYERS = 8
ROUNDS = 3


def on_rank(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    """An update and a scoring with a rendezvous ahead of each collective, and with one agreement a micro-batch, in turns."""
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    optimizer = OptimizerConfig(name="sgd", lr=0.0)
    engine = ModelEngine(
        model, name="policy", micro_batching=fixed_rows(1), optimizer=optimizer, strategy=spread("fsdp2")
    )
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=AlgorithmConfig(), temperature=1.0)
    size_itself(engine, FailingMeter(), tokens=32)
    closed = close(make_batch(LENGTHS, dtype=model.dtype))
    shard = stage(closed.batch, 2).shards[rank]
    consensus: Any = engine.strategy
    consensus = consensus._consensus
    counts = {"agreements": 0, "micro_batches": 0}
    agree, begin = consensus._rendezvous, consensus.begin_micro_batch

    def counted(code: int) -> int:
        counts["agreements"] += 1
        return int(agree(code))

    def begun(kind: object) -> None:
        counts["micro_batches"] += 1
        begin(kind)

    consensus._rendezvous, consensus.begin_micro_batch = counted, begun
    phases = {
        "update": lambda: learner.forward_backward(replace(closed, batch=shard)),
        "score": lambda: learner.forward(shard),
    }
    found: dict[str, dict[str, Any]] = {}
    for round_ in range(
        ROUNDS + 1
    ):  # the first is not counted: it makes what FSDP2 gathers into, and notes collectives
        for follows in (True, False):
            consensus.follows = follows
            for phase, run in phases.items():
                distributed.barrier()
                counts |= dict.fromkeys(counts, 0)
                started = time.perf_counter()
                run()
                seconds = time.perf_counter() - started
                learner.optim_step()
                if round_:
                    each = found.setdefault(f"{phase}, {'once a micro-batch' if follows else 'each collective'}", {})
                    each.setdefault("seconds", []).append(seconds / counts["micro_batches"])
                    each |= counts
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_agree_once_a_micro_batch_and_not_once_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path, num_hidden_layers=NUM_LAYERS)
    first, second = on_ranks(on_rank, tmp_path)
    for name, each in first.items():
        assert {**each, "seconds": 0} == {**second[name], "seconds": 0}
        print(
            f"\n{name}: {each['agreements']} agreements for {each['micro_batches']} micro-batches of {NUM_LAYERS} layers,",
            end=" ",
        )
        print(f"{1e3 * min(each['seconds']):.1f} ms each", end="")
    update, score = (first[f"{phase}, once a micro-batch"] for phase in ("update", "score"))
    assert all(each["agreements"] == each["micro_batches"] + 1 for each in (update, score))
    before = {phase: first[f"{phase}, each collective"] for phase in ("update", "score")}
    assert before["score"]["agreements"] > NUM_LAYERS * before["score"]["micro_batches"]
    assert before["update"]["agreements"] > 2 * NUM_LAYERS * before["update"]["micro_batches"]
