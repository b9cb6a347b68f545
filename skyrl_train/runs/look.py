"""The first look: what two prompts of a run make of its model, its reward and its settings, before it takes long.

    2 prompts x 4 samples --the run's engine--> texts --environments of its own--> rewards --one update, dropped--> seconds
                  other texts of no engine's --environments of its own--> rewards: does the reward read the text?

It draws from seeds of its own and moves no weight: the run behind it is the same, bit for bit, as without it.
"""

from __future__ import annotations

import json
import math
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from skyrl_train.config import Config
from skyrl_train.config.algorithm import FilterConfig
from skyrl_train.config.derived import scores_entropies
from skyrl_train.config.environment import reward_entries
from skyrl_train.config.rules import sizes_of
from skyrl_train.errors import byte_size, counted
from skyrl_train.interfaces import InferenceEngine, Learner
from skyrl_train.model import load_tokenizer
from skyrl_train.plan import (
    BatchPlan,
    RowLengths,
    duration,
    expected_peak_bytes,
    expected_step_seconds,
    make_batch_plan,
    recorded_lengths,
)
from skyrl_train.rollout import check_failures
from skyrl_train.rollout.hosts import facts_of, row_columns
from skyrl_train.rollout.rewards import forget_rewards
from skyrl_train.runs.construction.parts import Host, assembler, rollout_generator, trainer_of
from skyrl_train.runs.task import Attempt
from skyrl_train.system import derive_seed
from skyrl_train.telemetry import StepMetrics
from skyrl_train.trainers import Learners, PromptBatches, equal_groups, sampling_params, steps
from skyrl_train.trainers.evaluation import groups_of
from skyrl_train.types import (
    GenerationOutput,
    GenerationRequest,
    Prompt,
    RolloutBatch,
    StopReason,
    Tokenizer,
    Trajectory,
    Turn,
)

NUM_PROMPTS, NUM_SAMPLES = 2, 4
LONG_STEP_S = 30.0
"""A first step that is expected to take longer is looked at before, unless `trainer.look=off`."""
_GENERATE_S = 8.0
"""Expected seconds of the rollouts beyond which the look's responses are cut shorter than the run's."""
_Turns = tuple[tuple[int, ...], ...]
"""The token ids of an answer's turns."""
_ALL_BUT_ALL = 0.99
"""Share of failed samples that is allowed at most: of samples that all failed there is nothing to see."""

_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""How a row's own answer is written, to see whether a reward reads it."""


def first_look(
    attempt: Attempt[Config, BatchPlan],
    batches: PromptBatches,
    host: Host,
    learners: Learners,
    *,
    is_asked: bool = False,
) -> None:
    """Look at a run that begins, where its first step is expected to be long or the look is asked for.

    Args:
        batches: The training prompts.
        is_asked: Whether the command asks for the look itself.

    Raises SkyrlTrainError where every sample fails, with the reasons.
    """
    config, plan, console = attempt.config, attempt.plan, attempt.console
    if not is_asked:
        if not attempt.is_fresh or config.trainer.look == "off":
            return
        expected = expected_step_seconds(config, plan) if config.trainer.look == "auto" else None
        if config.trainer.look == "auto" and (expected is None or expected.step_s <= LONG_STEP_S):
            return
    prompts = batches(0)[:NUM_PROMPTS]
    reason = why_skipped(config, prompts) if attempt.is_fresh else "the run begins at a checkpoint"
    if reason:
        console.note(f"first look: skipped, since {reason}")
        return

    tokenizer, small = cast("Tokenizer", load_tokenizer(config.model)), _shortened(config)
    began = time.monotonic()
    with console.phase("look"), torch.random.fork_rng(devices=[]):
        seen = _look(config, small, plan, prompts, host, learners, tokenizer)
    length, of_run = (each.generator.sampling.max_generate_length for each in (small, config))
    cut = "" if length == of_run else f" of at most {length} new tokens in place of {of_run}"
    title = f"first look: {NUM_PROMPTS} prompts x {NUM_SAMPLES} samples{cut}, {duration(time.monotonic() - began)}"
    console.header(title, list(look_lines(seen, plan)))
    for line in look_warnings(seen, config, plan, tokenizer):
        console.warn(f"first look: {line}")


def why_skipped(config: Config, prompts: Sequence[Prompt]) -> str:
    """Why nothing is looked at; empty where it can be."""
    if config.generator.backend == "replay":
        return "rollouts are recorded"
    if config.placement.backend == "ray" or config.generator.has_own_devices:
        return "engine and models are not both in this process"
    if config.trainer.max_staleness:
        return "rollouts are made while the policy updates (trainer.max_staleness)"
    if config.generator.agent_loop != "multi_turn":
        return "trajectories are made by generator.agent_loop, which may do anything"
    if config.trainer.look != "full" and _asks_server(config, prompts):
        return "a reward, a tool or the environment asks a server, which may cost: trainer.look=full asks it"
    return ""


