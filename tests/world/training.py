"""The real controller, stream, journal, checkpoints and restarts, around an engine, environments and a learner of the world.

The learner is exact: its weight is an integer that each optimizer step folds the accepted rows into. So two runs that
trained on the same batches have the same weight, and any other batch shows.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config import Config
from skyrl_train.data import PromptSource
from skyrl_train.errors import EngineError, SkyrlTrainError, StopRequested
from skyrl_train.interfaces import HeldState
from skyrl_train.plan import plan_batches
from skyrl_train.rollout import FILE, Journal, RolloutGenerator
from skyrl_train.rollout.stream import RolloutStream
from skyrl_train.runs import Attempt, assembler, open_checkpoints, task, trainer_of
from skyrl_train.runs.cli.composition import write_yaml
from skyrl_train.runs.task import Parts
from skyrl_train.system.files import sync_tree, write_hashed
from skyrl_train.telemetry import Last, Mean, RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers import (
    Learners,
    PPOTrainer,
    checkpointed_models,
    find_start,
    loop,
    prepare_run_folder,
    resume as resume_module,
    sampling_params,
    steps,
)
from skyrl_train.trainers.checkpoints import DataFingerprint, oldest_step
from skyrl_train.trainers.checkpoints.folder import latest_checkpoint, step_of, verify
from skyrl_train.trainers.evaluation.evaluate import Evaluator, read_evaluations
from skyrl_train.trainers.stop import StopFlag
from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, StopReason, VersionRun
from tests.support.fakes import make_tokenizer
from tests.support.stores import empty_bucket
from tests.world.disk import ROOT, Disk
from tests.world.faults import Machine
from tests.world.machine import LawBroken, Namespace, Process, World
from tests.world.seams import simulated

FOLDER = Path(ROOT) / "run"
TOKENIZER = make_tokenizer()
_DIGITS = [TOKENIZER.convert_tokens_to_ids(str(digit)) for digit in range(10)]
_END = TOKENIZER.eos_token_id
_MODULUS = (1 << 61) - 1
_HELD_OUT = 2
"""Prompts of an evaluation."""
_URL = "lab://bucket/run"
_STORE_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S, STEP_TIMEOUT_S = 60.0, 20.0


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """What of a world is drawn by its seed: sizes, settings, and which faults there are."""

    steps: int
    batch: int
    samples: int
    staleness: int
    stale_groups: str
    take_groups: str
    oversample: float
    num_prompts: int
    ckpt_interval: int
    kept: int
    background: bool
    compacts: bool
    environment: str
    turns: int
    lost_answers: float
    slow_engine: float
    hangs: float
    rivals: bool
    engine_dies: float
    breaks: float
    """Environments that raise, or answer nonsense."""
    eval_interval: int
    """0 is without evaluations."""
    has_store: bool
    store_fails: float
    vanishes: bool
    """Machines do, with their disks; the run goes on from the object store."""

    @staticmethod
    def of(world: World) -> Swarm:
        draw = world.random("swarm")

        def on(share: float) -> bool:
            return draw.random() < share

        batch = draw.choice((1, 2, 2, 3))
        steps = draw.choice((4, 6, 8))
        take_groups = draw.choice(("first_finished", "first_finished", "in_order"))
        oversample = draw.choice((1.0, 1.0, 1.5))
        stale = "drop" if oversample > 1 and take_groups == "first_finished" else draw.choice(("wait", "wait", "drop"))
        return Swarm(
            steps=steps,
            batch=batch,
            samples=draw.choice((1, 2, 3)),
            staleness=draw.choice((1, 1, 2, 3)),
            stale_groups=stale,
            take_groups=take_groups,
            oversample=oversample,
            num_prompts=batch * draw.choice((2, steps, 3 * steps)),
            ckpt_interval=draw.choice((1, 1, 2, 3)),
            kept=draw.choice((1, 2, 3)),
            background=on(0.6),
            compacts=on(0.7),
            environment=draw.choice(("Stateful", "Deterministic", "Forgetful")),
            turns=draw.choice((1, 2, 3)),
            lost_answers=draw.choice((0.0, 0.0, 0.01)),
            slow_engine=draw.choice((0.0, 0.05, 0.3)),
            hangs=draw.choice((0.0, 0.0, 0.01)),
            rivals=on(0.2),
            engine_dies=draw.choice((0.0, 0.0, 0.01)),
            breaks=draw.choice((0.0, 0.0, 0.01)),
            eval_interval=draw.choice((0, 0, 2, 3)),
            has_store=on(0.3),
            store_fails=draw.choice((0.0, 0.05)),
            vanishes=on(0.5),
        )

    @property
    def fails(self) -> bool:
        """Whether a run may end by an error that explains itself."""
        return bool(self.lost_answers or self.hangs or self.engine_dies or self.breaks or self.store_fails)


def digest(*parts: object) -> int:
    """A number that stands for these values."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class Engine:
    """Answers after a while, or never. Implements InferenceEngine and WeightTransport."""

    def __init__(self, world: World, swarm: Swarm, laws: Laws) -> None:
        self._world, self._swarm, self._laws, self.weight_version, self.weight = world, swarm, laws, -1, 0
        self._draw = world.random("engine")
        self.asked: set[str] = set()
        """Requests that have no answer yet."""
        self._num_deaths = 0

    def lease(self) -> contextlib.AbstractContextManager[None]:
        return nullcontext()

    def sync(self, weights: Iterator[tuple[str, Any]], version: int) -> None:
        self.weight = int(dict(weights)["weight"])
        self._world.sleep(self._draw.random(), "the transport of weights")
        self._world.event("message", f"weights {version}")
        self.weight_version = version
        self._laws.synced(version, self.weight)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        import asyncio

        draw, swarm, world = self._draw, self._swarm, self._world
        self._laws.asks(request, self.asked)
        self.asked.add(request.request_id)
        try:
            first, began, life = self.weight_version, world.now, self._num_deaths
            await asyncio.sleep(draw.expovariate(2.0) * (40 if draw.random() < swarm.slow_engine else 1))
            if draw.random() < swarm.lost_answers and world.fault("lost", f"the answer to {request.request_id}"):
                await asyncio.sleep(10 * REQUEST_TIMEOUT_S)
            if draw.random() < swarm.engine_dies and world.fault("engine", "dies, and another takes its place"):
                self._num_deaths += 1
            if life != self._num_deaths:
                raise EngineError("the engine died")
            if world.now - began > REQUEST_TIMEOUT_S + 1.0:
                raise LawBroken(
                    f"request {request.request_id} is at the engine {world.now - began:.0f} s, after its deadline"
                )
            world.event("message", f"answer {request.request_id}")
        finally:
            self.asked.remove(request.request_id)
        last = self.weight_version
        tokens = [_DIGITS[digest(request.seed, request.prompt_token_ids, index) % 10] for index in range(2)] + [_END]
        runs = [VersionRun(0, first)] + ([VersionRun(1, last)] if last != first else [])
        return GenerationOutput(
            token_ids=tuple(tokens),
            logprobs=tuple(-0.5 - (first if index == 0 else last) / 64 for index in range(3)),
            stop_reason=StopReason.STOP,
            weight_versions=tuple(runs),
        )

    def close(self) -> None: ...


