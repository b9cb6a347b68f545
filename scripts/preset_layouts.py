#!/usr/bin/env python3
"""One real step of every preset under every layout, on the same recorded on-policy rollouts: do the gradient norms agree?

    record (one step of the loop, a tiny random model) --> rollouts, rewards drawn
    each preset x rows per trajectory or per turn x layout x 1 or 2 ranks x float32, float64:
        assemble --> score --> estimate --> close --> forward, backward --> gradient norm

Old, reference and value columns are scored once and shared by all layouts ("shared"), and once by each layout itself
("own"). The plain case is one row per trajectory, padded, on one rank.

Some presets select tokens by a computed quantity, and two evaluations in float32 may select others. A token counts as
flipped where the slope of its loss differs from that of the plain case by more than rounding; the norm is then also taken
with the slopes of these tokens held at the plain case's.

    python scripts/preset_layouts.py            prints the table
    python scripts/preset_layouts.py --write    puts it into docs/algorithms.md
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from torch import (
    Tensor,
    distributed as dist,  # noqa: TID251 - the two ranks are processes of this script
    multiprocessing,
    nn,
)
from transformers import AutoModelForCausalLM

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout as RowLayout
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, StagedBatch, computed_together, stage
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import needs_critic, needs_reference
from skyrl_train.config.derived import old_logprobs_scored
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import ModelStrategy, Replicated, SingleProcess, join, leave
from skyrl_train.endpoints import Rendezvous
from skyrl_train.learner import CriticLearner, ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm, load_tokenizer, load_value_model, quiet_transformers
from skyrl_train.runs import assembler, train
from skyrl_train.runs.cli import HYDRA_VERSION_BASE, conf_dir, load_node, register_resolvers
from skyrl_train.telemetry import StepMetrics
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.trainers import steps
from skyrl_train.types import RolloutBatch, StopReason, Trajectory

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- layouts: written by scripts/preset_layouts.py -->", "<!-- end of layouts -->"
PRESETS = tuple(sorted(path.stem for path in (conf_dir() / "algorithm").glob("*.yaml")))
EXTRA = {
    "distillation": ("reference.model.path=the-policy-with-its-weights-moved",),
    "gdpo": ("+trainer.algorithm.reward_components={solved: 1.0, solved_first_turn: 0.5}",),
}
"""What a preset asks for beside its name."""
SIZES = (
    "platform=cpu",
    "+experiment=gsm8k_multiturn",
    "tracker=[]",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "generator.sampling.max_generate_length=24",
    "trainer.total_steps=1",
    "trainer.train_batch_size=3",
    "trainer.policy_mini_batch_size=3",
    "trainer.critic_mini_batch_size=3",
    "trainer.ckpt_interval=0",
    "trainer.export_hf=false",
)
ROWS_PER_MICRO_BATCH = 5
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative difference of a gradient norm to that of the plain case."""
DTYPES = tuple(LIMITS)
FLIPPED = 1e-3
"""A token's slope that differs by more than this share of the largest one is a selection that flipped, not rounding."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a forward computes rows."""

    name: str
    choice: LayoutChoice
    merges: bool = False


LAYOUTS = (
    Layout(name="padded", choice="padded"),
    Layout(name="packed", choice="packed"),
    Layout(name="merged", choice="packed", merges=True),
    Layout(name="prefix_shared", choice="prefix_shared"),
)


_TWO_RANKS, _NORMS = "two_ranks.safetensors", "norms"
"""A file, and its tensor `[cases, 4]`: the numbers of `Norms`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: what is computed, and how."""

    preset: str
    dtype: torch.dtype
    step_wise: bool
    layout: Layout
    shared: bool
    """Columns are those of the plain case; else this layout scores its own."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Of one step."""

    policy: float
    critic: float | None
    num_flipped: int
    held: float
    """The policy's, with the slopes of flipped tokens held at the plain case's."""


Table = dict[str, Tensor]
"""Column name to `[trajectories, longest]`: a token has one number, in whichever row it stands."""