def _asks_server(config: Config, prompts: Sequence[Prompt]) -> bool:
    """Whether a reward, a tool or an environment asks a server, as far as names and arguments say."""
    environment = config.environment
    parts = [environment.env_class, environment.reward, environment.rewards, environment.tools, config.data.mix]
    said = json.dumps([*parts, *(prompt.env_class for prompt in prompts)], default=str)
    return re.search(r'"(judge|search|searchcode)"|[a-z_]*url": "|://', said) is not None


def _shortened(config: Config) -> Config:
    """The configuration of a run of the look's size: other seeds, one optimizer step, failures that end nothing."""
    trainer = replace(
        config.trainer,
        train_batch_size=NUM_PROMPTS,
        policy_mini_batch_size=NUM_PROMPTS,
        critic_mini_batch_size=NUM_PROMPTS,
        docs_per_step=0,
        algorithm=replace(config.trainer.algorithm, critic_warmup_steps=0, filters=FilterConfig()),
    )
    environment = replace(config.environment, max_failed_fraction=1.0, num_workers=2)
    generator = replace(config.generator, n_samples_per_prompt=NUM_SAMPLES)
    seed = derive_seed(config.seed, "look")
    small = replace(config, seed=seed, trainer=trainer, environment=environment, generator=generator)
    expected = expected_step_seconds(small, _plan(small))
    if expected is None or expected.generate_s <= _GENERATE_S:
        return small
    longest = config.generator.sampling.max_generate_length * _GENERATE_S / expected.generate_s
    sampling = replace(config.generator.sampling, max_generate_length=max(8, int(longest)))
    return replace(small, generator=replace(generator, sampling=sampling))


def _plan(small: Config) -> BatchPlan:
    return make_batch_plan(small.trainer, small.generator, sizes_of(small), num_train_prompts=NUM_PROMPTS)


class _Engine:
    """The run's engine, or in its place turns that are given."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.given: Mapping[tuple[int, int], _Turns] = {}
        """By prompt and sample; where there are any, nothing is sampled."""

    @property
    def weight_version(self) -> int:
        """Version of the run's first weights."""
        return self._engine.weight_version

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory to the run's engine until the context is left."""
        return self._engine.lease()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return the engine's answer, or the given turn as an answer. Raises EngineError, DeadlineError."""
        if not self.given:
            return await self._engine.generate(request)
        prompt, sample, turn = map(int, request.request_id.rsplit("-", 3)[1:])
        turns = self.given[prompt, sample]
        tokens = turns[min(turn, len(turns) - 1)][: request.sampling.max_generate_length]
        stop, version = StopReason.STOP, self.weight_version
        return GenerationOutput(
            token_ids=tokens, logprobs=(0.0,) * len(tokens), stop_reason=stop, weight_version=version
        )

    def close(self) -> None:
        """Nothing: the engine is the run's."""


class _Undone:
    """A learner whose steps move nothing."""

    def __init__(self, learner: Any) -> None:
        self._engine = learner.engine
        passes = ("forward", "forward_backward", "forward_with_entropy", "forward_sum_pi_squared")
        vars(self).update({name: getattr(learner, name) for name in passes if hasattr(learner, name)})

    def optim_step(self) -> StepMetrics:
        """Drop the gradient; there are no metrics."""
        self._engine.zero_grad()
        return {}


def _look(
    config: Config,
    small: Config,
    plan: BatchPlan,
    prompts: Sequence[Prompt],
    host: Host,
    learners: Learners,
    tokenizer: Tokenizer,
) -> Seen:
    """Raises SkyrlTrainError where every sample fails."""
    sampling = sampling_params(small.generator.sampling)
    assert host.engines is not None, "whatever is no recording is an engine"
    steps.sync(learners.policy, host.engines.transport, version=0)
    engine = _Engine(host.engines.engine)
    with ExitStack() as stack:
        generator = rollout_generator(small, engine, host)
        stack.callback(generator.close)
        began = time.monotonic()
        generated = steps.generate(
            generator,
            lambda _: prompts,
            trainer_of(small),
            n_samples_per_prompt=small.generator.n_samples_per_prompt,
            sampling=sampling,
            step=1,
            position=0,
        )
        generate_s = time.monotonic() - began
        made = generated.everything.trajectories
        if all(each.failed for each in made):
            check_failures(made, len(made), limit=min(config.environment.max_failed_fraction, _ALL_BUT_ALL))
        engine.given = _other_answers(generated.everything, tokenizer)
        num_others = len(engine.given) // len(prompts)
        others = generator.generate(
            prompts, n_samples_per_prompt=num_others, sampling=sampling, global_step=1, purpose="look"
        )
        generator.take_metrics()
    if not any(entry.in_trainer for entry in reward_entries(config.environment)):
        forget_rewards()  # so that an object that counts its calls begins anew
    is_profiled = 1 in config.trainer.profile_steps  # and would be of this update
    is_measured = not (config.platform.on_gpu or is_profiled or any(each.failed for each in made))
    learn_s = _update(generated, small, learners) if is_measured else 0.0
    lengths = recorded_lengths([generated.everything], step_wise=config.generator.is_step_wise, source="the first look")
    more = plan.num_samples_per_batch / len(made)
    of_step = _step_seconds(config, plan, small, lengths, generate_s, learn_s, more=more)
    return Seen(
        rollouts=generated.everything,
        others=others,
        generate_s=of_step[0],
        learn_s=of_step[1],
        is_measured=is_measured,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        step_bytes=expected_peak_bytes(config, plan, lengths) or 0,
    )


