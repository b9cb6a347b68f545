"""Measures what a row costs the process of the loop, on Ray, whatever its length: CPU, memory, and rows a second end to end.

    python scripts/bench/data_plane.py
    python scripts/bench/data_plane.py --rows 512 --tokens 1900 --by-value     # every token through the loop, as it was

No model is there: fake engines make up tokens, texts and log-probabilities, and fake ranks answer with numbers of the right
shape. All between them is what a run uses: facts, references, row assembly, scores, advantages, mini-batches, metrics, and
the log of rollouts, which is written to disk. Engines answer one call each with all their rows, which they have put into the
object store; `--by-value` asks them for each row, whose tokens and log-probabilities are in the answer.

    driver CPU      of the process of the loop, all threads, of the best step; what is fixed per call is in it
    of it idle      what as many seconds cost that process while nobody asks it for anything: Ray's threads
    driver calls    of Python functions in the loop's thread in a step: unlike seconds, no neighbour changes their number;
                    a longer step looks more often whether its actors live
    driver memory   what Python and numpy hold of a step's rollouts and rows when its update ends, by tracemalloc
    rows/s          of a whole step, log flushed; on a machine whose cores are fewer than the engines and ranks together
    writer CPU      of the process that writes a step's log, while it does nothing else, a token
    worker CPU      of the process that assembles, estimates, measures and writes, a token
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib
import pstats
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from synthetic_rollouts import make_rollouts

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import DataPlane, arrays_of, facts_in, trajectories_of
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.cluster import (
    ActorGroup,
    LearnerRank,
    RayLearner,
    RayPlane,
    RaySession,
    RemoteActor,
    Served,
    put_arrays,
)
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import PlacementConfig
from skyrl_train.runs import assembler
from skyrl_train.telemetry import StepMetrics
from skyrl_train.trainers import Learners, RolloutLog, batch_metrics, rollout_metrics, steps
from skyrl_train.types import GenerationOutput, Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 1900, 32000], help="of a row, one run for each")
    parser.add_argument("--rows", type=int, default=2048, help="of a step, at most; fewer where they are long")
    parser.add_argument("--most-tokens", type=int, default=16_000_000, help="of a step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="in which the engines are")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of which the best is taken")
    parser.add_argument("--verbs", action="store_true", help="show the driver's CPU by verb")
    parser.add_argument("--by-value", action="store_true", help="every token through the loop")
    args = parser.parse_args(argv)
    placement = PlacementConfig(backend="ray", start_timeout_s=600.0, call_timeout_s=600.0)
    session = RaySession(placement, num_cpus=8, name="bench", largest_bucket_bytes=2 * 10**9)
    table = harness.Table(
        *("tokens a row", "rows", "driver CPU us/row", "of it idle", "driver calls", "driver bytes/row", "rows/s"),
        *("writer CPU ns/token", "worker CPU ns/token", "MB stored"),
        title="every token through the loop" if args.by_value else "by reference",
    )
    try:
        run = Run(args, session, placement)
        for tokens in args.tokens:
            table.row(*run.measure(tokens))
    finally:
        session.close()
    return 0


_IDLE_S = 5.0

ray: Any = importlib.import_module("ray")
"""What only `cluster` imports elsewhere."""


class FakeEngine:
    """Some engines in one process, each of which makes the rows of whole prompts."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], RolloutBatch] = {}

    def ready(self) -> bool:
        return True

    def warm(self, number: int, prompts: int, samples: int, tokens: int) -> None:
        """Make them up before anything is measured."""
        draw = np.random.default_rng(number)
        self._made[number, prompts, tokens] = make_rollouts(
            *(prompts, samples, 1, tokens),
            ids=lambda count: draw.integers(0, 150_000, count, dtype=np.int32),
            text=lambda ids: "word " * len(ids),
            logprobs=lambda count: -draw.random(count, dtype=np.float32),
        )

    def roll_out(self, number: int, prompts: int, tokens: int, uids: list[str]) -> Any:
        """Put all rows of an engine; what the loop reads of them."""
        rollouts = self._made[number, prompts, tokens]
        samples = rollouts.n_samples_per_prompt
        named = [replace(each, prompt_uid=uids[at // samples]) for at, each in enumerate(rollouts.trajectories)]
        arrays = arrays_of(named)
        return put_arrays(arrays), facts_in(arrays)

    def generate(self, number: int, prompts: int, tokens: int, row: int) -> GenerationOutput:
        """The answer to one request, as engines give it to an agent loop in the driver."""
        turn = self._made[number, prompts, tokens].trajectories[row].turns[0]
        return GenerationOutput(
            token_ids=tuple(turn.response_token_ids.tolist()),
            logprobs=tuple(turn.response_logprobs.tolist()),
            stop_reason=StopReason.STOP,
            weight_version=0,
        )


class FakeModel:
    """What a rank computes with: numbers of the right shape."""

    def forward(self, batch: TrainingInputBatch) -> torch.Tensor:
        return torch.where(batch["loss_mask"], -0.5, 0.0)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        float((mini_batch.batch["loss_weights"] * mini_batch.batch["advantages"]).sum())
        return {}

    def optim_step(self) -> StepMetrics:
        return {}


class FakeRank:
    """The actor of a rank."""

    def __init__(self) -> None:
        self._served = Served()
        self._served.add(LearnerRank, LearnerRank(FakeModel(), "policy"))  # type: ignore[arg-type]

    def ping(self) -> bool:
        return True

    def invoke(self, key: str, *args: Any, **kwargs: Any) -> Any:
        return self._served.answer(key, args, kwargs)


class Run:
    """Engines, ranks and the plane of one session."""

    def __init__(self, args: argparse.Namespace, session: RaySession, placement: PlacementConfig) -> None:
        from skyrl_train.weight_sync import DeviceSharing

        self._args = args
        self._verbs: dict[str, list[float]] = {}
        places = f"{Path(__file__).parent}"
        env = session.runtime_env(1)
        env["env_vars"]["PYTHONPATH"] += f":{places}"
        options = {"num_cpus": 0, "runtime_env": env}
        self._engines = [ray.remote(FakeEngine).options(**options).remote() for _ in range(args.processes)]
        ranks = [
            RemoteActor(
                handle=ray.remote(concurrency_groups={"health": 1})(FakeRank).options(**options).remote(),
                role="rank",
                rank=rank,
                log_folder=None,
            )
            for rank in range(args.ranks)
        ]
        self._learner = RayLearner(ActorGroup(placement, "policy", ranks), sharing=DeviceSharing())
        self._plane = DataPlane() if args.by_value else RayPlane(session, placement, num_threads=1)
        ray.get([each.ready.remote() for each in self._engines])
        self._plane.ask(np.zeros, 1)

    def measure(self, tokens: int) -> tuple[str, ...]:
        """Return a row of the table."""
        args = self._args
        rows = min(args.rows, args.most_tokens // tokens)
        per_engine = max(1, rows // (args.engines * args.samples))
        prompts = per_engine * args.engines
        rows = prompts * args.samples
        ray.get([self._at(n).warm.remote(n, per_engine, args.samples, tokens) for n in range(args.engines)])
        config = make_config(prompts, args.samples)
        gc.collect()
        gc.freeze()  # as the loop does (`trainers/loop.py`)
        found, worker = [], [0.0]
        with tempfile.TemporaryDirectory() as folder:
            log = RolloutLog(Path(folder), plane=self._plane)
            for step in range(1, args.steps + 2):
                wall, cpu = time.perf_counter(), time.process_time()
                self._step(step, config, log, per_engine, prompts, tokens)
                found.append((time.process_time() - cpu, time.perf_counter() - wall))
                worker.append(self._plane.ask(time.process_time))
            found, worker = found[1:], worker[1:]  # the first imports
            cpu, wall = min(found)
            idle = wall * idle_cpu()
            if args.verbs:
                for verb, seconds in self._verbs.items():
                    sys.stdout.write(f"{tokens:>8,} {verb:<10} {1e6 * min(seconds[1:]) / rows:8.1f} us/row\n")
            self._verbs.clear()
            profile = cProfile.Profile()
            profile.runcall(self._step, args.steps + 2, config, log, per_engine, prompts, tokens)
            gc.collect()
            tracemalloc.start()
            held = self._step(args.steps + 3, config, log, per_engine, prompts, tokens)
            gc.collect()
            memory, stored = tracemalloc.get_traced_memory()[0], used_bytes()
            tracemalloc.stop()
            writer = min(self._plane.ask(seconds_of_writing, Path(folder), *held) for _ in range(2))
            del held
            log.close()
        return (
            f"{tokens:,}",
            f"{rows:,}",
            f"{1e6 * cpu / rows:.0f}",
            f"{1e6 * idle / rows:.0f}",
            f"{pstats.Stats(profile).total_calls:,}",  # type: ignore[attr-defined]
            f"{memory / rows:.0f}",
            f"{rows / min(wall for _, wall in found):.0f}",
            f"{1e9 * writer / (rows * tokens):.0f}",
            f"{1e9 * min(later - before for before, later in pairwise(worker)) / (rows * tokens):.0f}",
            f"{stored / 1e6:.0f}",
        )

    def _at(self, engine: int) -> Any:
        return self._engines[engine % len(self._engines)]

    def _generate(self, step: int, per_engine: int, prompts: int, tokens: int) -> RolloutBatch:
        args, size = self._args, self._args.samples
        asked = tuple(Prompt(uid=f"{step}-{n}", messages=({"role": "user", "content": "?"},)) for n in range(prompts))
        uids = [each.uid for each in asked]
        parts = [uids[n * per_engine : (n + 1) * per_engine] for n in range(args.engines)]
        trajectories: list[Trajectory] = []
        if args.by_value:
            refs = [
                self._at(n).generate.remote(n, per_engine, tokens, row)
                for n in range(args.engines)
                for row in range(per_engine * size)
            ]
            added = np.zeros(tokens // 5, np.int32)
            for number, ref in enumerate(refs):
                output = ray.get(ref)
                turn = Turn(
                    added_token_ids=added,
                    response_token_ids=np.array(output.token_ids, dtype=np.int32),
                    response_logprobs=np.array(output.logprobs, dtype=np.float32),
                    response_text="word " * len(output.token_ids),
                    reward=float(number % 2),
                    stop_reason=output.stop_reason,
                    weight_versions=output.weight_versions,
                )
                uid, sample = uids[number // size], number % size
                trajectories.append(
                    Trajectory(prompt_uid=uid, sample_index=sample, turns=(turn,), outcome=Outcome.DONE)
                )
        else:
            refs = [self._at(n).roll_out.remote(n, per_engine, tokens, parts[n]) for n in range(args.engines)]
            for source, facts in ray.get(refs):
                trajectories += trajectories_of(source, facts)
        return RolloutBatch(prompts=asked, trajectories=tuple(trajectories), n_samples_per_prompt=size)

    def _step(
        self, step: int, config: Config, log: RolloutLog, per_engine: int, prompts: int, tokens: int
    ) -> tuple[RolloutBatch, TrainingInputBatch]:
        """One step as `trainers/ppo.py` makes it."""
        plane, learners = self._plane, Learners(policy=self._learner, reference=self._learner, critic=None)
        algorithm, assemble = config.trainer.algorithm, assembler(config)

        def verb(name: str, work: Callable[[], Any]) -> Any:
            before = time.process_time()
            result = work()
            self._verbs.setdefault(name, []).append(time.process_time() - before)
            return result

        rollouts = verb("generate", lambda: self._generate(step, per_engine, prompts, tokens))
        batch = verb("assemble", lambda: plane.make_rows(assemble, rollouts, step=step, weight_version=0))
        batch = verb("score", lambda: steps.score(batch, learners, config.trainer))
        batch = verb("estimate", lambda: plane.add_columns(steps.estimate, batch, algorithm, kl_coef=0.0, seed=1))
        log.write(rollouts, batch, step=step)
        verb("log", log.flush)
        verb("update", lambda: steps.update(batch, learners, config.trainer, on_progress=lambda *_: None, plane=plane))
        verb("metrics", lambda: (rollout_metrics(rollouts), plane.ask(batch_metrics, batch, algorithm)))
        return rollouts, batch


def make_config(prompts: int, samples: int) -> Config:
    config = Config()
    algorithm = AlgorithmConfig(kl_loss_coef=0.01)
    mini = prompts // 4 if prompts % 4 == 0 else prompts
    trainer = replace(
        config.trainer, algorithm=algorithm, train_batch_size=prompts, policy_mini_batch_size=mini, layout="packed"
    )
    return replace(config, trainer=trainer, generator=replace(config.generator, n_samples_per_prompt=samples))


def idle_cpu() -> float:
    """CPU seconds of this process in a second in which it does nothing."""
    cpu = time.process_time()
    time.sleep(_IDLE_S)
    return (time.process_time() - cpu) / _IDLE_S


def seconds_of_writing(folder: Path, rollouts: RolloutBatch, batch: TrainingInputBatch) -> float:
    """CPU seconds of the process that writes a step's log, while it does nothing else."""
    log, before = RolloutLog(folder), time.process_time()
    log.write(rollouts, batch, step=1)
    log.flush()
    seconds = time.process_time() - before
    log.close()
    return seconds


def used_bytes() -> float:
    """Of the object store, by its own count."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    context = ray.get_runtime_context()
    reply = get_memory_info_reply(get_state_from_address(context.gcs_address))
    return float(reply.store_stats.object_store_bytes_used)


if __name__ == "__main__":
    harness.run(main)