class SpreadLearner:
    """A learner of which each rank computes its shard of every batch. Implements Learner as far as a step needs."""

    def __init__(self, learner: PolicyLearner | CriticLearner, layout: Layout) -> None:
        self.learner, self.layout = learner, layout
        self.strategy = learner.engine.strategy
        trainer = TrainerConfig(
            layout=layout.choice,
            micro_train_batch_size_per_gpu=ROWS_PER_MICRO_BATCH,
            micro_forward_batch_size_per_gpu=ROWS_PER_MICRO_BATCH,
        )
        batching = make_micro_batch_strategy(trainer, merge_turns=layout.merges)
        learner.engine.oom_retry.use(micro_batching=batching)

    def staged(self, batch: TrainingInputBatch) -> StagedBatch:
        together = computed_together(self.layout.choice, merge_turns=self.layout.merges)
        return stage(batch, self.strategy.num_ranks, together=together)

    def _scored(self, batch: TrainingInputBatch, score: Callable[[TrainingInputBatch], Tensor]) -> Tensor:
        staged = self.staged(batch)
        own = score(staged.shards[self.strategy.rank])
        found = [own] * self.strategy.num_ranks
        if self.strategy.num_ranks > 1:
            dist.all_gather_object(found, own)
        return staged.collect(found)

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        return self._scored(batch, self.learner.forward)

    def forward_with_entropy(self, batch: TrainingInputBatch) -> Tensor:
        assert isinstance(self.learner, PolicyLearner)
        return self._scored(batch, self.learner.forward_with_entropy)

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        assert isinstance(self.learner, PolicyLearner)
        return self._scored(batch, self.learner.forward_sum_pi_squared)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        shard = self.staged(mini_batch.batch).shards[self.strategy.rank]
        return self.learner.forward_backward(replace(mini_batch, batch=shard))

    def optim_step(self) -> StepMetrics:
        return self.learner.optim_step()


class NotingPolicy(SpreadLearner):
    """The policy, which also notes the slope of each token's loss, in float32, and compares it with the plain case's."""

    plain_slopes: Tensor | None = None
    num_flipped = 0
    slopes: Tensor | None = None
    held: float | None = None

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        if self.learner.engine.model.dtype == torch.float32:
            self._note(mini_batch)
        return super().forward_backward(mini_batch)

    def _note(self, mini_batch: MiniBatch) -> None:
        """What the loss makes of the log-probabilities that this layout computes, token by token."""
        assert isinstance(self.learner, PolicyLearner)
        batch = mini_batch.batch
        logprobs = batch.with_columns(values=self.forward(batch)).padded("values").requires_grad_()
        columns = {name: batch.padded(name) for name in batch.token_columns}
        total = self.learner._terms(columns, logprobs, torch.zeros_like(logprobs)).total
        slopes = batch.from_padded(torch.autograd.grad(total, logprobs)[0])
        self.slopes = to_table(batch, slopes)
        if self.plain_slopes is None:
            return
        expected = from_table(batch, self.plain_slopes)
        flipped = (slopes - expected).abs() > FLIPPED * expected.abs().max()
        self.num_flipped = int(flipped.sum())
        if self.num_flipped:
            held = batch.with_columns(advantages=torch.where(flipped, expected, slopes).float())
            self.learner.engine.forward_backward(self.staged(held).shards[self.strategy.rank], self._linear)
            self.held = self.optim_step()["policy/grad_norm"].value

    def _linear(self, hidden: Tensor, rows: TrainingInputBatch, layout: RowLayout) -> tuple[Tensor, StepMetrics]:
        """The loss with these slopes; they stand in the column `advantages`."""
        assert isinstance(self.learner, PolicyLearner)
        scores = self.learner._scores(hidden, rows, layout, with_entropy=False)
        return (rows.padded("advantages") * scores.logprobs).sum(), {}


def to_table(batch: TrainingInputBatch, column: Tensor) -> Tensor:
    """`[trajectories, longest]` of a flat column, 0 where nothing is trained."""
    trajectory, position, mask = _places(batch)
    table = column.new_zeros(int(trajectory.max()) + 1, 4096)
    return table.index_put((trajectory[mask], position[mask]), column[mask])


def from_table(batch: TrainingInputBatch, table: Tensor) -> Tensor:
    """The flat column of another form of the same trajectories; 0 where nothing is trained."""
    trajectory, position, mask = _places(batch)
    return torch.where(mask, table[trajectory, position], 0.0)


def _places(batch: TrainingInputBatch) -> tuple[Tensor, Tensor, Tensor]:
    position = torch.arange(batch.num_tokens) - torch.repeat_interleave(batch.row_offsets[:-1], batch.lengths)
    return torch.repeat_interleave(batch["trajectory_index"].long(), batch.lengths), position, batch["loss_mask"]