CURRENT: list[TrainingWorld] = []
"""The world whose environments are made by their names."""


class Forgetful:
    """An environment that tells a secret of its own in each observation, and is lost with its process."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        self._here = CURRENT[-1]
        self.secret, self.turns = self._here.world.random("secret").randrange(10), 0

    def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        world, swarm = self._here.world, self._here.swarm
        draw = world.random("environment")
        seconds = draw.expovariate(4.0)
        if draw.random() < swarm.hangs and world.fault("hang", "an environment"):
            seconds = 3 * STEP_TIMEOUT_S
        world.sleep(seconds, "an environment's work")
        world.event("message", "environment")
        if draw.random() < swarm.breaks and world.fault("breaks", "an environment"):
            if draw.random() < 0.5:
                return {"observations": 7, "reward": "much", "done": None}
            raise RuntimeError("an environment broke")
        self.turns += 1
        told = {"role": "user", "content": f"{self.secret} + {self.turns}"}
        is_over = self.turns >= swarm.turns
        return {"observations": [told], "reward": float(digest(action, self.secret) % 2), "done": is_over}

    def get_metrics(self) -> dict[str, float]:
        return {"secret": float(self.secret)}

    def close(self) -> None: ...


class Stateful(Forgetful):
    """Offers its state."""

    def get_state(self) -> Any:
        return {"secret": self.secret, "turns": self.turns}

    def set_state(self, state: Any) -> None:
        self.secret, self.turns = state["secret"], state["turns"]


class Deterministic(Forgetful):
    """Can be played again."""

    deterministic = True

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.secret = 7


class Learner:
    """One integer. Implements Learner."""

    def __init__(self, world: World, laws: Laws) -> None:
        self._world, self._laws = world, laws
        self.weight, self.num_steps, self._gradient, self._rows = 1, 0, 0, []  # type: ignore[var-annotated]
        self._draw = world.random("learner")

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.where(batch["loss_mask"], torch.tensor(-0.5), torch.tensor(0.0))

    def forward_backward(self, mini_batch: Any) -> dict[str, Any]:
        batch = mini_batch.batch
        self._world.sleep(self._draw.expovariate(0.5), "an update")
        self._world.event("message", "update")
        columns = {name: batch[name].tolist() for name in ("input_ids", "loss_mask", "rewards")}
        self._gradient = (self._gradient + digest(batch.metadata.uids, columns)) % _MODULUS
        self._rows += batch.metadata.uids
        return {"policy/entropy": Mean(1.0, 1)}

    def optim_step(self) -> dict[str, Any]:
        before = self.weight
        self.weight = (self.weight * 1_000_003 + self._gradient) % _MODULUS
        self.num_steps += 1
        self._laws.trained(self.num_steps, before, self.weight, tuple(dict.fromkeys(self._rows)))
        self._gradient, self._rows = 0, []
        return {"policy/grad_norm": Mean(1.0, 1.0), "policy/lr": Last(1.0)}

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield "weight", self.weight

    def load_weights(self, weights: Any) -> None:
        self.weight = int(dict(weights)["weight"])

    def hold_state(self, *, copies: bool) -> HeldState:
        state = [self.weight, self.num_steps]

        def write(folder: Path) -> dict[str, tuple[int, str]]:
            folder.mkdir(parents=True)
            return {name: write_hashed(folder / name, [json.dumps(state).encode()]) for name in ("a.json", "b.json")}

        return HeldState(is_copied=copies, write=write)

    def load(self, folder: Path) -> None:
        both = [json.loads((folder / name).read_text()) for name in ("a.json", "b.json")]
        if both[0] != both[1]:
            raise LawBroken(f"a checkpoint that verifies holds {both}")
        self.weight, self.num_steps = both[0]
        self._laws.loaded(self.num_steps, self.weight)

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(self.weight))
        sync_tree(folder)

    def close(self) -> None: ...


class Laws:
    """What was trained on, from the first process to the last, and what must hold of it."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.steps: dict[int, tuple[int, int, tuple[str, ...]]] = {}
        """By step: the weight before and after, and the prompts."""
        self.taken: dict[int, Any] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        """Prompts of the turns that are on the disk, by their requests."""
        self.highest_checkpoint = 0
        most = (swarm.staleness + 1) * swarm.batch * swarm.samples
        self._most_asked = (
            int(most * max(1.0, swarm.oversample)) + swarm.samples + _HELD_OUT * bool(swarm.eval_interval)
        )

    def asks(self, request: GenerationRequest, asked: set[str]) -> None:
        """A request comes to the engine."""
        if len(asked) >= self._most_asked:
            raise LawBroken(
                f"{len(asked) + 1} requests at the engine, where at most {self._most_asked} are allowed for"
            )
        if request.request_id in asked:
            raise LawBroken(f"request {request.request_id} is asked beside itself")
        if self.kept.get(request.request_id) == request.prompt_token_ids:
            raise LawBroken(f"turn {request.request_id}, which was on the disk, is made again")

    def trained(self, step: int, before: int, after: int, uids: tuple[str, ...]) -> None:
        known = self.steps.setdefault(step, (before, after, uids))
        if known != (before, after, uids):
            raise LawBroken(f"step {step} was {known}, and after a restart {(before, after, uids)}")
        if step > 1 and step - 1 in self.steps and self.steps[step - 1][1] != before:
            raise LawBroken(f"step {step} began at another weight than step {step - 1} left")

    def synced(self, version: int, weight: int) -> None:
        expected = self.steps[version][1] if version else 1
        if weight != expected:
            raise LawBroken(f"the engine has weights {weight} as version {version}, which were {expected}")

    def lost_after(self, step: int) -> None:
        """The journal is gone: what was made after a checkpoint may be made otherwise."""
        self.steps = {number: made for number, made in self.steps.items() if number <= step}
        self.taken = {version: settled for version, settled in self.taken.items() if version < step}
        self.kept.clear()

    def loaded(self, step: int, weight: int) -> None:
        if step and self.steps.get(step, (0, None))[1] != weight:
            raise LawBroken(f"the checkpoint of step {step} has weights {weight}; it was {self.steps.get(step)}")

    def on_disk(self, version: int, disk: Disk) -> None:
        """A batch that leaves the stream, and the groups that it is made of, would be there after a crash."""
        text = bytes(disk.find(FOLDER / "journal" / FILE).synced)
        batch = re.search(rb'^\{"batch": %d, "groups": (\[[^\]]*\])' % version, text, re.MULTILINE)
        if batch is None:
            raise LawBroken(f"batch {version} is trained on, and is not on the disk")
        for ordinal in json.loads(batch[1]):
            if b'\n{"group": %d,' % ordinal not in text[: batch.start()]:
                raise LawBroken(f"batch {version} is on the disk before its group {ordinal}")

    def passed_over(self, settled: Any, pending: Any) -> None:
        """No prompt is left out on the way: what comes before one that is settled is settled, or was begun."""
        highest = max(settled.beyond, default=0)
        if pending is not None:
            for ordinal in range(settled.watermark, highest):
                if not settled.holds(ordinal) and ordinal not in pending:
                    raise LawBroken(f"prompt {ordinal} of the order was passed over: {settled}, {sorted(pending)}")

    def took(self, version: int, taken: Any) -> None:
        """A batch leaves the stream."""
        for each in taken.rollouts.trajectories:
            for turn in each.turns:
                for run in turn.weight_versions:
                    if not 0 <= version - run.version <= self._swarm.staleness:
                        raise LawBroken(f"a token of version {run.version} is trained on at version {version}")
            said = {str(message["content"]).split()[0] for turn in each.turns for message in turn.observations}
            if len(said) > 1 or (said and not each.failed and {str(int(each.metrics["secret"]))} != said):
                raise LawBroken(f"a trajectory is of several environments: {said}, {each.metrics}")


