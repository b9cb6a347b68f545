"""Rewards: what they say of the answers, and whether a group's samples differ."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from skyrl_train.doctor.findings import Finding, row_of, rows_of
from skyrl_train.doctor.limits import LIMITS
from skyrl_train.doctor.tables import Series, Tables
from skyrl_train.doctor.trajectories import Trajectory, last_number

_FEW = 20
"""Trajectories below which no share is trusted."""


def constant_reward(run: Tables) -> Iterator[Finding]:
    """Every trajectory of the run has the same reward, from the first step on.

    A verifier that breaks returns one number; groups without a spread have no gradient (DAPO, arXiv:2503.14476, 3.2). Of
    answers that are all cut off it can say nothing else; where others end by themselves, it is what does not look.
    """
    spread = run.series("reward/std")
    mean = run.series("reward/mean")
    if len(spread) < 3 or spread.values.max() > LIMITS["constant_reward"] or np.ptp(mean.values) > 1e-9:
        return
    ended = [each for each in run.trajectories if all(turn.stop_reason != "length" for turn in each.turns)]
    yield Finding(
        what=f"Every trajectory of every step has the reward {mean.values[0]:g}: nothing can be learned from it",
        evidence=(spread.shown(), mean.shown()),
        remedy="Call the reward function on two answers by hand, a right one and a wrong one. Does it find the answer in "
        "the text (the last line, the format that it asks for), and the truth in the row's column?",
        since=int(mean.steps[0]),
        certainty=0.9 if len(ended) >= _FEW else 0.5,
        rows=rows_of(ended or run.trajectories),
    )


def zero_variance_groups(run: Tables) -> Iterator[Finding]:
    """Most groups have one reward for all samples, so that their advantages are 0 (DAPO, arXiv:2503.14476, 3.2)."""
    share = run.series("group/zero_variance")
    least = LIMITS["zero_variance_groups"]
    if len(share) < 3 or share.last() < least:
        return
    rewards = run.series("reward/mean")
    width = run.largest_reward - run.least_reward
    at_the_top = width > 0 and rewards.last() >= run.largest_reward - 0.1 * width
    why = "almost every sample is right" if at_the_top else "almost every sample of a prompt has the same reward"
    yield Finding(
        what=f"{share.last():.0%} of the groups have no spread of rewards in the last steps: {why}",
        evidence=(share.shown(), rewards.shown()),
        remedy="The data is solved: stop, or train on harder prompts"
        if at_the_top
        else "Train on prompts that the model solves sometimes (data.curriculum, "
        "trainer.algorithm.filters.dynamic_sampling), sample more a prompt, or begin with a model that can do some of them",
        level="note" if at_the_top else "problem",
        since=share.since(lambda values: values >= least),
        certainty=0.8,
    )


def verifier_contradicts_truth(run: Tables) -> Iterator[Finding]:
    """Answers that state the row's truth get the lowest reward, or others the highest."""
    whole = [each for each in _judged(run.trajectories) if not any(turn.stop_reason == "length" for turn in each.turns)]
    known = [each for each in whole if each.truth is not None and last_number(each.text)]
    if len(known) < _FEW:
        return
    right = [each for each in known if last_number(each.text) == last_number(each.truth or "")]
    wrong = [each for each in known if last_number(each.text) != last_number(each.truth or "")]
    lowest, highest = min(each.reward or 0.0 for each in known), max(each.reward or 0.0 for each in known)
    refused = [each for each in right if each.reward == lowest and (lowest < highest or not highest)]
    accepted = [each for each in wrong if each.reward == highest and lowest < highest]
    if len(right) >= _FEW and len(refused) > LIMITS["verifier_contradicts_truth"] * len(right):
        yield Finding(
            what=f"{len(refused)} of {len(right)} answers that end with the row's truth have the lowest reward, {lowest:g}",
            evidence=tuple(f"{each.name}: truth {each.truth}, reward {each.reward:g}" for each in refused[:3]),
            remedy="The verifier rejects what is right: compare how it reads an answer (format, white space, units) with "
            "these texts",
            since=refused[0].step,
            rows=rows_of(refused),
        )
    if len(wrong) >= _FEW and len(accepted) > LIMITS["verifier_contradicts_truth"] * len(wrong):
        yield Finding(
            what=f"{len(accepted)} of {len(wrong)} answers whose last number is not the row's truth have the highest reward",
            evidence=tuple(f"{each.name}: truth {each.truth}, reward {each.reward:g}" for each in accepted[:3]),
            remedy="The verifier takes what is wrong: does it compare with the truth of this row, and only the answer?",
            since=accepted[0].step,
            certainty=0.8,
            rows=rows_of(accepted),
        )