def config_of(preset: str, folder: Path, *overrides: str) -> Config:
    """The preset on the model of `folder`."""
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        paths = [f"model.path={folder / 'model'}", f"output_dir={folder / 'recorded'}"]
        chosen = [f"algorithm={preset}", *EXTRA.get(preset, ()), *overrides, *paths]
        return load_node(compose("config", [*SIZES, *chosen]), Config)


def save_model(folder: Path) -> None:
    """A random model of the bundled one's family and vocabulary, small enough for hundreds of steps in float64."""
    bundled = ModelConfig()
    sizes: Any = load_causal_lm(bundled, "cpu").config
    sizes.hidden_size, sizes.intermediate_size, sizes.initializer_range = 48, 64, 0.2
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(sizes).save_pretrained(folder)
    load_tokenizer(bundled).save_pretrained(folder)


def record(folder: Path) -> RolloutBatch:
    """One step's rollouts by the model as it is, through the whole loop: prompts, environment, engine; and the prompts that
    a policy is shown as its own teacher.

    A random model solves nothing and seldom stops, so rewards, those of greedy samples and the components of GDPO are drawn,
    and every other trajectory is told to have ended by itself.
    """
    train(config_of("self_distillation", folder, "data.max_train_prompts=3", "trainer.dump_rollouts=true"))
    rollouts = read_rollouts(folder / "recorded" / "rollouts" / "train_step_000001.parquet")[1]
    draws = random.Random(0)

    def rewarded(trajectory: Trajectory) -> Trajectory:
        turns = tuple(replace(turn, reward=draws.choice([0.0, 0.5, 1.0])) for turn in trajectory.turns)
        end = StopReason.LENGTH if trajectory.sample_index % 2 else StopReason.STOP
        turns = (*turns[:-1], replace(turns[-1], stop_reason=end))
        metrics = {name: draws.choice([0.0, 1.0]) for name in ("solved", "solved_first_turn")}
        return replace(trajectory, turns=turns, metrics=metrics, greedy_reward=0.5)

    return replace(rollouts, trajectories=tuple(rewarded(trajectory) for trajectory in rollouts.trajectories))


def in_float64(model: nn.Module) -> None:
    """Computes in float64 throughout: transformers' norms would round to float32 inside."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                weight: Any = child.weight
                norm = nn.RMSNorm(weight.shape[0], eps=float(child.variance_epsilon))  # type: ignore[arg-type]
                norm.weight = weight
                setattr(parent, name, norm)
    model.double()


def build(config: Config, role: str, dtype: torch.dtype, strategy: ModelStrategy) -> PolicyLearner | CriticLearner:
    """The model in this role. Its optimizer has a rate of 0: a step tells the gradient's norm and moves nothing."""
    model: Any = (load_value_model if role == "critic" else load_causal_lm)(config.model, "cpu")
    generator = torch.Generator().manual_seed(1)
    if role == "critic":
        nn.init.normal_(model.score.weight, std=0.2, generator=generator)
    if role == "reference" and config.reference.model.path != "policy":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    if dtype == torch.float64:
        in_float64(model)
    optimizer = OptimizerConfig(name="sgd", lr=0.0, weight_decay=0.0, max_grad_norm=0.0)
    engine = ModelEngine(
        model,
        name=role,
        micro_batching=make_micro_batch_strategy(TrainerConfig()),
        optimizer=None if role == "reference" else optimizer,
        strategy=strategy,
    )
    if role == "critic":
        return CriticLearner(engine, model=config.model, algorithm=config.trainer.algorithm)
    return PolicyLearner(
        engine,
        model=config.model,
        algorithm=config.trainer.algorithm,
        temperature=1.0,
        on_policy=old_logprobs_scored(scored_before(config).trainer) != "all",
    )


def scored_before(config: Config) -> Config:
    """The same with more than one epoch to come, for which the policy scores the batch where its loss reads that."""
    return replace(config, trainer=replace(config.trainer, update_epochs_per_batch=2))


