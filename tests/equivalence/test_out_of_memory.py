"""Memory that runs out on one rank, anywhere in a pass: no rank waits, and the step is what it would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.steps import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.learner.memory import MemoryProbe, Prober
from skyrl_train.model import load_causal_lm
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import close, on_policy
from tests.support.learner_cases import fixed_rows, make_batch, make_double, save_tiny_model
from tests.support.memory_cases import DEADLINE_S, FailingMeter, full_weights, size_itself, spread

ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)
ON_POLICY = replace(ALGORITHM, policy_loss={"_target_": "kl_cov", "share": 0.5}, kl_estimator="abs")
"""Terms with a kink where the old and the new log-probability are equal."""
LENGTHS = [9, 14, 7, 12, 16, 8, 10, 11, 13, 9, 15, 6]
TOKENS = 64
CASES = {"ddp": torch.float64, "fsdp2": torch.float64, "fsdp2 in float32": torch.float32}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
RANDOM_POINTS = 6


@dataclass(frozen=True)
class Found:
    """After one step."""

    weights: Tensor
    scores: Tensor
    budgets: tuple[int, int]


@dataclass(frozen=True)
class Ran:
    """One rank's part of a case."""

    num_meetings: int
    calm: Found
    disturbed: list[Found]
    on_policy: list[Found]
    """The undisturbed step from the ranks' own scores, then disturbed ones; of `ddp` alone."""
    probes: list[list[MemoryProbe]]
    """Of an undisturbed sizing, then with memory running out in one probe after another."""
    around_probes: tuple[Tensor, Tensor]
    """Weights before the probes, and after them."""


def build(folder: Path, case: str) -> tuple[PolicyLearner, FailingMeter]:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    if CASES[case] == torch.float64:
        make_double(model)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=fixed_rows(1),
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        strategy=spread(case.split()[0], CASES[case]),
    )
    return PolicyLearner(engine, model=ModelConfig(), algorithm=ALGORITHM, temperature=1.0), FailingMeter()


def one_step(
    learner: PolicyLearner, meter: FailingMeter, rank: int, refused: list[int], *, own_scores: bool = False
) -> Found:
    """A scoring and an update from the weights as they are, which come back afterwards.

    With `own_scores`, what was scored is what the update starts from, however memory ran out in either.
    """
    engine, learner._algorithm = learner.engine, ON_POLICY if own_scores else ALGORITHM
    batches = size_itself(engine, meter, tokens=TOKENS)
    closed = close(make_batch(LENGTHS, dtype=engine.model.dtype))
    shard = stage(closed.batch, 2).shards[rank]
    before = [parameter.detach().clone() for parameter in engine.parameters.values()]
    meter.refuse(*refused)
    scores = learner.forward(shard)
    learner.forward_backward(replace(closed, batch=on_policy(shard, scores) if own_scores else shard))
    learner.optim_step()
    found = Found(full_weights(engine), scores, (batches.budgets.training, batches.budgets.forward))
    with torch.no_grad():
        for parameter, value in zip(engine.parameters.values(), before):
            parameter.copy_(value)
    if engine.strategy.sharded:
        from skyrl_train.distributed import reshard

        reshard(engine.model)
    return found


@contextmanager
def noting_meetings(learner: PolicyLearner, meter: FailingMeter) -> Iterator[list[int]]:
    """How many allocations there were before each agreement of ranks and each collective of a pass."""
    strategy: Any = learner.engine.strategy
    consensus = strategy._consensus
    meet: Callable[[int], int] = consensus._rendezvous
    count: Callable[..., None] = consensus.before_collective
    noted: list[int] = []

    def noting(code: int) -> int:
        noted.append(meter.num_allocations)
        return meet(code)

    def counting(collective: Any = None) -> None:
        noted.append(meter.num_allocations)
        count(collective)

    consensus._rendezvous, consensus.before_collective = noting, counting
    try:
        yield noted
    finally:
        consensus._rendezvous = meet
        del consensus.before_collective


