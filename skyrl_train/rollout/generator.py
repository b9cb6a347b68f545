"""`RolloutGenerator`: prompts in, trajectories out.

Each trajectory runs as one task of an event loop on a thread of its own. Environments run in worker processes or on
further threads, the engine where its backend puts it. Every trajectory leases the engine before the first one asks for
tokens, so that an engine that generates in waves sees the same batches on every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import with_sandbox
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.config.rules import MixedDataset
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.interfaces import InferenceEngine, ReportsMetrics
from skyrl_train.parts import AGENT_LOOPS
from skyrl_train.rollout.agent_loop import Episode, Job, Limits
from skyrl_train.rollout.boundary import Environments
from skyrl_train.rollout.boundary.session import EnvironmentSession, Restarted
from skyrl_train.rollout.chat_tokens import ChatTokens, with_context
from skyrl_train.rollout.checked_engine import (
    FIRST_FEW,
    CheckedEngine,
    check_failures,
    checked_trajectory,
)
from skyrl_train.rollout.envs.environments import check_environment, check_rows, environment_of, uses_processes
from skyrl_train.rollout.hosts.local import LocalWorkers
from skyrl_train.rollout.hosts.processes import SLOW_TO_START, ProcessEnvironments, WorkerHost
from skyrl_train.rollout.hosts.scoring import Rewards
from skyrl_train.rollout.hosts.threads import ThreadEnvironments
from skyrl_train.rollout.journal import Journal
from skyrl_train.rollout.loop_thread import LoopThread
from skyrl_train.rollout.tools.formats import ToolParser
from skyrl_train.rollout.tools.toolbox import Schema, starts_servers, tool_schemas
from skyrl_train.system import derive_seed
from skyrl_train.telemetry import Activity, TellsWhenBusy
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Tokenizer, Trajectory, token_ids

logger = logging.getLogger(__name__)

STREAM = "stream"
"""Purpose, in requests and seeds, of groups that run by themselves."""
_GREEDY = "greedy_stream"
"""Purpose of their greedy samples, which are a baseline."""


class Place(NamedTuple):
    """A prompt's in its batch."""

    number: int
    num_before: int
    """How often the batch has the same prompt before."""


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
        self._none_succeeded = True
        self.activity = Activity()
        """What engine and environments are at."""
        if isinstance(engine, TellsWhenBusy):
            engine.on_busy = self.activity.engine_computes
        self._engine = CheckedEngine(engine, vocabulary_size=self._vocabulary_size, activity=self.activity)
        self._reporting = engine if isinstance(engine, ReportsMetrics) else None
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
        self.thread = LoopThread(name="rollout")
        """The event loop that all trajectories run on."""
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
        self._check_rows(prompts)
        hosts = [task.hosts for task in self._tasks.values()]
        before = [(each.num_given_up, each.num_close_failures) for each in hosts]
        places = places_of(prompts)
        trajectories = self.thread.run(
            self._run_all(prompts, places, n_samples_per_prompt, sampling, global_step, purpose)
        )
        for each, (hung, unclosed) in zip(hosts, before):
            if each.num_given_up > hung:
                logger.warning("%d environment calls hung; %s", each.num_given_up - hung, each.given_up)
            if each.num_close_failures > unclosed:
                logger.warning("%d environments could not be closed", each.num_close_failures - unclosed)
        return RolloutBatch(
            prompts=tuple(prompts), trajectories=tuple(trajectories), n_samples_per_prompt=n_samples_per_prompt
        )

    async def run_part(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[Place],
        *,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
    ) -> list[Trajectory]:
        """Return all samples of some prompts of a batch, which are what `generate` makes of them among all. `places`: theirs
        in the batch (`places_of`).

        To be awaited on `thread`. Raises DataError, ConfigError as `generate` does; who has the whole batch knows how many
        samples may fail.
        """
        self._check_rows(prompts)
        settings = (n_samples_per_prompt, sampling, global_step, purpose)
        return await self._run_all(prompts, places, *settings, is_whole=False)

    async def run_group(
        self,
        prompt: Prompt,
        *,
        ordinal: int,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        journal: Journal,
        with_greedy: bool = False,
    ) -> tuple[Trajectory, ...]:
        """Return all samples of one prompt, which runs by itself: the engine may answer it beside any others.

        To be awaited on `thread`. `ordinal` is the prompt's index in the order of the data; requests are named and seeded by
        it. What engine and environments answer is in the `journal`, or taken from there. `with_greedy` adds a greedy sample,
        the last. Raises DataError, ConfigError as `generate` does; SaveError.
        """
        self._check_rows([prompt])
        first = [Place(0, 0)]
        jobs = self._jobs([prompt], first, n_samples_per_prompt, sampling, ordinal, STREAM)
        if with_greedy:
            jobs += self._jobs([prompt], first, 1, replace(sampling, temperature=0.0), ordinal, _GREEDY)
        tasks = [asyncio.ensure_future(self._run(job, contextlib.ExitStack(), [], journal)) for job in jobs]
        samples, greedy = tasks[:n_samples_per_prompt], tasks[n_samples_per_prompt:]
        try:
            groups = [await self._score_group(prompt, group) for group in (samples, greedy) if group]
            return tuple(one for group in groups for one in group)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take_metrics(self) -> dict[str, float]:
        """Return what judges did since the last time."""
        return {name: value for task in self._tasks.values() for name, value in task.rewards.take_metrics().items()}

    def engine_metrics(self) -> dict[str, float]:
        """Return what the engine measured since the last time, if it does."""
        return {} if self._reporting is None else dict(self._reporting.take_metrics())

    def close(self) -> None:
        """Ends the environments' threads or processes. Idempotent."""
        if not self.thread.is_closed:
            for task in self._tasks.values():
                self.thread.run(task.hosts.aclose())
        self.thread.close()

    def _host(self, environment: EnvironmentConfig, workers: WorkerHost | None, log: Path | None) -> _Task:
        timeout_s, waits = environment.step_timeout_s, self.activity.environment
        hosts: Environments
        if uses_processes(environment):
            host, most = workers or LocalWorkers.of(environment, log), most_workers(environment)
            hosts = ProcessEnvironments(host, num_workers=most, timeout_s=timeout_s, around=waits)
            # Imports go on while models are loaded; what is wrong with them is raised where rollouts need them.
            self.thread.begin(host.ready())
        else:
            if environment.env_class is not None:
                check_environment(environment.env_class)
            hosts = ThreadEnvironments(num_workers=environment.num_workers, timeout_s=timeout_s, around=waits)
        return _Task(environment, hosts, Rewards(environment, hosts), tool_schemas(environment.tools))

    def _check_rows(self, prompts: Sequence[Prompt]) -> None:
        for name, task in self._tasks.items():
            check_rows([prompt for prompt in prompts if prompt.dataset == name], task.environment)

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[Place],
        n_samples: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
    ) -> list[Job]:
        jobs: list[Job] = []
        for prompt, (prompt_index, num_before) in zip(prompts, places, strict=True):
            # The same prompt twice in a batch must not give the same samples twice.
            prompt_number = derive_seed(0, f"prompt/{prompt.uid}", num_before)
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

    async def _run_all(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[Place],
        n_samples: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
        *,
        is_whole: bool = True,
    ) -> list[Trajectory]:
        # Prompts become tokens on the loop's thread alone: tokenizers are not for several threads at once.
        jobs = self._jobs(prompts, places, n_samples, sampling, global_step, purpose)
        with contextlib.ExitStack() as all_leases:
            runs: list[Coroutine[Any, Any, Trajectory]] = []
            complete: list[tuple[Prompt, Trajectory]] = []
            for job in jobs:
                lease = all_leases.enter_context(contextlib.ExitStack())
                lease.enter_context(self._engine.lease())
                runs.append(self._run(job, lease, complete))
            tasks = [asyncio.ensure_future(run) for run in runs]
            groups: list[asyncio.Task[list[Trajectory]]] = []
            if any(task.rewards.of_groups for task in self._tasks.values()):
                groups = [
                    asyncio.ensure_future(
                        self._score_group(job.prompt, tasks[start : start + n_samples], job.global_step)
                    )
                    for start, job in list(enumerate(jobs))[::n_samples]
                ]
            try:
                trajectories = list(await (self._watch(tasks) if is_whole else asyncio.gather(*tasks)))
                if groups:
                    trajectories = [one for group in await asyncio.gather(*groups) for one in group]
                if groups and is_whole:
                    check_failures(trajectories, len(jobs), limit=self._environment.max_failed_fraction)
                return trajectories
            except SkyrlTrainError as error:
                error.trajectories = tuple(complete)
                raise
            finally:
                for task in (*tasks, *groups):
                    task.cancel()
                await asyncio.gather(*tasks, *groups, return_exceptions=True)

    async def _score_group(
        self, prompt: Prompt, tasks: Sequence[asyncio.Task[Trajectory]], global_step: int | None = None
    ) -> list[Trajectory]:
        """Return the samples of a prompt, once all have ended, with the rewards that compare them."""
        rewards, trajectories = self._tasks[prompt.dataset].rewards, await asyncio.gather(*tasks)
        if not rewards.of_groups:
            return list(trajectories)
        return await rewards.score_group(prompt, trajectories, global_step=global_step)

    async def _run(
        self,
        job: Job,
        lease: contextlib.ExitStack,
        complete: list[tuple[Prompt, Trajectory]],
        journal: Journal | None = None,
    ) -> Trajectory:
        """Return the job's trajectory, which is appended to what is `complete` as well, with a `journal` going on where a
        run before was. The job's group is in flight until then."""
        is_eval = job.purpose == "eval"
        with self.activity.trajectory((is_eval, job.global_step, job.prompt_index), is_timed=not is_eval):
            with lease:
                try:
                    trajectory = await self._agent_loop(self._episode(job, journal))
                except Restarted:  # once at most: the journal has nothing left that could be refused
                    trajectory = await self._agent_loop(self._episode(job, journal))
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

    def _episode(self, job: Job, journal: Journal | None) -> Episode:
        task = self._tasks[job.prompt.dataset]
        env_class = environment_of(job.prompt, task.environment)
        extras = {**job.prompt.extras, "max_turns": self._limits.max_turns, "env_class": env_class}
        session = EnvironmentSession(
            task.hosts,
            with_sandbox(task.environment.env_class or env_class, task.environment),
            extras,
            name=env_class.rpartition(":")[2],
            tools=task.environment.tools,
            max_result_chars=task.environment.max_tool_result_chars,
            journal=journal,
            trajectory=job.name,
        )
        return Episode(
            job=job,
            engine=self._engine if journal is None else self._engine.with_journal(journal),
            session=session,
            chat=self._chat,
            limits=self._limits,
            parse_calls=self._parse_calls,
        )

    async def _watch(self, tasks: Sequence[asyncio.Task[Trajectory]]) -> list[Trajectory]:
        """Return the results of all, reporting progress; raises at the first error and as soon as too many have failed."""
        done: list[Trajectory] = []
        for next_done in asyncio.as_completed(tasks):
            trajectory = await next_done
            done.append(trajectory)
            self._none_succeeded = self._none_succeeded and trajectory.failed
            if trajectory.failed:
                # Not the first to end: a judge that refuses at once, now and then, is faster than its answers.
                none = self._none_succeeded and all(task.done() for task in tasks[:FIRST_FEW])
                limit = self._environment.max_failed_fraction
                check_failures(done, len(tasks), limit=limit, none_succeeded=none)
            if self.on_progress is not None:
                self.on_progress(len(done), len(tasks))
        return [task.result() for task in tasks]


def places_of(prompts: Sequence[Prompt]) -> list[Place]:
    """Return the places of a batch's prompts."""
    seen: Counter[str] = Counter()
    places = []
    for index, prompt in enumerate(prompts):
        places.append(Place(index, seen[prompt.uid]))
        seen[prompt.uid] += 1
    return places


def most_workers(environment: EnvironmentConfig) -> int | None:
    """Return how many worker processes there may be; None is as many as trajectories. Hundreds of servers that start at once
    would all be late."""
    if environment.num_workers is None and starts_servers(environment.tools):
        return SLOW_TO_START
    return environment.num_workers