def equal_answers_unequal_rewards(run: Tables) -> Iterator[Finding]:
    """Two samples of one prompt have the same text and different rewards: the verifier is no function of the answer."""
    pairs: list[tuple[Trajectory, Trajectory]] = []
    repeated = 0
    for group in run.groups():
        by_text: dict[str, list[Trajectory]] = defaultdict(list)
        for each in group:
            by_text[each.text].append(each)
        for same in by_text.values():
            repeated += len(same) > 1
            low, high = (side(same, key=lambda each: each.reward or 0.0) for side in (min, max))
            if (high.reward or 0.0) - (low.reward or 0.0) > 1e-9:
                pairs.append((low, high))
    if repeated < _FEW or len(pairs) < LIMITS["equal_answers_unequal_rewards"] * repeated:
        return
    yield Finding(
        what=f"{len(pairs)} of {repeated} texts that were sampled twice for a prompt have two different rewards",
        evidence=tuple(f"{low.name}: {low.reward:g}; {high.sample}: {high.reward:g}" for low, high in pairs[:3]),
        remedy="The reward is not a function of the answer: a judge that samples (temperature 0), a tie that is broken at "
        "random, state that a row leaves to the next, or a reward by time",
        since=min(low.step for low, _ in pairs),
        rows=tuple(row_of(each) for pair in pairs[:2] for each in pair),
    )


def truth_contradicts_row(run: Tables) -> Iterator[Finding]:
    """The truth that rewards compare with is not what the row's own worked solution ends with, or one question has two."""
    seen: dict[str, Trajectory] = {}
    wrong: list[tuple[Trajectory, str]] = []
    for each in _judged(run.trajectories):
        if each.truth is None or not last_number(each.truth) or each.uid in seen:
            continue
        seen[each.uid] = each
        solutions = [text for text in _texts(each.extras) if len(text) > len(each.truth) and last_number(text)]
        if solutions and all(last_number(text) != last_number(each.truth) for text in solutions):
            wrong.append((each, solutions[0]))
    by_prompt: dict[str, dict[str, Trajectory]] = defaultdict(dict)
    for each in seen.values():
        by_prompt[each.prompt][last_number(each.truth or "")] = each
    two = [list(truths.values()) for truths in by_prompt.values() if len(truths) > 1]
    if len(seen) >= _FEW and len(wrong) >= LIMITS["truth_contradicts_row"] * len(seen):
        yield Finding(
            what=f"The truth of {len(wrong)} of {len(seen)} prompts is not what the row's own solution ends with",
            evidence=tuple(f"{each.uid}: truth {each.truth}, solution ...{text[-40:]!r}" for each, text in wrong[:3]),
            remedy="The column of truths belongs to other rows: was it shuffled, sorted or joined by the wrong key?",
            since=wrong[0][0].step,
            rows=tuple(row_of(each, each.prompt) for each, _ in wrong[:3]),
        )
    if len(seen) >= _FEW and len(two) >= 0.02 * len(by_prompt) and len(two) > 1:
        yield Finding(
            what=f"{len(two)} questions stand in the data with more than one truth",
            evidence=tuple(", ".join(f"{each.uid}: {each.truth}" for each in rows) for rows in two[:3]),
            remedy="Keep one row a question",
            level="warning",
            rows=tuple(row_of(each, each.prompt) for rows in two[:1] for each in rows),
        )


def truth_in_prompt(run: Tables) -> Iterator[Finding]:
    """The prompt holds the answer: almost every truth of two or more characters stands in its question as a word."""
    checked = {each.uid: each for each in _judged(run.trajectories) if each.truth and len(each.truth.strip()) > 1}
    held = {each.uid: each for each in run.evaluations if each.truth and len(each.truth.strip()) > 1}
    leaking, leaking_held = ([each for each in rows.values() if _names_truth(each)] for rows in (checked, held))
    if len(checked) < _FEW or len(leaking) < LIMITS["truth_in_prompt"] * len(checked):
        return
    yield Finding(
        what=f"{len(leaking)} of {len(checked)} prompts hold their own answer",
        evidence=(
            f"{len(leaking_held)} of {len(held)} held-out prompts do",
            *(f"{each.uid}: truth {each.truth}, in ...{each.prompt[-60:]!r}" for each in leaking[:2]),
        ),
        remedy="Leave the answer's column out of the prompt's template; what was learned is to copy",
        certainty=0.95 if len(leaking_held) < 0.5 * max(1, len(held)) else 0.7,
        rows=tuple(row_of(each, each.prompt) for each in leaking[:3]),
    )