class Steps:
    """Steps of one preset in one type, on this process's ranks."""

    def __init__(
        self, preset: str, dtype: torch.dtype, rollouts: RolloutBatch, folder: Path, strategy: ModelStrategy
    ) -> None:
        self.preset, self.dtype, self.rollouts = preset, dtype, rollouts
        self.config = config_of(preset, folder)
        algorithm = self.config.trainer.algorithm
        roles = ["policy"]
        roles += ["reference"] if needs_reference(algorithm) else []
        roles += ["critic"] if needs_critic(algorithm) else []
        self.learners = {role: build(self.config, role, dtype, strategy) for role in roles}
        self.tables: Table = {}
        self.plain_slopes: Tensor | None = None

    def run(self, case: Case, *, is_plain: bool = False) -> Norms:
        """The norms of one optimizer step over all rollouts. The plain case comes first and leaves its columns."""
        generator = replace(self.config.generator, step_wise_trajectories=case.step_wise)
        config = replace(self.config, generator=generator)
        policy = NotingPolicy(self.learners["policy"], case.layout)
        policy.plain_slopes = self.plain_slopes
        others = {
            role: SpreadLearner(learner, case.layout) for role, learner in self.learners.items() if role != "policy"
        }
        learners: Any = steps.Learners(
            policy=policy,  # type: ignore[arg-type]
            reference=others.get("reference"),  # type: ignore[arg-type]
            critic=others.get("critic"),  # type: ignore[arg-type]
        )
        batch = assembler(config)(self.rollouts, step=1, weight_version=0)
        if case.shared and not is_plain:
            columns = {name: from_table(batch, table) for name, table in self.tables.items()}
            batch = batch.with_columns(**columns)
        else:
            scored = steps.score(batch, learners, scored_before(config).trainer, rollouts=self.rollouts)
            if is_plain:
                new = scored.token_columns.keys() - batch.token_columns.keys()
                self.tables = {name: to_table(scored, scored[name]) for name in new}
            batch = scored
        coef = config.trainer.algorithm.kl_reward_coef
        batch = steps.estimate(batch, config.trainer.algorithm, kl_coef=coef, seed=config.seed)
        metrics = steps.update(batch, learners, config.trainer, on_progress=lambda _done, _total: None).metrics
        if is_plain:
            self.plain_slopes = policy.slopes
        norm = metrics["policy/grad_norm"].value
        return Norms(
            policy=norm,
            critic=metrics["critic/grad_norm"].value if "critic" in others else None,
            num_flipped=policy.num_flipped,
            held=norm if policy.held is None else policy.held,
        )


def cases_of(preset: str, dtype: torch.dtype) -> list[Case]:
    """The plain one first."""
    return [
        Case(preset=preset, dtype=dtype, step_wise=step_wise, layout=layout, shared=shared)
        for shared in (True, False)
        for step_wise in (False, True)
        for layout in LAYOUTS
    ]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """All cases of one preset in one type on one rank, and what the plain one leaves."""

    norms: dict[Case, Norms]
    tables: Table
    plain_slopes: Tensor | None


def run_alone(presets: Sequence[str], rollouts: RolloutBatch, folder: Path) -> dict[tuple[str, torch.dtype], Ran]:
    found = {}
    for preset in presets:
        for dtype in DTYPES:
            own = Steps(preset, dtype, rollouts, folder, SingleProcess())
            cases = cases_of(preset, dtype)
            norms = {case: own.run(case, is_plain=case is cases[0]) for case in cases}
            found[preset, dtype] = Ran(norms=norms, tables=own.tables, plain_slopes=own.plain_slopes)
        print(f"{preset}: one rank done", flush=True)
    return found


def run_rank(rank: int, folder: Path, rollouts: RolloutBatch, alone: dict[tuple[str, torch.dtype], Ran]) -> None:
    """One of two ranks: each step's rows are dealt to both, and their gradients are summed. Rank 0 keeps the norms."""
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting"
    join(Rendezvous(rank=rank, num_ranks=2, init_method=place, timeout_s=TIMEOUT_S), torch.device("cpu"))
    found: dict[Case, Norms] = {}  # in the order of `read_two_ranks`
    for (preset, dtype), first in alone.items():
        own = Steps(preset, dtype, rollouts, folder, Replicated())
        own.tables, own.plain_slopes = first.tables, first.plain_slopes
        found.update((case, own.run(case)) for case in cases_of(preset, dtype))
    if rank == 0:
        rows = [[each.policy, each.critic or 0.0, each.num_flipped, each.held] for each in found.values()]
        save_file({_NORMS: torch.tensor(rows, dtype=torch.float64)}, folder / _TWO_RANKS)
    dist.barrier()
    leave()


def read_two_ranks(folder: Path, alone: dict[tuple[str, torch.dtype], Ran]) -> dict[Case, Norms]:
    """What rank 0 wrote, by the cases that one rank ran as well."""
    rows = load_file(folder / _TWO_RANKS)[_NORMS].tolist()
    cases = [(case, norms) for ran in alone.values() for case, norms in ran.norms.items()]
    return {
        case: Norms(policy=policy, critic=None if first.critic is None else critic, num_flipped=int(flipped), held=held)
        for (case, first), (policy, critic, flipped, held) in zip(cases, rows, strict=True)
    }


