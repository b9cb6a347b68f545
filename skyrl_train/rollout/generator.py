"""`RolloutGenerator`: prompts in, trajectories out.

Each trajectory runs as one task of an event loop on a thread of its own. Environments run in worker processes or on
further threads, the engine where its backend puts it. Every trajectory leases the engine before the first one asks for
tokens, so that an engine that generates in waves sees the same batches on every run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.parts import AGENT_LOOPS
from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.agent_loop import Episode, Job, Limits
from skyrl_train.rollout.chat_tokens import ChatTokens, with_context
from skyrl_train.rollout.checked_engine import CheckedEngine, check_failures, checked_trajectory
from skyrl_train.rollout.env_boundary import Environments, EnvironmentSession
from skyrl_train.rollout.env_local import LocalWorkers, WorkerSettings
from skyrl_train.rollout.env_processes import ProcessEnvironments, WorkerHost
from skyrl_train.rollout.env_threads import ThreadEnvironments
from skyrl_train.rollout.environments import check_environment, check_rows, environment_of, uses_processes
from skyrl_train.seeding import derive_seed
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Tokenizer, Trajectory, token_ids

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 10.0
_SIGNAL_POLL_S = 0.5

ProgressCallback = Callable[[int, int], None]
"""Called with (trajectories done, trajectories in all), from the generator's thread."""


