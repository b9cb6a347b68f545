"""The update: gradients, advantages, the critic, what a restart leaves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from skyrl_train.doctor.findings import Finding, row_of, rows_of
from skyrl_train.doctor.limits import LIMITS
from skyrl_train.doctor.tables import Tables
from skyrl_train.doctor.trajectories import Trajectory

_CENTRED = ("grpo", "rloo", "dr_grpo")
"""Estimators whose advantages add up to 0 in a group."""
_STEPS_OF_A_CRITIC = 30
"""After so many a critic that learns explains something."""


def not_finite(run: Tables) -> Iterator[Finding]:
    """A number is NaN or infinite: in a step's record, or in what a row trained on."""
    values = run.non_finite()
    rows: list[Trajectory] = []
    for each in run.trajectories:
        columns = (each.column(name) for name in ("logprobs", "policy_logprobs", "advantages"))
        if any(column is not None and not np.isfinite(column).all() for column in columns):
            rows.append(each)
    ends = [
        (step, error)
        for step, error in run.rollouts.failed_steps()
        if "finite" in error or "NaN" in error or "nan" in error
    ]
    if not values and not rows and not ends:
        return
    first = min([step for step, _ in values] + [each.step for each in rows] + [step for step, _ in ends])
    yield Finding(
        what="Numbers are not finite: "
        + (ends[0][1][:160] if ends else f"{len(values)} metrics, {len(rows)} trajectories"),
        evidence=tuple(f"{name} of step {step} is no finite number" for step, name in values[:4]),
        remedy="Look at the first row that has one: a reward or a log-probability of minus infinity (a token that sampling "
        "excluded), a division by a length of 0. `skyrl-capsule` executes the step again",
        since=first,
        certainty=0.95,
        rows=rows_of(rows),
    )


def training_breaks(run: Tables) -> Iterator[Finding]:
    """The reward was higher and fell, while updates were large: the learning rate is too high."""
    reward = run.series("reward/mean")
    if len(reward) < 8:
        return
    smooth = np.convolve(reward.values, np.ones(3) / 3, mode="valid")
    smooth[0] = reward.values[0]  # which a first update of that kind may end
    best = int(np.argmax(smooth))
    lost = smooth[best] - smooth[-1]
    kl, norm, entropy = (run.series(f"policy/{name}") for name in ("approx_kl", "grad_norm", "entropy"))
    clip = run.series("policy/clip_fraction")
    scale = max(float(run.series("reward/std").values.max(initial=0.0)), 1e-9)
    least = LIMITS["training_breaks"] * scale
    large = {
        "policy/approx_kl above 0.1": len(kl) > 0 and float(np.abs(kl.values).max()) > 0.1,
        "policy/clip_fraction above 0.4": len(clip) > 0 and float(clip.values.max()) > 0.4,
        "policy/grad_norm ten times what it was": any(
            norm.values[index] > 10 * np.median(norm.values[:index]) > 0 for index in range(3, len(norm))
        ),
        "policy/entropy threefold": len(entropy) > 5 and entropy.last() > 3 * entropy.first(3),
    }
    signs = [name for name, holds in large.items() if holds]
    never_rose = smooth[best] - smooth[0] < 0.1 * scale and lost < 0.1 * scale
    if not signs or (lost < least and not (never_rose and len(signs) >= 2)):
        return
    yield Finding(
        what=f"The reward fell from {smooth[best]:.3g} to {smooth[-1]:.3g} while updates were large"
        if lost >= least
        else "Updates are so large that the reward never rises",
        evidence=(reward.shown(), kl.shown(), norm.shown(), entropy.shown(), run.series("policy/lr").shown(digits=2)),
        remedy=f"Lower trainer.policy.optimizer.lr three- to tenfold, with warm-up ({', '.join(signs)}); go on from a "
        f"checkpoint before step {int(reward.steps[min(best + 1, len(reward) - 1)])}",
        since=int(reward.steps[min(best + 1, len(reward) - 1)]),
        certainty=0.6 + 0.1 * len(signs),
        rows=rows_of(run.late),
    )


