"""Engines and machines: whose weights sampled, what they compute otherwise than the trainer, who waits for whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from skyrl_train.doctor.findings import Finding, rows_of
from skyrl_train.doctor.limits import LIMITS
from skyrl_train.doctor.tables import Series, Tables
from skyrl_train.doctor.trajectories import Trajectory

_WEIGHTS = (
    "Do the engines get the weights (generator.verify_weight_sync=true, weight_sync.jsonl)? Do they compute in another type "
    "(generator.vllm.dtype) or with rounded weights (generator.quantization)? Recorded rollouts are of other weights"
)
LARGEST_DRIFT = 0.2
"""Mean distance of the engine's log-probabilities from the trainer's, nats a token, that one step alone is warned about."""
_SMALL = 1e-3
"""Nats a token that two kernels of one float type differ by at the most."""


def _mismatch(run: Tables) -> Series:
    """The mean difference of log-probabilities between trainer and engine, of steps whose tokens are of the
    latest weights."""
    named = (run.series(name) for name in ("mismatch/logprob_diff_mean", "policy/rollout_logprob_diff"))
    series = next(
        (each for each in named if len(each)), Series("mismatch/logprob_diff_mean", np.zeros(0, int), np.zeros(0))
    )
    age = np.nan_to_num(run.series("off_policy/age/max").at(series.steps))
    return Series(series.name, series.steps[age == 0], series.values[age == 0])


def stale_weights(run: Tables) -> Iterator[Finding]:
    """The engine's log-probabilities move away from the trainer's step by step: it keeps older weights than it says."""
    mismatch = _mismatch(run)
    if len(mismatch) >= 4:
        usual = max(_SMALL, mismatch.first(2))
        if mismatch.last(3) > LIMITS["stale_weights"] * usual and _rises(mismatch):
            split = _split(run)
            yield Finding(
                what="The engine samples from other weights than the trainer's: their log-probabilities move apart"
                + (f", in {split:.0%} of the trajectories" if split else ""),
                evidence=(mismatch.shown(), run.series("mismatch/ratio_outside_10_percent").shown())
                + (("some trajectories agree and others do not: one of several engines is behind",) if split else ()),
                remedy=_WEIGHTS,
                since=mismatch.since(lambda values: values > 2 * usual),
                certainty=0.95,
                rows=rows_of(run.late),
            )


def computes_otherwise(run: Tables) -> Iterator[Finding]:
    """Engine and trainer differ from the first step on and do not drift: another float type, temperature or template.

    With a temperature that only one side applies, the engine's surprise at its own tokens is not the trainer's entropy.
    (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.)
    """
    mismatch, entropy = _mismatch(run), run.series("policy/entropy")
    # Rounding of 24 bits makes 1e-6 nats a token, and of 8 bits ten thousand times as many.
    exactness = 0.01 if run.settings.get("model.dtype") == "float32" else 1.0
    small, least = _SMALL * max(0.1, exactness), LIMITS["computes_otherwise"] * exactness
    if len(mismatch) < 2 or mismatch.first(2) < small or mismatch.last() > 5 * mismatch.first(2):
        return
    slope, correlation = _slope(run)
    surprise = _surprise(run)
    at_once = entropy.at(surprise.steps) if len(surprise) else np.zeros(0)
    ratio = float(np.nanmedian(surprise.values / at_once)) if len(at_once) and np.isfinite(at_once).any() else 1.0
    tempered = (correlation > 0.9 and abs(slope - 1) > 0.08) or (mismatch.first(2) > 0.02 and abs(ratio - 1) > 0.1)
    outside = run.series("mismatch/ratio_outside_10_percent")
    if not tempered and (len(outside) == 0 or outside.last() < 0.01) and mismatch.first() < least:
        return
    what = (
        "Trainer and engine apply another temperature: the trainer's log-probabilities are those of a distribution that is "
        f"{'flatter' if ratio < 1 or slope < 1 else 'sharper'}"
        if tempered
        else f"Trainer and engine compute otherwise: {mismatch.first():.2g} nats a token, from the first step on"
    )
    yield Finding(
        what=what,
        evidence=(mismatch.shown(), outside.shown(), f"engine's surprise over the trainer's entropy: {ratio:.2f}")
        + ((f"slope of the trainer's log-probabilities over the engine's: {slope:.2f}",) if correlation else ()),
        remedy="The scoring pass must divide logits by generator.sampling.temperature, as sampling does"
        if tempered
        else "model.dtype and generator.vllm.dtype should agree, the head in float32 (generator.vllm); else correct for it "
        "(trainer.algorithm.off_policy.weight)",
        level="problem" if tempered or mismatch.last() > 0.05 else "warning",
        since=int(mismatch.steps[0]),
        certainty=0.85,
        rows=rows_of(run.early),
    )


def engine_drift(metrics: Mapping[str, float]) -> str:
    """A warning where the engine's log-probabilities are those of another model than the trainer's; else empty, as where
    tokens are of older weights and have to differ.

    Rounding in 16-bit types and fused kernels moves a token's log-probability by hundredths in the mean.
    """
    if metrics.get("off_policy/age/max", 0.0) > 0:
        return ""
    names = ("mismatch/logprob_diff_mean", "policy/rollout_logprob_diff")
    name = next((name for name in names if name in metrics), "")
    if not name or metrics[name] <= LARGEST_DRIFT:
        return ""
    return (
        f"{name} is {metrics[name]:.2g}: the engine's log-probabilities are not those of the trainer's weights. Does it "
        "serve the weights that it is given? generator.verify_weight_sync=true compares them after each sync, for engines "
        "on devices of their own"
    )


def one_engine_behind(run: Tables) -> Iterator[Finding]:
    """Some trajectories of a step agree with the trainer and others do not: one of several engines has other weights than
    it says. Steps whose tokens are of older weights by their own versions are not asked."""
    share = _split(run)
    if not share:
        return
    far = [each for each in run.late if _distance(each) > 10 * _SMALL]
    yield Finding(
        what=f"{share:.0%} of the trajectories of a step come from other weights, the rest from the trainer's: one engine "
        "is behind",
        evidence=tuple(f"{each.name}: {_distance(each):.2g} nats a token" for each in far[:3]),
        remedy="One engine misses weight syncs: see weight_sync.jsonl for which, and engines/serving",
        certainty=0.96,
        since=min((each.step for each in far), default=None),
        rows=rows_of(far),
    )


def too_old(run: Tables) -> Iterator[Finding]:
    """Tokens are older than the run allows."""
    age, bound = run.series("off_policy/age/max"), run.settings.get("trainer.max_staleness")
    if not len(age) or not isinstance(bound, int) or isinstance(bound, bool):
        return
    over = np.flatnonzero(age.values > bound)
    if len(over) < LIMITS["too_old"]:
        return
    yield Finding(
        what=f"Trained tokens are up to {age.values.max():.0f} versions old, and trainer.max_staleness={bound}",
        evidence=(age.shown(), run.series("off_policy/age/mean").shown()),
        remedy="Groups are admitted too early, or versions are counted otherwise by an engine of your own",
        since=int(age.steps[over[0]]),
        certainty=0.95,
    )


def one_group_is_waited_for(run: Tables) -> Iterator[Finding]:
    """A step waits for its slowest group: much of its generation has an engine that does nothing (a worker that is slow)."""
    group, generate, busy = (run.series(f"timing/{name}") for name in ("group/max", "generate", "engine/busy"))
    if len(generate) < 5 or not len(busy):
        return
    steps = generate.steps
    idle = 1 - busy.at(steps) / np.maximum(generate.values, 1e-9)
    alone = run.series("timing/wait/environments_alone")
    late = float(np.nanmedian(idle[-10:]))
    if not late > LIMITS["one_group_is_waited_for"] or not generate.last() > 1.0:
        return
    first = float(np.nanmedian(idle[:3]))
    yield Finding(
        what=f"The engine computes nothing in {late:.0%} of the generation: something is waited for",
        evidence=(
            generate.shown(),
            busy.shown(),
            group.shown(),
            run.series("timing/wait/environments").shown(),
            alone.shown(),
        ),
        remedy="Environments, tools or a judge answer late, or one worker is slow: see the timeline's groups (skyrl-view), "
        "environment.num_workers, and timing/group/max against the median",
        level="warning",
        since=int(steps[0]) if first > 0.5 else int(steps[len(steps) // 2]),
        certainty=0.7,
    )


def steps_get_slower(run: Tables) -> Iterator[Finding]:
    """A step takes longer and longer for the same tokens: something grows."""
    seconds, tokens = run.series("timing/step"), run.series("batch/tokens")
    if len(seconds) < 20:
        return
    rate = seconds.values / np.maximum(np.nan_to_num(tokens.at(seconds.steps), nan=1.0), 1.0)
    third = len(rate) // 3
    early, late = float(np.median(rate[:third])), float(np.median(rate[-third:]))
    if late < LIMITS["steps_get_slower"] * early:
        return
    phases = [name for name in run.names if name.startswith("timing/") and name.count("/") == 1 and "per_s" not in name]
    grown = max(
        (run.series(name) for name in phases if name != "timing/step"), key=lambda each: each.last() - each.first()
    )
    yield Finding(
        what=f"A token takes {late / early:.1f} times as long as at first; `{grown.name}` grew the most",
        evidence=(seconds.shown(), grown.shown()),
        remedy="Look at what that phase does in the timeline; a machine that is shared, throttles, or a file that grows",
        level="warning",
        since=int(seconds.steps[third]),
        certainty=0.7,
    )


def memory_grows(run: Tables) -> Iterator[Finding]:
    """Memory that is held rises steadily: a leak, which ends a long run."""
    for name in run.names:
        series = run.series(name)
        if not name.startswith("memory/") or not name.endswith(("_gib", "_gb")) or len(series) < 12:
            continue
        values = series.values[len(series) // 4 :]
        trend = float(np.corrcoef(np.arange(len(values)), values)[0, 1]) if np.ptp(values) > 0 else 0.0
        grown = values[-1] - values[0]
        if trend > 0.95 and grown > LIMITS["memory_grows"] * values[0] and np.mean(np.diff(values) > 0) > 0.6:
            yield Finding(
                what=f"`{name}` rises with every step, by {grown:.2g} GiB since step {series.steps[len(series) // 4]}",
                evidence=(series.shown(),),
                remedy="Something keeps what each step makes: an environment, a reward function or a custom metric that "
                "appends to a list is the usual one",
                level="warning",
                since=int(series.steps[len(series) // 4]),
                certainty=0.8,
            )


def _distance(each: Trajectory) -> float:
    """Mean difference of the log-probabilities of a trajectory; 0 where the policy's were not recorded."""
    engine, policy = each.column("logprobs"), each.column("policy_logprobs")
    if engine is None or policy is None or len(engine) != len(policy) or not len(engine):
        return 0.0
    return float(np.mean(np.abs(policy - engine)))


