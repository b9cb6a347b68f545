"""What the first look tells: two samples and their rewards, what the run will take, what would keep it from learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_train.config import Config
from skyrl_train.errors import byte_size, counted
from skyrl_train.plan import BatchPlan, duration
from skyrl_train.rollout.hosts import facts_of, row_columns
from skyrl_train.trainers import equal_groups
from skyrl_train.trainers.evaluation import groups_of
from skyrl_train.types import RolloutBatch, StopReason, Tokenizer, Trajectory

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
    """Of scores and update."""
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