def gradient_always_clipped(run: Tables) -> Iterator[Finding]:
    """Every gradient is longer than the bound by far, so that all steps have one length and the learning rate means another
    thing (Pascanu et al., arXiv:1211.5063)."""
    for model, section in (("policy", "trainer.policy"), ("critic", "critic")):
        norm, bound = run.series(f"{model}/grad_norm"), run.settings.get(f"{section}.optimizer.max_grad_norm")
        if len(norm) < 5 or not isinstance(bound, (int, float)) or not bound > 0:
            continue
        share, ratio = float(np.mean(norm.values > bound)), float(np.median(norm.values)) / bound
        if share < 0.95 or ratio < LIMITS["gradient_always_clipped"]:
            continue
        yield Finding(
            what=f"The gradient of the {model} is clipped in {share:.0%} of the steps, in the median to a {1 / ratio:.0%} "
            "of its length",
            evidence=(norm.shown(), f"{section}.optimizer.max_grad_norm={bound:g}"),
            remedy=f"Raise {section}.optimizer.max_grad_norm to what is usual here, "
            f"{np.median(norm.values):.2g}; with AdamW "
            "only the spread between steps is lost, with SGD the step itself. Where norms rise, look for what makes them",
            level="problem" if ratio >= 10 else "warning",
            since=int(norm.steps[0]),
            certainty=0.8,
        )


def advantages_off(run: Tables) -> Iterator[Finding]:
    """Advantages of a group are not what its rewards make: not centred, not divided by their deviation (GRPO,
    2402.03300)."""
    name = run.settings.get("trainer.algorithm.advantage_estimator")
    name = name.get("_target_") if isinstance(name, dict) else name
    if name not in _CENTRED:
        return
    off: list[tuple[float, float, Trajectory]] = []
    deviations: list[float] = []
    divides = name == "grpo" and run.settings.get("trainer.algorithm.normalize_by_std") is True
    checked = 0
    for group in run.groups():
        rewards = np.array([each.reward for each in group])
        columns = [each.column("advantages") for each in group]
        if np.ptp(rewards) == 0 or any(column is None or not len(column) for column in columns):
            continue
        advantages = np.array([float(column[0]) for column in columns if column is not None])
        checked += 1
        deviations.append(float(advantages.std()))
        centre = abs(float(advantages.mean()))
        if centre > 0.05 * max(float(np.abs(advantages).max()), 1e-12):
            off.append((centre, float(np.abs(advantages).max()), group[0]))
    if checked >= 10 and len(off) > LIMITS["advantages_off"] * checked:
        centre, largest, shown = off[0]
        yield Finding(
            what=f"Advantages are not centred in {len(off)} of {checked} groups: {name} makes them add up to 0",
            evidence=(f"{shown.uid} of step {shown.step}: mean {centre:.3g}, largest {largest:.3g}",),
            remedy="The advantages are not those of the estimator: is the baseline left out, or are groups torn apart (a "
            "filter after the estimate, samples of a prompt in two batches)? `skyrl-doctor audit` recomputes them",
            since=shown.step,
            certainty=0.9,
            rows=(row_of(shown),),
        )
    elif divides and checked >= 10 and not 0.7 < np.median(deviations) < 1.3:
        yield Finding(
            what=f"Advantages of a group have the deviation {np.median(deviations):.2g}, and "
            "normalize_by_std=true makes it 1",
            evidence=(f"groups with a spread of rewards: {checked}", run.series("reward/std").shown()),
            remedy="The advantages are not divided by their group's deviation: the size of rewards decides the "
            "size of updates",
            certainty=0.85,
        )


