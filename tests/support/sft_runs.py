"""A whole supervised run in milliseconds: the real loop, loader, collators and checkpoints around a model of one number."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.config import SFTConfig
from skyrl_train.data import BatchLoader, SFTBatch
from skyrl_train.data.sft import ExampleSet, SourcePart, store_of
from skyrl_train.errors import NonFiniteError
from skyrl_train.interfaces import HeldState, Learner
from skyrl_train.runs import Attempt, SFTData, build_loader, build_sft_evaluator, open_best, open_checkpoints, plan_sft
from skyrl_train.system.files import FileSums, write_hashed
from skyrl_train.telemetry import Last, Mean, RunFolder, StepMetrics
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers import SFTResult, SFTTrainer, find_start, prepare_run_folder, sft
from skyrl_train.trainers.checkpoints import (
    DataFingerprint,
    settings_of,
)
from tests.support.fakes_trainer import quick_drawing

THREADS = "sft-collate"
LENGTHS = (7, 3, 9, 4, 12, 5, 8, 3, 6, 10)


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it."""


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """A supervised run inside ends as by kill -9 where its update of that step would begin."""
    update = sft.update

    def killed(policy: Learner, batch: SFTBatch) -> dict[str, float]:
        if batch.step == step:
            raise Killed
        return update(policy, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "update", killed)
        with pytest.raises(Killed):
            yield


