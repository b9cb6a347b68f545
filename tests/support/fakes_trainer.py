"""A whole training run in milliseconds: fakes of the Protocols that a trainer knows, and a run built of them.

The policy is one number, its weight. A sample is right with probability sigmoid(weight), decided by a derived seed, so
that training raises the reward and every run with the same seed is the same.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.config import Config
from skyrl_train.config.derived import scores_entropies
from skyrl_train.data import Curriculum, PromptSource
from skyrl_train.errors import NonFiniteError
from skyrl_train.interfaces import HeldState
from skyrl_train.plan import BatchPlan, plan_batches
from skyrl_train.runs import Attempt, assembler, open_checkpoints, trainer_of
from skyrl_train.system import derive_seed
from skyrl_train.system.files import FileSums, write_hashed
from skyrl_train.telemetry import Last, Mean, RunFolder, StepMetrics
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers import (
    Learners,
    PPOTrainer,
    RolloutLog,
    Start,
    TrainingResult,
    checkpointed_models,
    find_start,
    prepare_run_folder,
    sampling_params,
)
from skyrl_train.trainers.checkpoints import (
    DataFingerprint,
    settings_of,
)
from skyrl_train.trainers.evaluation import Evaluator
from skyrl_train.types import (
    Failure,
    FailureKind,
    Outcome,
    Prompt,
    RolloutBatch,
    SamplingParams,
    StopReason,
    Trajectory,
    Turn,
    find_parent,
    token_ids,
)

BASE_LOGPROB = -1.0


def make_prompts(count: int, **columns: Any) -> list[Prompt]:
    return [
        Prompt(uid=f"p{index}", messages=({"role": "user", "content": f"{index}?"},), extras=columns)
        for index in range(count)
    ]


def make_turn(
    prompt: Sequence[int] = (1, 2), response: Sequence[int] = (3,), *, reward: float = 0.0, **changes: Any
) -> Turn:
    """A turn with its whole prompt: `linked` makes it one of a trajectory."""
    fields: dict[str, Any] = {
        "added_token_ids": token_ids(prompt),
        "response_token_ids": token_ids(response),
        "response_logprobs": (BASE_LOGPROB,) * len(response),
        "response_text": "x" * len(response),
        "reward": reward,
        "stop_reason": StopReason.STOP,
        "weight_versions": ((0, 0),),
    }
    return Turn(**{**fields, **changes})


def linked(*turns: Turn) -> tuple[Turn, ...]:
    """Turns that were made with their whole prompts, each as what it adds to the earlier one that it continues."""
    found: list[Turn] = []
    for turn in turns:
        parent, added = find_parent(found, turn.added_token_ids)
        found.append(replace(turn, parent=parent, added_token_ids=added))
    return tuple(found)


def make_trajectory(*turns: Turn, uid: str = "p0", sample: int = 0, **changes: Any) -> Trajectory:
    turns = linked(*turns) or (make_turn(),)
    trajectory = Trajectory(prompt_uid=uid, sample_index=sample, turns=turns, outcome=Outcome.DONE)
    return replace(trajectory, **changes)


def failed_trajectory(
    *,
    uid: str = "p0",
    sample: int = 0,
    kind: FailureKind = FailureKind.ENVIRONMENT_ERROR,
    message: str = "ValueError: broken",
) -> Trajectory:
    failure = Failure(kind=kind, message=message, turn_index=0)
    return Trajectory(prompt_uid=uid, sample_index=sample, turns=(), outcome=Outcome.FAILED, failure=failure)


class FakeEngine:
    """Holds the weight that samples. Implements WeightTransport."""

    def __init__(self) -> None:
        self.weight = math.nan
        self.versions: list[int] = []

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.weight = float(dict(weights)["weight"])
        self.versions.append(version)


class FakeGenerator:
    """Two turns where the first answer is wrong. Implements Generator.

    `is_broken(step, prompt index, sample)` makes trajectories fail; `on_call` is told the step and the purpose.
    """

    is_recorded = False

    def __init__(
        self,
        engine: FakeEngine,
        *,
        seed: int = 0,
        is_broken: Callable[[int, int, int], bool] = lambda step, prompt, sample: False,
        on_call: Callable[[int, str], None] = lambda step, purpose: None,
    ) -> None:
        self._engine = engine
        self._seed = seed
        self._is_broken = is_broken
        self._on_call = on_call
        self.calls: list[tuple[str, int, tuple[str, ...]]] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
    ) -> RolloutBatch:
        self.calls.append((purpose, global_step, tuple(prompt.uid for prompt in prompts)))
        self._on_call(global_step, purpose)
        trajectories = [
            failed_trajectory(uid=prompt.uid, sample=sample)
            if purpose != "eval" and self._is_broken(global_step, index, sample)
            else self._trajectory(prompt, sample, global_step, purpose)
            for index, prompt in enumerate(prompts)
            for sample in range(n_samples_per_prompt)
        ]
        return RolloutBatch(
            prompts=tuple(prompts), trajectories=tuple(trajectories), n_samples_per_prompt=n_samples_per_prompt
        )

    def close(self) -> None:
        """Nothing is held."""

    def _trajectory(self, prompt: Prompt, sample: int, step: int, purpose: str) -> Trajectory:
        draws = [derive_seed(self._seed, f"{purpose}/{prompt.uid}", step, sample, turn) / 2**63 for turn in range(2)]
        skill = 1.0 / (1.0 + math.exp(-self._engine.weight))
        logprob = logprob_of(self._engine.weight)
        versions = ((0, self._engine.versions[-1] if self._engine.versions else 0),)
        first = make_turn(
            (1, 2),
            (3, 4),
            reward=float(draws[0] < skill),
            response_logprobs=(logprob, logprob),
            weight_versions=versions,
        )
        turns = [first]
        if not first.reward:
            second = 0.5 * (draws[1] < skill)
            turns.append(
                make_turn((1, 2, 3, 4, 9), (5,), reward=second, response_logprobs=(logprob,), weight_versions=versions)
            )
        return make_trajectory(
            *turns,
            uid=prompt.uid,
            sample=sample,
            metrics={"solved": float(turns[-1].reward > 0), "solved_first_turn": first.reward},
        )


def logprob_of(weight: float) -> float:
    return BASE_LOGPROB - 0.01 * weight


class FakeLearner:
    """One weight with momentum: state that is lost shows. Implements Learner."""

    def __init__(
        self, name: str = "policy", *, weight: float = 0.0, lr: float = 1.0, fail_at: int | None = None
    ) -> None:
        """`fail_at` is the optimizer step (from 1) that finds a gradient that is not finite."""
        self.name = name
        self.weight = weight
        self.momentum = 0.0
        self.num_optimizer_steps = 0
        self.num_closed_prompts: list[int] = []
        self.steps_and_versions: list[tuple[int, int]] = []
        """Training step and version of the sampling weights, for each mini-batch."""
        self._gradient = 0.0
        self._lr = lr
        self._fail_at = fail_at

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        return torch.where(batch["loss_mask"], torch.tensor(logprob_of(self.weight)), torch.tensor(0.0))

    def forward_with_entropy(self, batch: TrainingInputBatch) -> Tensor:
        return torch.stack((self.forward(batch), 0.5 * batch["loss_mask"]), dim=1)

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        raise NotImplementedError

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        batch = mini_batch.batch
        self._gradient += float((batch["loss_weights"] * batch["rewards"]).sum())
        self.num_closed_prompts.append(len(set(batch.metadata.uids)))
        self.steps_and_versions.append((batch.metadata.global_step, batch.metadata.weight_version))
        num_tokens = mini_batch.denominators.num_tokens
        return {f"{self.name}/entropy": Mean(0.5 * num_tokens, num_tokens)}

    def optim_step(self) -> StepMetrics:
        if self.num_optimizer_steps + 1 == self._fail_at:
            raise NonFiniteError(f"{self.name}: gradient norm inf. No weight was changed.")
        self.momentum = 0.9 * self.momentum + self._gradient
        self.weight += self._lr * self.momentum
        self.num_optimizer_steps += 1
        gradient, self._gradient = self._gradient, 0.0
        return {f"{self.name}/grad_norm": Mean(abs(gradient), 1.0), f"{self.name}/lr": Last(1.0)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.tensor(self.weight, dtype=torch.float64)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.weight = float(dict(weights)["weight"])

    def hold_state(self, *, copies: bool) -> HeldState:
        state = [self.weight, self.momentum, self.num_optimizer_steps]
        return HeldState(is_copied=copies, write=lambda folder: self.write_state(folder, state))

    def write_state(self, folder: Path, state: Sequence[float]) -> FileSums:
        folder.mkdir(parents=True)
        name = "learner.json"
        return {name: write_hashed(folder / name, [json.dumps(state).encode()])}

    def load(self, folder: Path) -> None:
        self.weight, self.momentum, self.num_optimizer_steps = json.loads((folder / "learner.json").read_text())

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(self.weight))

    def close(self) -> None:
        """Nothing is held."""


class MemoryTracker:
    """Implements Tracker; `fail_at` are steps at which it breaks."""

    def __init__(self, *, fail_at: Sequence[int] = ()) -> None:
        self.records: dict[int, dict[str, float]] = {}
        self.closed = False
        self._fail_at = fail_at

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step in self._fail_at:
            raise ConnectionError("the server went away")
        self.records[step] = dict(metrics)

    def close(self) -> None:
        self.closed = True


def make_config(output_dir: Path, **trainer_changes: Any) -> Config:
    """8 prompts in batches of 4, 2 samples each; 4 steps of 2 optimizer steps; evaluation and checkpoint every 2."""
    config = Config()
    trainer = replace(
        config.trainer,
        **{
            "total_steps": 4,
            "train_batch_size": 4,
            "policy_mini_batch_size": 2,
            "critic_mini_batch_size": 2,
            "micro_train_batch_size_per_gpu": 1,
            "micro_forward_batch_size_per_gpu": 1,
            "eval_interval": 2,
            "ckpt_interval": 2,
            **trainer_changes,
        },
    )
    generator = replace(config.generator, n_samples_per_prompt=2)
    return replace(config, output_dir=str(output_dir), trainer=trainer, generator=generator, run_name="fake run")


def quick_drawing(metrics_file: Path, image_file: Path, *, title: str) -> None:
    """An empty picture: drawing takes longer than all the rest of a fake run."""
    del metrics_file, title
    image_file.touch()


@dataclass
class FakeRun:
    """What `main` does, with fakes. `run()` may be called again in the same folder, as a new process would."""

    root: Path
    config: Config
    learner: FakeLearner = field(default_factory=FakeLearner)
    reference: FakeLearner | None = None
    critic: FakeLearner | None = None
    prompts: list[Prompt] = field(default_factory=lambda: make_prompts(8))
    held_out: list[Prompt] = field(default_factory=lambda: make_prompts(6))
    is_broken: Callable[[int, int, int], bool] = lambda step, prompt, sample: False
    on_call: Callable[[int, str], None] = lambda step, purpose: None
    output: StringIO = field(default_factory=StringIO)
    engine: FakeEngine = field(default_factory=FakeEngine)
    draw: Callable[..., object] = quick_drawing

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.root)
        self.console = RunConsole(file=self.output)
        self.checkpoints = open_checkpoints(self.folder.checkpoints, self.config.trainer)
        self.generator = FakeGenerator(
            self.engine, seed=self.config.seed, is_broken=self.is_broken, on_call=self.on_call
        )

    @property
    def plan(self) -> BatchPlan:
        return plan_batches(self.config, num_train_prompts=len(self.prompts))

    def start(self) -> Start:
        data = DataFingerprint.of(self.prompts)
        return find_start(
            self.config.trainer,
            settings_of(self.config),
            type(self.config),
            self.folder,
            self.checkpoints,
            data=data,
            total_steps=self.plan.total_steps,
        )

    def run(self) -> TrainingResult | None:
        """None where the run in the folder is complete."""
        start = self.start()
        for note in start.notes:
            self.console.note(note)
        if start.complete:
            return None
        self.folder.create()
        with self.folder.locked():
            notes = prepare_run_folder(
                self.folder, start, write_config=lambda path: path.write_text("seed: 0\n"), plan={"total_steps": 4}
            )
            self.checkpoints.take_over(start.checkpoint if start.own else None)
            for note in notes:
                self.console.note(note)
            with ExitStack() as stack:
                return self._trainer(start, stack).train()

    def _trainer(self, start: Start, stack: ExitStack) -> PPOTrainer:
        config = self.config
        rollout_log = RolloutLog(self.folder.rollouts, config.rollouts)
        stack.callback(rollout_log.close)
        evaluator = Evaluator(
            self.generator,
            self.held_out,
            sampling=sampling_params(config.generator.eval_sampling),
            n_samples_per_prompt=config.generator.eval_n_samples_per_prompt,
            batch_size=config.trainer.eval_batch_size,
            env_class=config.environment.env_class,
            on_rollouts=rollout_log.write_evaluation,
        )
        learners = Learners(policy=self.learner, reference=self.reference, critic=self.critic)
        interval = config.trainer.algorithm.ref_update_interval
        attempt = Attempt(
            config=config,
            plan=self.plan,
            data=DataFingerprint.of(self.prompts),
            start=start,
            folder=self.folder,
            console=self.console,
            checkpoints=self.checkpoints,
            stack=stack,
        )
        models = checkpointed_models(learners, start, ref_update_interval=interval)
        loop = attempt.loop(models, draw=self.draw, draw_timeline=quick_drawing)
        size = config.trainer.train_batch_size
        source = PromptSource(self.prompts, batch_size=size, shuffle=True, seed=config.seed)
        chosen = config.data.curriculum
        curriculum = Curriculum(
            datasets=[source.first_epoch()], slots=lambda _: [0] * size, seed=config.seed, config=chosen
        )
        return PPOTrainer(
            loop=loop,
            trainer=trainer_of(config),
            assemble=assembler(config),
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling=sampling_params(config.generator.sampling),
            seed=config.seed,
            scores_entropies=scores_entropies(config),
            prompts=source.batch,
            curriculum=curriculum if chosen.enabled else None,
            generator=self.generator,
            learners=learners,
            transport=self.engine,
            evaluator=evaluator if self.held_out else None,
            rollout_log=rollout_log,
            capsules=attempt.capsules(loop),
        )


def fake_run(root: Path, *, config: Config | None = None, **parts: Any) -> FakeRun:
    return FakeRun(root=root, config=config or make_config(root), **parts)


def send_signal_at(step: int, signum: int = signal.SIGTERM) -> Callable[[int, str], None]:
    """For `on_call`: a signal arrives while the rollouts of training step `step` are generated."""

    def on_call(current: int, purpose: str) -> None:
        if purpose == "train" and current == step:
            os.kill(os.getpid(), signum)

    return on_call


def records_without_timings(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    measured = ("timing/", "memory/")
    return [{name: value for name, value in record.items() if not name.startswith(measured)} for record in records]