def _other_answers(rollouts: RolloutBatch, tokenizer: Tokenizer) -> dict[tuple[int, int], _Turns]:
    """Return the turns of other answers to each prompt, as many for each: one of its own again, another prompt's, an empty
    one, and what its row calls the answer, in several forms."""

    def tokens(text: str) -> tuple[int, ...]:
        return (*tokenizer(text, add_special_tokens=False)["input_ids"], *end)

    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    empty = (end or tokens("\n"),)
    played = [
        next((tuple(map(_response, each.turns)) for each in group if not each.failed), empty)
        for _, group in groups_of(rollouts)
    ]
    found: dict[tuple[int, int], _Turns] = {}
    for index, prompt in enumerate(rollouts.prompts):
        answer = row_columns(prompt).get("answer")
        forms = [(tokens(form.format(answer)),) for form in _FORMS if isinstance(answer, (str, int, float))]
        answers = [played[index], played[(index + 1) % len(played)], empty, *(forms or [empty] * len(_FORMS))]
        found |= {(index, sample): turns for sample, turns in enumerate(answers)}
    return found


def _response(turn: Turn) -> tuple[int, ...]:
    return tuple(turn.response_token_ids.tolist())


def _update(generated: steps.Generated, config: Config, learners: Learners) -> float:
    """Score and update once, and drop the gradient; return the seconds."""
    trainer, assemble, began = trainer_of(config), assembler(config), time.monotonic()
    critic = None if learners.critic is None else cast("Learner", _Undone(learners.critic))
    undone = replace(learners, policy=cast("Learner", _Undone(learners.policy)), critic=critic)
    try:
        batch = assemble(generated.rollouts, step=1, weight_version=0)
        entropies = scores_entropies(config)
        batch = steps.score(batch, learners, trainer, rollouts=generated.rollouts, with_entropies=entropies)
        batch = steps.estimate(batch, trainer.algorithm, kl_coef=trainer.algorithm.kl_reward_coef, seed=config.seed)
        batch = batch.without_columns("entropies")
        steps.update(batch, undone, trainer, on_progress=lambda *_: None)
    finally:
        undone.policy.optim_step()  # where the update broke off
        if critic is not None:
            critic.optim_step()
    return time.monotonic() - began


def _step_seconds(
    config: Config,
    plan: BatchPlan,
    small: Config,
    lengths: RowLengths,
    generate_s: float,
    learn_s: float,
    *,
    more: float,
) -> tuple[float, float]:
    """Seconds of a step's rollouts, and of the rest: those of the look, times what the plan expects a step to be longer,
    or else `more`."""
    of_step = expected_step_seconds(config, plan, lengths=lengths)
    of_look = expected_step_seconds(small, _plan(small), lengths=lengths)
    if of_step is None or of_look is None:
        return generate_s * more, learn_s * more
    expected_s = of_step.score_s + of_step.update_s
    longer = expected_s / (of_look.score_s + of_look.update_s)
    return generate_s * of_step.generate_s / of_look.generate_s, learn_s * longer or expected_s


_SMALLEST_WAY = 5e-5
"""Learning rate times optimizer steps, about as far as Adam moves a weight, below which answers stay what they are."""
_LONGEST_TEXT = 300
"""Characters of a prompt or an answer that are shown."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the look found, and what follows from it for a step of the run."""

    rollouts: RolloutBatch
    others: RolloutBatch
    """The same prompts with other answers: of each prompt the first is its first sample's again."""
    generate_s: float
    learn_s: float
    """Seconds of scores and update of a whole step."""
    is_measured: bool
    """Whether `learn_s` follows from an update that was made; else from stated rates of the device."""
    peak_bytes: int
    """The most memory of the process so far."""
    step_bytes: int
    """The most that the process is expected to take in a step; 0 is not known."""

    @property
    def kept(self) -> list[Trajectory]:
        """The samples that did not fail."""
        return [each for each in self.rollouts.trajectories if not each.failed]