def reward_without_solving(run: Tables) -> Iterator[Finding]:
    """Something else than solving is paid: the reward rises while the share of solved prompts does not, or a wrong answer
    earns more than a right one to the same prompt. Either way more reward is had by solving less, which is what makes a
    reward hackable (Skalse et al., arXiv:2209.13085).

    Length that rises with it, within groups too, names itself.
    """
    reward, solved = run.series("reward/mean"), _solved(run)
    pairs = [
        (right, wrong)
        for group in run.groups()
        for right in group
        for wrong in group
        if _is_right(right) is True and _is_right(wrong) is False
    ]
    upside_down = [pair for pair in pairs if (pair[0].reward or 0.0) < (pair[1].reward or 0.0) - 1e-9]
    is_upside_down = len(pairs) >= _FEW and len(upside_down) >= max(3, 0.02 * len(pairs))
    if (len(solved) < 6 or len(reward) < 6) and not is_upside_down:
        return
    deviation = run.series("reward/std")
    scale = deviation.first(len(deviation) // 2) or 1.0
    gain, solved_gain = (each.last() - each.first(3) for each in (reward, solved))
    rises = gain >= LIMITS["reward_without_solving"] * scale and solved_gain <= min(0.05, 0.3 * gain)
    if not rises and not is_upside_down:
        return
    length = run.series("response_length/mean")
    correlation, groups = _length_correlation(run)
    by_length = groups >= _FEW and correlation > 0.5
    parts = [each for each in map(run.series, run.names) if re.fullmatch(r"reward/[^/]+/mean", each.name)]
    paid = max(parts, key=lambda each: each.last() - each.first(3), default=None)
    yield Finding(
        what=(
            "The reward rises and the share of solved prompts does not"
            if rises
            else f"In {len(upside_down) / len(pairs):.0%} of the pairs of a right and a wrong answer to one prompt the "
            "wrong one earns more"
        )
        + (": longer answers are paid" if by_length else f": `{paid.name}` is what rises" if paid else ""),
        evidence=(reward.shown(), solved.shown(), length.shown())
        + ((f"rank correlation of length and reward within {groups} groups: {correlation:.2f}",) if groups else ())
        + ((paid.shown(),) if paid else ()),
        remedy="Pay for length or format only where the answer is right, or bound what they can add; look at the highest "
        "rewards of the last steps",
        since=int(reward.steps[len(reward) // 3]) if rises else upside_down[0][0].step,
        rows=rows_of(
            sorted(_judged(run.late), key=lambda each: -(each.reward or 0.0))
            if rises
            else [each for pair in upside_down[:2] for each in pair]
        ),
    )


def _is_right(each: Trajectory) -> bool | None:
    """Return whether an answer is right: as its environment says, else by the row's truth; None where neither is known."""
    if each.solved is not None:
        return each.solved >= 1
    truth = last_number(each.truth or "")
    return last_number(each.text) == truth if truth else None


def _solved(run: Tables) -> Series:
    """Return the share of each step's answers that are right: as the environment says, else by the rows' truths."""
    said = run.series("env/solved")
    by_step: dict[int, list[bool]] = defaultdict(list)
    for each in _judged(run.trajectories) if not len(said) else ():
        if (is_right := _is_right(each)) is not None:
            by_step[each.step].append(is_right)
    steps = sorted(by_step)
    shares = np.array([np.mean(by_step[step]) for step in steps], np.float64)
    return said if len(said) else Series("answers that end with the row's truth", np.array(steps, np.int64), shares)


def rewards_follow_length(run: Tables) -> Iterator[Finding]:
    """Within a group the longer answer has the higher reward, and answers grow (Singhal et al., arXiv:2310.03716)."""
    length = run.series("response_length/mean")
    correlation, groups = _length_correlation(run)
    if (
        groups < _FEW
        or correlation < LIMITS["rewards_follow_length"]
        or len(length) < 6
        or length.last() < 1.3 * length.first(3)
    ):
        return
    yield Finding(
        what=f"Within a group the longer answer is paid (rank correlation {correlation:.2f}), and answers grow",
        evidence=(length.shown(), f"rank correlation over {groups} groups: {correlation:.2f}"),
        remedy="Read two samples of one group of the last steps: is the longer one better? A reward may count what it "
        "should only find",
        level="warning",
        since=int(length.steps[len(length) // 3]),
        certainty=0.7,
        rows=rows_of(sorted(_judged(run.late), key=lambda each: -each.num_tokens)),
    )


def silence_pays(run: Tables) -> Iterator[Finding]:
    """Answers without an action become more as the reward rises: the policy learns to say nothing."""
    invalid, reward = run.series("env/invalid_actions"), run.series("reward/mean")
    rewards = reward.at(invalid.steps)
    seen = [(float(one), float(other)) for one, other in zip(invalid.values, rewards) if np.isfinite(other)]
    if len(seen) < 8 or not (told := silence_pays_text(seen)):
        return
    yield Finding(
        what="Answers without an action become more, and the reward rises with them",
        evidence=(told, invalid.shown(), reward.shown()),
        remedy="Give answers without an action less than the worst action earns (invalid_reward of gymnasium environments)",
        certainty=0.8,
        rows=rows_of(_judged(run.late)),
    )


def silence_pays_text(seen: Sequence[tuple[float, float]]) -> str:
    """A line where answers without an action become more as the reward rises, given `env/invalid_actions` and `reward/mean`
    of the last steps; else empty."""
    middle = len(seen) // 2
    if middle < 2:
        return ""
    before, after = ([math.fsum(each) / len(half) for each in zip(*half)] for half in (seen[:middle], seen[middle:]))
    if after[0] < before[0] + LIMITS["silence_pays"] or after[1] <= before[1]:
        return ""
    return (
        f"env/invalid_actions rises with the reward, {before[0]:.2g} to {after[0]:.2g} a trajectory while reward/mean goes "
        f"from {before[1]:.3g} to {after[1]:.3g}: does the policy learn to say nothing? Give answers without an action less "
        "than the worst action earns (invalid_reward of gymnasium environments). This is said once"
    )


def reward_fails(run: Tables) -> Iterator[Finding]:
    """Rewards or environments fail in so many trajectories that what is left decides the update."""
    share = run.series("failures/fraction")
    failed = [each for each in run.trajectories if each.failure]
    last = share.last() if len(share) else len(failed) / max(1, len(run.trajectories))
    least = LIMITS["reward_fails"]
    if not last >= least:
        return
    kinds = Counter(each.failure for each in [each for each in run.late if each.failure] or failed)
    kind = kinds.most_common(1)[0][0] if kinds else "failure"
    shown = [each for each in failed if each.failure == kind]
    whose = "A reward function or judge" if str(kind).startswith(("reward", "not_scored")) else "The environment"
    whose = "The engine" if str(kind).startswith("engine") else whose
    yield Finding(
        what=f"{whose} fails in {last:.0%} of the trajectories of the last steps ({kind})"
        + (": almost nothing is left to learn from" if last > 0.8 else ""),
        evidence=(share.shown(), *(f"{each.name}: {each.failure_message}" for each in shown[:2])),
        remedy="Failed trajectories are in no gradient, so that what fails is never learned. Mend what the message names; "
        "raise its timeout where it only waits",
        since=share.since(lambda values: values >= least) if len(share) else None,
        certainty=0.95,
        rows=tuple(row_of(each, each.failure_message) for each in shown[:3]),
    )


def _judged(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [each for each in trajectories if each.reward is not None and each.failure is None]


def _texts(extras: object, depth: int = 0) -> Iterator[str]:
    """The texts of a row's columns, those of two levels below among them."""
    if isinstance(extras, str):
        yield extras
    elif isinstance(extras, dict) and depth < 3:
        for name, value in extras.items():
            if name in ("answer", "solution", "reference", "response", "completion") or isinstance(value, dict):
                yield from _texts(value, depth + 1)


def _names_truth(each: Trajectory) -> bool:
    return re.search(rf"(?<!\w){re.escape((each.truth or '').strip())}(?!\w)", each.prompt) is not None


def _length_correlation(run: Tables) -> tuple[float, int]:
    """Mean rank correlation of length and reward within the groups of the later half of the steps, and of how many."""
    steps = sorted({each.step for each in run.trajectories})
    later = set(steps[len(steps) // 2 :])
    found = []
    for group in run.groups():
        lengths = [each.num_tokens for each in group]
        rewards = [each.reward or 0.0 for each in group]
        if group[0].step in later and len(group) > 2 and len(set(lengths)) > 1 and len(set(rewards)) > 1:
            found.append(float(np.corrcoef(_ranks(lengths), _ranks(rewards))[0, 1]))
    return (float(np.mean(found)), len(found)) if found else (0.0, 0)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]