def points_between(marks: list[int]) -> list[int]:
    """One allocation between each two marks, the first, one in the middle and the last in turns."""
    spans = [(before + 1, after) for before, after in pairwise([0, *marks]) if after > before]
    return [(first, (first + last) // 2, last)[index % 3] for index, (first, last) in enumerate(spans)]


def run_case(rank: int, folder: Path, case: str) -> Ran:
    """The undisturbed step, then the same one with memory running out on rank 1 ahead of one meeting after another, at
    random points, and on both ranks at once; then probes."""
    learner, meter = build(folder, case)
    strategy = learner.engine.strategy
    one_step(learner, meter, rank, [])  # the first step makes what FSDP2 gathers into: later ones allocate less
    with noting_meetings(learner, meter) as meetings:
        calm = one_step(learner, meter, rank, [])
    points = points_between(meetings)
    generator = torch.Generator().manual_seed(len(case))
    points += torch.randint(1, meter.num_allocations + 1, (RANDOM_POINTS,), generator=generator).tolist()
    if CASES[case] == torch.float32:
        points = points[::4]
    points = [strategy.agree(point * rank) for point in points]  # those of rank 1
    consensus: Any = strategy
    disturbed = []
    for number, point in enumerate(points):
        if number % 4 == 3:
            consensus._consensus._known.clear()  # as in the first pass of a run, where no collective is foreseen
        disturbed.append(one_step(learner, meter, rank, [point] if rank == 1 else []))
    disturbed.append(one_step(learner, meter, rank, [points[0]]))
    refusals = [[], *([point] if rank == 1 else [] for point in points[1::5])] if case == "ddp" else []
    on_policy_steps = [one_step(learner, meter, rank, refused, own_scores=True) for refused in refusals]
    learner._algorithm = ALGORITHM
    before = full_weights(learner.engine)
    probes = run_probes(learner, meter, rank)
    after = full_weights(learner.engine)
    return Ran(len(meetings), calm, disturbed, on_policy_steps, probes, (before, after))


def run_probes(learner: PolicyLearner, meter: FailingMeter, rank: int) -> list[list[MemoryProbe]]:
    """Probes of 1, 2 and 4 rows and of shorter ones, undisturbed and with memory running out in each."""
    prober, strategy, found = Prober(learner=learner, meter=meter), learner.engine.strategy, list[list[MemoryProbe]]()
    for training in (True, False):
        meter.refuse()
        marks = list[int]()
        for rows in (1, 2, 4, 4, 4):
            prober.probe(rows, 16, training=training)
            marks.append(meter.num_allocations)
        for point in [0, *(strategy.agree(point * rank) for point in points_between(marks))]:
            meter.refuse(*([point] if rank == 1 else []))
            found.append(prober.grow([16, 8, 4], max_positions=64, training=training))
            assert all(parameter.grad is None for parameter in learner.engine.parameters.values())
    return found


def run_rank(rank: int, folder: Path) -> dict[str, Ran]:
    return {case: run_case(rank, folder, case) for case in CASES}


def apart(mine: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((mine - other).abs().max() / other.abs().max())


def sizes(probes: list[MemoryProbe]) -> list[tuple[int, int]]:
    return [(probe.rows, probe.longest) for probe in probes]


def check_steps(calm: Found, disturbed: list[Found], tolerance: float, *, own_scores: bool = False) -> None:
    for found in disturbed:
        training, forward = found.budgets
        assert min(training, forward) < TOKENS, "memory did run out"
        assert apart(found.weights, calm.weights) <= tolerance
        assert apart(found.scores, calm.scores) <= tolerance
        if training == TOKENS and (forward == TOKENS or not own_scores):
            assert torch.equal(found.weights, calm.weights)
        if forward == TOKENS:
            assert torch.equal(found.scores, calm.scores)


@pytest.mark.nightly
def test_memory_that_runs_out_on_one_rank_changes_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase whose micro-batches were not cut smaller is the same bit for bit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path)
    ranks: list[dict[str, Ran]] = on_ranks(run_rank, tmp_path, deadline_s=DEADLINE_S)
    for case, dtype in CASES.items():
        runs = [rank[case] for rank in ranks]
        assert runs[0].num_meetings == runs[1].num_meetings
        assert runs[0].num_meetings >= (2 if case == "ddp" else 16), (
            "gradients are summed once, parameters gathered often"
        )
        for run in runs:
            check_steps(run.calm, run.disturbed, TOLERANCES[dtype])
            if case == "ddp":
                undisturbed_step, *others = run.on_policy
                assert len(others) > 1
                check_steps(undisturbed_step, others, TOLERANCES[dtype], own_scores=True)
            assert torch.equal(*run.around_probes)
        first, second = runs
        assert [found.budgets for found in first.disturbed] == [found.budgets for found in second.disturbed]
        assert [sizes(probes) for probes in first.probes] == [sizes(probes) for probes in second.probes]
        undisturbed = sizes(first.probes[0])
        assert undisturbed == [(1, 16), (2, 16), (4, 16), (8, 8), (16, 4)]
        assert any(len(probes) < len(undisturbed) for probes in first.probes), "none was refused"