def run_all(presets: Sequence[str], folder: Path) -> list[tuple[Case, int, Norms, Norms]]:
    """Each case with its number of ranks, its norms, and those of the plain case."""
    save_model(folder / "model")
    rollouts = record(folder)
    alone = run_alone(presets, rollouts, folder)
    multiprocessing.start_processes(run_rank, args=(folder, rollouts, alone), nprocs=2, join=True, start_method="spawn")
    together = read_two_ranks(folder, alone)
    found = []
    for ran in alone.values():
        first, plain = next(iter(ran.norms.items()))
        if not plain.policy:
            raise ValueError(f"{first.preset}: these rollouts give it no gradient, which says nothing of layouts")
        for case, norms in ran.norms.items():
            found += [(case, 1, norms, plain), (case, 2, together[case], plain)]
    return found


def distance(norms: Norms, plain: Norms, *, held: bool) -> float:
    """The larger of the policy's and the critic's relative difference."""
    found = [abs((norms.held if held else norms.policy) / plain.policy - 1)]
    if norms.critic is not None and plain.critic is not None:
        found.append(abs(norms.critic / plain.critic - 1))
    return max(found)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One preset's line of the table."""

    preset: str
    norm: float
    largest: dict[tuple[torch.dtype, bool], float]
    """By type and by whether columns are shared; with flipped tokens held."""
    as_it_is: float
    """The largest in float32 without holding any."""
    num_flipped: int
    """The most in one case."""

    @property
    def within(self) -> bool:
        return all(largest <= LIMITS[dtype] for (dtype, _), largest in self.largest.items())


def rows_of(found: Sequence[tuple[Case, int, Norms, Norms]]) -> list[Row]:
    rows = []
    for preset in dict.fromkeys(case.preset for case, *_ in found):
        own = [(case, norms, plain) for case, _, norms, plain in found if case.preset == preset]
        largest = {
            (dtype, shared): max(
                distance(norms, plain, held=True)
                for case, norms, plain in own
                if case.dtype == dtype and case.shared == shared
            )
            for dtype in DTYPES
            for shared in (True, False)
        }
        single = [(norms, plain) for case, norms, plain in own if case.dtype == torch.float32]
        rows.append(
            Row(
                preset=preset,
                norm=own[0][2].policy,
                largest=largest,
                as_it_is=max(distance(norms, plain, held=False) for norms, plain in single),
                num_flipped=max(norms.num_flipped for norms, _ in single),
            )
        )
    return rows


HEADER = (
    "| Preset | Gradient norm | float64: shared, own | float32: shared, own |",
    "|---|---|---|---|",
)


def line_of(row: Row) -> str:
    cells = " | ".join(f"{row.largest[dtype, True]:.0e}, {row.largest[dtype, False]:.0e}" for dtype in DTYPES)
    flipped = f", {row.num_flipped} flipped ({row.as_it_is:.0e} with them)" if row.num_flipped else ""
    return f"| `{row.preset}` | {row.norm:.4f} | {cells}{flipped} |"


def in_jobs(presets: Sequence[str], jobs: int) -> tuple[list[str], bool]:
    """The table's lines, each job measuring its share of the presets in processes of its own, and whether all are within."""
    running = [
        subprocess.Popen([sys.executable, __file__, *presets[job::jobs]], stdout=subprocess.PIPE, text=True)
        for job in range(min(jobs, len(presets)))
    ]
    printed = [line for process in running for line in process.communicate()[0].splitlines()]
    within = all(process.returncode == 0 for process in running)
    return sorted(line for line in printed if line.startswith("| `")), within


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a preset's gradient depends on its layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/algorithms.md")
    parser.add_argument("presets", nargs="*", help="only these (default: all of conf/algorithm)")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (three each)")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    presets = parsed.presets or PRESETS
    if parsed.jobs > 1:
        lines, within = in_jobs(presets, parsed.jobs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = rows_of(run_all(presets, Path(folder)))
        lines, within = [line_of(row) for row in rows], all(row.within for row in rows)
        print(*(f"outside of the limits: {row.preset}" for row in rows if not row.within), sep="\n")
    content = "\n".join([*HEADER, *lines])
    print(content)
    if parsed.write:
        document = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = document.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}", encoding="utf-8")
    return 0 if within and len(lines) == len(presets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