def look_lines(seen: Seen, plan: BatchPlan) -> Iterator[str]:
    """Yield what was seen, for a header of the console."""
    prompts = {prompt.uid: prompt for prompt in seen.rollouts.prompts}
    ranked = sorted(seen.kept, key=lambda each: each.reward)
    for name, each in (("highest", ranked[-1]), ("lowest", ranked[0])):
        prompt, turn = prompts[each.prompt_uid], each.turns[-1]
        said = ", ".join(f"{key} {value:g}" for key, value in {**each.rewards, **each.metrics}.items())
        length = counted(len(turn.response_token_ids), "token")
        yield f"{name:<11} reward {each.reward:g} ({said or 'one number'}), {length}, ended by {turn.stop_reason.value}"
        yield f"  prompt    {_shown(prompt.messages[-1].get('content', ''))}"
        yield f"  it read   {_shown(turn.response_text)}"
        if (answer := row_columns(prompt).get("answer")) is not None:
            yield f"  answer    {_shown(answer)}"
    groups = [[each.reward for each in group if not each.failed] for _, group in groups_of(seen.rollouts)]
    spread = sum(len(set(group)) > 1 for group in groups)
    mean = sum(each.reward for each in seen.kept) / len(seen.kept)
    yield f"groups      {spread} of {len(groups)} have samples with different rewards; mean reward {mean:.3g}"
    step_s = seen.generate_s + seen.learn_s
    yield (
        f"time        about {duration(step_s)} a step: rollouts {duration(seen.generate_s)}, scores and update "
        f"{duration(seen.learn_s)}{'' if seen.is_measured else ' (reckoned)'}; {counted(plan.total_steps, 'step')} "
        f"{duration(step_s * plan.total_steps)}, evaluations aside"
    )
    expected = f", about {byte_size(seen.step_bytes)} in a step" if seen.step_bytes else ""
    yield f"memory      {byte_size(seen.peak_bytes)} so far{expected}"


def look_warnings(seen: Seen, config: Config, plan: BatchPlan, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what would keep the run from learning anything."""
    made = seen.rollouts.trajectories
    if failure := next((each.failure for each in made if each.failure is not None), None):
        lost = f"{len(made) - len(seen.kept)} of {counted(len(made), 'sample')}"
        yield f"{lost} failed, the first by {failure.kind.value}: {failure.message}"
    if told := equal_groups(seen.rollouts, config.trainer.algorithm):
        yield told
    yield from _reward_warnings(seen, config)
    if all(each.turns[-1].stop_reason is StopReason.LENGTH for each in seen.kept):
        length, end = config.generator.sampling.max_generate_length, tokenizer.eos_token_id
        yield (
            f"all {len(seen.kept)} answers were cut at the limit, and the end token "
            f"{'is not known' if end is None else f'{tokenizer.decode([end])!r} was never sampled'}: raise "
            f"generator.sampling.max_generate_length={length}, or ask for shorter answers; a base model may never end one"
        )
    optimizer, updates = config.trainer.policy.optimizer, plan.total_optimizer_steps
    if optimizer.name != "sgd" and optimizer.lr * updates < _SMALLEST_WAY:
        yield (
            f"trainer.policy.optimizer.lr={optimizer.lr:g} x {counted(updates, 'update')} moves a weight by "
            f"{optimizer.lr * updates:.1e} at most, which changes no answer: try "
            f"trainer.policy.optimizer.lr={_SMALLEST_WAY * 10 / updates:.0e}, or more trainer.total_steps"
        )
    if not tokenizer.chat_template and config.data.prompt_format == "auto":
        yield "the tokenizer has no chat template: prompts are plain text. data.prompt_format=text says that this is meant"


def _reward_warnings(seen: Seen, config: Config) -> Iterator[str]:
    """Yield whether rewards depend on something else than the text."""
    compares = any(facts.form != "each" for facts in facts_of(config.environment).values())
    best, differs = -math.inf, False
    for (_, group), (_, others) in zip(groups_of(seen.rollouts), groups_of(seen.others)):
        sampled, tried = ([each.reward for each in part if not each.failed] for part in (group, others))
        if not sampled or not tried:
            return
        if not (compares or others[0].failed or group[0].failed) and group[0].reward != others[0].reward:
            yield (
                f"the same text was rewarded with {group[0].reward:g} and then with {others[0].reward:g}: the reward "
                "depends on something else than the text"
            )
            return
        best, differs = max(best, *tried), differs or len({*sampled, *tried}) > 1
    if not differs:
        yield (
            "the reward is independent of the text, as far as was tried: each prompt's samples, another prompt's answer, an "
            "empty one and the row's answer, where it has one, all earn the same. Does it read what it is given?"
        )
    elif best > max(each.reward for each in seen.kept):
        yield f"the reward does read the text: one that was not sampled earns {best:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(text)} characters)"
