"""Data: which prompts, how often, in which order, and whether held-out ones are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Sized

import numpy as np

from skyrl_train.doctor.findings import Finding, Level, row_of
from skyrl_train.doctor.limits import LIMITS
from skyrl_train.doctor.tables import Tables
from skyrl_train.doctor.trajectories import Trajectory

_SAME_ENTROPY = 0.08
"""Share by which the entropy of a policy that learns changes at least."""


def duplicated_prompts(run: Tables) -> Iterator[Finding]:
    """One text stands in the data under several names (Lee et al., arXiv:2107.06499). Of the copies of a row those alone are
    seen that were asked so far, which is the share of an epoch."""
    by_text: dict[str, dict[str, Trajectory]] = defaultdict(dict)
    for each in run.trajectories:
        if each.prompt:
            by_text[_plain(each.prompt)].setdefault(each.uid, each)
    copies = [list(rows.values()) for rows in by_text.values() if len(rows) > 1]
    prompts = sum(map(len, by_text.values()))
    doubled = sum(len(rows) - 1 for rows in copies)
    epoch, steps = run.plan.get("batches_per_epoch"), len(run.facts.uids_by_step())
    share_asked = min(1.0, steps / epoch) if isinstance(epoch, int) and epoch > 0 else 1.0
    if prompts < 20 or doubled < LIMITS["duplicated_prompts"] * prompts:
        return
    yield Finding(
        what=f"{doubled} of the {prompts} prompts that were read are copies of others",
        evidence=tuple(", ".join(each.uid for each in rows[:4]) for rows in copies[:3]),
        remedy="Keep one row a text, or say why some count more (data.mix has weights)",
        level="problem" if doubled > 0.3 * share_asked * prompts else "warning",
        since=min(each.step for rows in copies for each in rows),
        rows=tuple(row_of(each, each.prompt) for rows in copies[:1] for each in rows[:2]),
    )


def order_repeats(run: Tables) -> Iterator[Finding]:
    """The same prompts come again in the same order before an epoch is over: a resumed run read its data anew."""
    batches = run.facts.uids_by_step()
    epoch = run.plan.get("batches_per_epoch")
    seen: dict[tuple[int, ...], int] = {}
    again: list[tuple[int, int]] = []
    if len(run.series("curriculum/new_fraction")):
        return  # its order is no order of the data
    for step, uids in sorted(batches.items()):
        key = tuple(sorted(uids))
        before = seen.get(key)
        within = isinstance(epoch, int) and epoch > 1 and before is not None and (step - before) < epoch
        if len(uids) > 1 and before is not None and within:
            again.append((step, before))
        seen[key] = step
    distances = Counter(step - before for step, before in again)
    if len(again) < LIMITS["order_repeats"]:
        return
    distance, count = distances.most_common(1)[0]
    step, before = next(pair for pair in again if pair[0] - pair[1] == distance)
    yield Finding(
        what=f"Step {step} has the prompts of step {before} again, and {count} steps alike: an epoch has {epoch} batches",
        evidence=tuple(f"step {one} repeats step {other}" for one, other in again[:4]),
        remedy="The order of the data began anew, as where a run resumes without its position: the prompts before were "
        "trained twice, others never",
        since=step,
        certainty=0.95,
    )


def few_prompts_again(run: Tables) -> Iterator[Finding]:
    """A few prompts fill the batches while most of the data is never tried: a curriculum that is stuck, or a filter.

    A curriculum asks what it knows again on purpose, and is not stuck as long as its batches have prompts that are new (the
    exploration of a bandit: Auer et al., Machine Learning 47, 2002).
    """
    batches = run.facts.uids_by_step()
    steps = sorted(batches)
    epoch = run.plan.get("batches_per_epoch")
    later = steps[len(steps) // 2 :]
    asked = [uid for step in later for uid in batches[step]]
    if len(later) < 4 or not isinstance(epoch, int) or epoch <= len(later) or len(asked) < 16:
        return
    share = len(set(asked)) / len(asked)
    new = run.series("curriculum/new_fraction")
    if share > LIMITS["few_prompts_again"] or new.last() > 0:
        return
    often = Counter(asked).most_common(3)
    yield Finding(
        what=f"The last {len(later)} batches ask {len(set(asked))} prompts {len(asked)} times, and an epoch has "
        f"{epoch} batches",
        evidence=(
            new.shown(),
            run.series("curriculum/expected_solve_rate").shown(),
            *(f"{run.facts.names[uid]}: {count} times" for uid, count in often),
        ),
        remedy="The curriculum rests what it has not tried, or a filter takes the rest: see data.curriculum and "
        "curriculum/new_fraction, which must not stay at 0",
        since=later[0],
        certainty=0.85,
    )


def evaluation_is_trained_on(run: Tables) -> Iterator[Finding]:
    """Held-out prompts are among those that were trained on, to the letter or almost (Brown et al.,
    arXiv:2005.14165, app. C)."""
    trained = {_plain(each.prompt): each for each in run.trajectories if each.prompt}
    held = {_plain(each.prompt): each for each in run.evaluations if each.prompt and each.purpose == "eval"}
    equal = [(each, trained[text]) for text, each in held.items() if text in trained]
    words: dict[str, list[tuple[frozenset[str], Trajectory]]] = defaultdict(list)
    for text, each in trained.items():
        words[" ".join(re.findall(r"\d+", text))].append((frozenset(text.split()), each))
    near = []
    for text, each in held.items():
        own = frozenset(text.split())
        for other, row in words.get(" ".join(re.findall(r"\d+", text)), []):
            if text not in trained and len(own & other) >= 0.8 * len(own | other):
                near.append((each, row))
                break
    least = LIMITS["evaluation_is_trained_on"] * len(held)
    if len(equal) >= 2 and len(equal) >= least:
        yield _trained_on(equal, held, "stand in the training data", certainty=0.95, level="problem")
    if len(near) >= 2 and len(near) >= least:  # questions made from one template are often so near
        level: Level = "problem" if len(near) > 0.3 * len(held) else "note"
        yield _trained_on(near, held, "are rewordings of training rows", certainty=0.8, level=level)


def _trained_on(
    pairs: Sequence[tuple[Trajectory, Trajectory]], held: Sized, what: str, *, certainty: float, level: Level
) -> Finding:
    return Finding(
        what=f"{len(pairs)} of {len(held)} held-out prompts {what}: their accuracy says nothing",
        evidence=tuple(f"{one.uid} is {other.uid}" for one, other in pairs[:3]),
        remedy="Take them out of the training rows, and split by question before anything else",
        level=level,
        since=min(other.step for _, other in pairs),
        certainty=certainty,
        rows=tuple(row_of(one, one.prompt) for one, _ in pairs[:2]),
    )


def nothing_is_learned(run: Tables) -> Iterator[Finding]:
    """Rewards differ within groups, gradients are there, and nothing moves: a learning rate that is too low,
    frozen weights. Where updates do change what the policy says, slow learning looks the same, and a note says so."""
    reward, entropy = run.series("reward/mean"), run.series("policy/entropy")
    kl, drift = run.series("policy/approx_kl"), run.series("off_policy/drift_abs_mean")
    if len(reward) < 10 or not len(entropy) or not run.series("group/zero_variance").last() < 0.9:
        return
    noise = float(np.std(np.diff(reward.values))) / np.sqrt(2) + 1e-9
    third = max(1, len(reward) // 3)
    gain = float(np.mean(reward.values[-third:]) - np.mean(reward.values[:third]))
    change = abs(entropy.last() / entropy.first() - 1) if entropy.first() else 0.0
    least = LIMITS["nothing_is_learned"]
    moved = np.abs(drift.values) if len(drift) else np.sqrt(2 * np.abs(kl.values))
    moves = len(moved) > 0 and float(np.median(moved)) > least
    if abs(gain) > 2 * noise / np.sqrt(third) + 0.02 or (moves and change > _SAME_ENTROPY):
        return
    level: Level = "problem" if len(reward) >= 15 else "warning"
    yield Finding(
        what="The run learns nothing, though samples of a prompt differ in reward: reward and entropy stay where they were",
        evidence=(reward.shown(), entropy.shown(), kl.shown(), drift.shown(), run.series("policy/lr").shown(digits=2)),
        remedy="Raise trainer.policy.optimizer.lr tenfold and look whether policy/approx_kl follows; see that the weights "
        "which are trained are those that sample (an adapter that is merged, a scheduler that begins at 0)",
        level="note" if moves else level,
        since=int(reward.steps[0]),
        certainty=0.75 if not moves else 0.5,
    )


def _plain(text: str) -> str:
    """Return a text without what two copies of one question may differ in: case, punctuation, white space."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())