def _split(run: Tables) -> float:
    """Return which share of the last steps' trajectories is far from the trainer, where the others are near; else 0."""
    # The policy scores the rows of a step that come after its first optimizer step, often half of them.
    age = run.series("off_policy/age/max")
    known_old = set(age.steps[age.values > 0].tolist())
    scored = [each for each in run.late if each.step not in known_old and each.column("policy_logprobs") is not None]
    distances = [_distance(each) for each in scored]
    near = sum(each < 3 * _SMALL for each in distances)
    far = sum(each > 10 * _SMALL for each in distances)
    whole = near + far
    least = LIMITS["one_engine_behind"]
    mixed = whole >= 16 and least <= far / whole <= 1 - least and whole > 0.8 * len(distances)
    return far / whole if mixed else 0.0


def _slope(run: Tables) -> tuple[float, float]:
    """Regression of the trainer's on the engine's log-probabilities of the first steps: slope and correlation; (1, 0)
    where the trainer's were not recorded."""
    pairs = [
        (engine, policy)
        for each in run.early
        if (engine := each.column("logprobs")) is not None
        and (policy := each.column("policy_logprobs")) is not None
        and len(engine) == len(policy)
    ]
    if not pairs:
        return 1.0, 0.0
    engine, policy = (np.concatenate(side) for side in zip(*pairs))
    if len(engine) < 200 or not np.std(engine) > 0 or not np.std(policy) > 0:
        return 1.0, 0.0
    correlation = float(np.corrcoef(engine, policy)[0, 1])
    return correlation * float(np.std(policy) / np.std(engine)), correlation


def _surprise(run: Tables) -> Series:
    """Mean negative log-probability of the engine's own tokens, of the steps whose tokens were read."""
    found: dict[int, list[np.ndarray]] = {}
    for each in run.trajectories:
        if (column := each.column("logprobs")) is not None:
            found.setdefault(each.step, []).append(column)
    steps = sorted(found)
    return Series(
        "surprise", np.array(steps, int), np.array([-float(np.mean(np.concatenate(found[step]))) for step in steps])
    )


def _rises(series: Series) -> bool:
    """True where later values are above earlier ones throughout, as of weights that fall ever further behind."""
    thirds = np.array_split(series.values, 3)
    medians = [float(np.median(each)) for each in thirds if len(each)]
    return all(late > early for early, late in itertools.pairwise(medians))