def critic_diverges(run: Tables) -> Iterator[Finding]:
    """The critic's loss grows, or its values are far from any return: worse than a constant by more than that one's loss,
    or in the mean outside of what rewards were by half their range (the values that bootstrapping drives out of the bounds
    of the returns: van Hasselt et al., arXiv:1812.02648)."""
    loss, explained = run.series("critic/value_loss"), run.series("critic/explained_variance")
    value = run.series("critic/value").at(explained.steps)
    width = run.largest_reward - run.least_reward
    outside = np.maximum(value - run.largest_reward, run.least_reward - value) > 0.5 * width
    far = (explained.values < -1) | (outside & (width > 0))
    grows = loss.last() > LIMITS["critic_diverges"] * max(loss.first(), 1e-9)
    if len(loss) < 6 or not (grows or far.sum() >= 3) or (len(explained) and explained.last() > 0.1):
        return
    yield Finding(
        what=f"The critic diverges: its loss grew from {loss.first():.3g} to {loss.last():.3g}"
        if grows
        else f"The critic diverges: in {far.sum()} steps its values were farther off than a constant, or than any reward",
        evidence=(
            loss.shown(),
            explained.shown(),
            run.series("critic/value").shown(),
            run.series("critic/grad_norm").shown(),
        ),
        remedy="Lower critic.optimizer.lr, clip values (trainer.algorithm.critic_loss), and look whether returns are "
        "bounded: rewards of another scale need a normalisation",
        since=loss.since(lambda values: values > 2 * loss.first()) if grows else int(explained.steps[far.argmax()]),
        certainty=0.9,
    )


def critic_is_dead(run: Tables) -> Iterator[Finding]:
    """The critic explains nothing after many steps: it is not trained, or sees nothing. One that is new and moves has had
    few steps to explain anything, and a note says so."""
    explained, value = run.series("critic/explained_variance"), run.series("critic/value")
    if (
        len(explained) < 10
        or explained.values[len(explained) // 3 :].max() > LIMITS["critic_is_dead"]
        or explained.last() < -0.5
    ):
        return
    norm = run.series("critic/grad_norm")
    still = len(value) > 5 and float(np.ptp(value.values)) < 1e-3 * max(1.0, float(np.abs(value.values).max()))
    yield Finding(
        what="The critic explains nothing of the returns" + (", and its values do not move" if still else ""),
        evidence=(explained.shown(), value.shown(), norm.shown(), run.series("critic/lr").shown(digits=2)),
        remedy="Is it trained (critic.optimizer.lr, critic/grad_norm above 0), and with enough steps before the policy "
        "moves? A group estimator (grpo) needs no critic",
        level="problem"
        if still or norm.last() < 1e-8
        else "warning"
        if len(explained) >= _STEPS_OF_A_CRITIC
        else "note",
        since=int(explained.steps[0]),
        certainty=0.8 if still else 0.6,
    )


def held_out_gets_worse(run: Tables) -> Iterator[Finding]:
    """Held-out loss or accuracy gets worse while training goes on to gain: overfitting."""
    loss, accuracy = run.series("eval/loss"), run.series("eval/accuracy")
    if (
        len(loss) >= 3
        and loss.values[-1] > LIMITS["held_out_gets_worse"] * loss.values.min()
        and int(np.argmin(loss.values)) < len(loss) - 2
    ):
        best = int(np.argmin(loss.values))
        yield Finding(
            what=f"The held-out loss is lowest at step {loss.steps[best]} and rises since",
            evidence=(loss.shown(), run.series("train/loss").shown()),
            remedy="Take that checkpoint (best/), train for fewer epochs, or on more data",
            level="warning",
            since=int(loss.steps[best + 1]),
            certainty=0.9,
        )
    reward = run.series("reward/mean")
    if (
        len(accuracy) >= 4
        and accuracy.values.max() - accuracy.values[-2:].max() > 0.15
        and reward.last() >= reward.first(3)
    ):
        best = int(np.argmax(accuracy.values))
        yield Finding(
            what=f"Held-out accuracy fell from {accuracy.values[best]:.2f} to {accuracy.values[-1]:.2f}, and the training "
            "reward did not",
            evidence=(accuracy.shown(), reward.shown()),
            remedy="The policy learns the training rows or what their reward pays: compare texts of both, take the "
            f"checkpoint of step {accuracy.steps[best]}",
            level="warning",
            since=int(accuracy.steps[min(best + 1, len(accuracy) - 1)]),
            certainty=0.7,
        )