class WatchedJournal(Journal):
    """Tells the laws what it keeps."""

    laws: Laws

    async def keep_turn(self, request: GenerationRequest, output: GenerationOutput) -> None:
        await super().keep_turn(request, output)
        self.laws.kept[request.request_id] = request.prompt_token_ids

    def restart(self, trajectory: str, reason: str) -> None:
        super().restart(trajectory, reason)
        for name in [name for name in self.laws.kept if name.startswith(trajectory)]:
            del self.laws.kept[name]


class WatchedStream(RolloutStream):
    """Tells the laws what it gives."""

    laws: Laws
    world_disk: Disk

    def take(self) -> Any:
        version = self._rules.version
        taken = super().take()
        self.laws.took(version, taken)
        self.laws.passed_over(taken.settled, self._rules._pending if self._is_restored else None)
        self.laws.on_disk(version, self.world_disk)
        self.laws.taken[version] = taken.settled
        return taken


class TrainingWorld(Machine):
    """One run of a training job, with its machine, from the first start until it is complete."""

    def __init__(self, seed: int, *, keeps_log: bool = False, allowed: frozenset[int] | None = None) -> None:
        super().__init__(World(seed, keeps_log=keeps_log, allowed=allowed))
        self.swarm = Swarm.of(self.world)
        self.laws = Laws(self.swarm)
        self.flag: StopFlag | None = None
        self.holds = False
        """Whether the run's process says that it holds the folder."""
        self.is_new = False
        """Whether the machine before has vanished."""

    def stop(self) -> None:
        """A signal comes."""
        if self.flag is not None:
            self.flag.signal_name = "SIGTERM"

    def run(self) -> TrainingWorld:
        """Let it run to its end. Raises LawBroken."""
        CURRENT.append(self)
        LawBroken.first.clear()
        try:
            with simulated(self.world, self.disk), _quick(self), empty_bucket() as bucket:
                bucket.hook = self._at_store
                while not self._attempt():
                    if self.num_starts > 4 * self.rates.max_kills + 40:
                        raise LawBroken(f"{self.num_starts} starts, and no end: {dict(self.outcomes)}")
                self._check_end()
        finally:
            CURRENT.pop()
        return self

    def _attempt(self) -> bool:
        """One process. Returns whether the run is complete."""
        world, process = self.world, self.begin("run")
        self.flag = None
        done: list[str] = []
        main = world.start("main", lambda: done.append(self._main()), process)
        if self.swarm.rivals and world.random("rivals").random() < 0.3:
            world.sleep(world.random("rivals").uniform(0.0, 20.0), "a rival's start")
            self._rival()
        world.join(main)
        error = process.error
        if not process.is_dead:
            self._check_left(process, error)
        if self.end(process):
            self.holds = False
            swarm, draw = self.swarm, world.random("vanishes")
            if swarm.has_store and swarm.vanishes and draw.random() < 0.2 and world.fault("vanish", "machine and disk"):
                self.disk.vanish()
                self.is_new = True
            return False
        if error is not None:
            self._check_error(error)
            self.outcomes[type(error).__name__] += 1
            return False
        self.outcomes["complete"] += 1
        return True

    def _at_store(self, operation: str, path: str) -> None:
        """What comes before an operation of the object store takes effect."""
        world, draw = self.world, self.world.random("store")
        world.sleep(draw.expovariate(5.0), "the object store")
        if self.can_fail and draw.random() < self.swarm.store_fails and world.fault("store", f"{operation} {path}"):
            if draw.random() < 0.5:
                raise ConnectionError("the object store refuses")
            world.sleep(draw.uniform(0.5, 5) * _STORE_TIMEOUT_S, "an object store that hangs")
        world.event("message", f"{operation} {path.rpartition('/checkpoints/')[2]} at the store")

    def _rival(self) -> None:
        """A second process in the same folder is refused while the first holds it."""
        first = self.process
        if first is None or first.is_dead or not any(each.name == "main" and not each.is_done for each in first.fibers):
            return
        rival = Process("rival")
        raised: list[BaseException] = []

        def main() -> None:
            try:
                with RunFolder(FOLDER).locked():
                    if self.holds and not first.is_dead:  # type: ignore[union-attr]
                        raised.append(LawBroken("two processes have the run's folder"))
            except SkyrlTrainError:
                self.outcomes["rival refused"] += 1
            except OSError:
                pass

        if self.holds:
            self.world.join(self.world.start("rival", main, rival))
            for error in raised:
                raise error

    def _check_error(self, error: BaseException) -> None:
        swarm, rates = self.swarm, self.rates
        if isinstance(error, StopRequested) and rates.stops:
            return
        waits = rates.slow_disk and swarm.has_store  # what is fetched is on the disk before its deadline
        explained = isinstance(error, SkyrlTrainError) and (rates.full_disk or swarm.fails or waits)
        if not explained:
            raise LawBroken(f"the run ended by {type(error).__name__}: {error}") from error

    def _check_left(self, process: Process, error: BaseException | None) -> None:
        """After a process ended by itself nothing of it waits but threads that were given up."""
        self.holds = False
        left = [
            each
            for each in process.fibers
            if not each.is_done and not each.name.startswith(("environment", "main", "timer", _URL))
        ]
        for _ in range(200):
            left = [each for each in left if not each.is_done]
            if not left:
                return
            self.world.sleep(1.0, "the end of threads")
        raise LawBroken(f"threads are left after {error!r}: {[(each.name, each.waits_for) for each in left]}")

    def _main(self) -> str:
        """What the entry point does, with parts of the world."""
        swarm, folder = self.swarm, RunFolder(FOLDER)
        config, prompts = self._config(), make_prompts(swarm.num_prompts)
        console = RunConsole(file=StringIO())
        plan = plan_batches(config, num_train_prompts=len(prompts))
        data = DataFingerprint.of(prompts)
        checkpoints = open_checkpoints(folder.checkpoints, config.trainer)
        folder.create()
        with folder.locked():
            self.holds = True
            checkpoints.clean()
            start = find_start(
                config.trainer,
                _few_settings(config),
                type(config),
                folder,
                checkpoints,
                data=data,
                total_steps=plan.total_steps,
            )
            if start.complete:
                self.holds = False
                return "complete"
            if start.global_step < self.laws.highest_checkpoint:
                raise LawBroken(
                    f"the run goes on from step {start.global_step}, where step {self.laws.highest_checkpoint} was whole"
                )
            if self.is_new:
                self.laws.lost_after(start.global_step)
                self.is_new = False
            aside = self._num_aside()
            try:
                prepare_run_folder(
                    folder, start, write_config=lambda path: write_yaml({"seed": 0}, path), plan={"steps": swarm.steps}
                )
            finally:
                if start.checkpoint is None and self._num_aside() > aside:
                    raise LawBroken("the run set its own files aside, and began anew")
            checkpoints.take_over(start.checkpoint if start.own else None)
            with Parts(console, lambda error: None) as stack:
                engine = self._train(config, prompts, plan, data, start, folder, console, checkpoints, stack)
            if engine.asked:
                raise LawBroken(f"the run is over, and the engine is still asked for {sorted(engine.asked)}")
            self.holds = False
        return "trained"

    def _num_aside(self) -> int:
        folder: Any = self.disk.find(FOLDER)
        return sum(name.startswith("previous-") for name in folder.names)

    def _train(self, config, prompts, plan, data, start, folder, console, checkpoints, stack) -> Engine:  # type: ignore[no-untyped-def]
        swarm, world, laws = self.swarm, self.world, self.laws
        engine, learner = Engine(world, swarm, laws), Learner(world, laws)
        environment = replace(
            config.environment,
            env_class=f"tests.world.training:{swarm.environment}",
            step_timeout_s=STEP_TIMEOUT_S,
            isolation="thread",
            num_workers=8,
            max_failed_fraction=1.0,
        )
        generator = RolloutGenerator(engine, TOKENIZER, config.generator, environment, config.seed)
        stack.callback(generator.close)
        attempt = Attempt(
            config=config,
            plan=plan,
            data=data,
            start=start,
            folder=folder,
            console=console,
            checkpoints=checkpoints,
            stack=stack,
        )
        learners = Learners(policy=learner, reference=None, critic=None)  # type: ignore[arg-type]
        models = checkpointed_models(learners, start, ref_update_interval=0)
        made = attempt.loop(
            models, draw=lambda *_, **__: None, draw_timeline=lambda *_, **__: None, activity=generator.activity
        )
        made.observers.tell = self._told(made.observers.tell)  # type: ignore[method-assign]
        journal = WatchedJournal(
            folder.journal / FILE,
            prompts=data.sha256,
            oldest_checkpoint=lambda: oldest_step(folder.checkpoints) if swarm.compacts else None,
        )
        journal.laws = laws
        source = PromptSource(prompts, batch_size=swarm.batch, shuffle=True, seed=config.seed)
        stream = WatchedStream(
            generator,
            source.batch,
            config.trainer,
            journal,
            total_batches=plan.total_steps,
            n_samples_per_prompt=swarm.samples,
            sampling=sampling_params(config.generator.sampling),
            max_failed_fraction=1.0,
        )
        stream.laws, stream.world_disk = laws, self.disk
        stack.callback(stream.close)
        trainer = PPOTrainer(
            loop=made,
            trainer=trainer_of(config),
            assemble=assembler(config),
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling=sampling_params(config.generator.sampling),
            seed=config.seed,
            scores_entropies=False,
            prompts=source.batch,
            generator=generator,
            learners=learners,
            transport=engine,
            evaluator=self._evaluator(generator, config),
            rollout_log=None,
            stream=stream,
            capsules=attempt.capsules(made),
        )
        trainer.train()
        return engine

    def _evaluator(self, generator: RolloutGenerator, config: Config) -> Evaluator | None:
        if not self.swarm.eval_interval:
            return None
        return Evaluator(
            generator,
            make_prompts(_HELD_OUT),
            sampling=sampling_params(config.generator.sampling),
            n_samples_per_prompt=1,
            batch_size=_HELD_OUT,
            env_class=config.environment.env_class,
        )

    def _told(self, tell: Any) -> Any:
        def heard(event: str, step: int, **named: Any) -> Any:
            if event == "checkpoint":
                self.laws.highest_checkpoint = max(self.laws.highest_checkpoint, step)
            return tell(event, step, **named)

        return heard

    def _config(self) -> Config:
        swarm, config = self.swarm, Config()
        trainer = replace(
            config.trainer,
            total_steps=swarm.steps,
            train_batch_size=swarm.batch,
            policy_mini_batch_size=swarm.batch,
            critic_mini_batch_size=swarm.batch,
            micro_train_batch_size_per_gpu=1,
            micro_forward_batch_size_per_gpu=1,
            eval_interval=swarm.eval_interval,
            eval_before_train=False,
            checkpoint_url=_URL if swarm.has_store else "",
            checkpoint_timeout_s=_STORE_TIMEOUT_S,
            ckpt_interval=swarm.ckpt_interval,
            max_ckpts_to_keep=swarm.kept,
            background_checkpoints=swarm.background,
            max_staleness=swarm.staleness,
            stale_groups=swarm.stale_groups,
            take_groups=swarm.take_groups,
            oversample=swarm.oversample,
            dump_rollouts=False,
        )
        generator = replace(
            config.generator,
            n_samples_per_prompt=swarm.samples,
            max_turns=4,
            request_timeout_s=REQUEST_TIMEOUT_S,
            sampling=replace(config.generator.sampling, max_generate_length=8),
        )
        return replace(config, output_dir=str(FOLDER), trainer=trainer, generator=generator, run_name="world")

    def _check_end(self) -> None:
        """Each prompt once in each epoch, or dropped with a reason that is counted; the weights are those of the batches."""
        swarm, laws = self.swarm, self.laws
        if self.rates.power:  # what a complete run says is there stays there
            self.world.note("power comes back, without " + self.disk.lose_power(self.world.random("loss")))
        if json.loads((FOLDER / "complete.json").read_text()) != {"global_step": swarm.steps}:
            raise LawBroken("a run has ended, and does not say that it is complete")
        if json.loads((FOLDER / "export" / "model.json").read_text()) != laws.steps[swarm.steps][1]:
            raise LawBroken("the export is not of the last step")
        if sorted(laws.steps) != list(range(1, swarm.steps + 1)):
            raise LawBroken(f"steps {sorted(laws.steps)} were trained, of {swarm.steps}")
        records = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
        if [each["step"] for each in records] != list(range(1, swarm.steps + 1)):
            raise LawBroken(f"metrics.jsonl has steps {[each['step'] for each in records]}")
        self._check_evaluations(records)
        if (newest := latest_checkpoint(FOLDER / "checkpoints", verify)) is None or step_of(newest.name) != swarm.steps:
            raise LawBroken(f"the newest checkpoint of a complete run is {newest}")
        settled = laws.taken[swarm.steps - 1]
        source = PromptSource(make_prompts(swarm.num_prompts), batch_size=swarm.batch, shuffle=True, seed=Config().seed)
        ordinals = [*range(settled.watermark), *settled.beyond]
        expected = Counter(source.batch(each // swarm.batch)[each % swarm.batch].uid for each in ordinals)
        trained = Counter(uid.partition("#")[0] for _, _, uids in laws.steps.values() for uid in uids)
        num_dropped = sum(
            int(value) for each in records for name, value in each.items() if name.startswith("stream/dropped_")
        )
        missing = expected - trained
        if trained - expected or sum(missing.values()) != num_dropped:
            raise LawBroken(
                f"trained on {dict(trained)} of {dict(expected)}, and {num_dropped} were dropped with a reason"
            )

    def _check_evaluations(self, records: list[dict[str, Any]]) -> None:
        """Each evaluation that is due was made."""
        steps, interval = self.swarm.steps, self.swarm.eval_interval
        due = [step for step in range(1, steps + 1) if interval and (step % interval == 0 or step == steps)]
        made = [each["step"] for each in records if any(name.startswith("eval/") for name in each)]
        kept = [each.global_step for each in read_evaluations(FOLDER / "evaluation.json")]
        if made != due or (kept != due and not self.rates.full_disk):
            raise LawBroken(f"evaluations were due at {due}; the record has {made}, evaluation.json {kept}")


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(uid=f"p{index}", messages=({"role": "user", "content": f"{index} + 1?"},)) for index in range(count)]


def _few_settings(config: Config) -> dict[str, Any]:
    return {"seed": config.seed}


@contextmanager
def _quick(here: TrainingWorld) -> Iterator[None]:
    """What a world does without: signals of the real process, its garbage, git, the arithmetic of advantages, and three
    hundred settings that are the same at each start."""

    @contextmanager
    def no_signals(**_: Any) -> Iterator[StopFlag]:
        here.flag = StopFlag()
        yield here.flag

    def no_advantages(batch: Any, *_: Any, **__: Any) -> Any:
        return batch.with_columns(advantages=batch["rewards"], returns=batch["rewards"])

    own = (
        (task, "settings_of", _few_settings),
        (resume_module, "changes_since", lambda *_: []),
        (loop, "stop_on_signals", no_signals),
        (loop, "_start_up_uncollected", nullcontext),
        (loop, "gc", Namespace(gc, collect=lambda *_: 0)),
        (resume_module, "environment_of_run", lambda *_, **__: {}),
        (steps, "estimate", no_advantages),
    )
    before = [getattr(module, name) for module, name, _ in own]
    for module, name, value in own:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(own, before):
            setattr(module, name, value)