class RolloutGenerator:
    """Implements `Generator` with an engine and environments.

    Set `on_progress` to hear how far a batch is. `close` ends the threads; the engine belongs to whoever made it.
    """

    is_recorded = False

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer,
        generator: GeneratorConfig,
        environment: EnvironmentConfig,
        seed: int,
        on_progress: ProgressCallback | None = None,
        vocabulary_size: int | None = None,
        workers: WorkerHost | None = None,
        log: Path | None = None,
    ) -> None:
        """Raises ConfigError for an unknown environment (of one in worker processes, `generate` does), DataError for a
        tokenizer without a usable chat template.

        Args:
            on_progress: As the attribute.
            vocabulary_size: Rows of the policy's embedding; those of the tokenizer unless given.
            workers: Where worker processes are started, if not on this machine.
            log: Where those of this machine write what environments print; None is nowhere.
        """
        self._vocabulary_size = vocabulary_size or len(tokenizer)
        self._engine = CheckedEngine(engine, vocabulary_size=self._vocabulary_size)
        self._chat = ChatTokens(tokenizer)
        self._environment = environment
        self._limits = Limits(
            max_turns=generator.max_turns,
            max_context_length=generator.max_context_length,
            request_timeout_s=generator.request_timeout_s,
        )
        self._agent_loop: Callable[[Episode], Awaitable[object]] = AGENT_LOOPS.resolve(generator.agent_loop)
        self._context = generator.privileged_context
        self._seed = seed
        self._thread = LoopThread(name="rollout")
        self._environments = self._host_environments(workers, log)
        self.on_progress = on_progress

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
    ) -> RolloutBatch:
        """Return all trajectories in the order of their prompts and samples.

        Raises:
            SkyrlTrainError: More than `environment.max_failed_fraction` of the trajectories failed (EngineError where
                the engine is what fails).
            DataError: The chat template refuses a prompt, or nothing names its environment.
            ConfigError: A row names an environment that does not exist.
        """
        check_rows(prompts, self._environment)
        jobs = self._jobs(prompts, n_samples_per_prompt, sampling, global_step, purpose)
        hosts = self._environments
        hung, unclosed = hosts.num_given_up, hosts.num_close_failures
        trajectories = self._thread.run(self._run_all(jobs))
        if hosts.num_given_up > hung:
            logger.warning("%d environment calls hung; %s", hosts.num_given_up - hung, hosts.given_up)
        if hosts.num_close_failures > unclosed:
            logger.warning("%d environments could not be closed", hosts.num_close_failures - unclosed)
        return RolloutBatch(
            prompts=tuple(prompts), trajectories=tuple(trajectories), n_samples_per_prompt=n_samples_per_prompt
        )

    def close(self) -> None:
        """Ends the environments' threads or processes. Idempotent."""
        if not self._thread.is_closed:
            self._thread.run(self._environments.aclose())
        self._thread.close()

    def _host_environments(self, workers: WorkerHost | None, log: Path | None) -> Environments:
        environment = self._environment
        num_workers, timeout_s = environment.num_workers, environment.step_timeout_s
        if not uses_processes(environment):
            if environment.env_class is not None:
                check_environment(environment.env_class)
            return ThreadEnvironments(num_workers=num_workers, timeout_s=timeout_s)
        host = workers or LocalWorkers(WorkerSettings.of(environment, log=log))
        processes = ProcessEnvironments(host, num_workers=num_workers, timeout_s=timeout_s)
        # Imports go on while models are loaded; what is wrong with them is raised where rollouts need them.
        self._thread.begin(processes.prepare())
        return processes

    def _jobs(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, global_step: int, purpose: str
    ) -> list[Job]:
        jobs: list[Job] = []
        seen: Counter[str] = Counter()
        for prompt_index, prompt in enumerate(prompts):
            # The same prompt twice in a batch must not give the same samples twice.
            prompt_number = derive_seed(0, f"prompt/{prompt.uid}", seen[prompt.uid])
            seen[prompt.uid] += 1
            prompt_ids = self._chat.data_prompt(prompt)
            teacher_ids = (
                self._chat.data_prompt(with_context(prompt, self._context)) if self._context else token_ids(())
            )
            jobs.extend(
                Job(
                    prompt=prompt,
                    prompt_token_ids=prompt_ids,
                    teacher_token_ids=teacher_ids,
                    prompt_index=prompt_index,
                    prompt_number=prompt_number,
                    sample_index=sample_index,
                    sampling=sampling,
                    seed=self._seed,
                    global_step=global_step,
                    purpose=purpose,
                )
                for sample_index in range(n_samples)
            )
        return jobs

    async def _run_all(self, jobs: Sequence[Job]) -> list[Trajectory]:
        with contextlib.ExitStack() as all_leases:
            runs: list[Coroutine[Any, Any, Trajectory]] = []
            complete: list[tuple[Prompt, Trajectory]] = []
            for job in jobs:
                lease = all_leases.enter_context(contextlib.ExitStack())
                lease.enter_context(self._engine.lease())
                runs.append(self._run_one(job, lease, complete))
            tasks = [asyncio.ensure_future(run) for run in runs]
            try:
                await self._watch(tasks)
            except SkyrlTrainError as error:
                error.trajectories = tuple(complete)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    async def _run_one(
        self, job: Job, lease: contextlib.ExitStack, complete: list[tuple[Prompt, Trajectory]]
    ) -> Trajectory:
        """Return the job's trajectory, which is appended to what is `complete` as well."""
        with lease:
            env_class = environment_of(job.prompt, self._environment)
            extras = {**job.prompt.extras, "max_turns": self._limits.max_turns, "env_class": env_class}
            session = EnvironmentSession(
                self._environments,
                self._environment.env_class or env_class,
                extras,
                name=env_class.rpartition(":")[2],
            )
            episode = Episode(job=job, engine=self._engine, session=session, chat=self._chat, limits=self._limits)
            trajectory = await self._agent_loop(episode)
            if not isinstance(trajectory, Trajectory):
                kind = type(trajectory).__name__
                raise DataError(f"generator.agent_loop must give a Trajectory (skyrl_train.types); it gave {kind}")
            checked = checked_trajectory(
                trajectory,
                vocabulary_size=self._vocabulary_size,
                max_context_length=self._limits.max_context_length,
            )
            complete.append((job.prompt, checked))
            return checked

    async def _watch(self, tasks: Sequence[asyncio.Task[Trajectory]]) -> None:
        """Waits for all, reporting progress; raises at the first error and as soon as too many have failed."""
        done: list[Trajectory] = []
        for next_done in asyncio.as_completed(tasks):
            trajectory = await next_done
            done.append(trajectory)
            if trajectory.failed:
                check_failures(done, len(tasks), limit=self._environment.max_failed_fraction)
            if self.on_progress is not None:
                self.on_progress(len(done), len(tasks))


class LoopThread:
    """Runs coroutines to their end on one loop that lives as long as this object.

    Works whether or not the caller's thread runs a loop itself (a notebook, an async test), and what an engine bound to
    the loop (a connection pool, say) stays usable between calls.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or its exception.

        Where this thread is interrupted (Ctrl-C), the coroutine is cancelled and awaited first, so that nothing of it
        runs on.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            # In slices: a signal that another thread happens to receive does not wake this one.
            while not concurrent.futures.wait([future], timeout=_SIGNAL_POLL_S).done:
                continue
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                with contextlib.suppress(BaseException):
                    self._settle()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine whose result, or exception, nobody waits for."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Stops the loop. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _settle(self) -> None:
        """Waits until the cancelled coroutine has cleaned up after itself."""
        done: concurrent.futures.Future[None] = asyncio.run_coroutine_threadsafe(self._others_ended(), self._loop)
        done.result(_CANCEL_TIMEOUT_S)

    async def _others_ended(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_CANCEL_TIMEOUT_S)
