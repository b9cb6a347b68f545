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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.mix import MixedDataset
from skyrl_train.config.parts import AGENT_LOOPS
from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.agent_loop import Episode, Job, Limits
from skyrl_train.rollout.chat_tokens import ChatTokens, with_context
from skyrl_train.rollout.checked_engine import CheckedEngine, check_failures, checked_trajectory
from skyrl_train.rollout.env_boundary import Environments, EnvironmentSession, ToolSettings
from skyrl_train.rollout.env_local import LocalWorkers, WorkerSettings
from skyrl_train.rollout.env_processes import ProcessEnvironments, WorkerHost
from skyrl_train.rollout.env_threads import ThreadEnvironments
from skyrl_train.rollout.environments import check_environment, check_rows, environment_of, uses_processes
from skyrl_train.rollout.scoring import Rewards
from skyrl_train.rollout.tools.formats import ToolParser
from skyrl_train.rollout.tools.toolbox import Schema, tool_schemas
from skyrl_train.seeding import derive_seed
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Tokenizer, Trajectory, token_ids

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 10.0
_SIGNAL_POLL_S = 0.5

ProgressCallback = Callable[[int, int], None]
"""Called with (trajectories done, trajectories in all), from the generator's thread."""


@dataclass(frozen=True)
class _Task:
    """What scores the prompts of a data set, or of the run."""

    environment: EnvironmentConfig
    hosts: Environments
    rewards: Rewards
    tools: tuple[Schema, ...]


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
        parse_calls: ToolParser | None = None,
        chat: ChatTokens | None = None,
        mix: Sequence[MixedDataset] = (),
    ) -> None:
        """Raises ConfigError for an unknown environment (of one in worker processes, `generate` does), DataError for a
        tokenizer without a usable chat template.

        Args:
            on_progress: As the attribute.
            vocabulary_size: Rows of the policy's embedding; those of the tokenizer unless given.
            workers: Where worker processes are started, if not on this machine.
            log: Where those of this machine write what environments print; None is nowhere.
            parse_calls: Reads calls of tools in a response; None where no format is known.
            chat: How prompts become tokens; by the tokenizer's chat template unless given.
            mix: The data sets of prompts that name one, whose environment, rewards and sampling are their own.
        """
        self._vocabulary_size = vocabulary_size or len(tokenizer)
        self._engine = CheckedEngine(engine, vocabulary_size=self._vocabulary_size)
        self._chat = chat or ChatTokens(tokenizer)
        self._environment = environment
        self._limits = Limits(
            max_turns=generator.max_turns,
            max_context_length=generator.max_context_length,
            request_timeout_s=generator.request_timeout_s,
        )
        self._agent_loop: Callable[[Episode], Awaitable[object]] = AGENT_LOOPS.resolve(generator.agent_loop)
        self._parse_calls = parse_calls
        self._context = generator.privileged_context
        self._seed = seed
        self._thread = LoopThread(name="rollout")
        self._mix = {dataset.name: dataset for dataset in mix}
        # With a mix, no prompt is scored by the environment of the run.
        own = {name: dataset.environment for name, dataset in self._mix.items()} or {"": environment}
        self._tasks = {name: self._host(each, None if mix else workers, log) for name, each in own.items()}
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
        for name, task in self._tasks.items():
            check_rows([prompt for prompt in prompts if prompt.dataset == name], task.environment)
        jobs = self._jobs(prompts, n_samples_per_prompt, sampling, global_step, purpose)
        hosts = [task.hosts for task in self._tasks.values()]
        before = [(each.num_given_up, each.num_close_failures) for each in hosts]
        trajectories = self._thread.run(self._run_all(jobs, n_samples_per_prompt))
        for each, (hung, unclosed) in zip(hosts, before):
            if each.num_given_up > hung:
                logger.warning("%d environment calls hung; %s", each.num_given_up - hung, each.given_up)
            if each.num_close_failures > unclosed:
                logger.warning("%d environments could not be closed", each.num_close_failures - unclosed)
        return RolloutBatch(
            prompts=tuple(prompts), trajectories=tuple(trajectories), n_samples_per_prompt=n_samples_per_prompt
        )

    def take_metrics(self) -> dict[str, float]:
        """Return what judges did since the last time."""
        return {name: value for task in self._tasks.values() for name, value in task.rewards.take_metrics().items()}

    def close(self) -> None:
        """Ends the environments' threads or processes. Idempotent."""
        if not self._thread.is_closed:
            for task in self._tasks.values():
                self._thread.run(task.hosts.aclose())
        self._thread.close()

    def _host(self, environment: EnvironmentConfig, workers: WorkerHost | None, log: Path | None) -> _Task:
        hosts = self._host_environments(environment, workers, log)
        return _Task(environment, hosts, Rewards(environment, hosts), tool_schemas(environment.tools))

    def _host_environments(
        self, environment: EnvironmentConfig, workers: WorkerHost | None, log: Path | None
    ) -> Environments:
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
            task = self._tasks[prompt.dataset]
            tools = prompt.tools or task.tools
            prompt_ids = self._chat.data_prompt(prompt, tools)
            teacher_ids = (
                self._chat.data_prompt(with_context(prompt, self._context), tools) if self._context else token_ids(())
            )
            jobs.extend(
                Job(
                    prompt=prompt,
                    configured_tools=task.tools,
                    prompt_token_ids=prompt_ids,
                    teacher_token_ids=teacher_ids,
                    prompt_index=prompt_index,
                    prompt_number=prompt_number,
                    sample_index=sample_index,
                    sampling=self._sampling_of(prompt, sampling, purpose),
                    seed=self._seed,
                    global_step=global_step,
                    purpose=purpose,
                )
                for sample_index in range(n_samples)
            )
        return jobs

    def _sampling_of(self, prompt: Prompt, sampling: SamplingParams, purpose: str) -> SamplingParams:
        """Return how a prompt is sampled: as its data set says, but that a greedy baseline stays greedy."""
        dataset = self._mix.get(prompt.dataset)
        if dataset is None:
            return sampling
        changes = dict(dataset.eval_sampling if purpose == "eval" else dataset.sampling)
        if purpose.startswith("greedy"):
            changes.pop("temperature", None)
        return replace(sampling, **changes)

    async def _run_all(self, jobs: Sequence[Job], n_samples: int) -> list[Trajectory]:
        with contextlib.ExitStack() as all_leases:
            runs: list[Coroutine[Any, Any, Trajectory]] = []
            complete: list[tuple[Prompt, Trajectory]] = []
            for job in jobs:
                lease = all_leases.enter_context(contextlib.ExitStack())
                lease.enter_context(self._engine.lease())
                runs.append(self._run_one(job, lease, complete))
            tasks = [asyncio.ensure_future(run) for run in runs]
            groups: list[asyncio.Task[list[Trajectory]]] = []
            if any(task.rewards.of_groups for task in self._tasks.values()):
                groups = [
                    asyncio.ensure_future(self._score_group(jobs[start].prompt, tasks[start : start + n_samples]))
                    for start in range(0, len(jobs), n_samples)
                ]
            try:
                await self._watch(tasks)
                trajectories = [task.result() for task in tasks]
                if groups:
                    trajectories = [one for group in await asyncio.gather(*groups) for one in group]
                    check_failures(trajectories, len(jobs), limit=self._environment.max_failed_fraction)
                return trajectories
            except SkyrlTrainError as error:
                error.trajectories = tuple(complete)
                raise
            finally:
                for task in (*tasks, *groups):
                    task.cancel()
                await asyncio.gather(*tasks, *groups, return_exceptions=True)

    async def _score_group(self, prompt: Prompt, tasks: Sequence[asyncio.Task[Trajectory]]) -> list[Trajectory]:
        """Return the samples of a prompt, once all have ended, with the rewards that compare them."""
        rewards, trajectories = self._tasks[prompt.dataset].rewards, await asyncio.gather(*tasks)
        return await rewards.score_group(prompt, trajectories) if rewards.of_groups else list(trajectories)

    async def _run_one(
        self, job: Job, lease: contextlib.ExitStack, complete: list[tuple[Prompt, Trajectory]]
    ) -> Trajectory:
        """Return the job's trajectory, which is appended to what is `complete` as well."""
        with lease:
            task = self._tasks[job.prompt.dataset]
            env_class = environment_of(job.prompt, task.environment)
            extras = {**job.prompt.extras, "max_turns": self._limits.max_turns, "env_class": env_class}
            session = EnvironmentSession(
                task.hosts,
                task.environment.env_class or env_class,
                extras,
                name=env_class.rpartition(":")[2],
                tools=ToolSettings(
                    specs=task.environment.tools, max_result_chars=task.environment.max_tool_result_chars
                ),
            )
            episode = Episode(
                job=job,
                engine=self._engine,
                session=session,
                chat=self._chat,
                limits=self._limits,
                parse_calls=self._parse_calls,
            )
            trajectory = await self._agent_loop(episode)
            if not isinstance(trajectory, Trajectory):
                kind = type(trajectory).__name__
                raise DataError(f"generator.agent_loop must give a Trajectory (skyrl_train.types); it gave {kind}")
            checked = checked_trajectory(
                trajectory,
                vocabulary_size=self._vocabulary_size,
                max_context_length=self._limits.max_context_length,
            )
        # The engine waits for leased trajectories alone: it goes on while this one is scored.
        scored = await self._tasks[job.prompt.dataset].rewards.score(job.prompt, checked)
        complete.append((job.prompt, scored))
        return scored

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