def make_examples(lengths: tuple[int, ...] = LENGTHS, name: str = "train") -> ExampleSet:
    """Tokens of their own for each example; the first third of each is its prompt."""
    rows = [
        ([100 * index + position for position in range(length)], [position > length // 3 for position in range(length)])
        for index, length in enumerate(lengths)
    ]
    return ExampleSet([SourcePart(name=name, store=store_of(rows), rows=np.arange(len(rows)), max_length=100)])


def make_data(lengths: tuple[int, ...] = LENGTHS, held_out: tuple[str, ...] = ("held",)) -> SFTData:
    train = make_examples(lengths)
    flat = train.gather(np.arange(len(train)))
    return SFTData(
        train=train,
        weights=(1.0,),
        validation={name: make_examples((5, 6, 7), name) for name in held_out},
        fingerprint=DataFingerprint(num_prompts=len(train), sha256=hashlib.sha256(flat.input_ids.data).hexdigest()),
        notes=(),
    )


def make_config(root: Path, **trainer: Any) -> SFTConfig:
    """Steps of 4 of the 10 examples, 3 epochs; evaluation every 3 steps, a checkpoint every 2."""
    data = {name: trainer.pop(name) for name in ("incomplete_step", "shuffle") if name in trainer}
    config = SFTConfig(run_name="fake run", output_dir=str(root))
    settings = {
        "num_epochs": 3,
        "batch_size": 4,
        "max_tokens_per_microbatch": 24,
        "eval_interval": 3,
        "eval_batch_size": 2,
        "ckpt_interval": 2,
        **trainer,
    }
    return replace(
        config,
        data=replace(config.data, max_length=24, **data),
        trainer=replace(config.trainer, **settings),
    )


def digest(mini_batch: MiniBatch) -> str:
    """Over every byte of the batch."""
    batch, content = mini_batch.batch, hashlib.sha256()
    for name, column in sorted({**batch.token_columns, **batch.row_columns}.items()):
        content.update(f"{name} {column.dtype} {tuple(column.shape)}".encode())
        content.update(column.contiguous().numpy().tobytes())
    content.update(batch.row_offsets.numpy().tobytes())
    content.update(repr((batch.metadata, mini_batch.denominators)).encode())
    return content.hexdigest()


@dataclass
class RecordingLearner:
    """One weight with momentum, which remembers every batch. Implements Learner.

    `on_update(step)` is called before each; `loss_of(step)` is the held-out loss after so many steps.
    """

    on_update: Callable[[int], None] = lambda step: None
    loss_of: Callable[[int], float] | None = None
    fail_at: int | None = None
    weight: float = 1.0
    momentum: float = 0.0
    num_steps: int = 0
    gradient: float = 0.0
    batches: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    num_loads: int = 0

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        loss = 1 / (1 + self.weight**2) if self.loss_of is None else self.loss_of(self.num_steps)
        return torch.where(batch["loss_mask"], torch.tensor(-loss, dtype=torch.float64), torch.tensor(0.0).double())

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        self.on_update(self.num_steps + 1)
        self.batches.append(digest(mini_batch))
        self.rows.append(mini_batch.batch.num_rows)
        batch = mini_batch.batch
        self.gradient += float((batch["loss_weights"] * batch["input_ids"]).sum()) / 1000
        return {"loss/total": Mean(self.gradient, 1.0), "loss/policy": Mean(self.gradient, 1.0)}

    def optim_step(self) -> StepMetrics:
        if self.num_steps + 1 == self.fail_at:
            raise NonFiniteError("policy: gradient norm inf. No weight was changed.")
        self.momentum = 0.9 * self.momentum + self.gradient
        self.weight += 0.1 * self.momentum
        self.num_steps += 1
        gradient, self.gradient = self.gradient, 0.0
        return {"policy/grad_norm": Mean(abs(gradient), 1.0), "policy/lr": Last(0.1)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.tensor(self.weight)

    def hold_state(self, *, copies: bool) -> HeldState:
        content = json.dumps([self.weight, self.momentum, self.num_steps]).encode()

        def write(folder: Path) -> FileSums:
            folder.mkdir(parents=True)
            return {"learner.json": write_hashed(folder / "learner.json", [content])}

        return HeldState(is_copied=copies, write=write)

    def load(self, folder: Path) -> None:
        self.num_loads += 1
        self.weight, self.momentum, self.num_steps = json.loads((folder / "learner.json").read_text())

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps([self.weight, self.num_steps]))

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class FakeSFTRun:
    """What `run_sft.train` does, with a fake learner. `run()` may be called again, as a new process would."""

    root: Path
    config: SFTConfig
    learner: RecordingLearner = field(default_factory=RecordingLearner)
    data: SFTData = field(default_factory=make_data)
    output: StringIO = field(default_factory=StringIO)
    on_loader: Callable[[BatchLoader], None] = lambda loader: None
    samples: Any = None

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.root)
        self.checkpoints = open_checkpoints(self.folder.checkpoints, self.config.trainer)

    @property
    def total_steps(self) -> int:
        return plan_sft(self.config, self.data).total_steps

    def run(self) -> SFTResult | None:
        """None where the run in the folder is complete."""
        console = RunConsole(file=self.output)
        start = find_start(
            self.config.trainer,
            settings_of(self.config),
            type(self.config),
            self.folder,
            self.checkpoints,
            data=self.data.fingerprint,
            total_steps=self.total_steps,
        )
        for note in start.notes:
            console.note(note)
        if start.complete:
            return None
        prepare_run_folder(self.folder, start, write_config=lambda path: path.write_text("seed: 0\n"), plan={})
        self.checkpoints.take_over(start.checkpoint if start.own else None)
        trainer = self.config.trainer
        with ExitStack() as stack:
            loader = build_loader(self.config, self.data, stack)
            self.on_loader(loader)
            attempt = Attempt(
                config=self.config,
                plan=plan_sft(self.config, self.data),
                data=self.data.fingerprint,
                start=start,
                folder=self.folder,
                console=console,
                checkpoints=self.checkpoints,
                stack=stack,
            )
            loop = attempt.loop({"policy": self.learner}, draw=quick_drawing, draw_timeline=quick_drawing)
            return SFTTrainer(
                loop=loop,
                settings=trainer,
                loader=loader,
                policy=self.learner,
                evaluator=build_sft_evaluator(self.config, self.data),
                samples=self.samples,
                best=open_best(self.folder, trainer, start),
                capsules=attempt.capsules(loop),
            ).train()


def sft_run(
    root: Path, *, learner: RecordingLearner | None = None, data: SFTData | None = None, **trainer: Any
) -> FakeSFTRun:
    return FakeSFTRun(
        root=root,
        config=make_config(root, **trainer),
        learner=learner or RecordingLearner(),
        data=data or make_data(),
    )


def workers() -> list[str]:
    """Threads of ours that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def raise_at(step: int, error: BaseException) -> Callable[[int], None]:
    """For `on_update`."""

    def on_update(current: int) -> None:
        if current == step:
            raise error

    return on_update


def records_without_timings(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    measured = ("timing/", "memory/")
    return [{name: value for name, value in record.items() if not name.startswith(measured)} for record in records]
