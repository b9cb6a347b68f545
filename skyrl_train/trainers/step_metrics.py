"""What is measured of one training step beside the learner's own metrics: the rollouts and the assembled batch.

Values over trajectories leave failed ones out, which have no reward; they are counted under `failures/`. A value with
nothing to measure it on is left out rather than invented.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from skyrl_train.algorithms import mean_token_kl
from skyrl_train.algorithms.losses import LARGEST_AGE_SHOWN, explained_variance
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import behind_updates, token_ages
from skyrl_train.config.algorithm import AlgorithmConfig, estimator_reads
from skyrl_train.doctor import engine_drift, silence_pays_text
from skyrl_train.registry import split_spec
from skyrl_train.trainers.checkpoints.state import Totals
from skyrl_train.trainers.evaluation.evaluate import groups_of, response_length
from skyrl_train.types import Outcome, RolloutBatch, Trajectory

DECLARED_METRICS = """
reward/{mean,std,max,min} | reward | Total rewards of trajectories, failed ones left out; `std` of the population. | |
    TRL `reward` (`reward_std` is the mean over groups); verl `critic/score/mean`, `/max`, `/min`; SkyRL
    `reward/avg_raw_reward`
reward/<name>/{mean,std,max,min} | reward | The same of one reward function, unweighted. | with reward functions | TRL
    `rewards/<name>/mean`, `rewards/<name>/std`
group/zero_variance | share | Groups of equal rewards, without a gradient where samples are compared. | groups of
    several | TRL `frac_reward_zero_std`
env/<name> | | Mean of what the environment reports (`get_metrics`); `env/solved` is accuracy. | where reported | SkyRL
    `environment/<name>`
turns/{mean,max} | count | Turns of a trajectory. | | verl `num_turns/mean`, `num_turns/max`
response_length/{mean,max,min} | tokens | Tokens sampled in a trajectory, all turns. | | TRL `completions/mean_length`,
    `/max_length`, `/min_length`; verl `response_length/mean`, ...; SkyRL `generate/avg_num_tokens`, `max_`, `min_`
context_length/{mean,max} | tokens | Tokens of a trajectory's last turn and all before it.
stop/<reason> | share | Turns that ended so: `stop`, `length` (`max_generate_length`), ... | | TRL
    `completions/clipped_ratio` and verl `response_length/clip_ratio` are `stop/length`
outcome/<way> | share | Trajectories that ended so: `done`, `truncated`, `max_turns`, `max_context`, ...
failures/count | count | Failed trajectories, which are in no mean and no gradient. | | SkyRL
    `generate/num_error_trajectories`
failures/fraction | share | Their share of all.
failures/<kind> | count | The same by cause (`types.py: FailureKind`). | where any
dataset/<name>/prompts | count | Prompts of one data set. | with `data.mix`
dataset/<name>/reward/mean | reward | Its `reward/mean`. | with `data.mix`
dataset/<name>/response_length/mean | tokens | Its `response_length/mean`. | with `data.mix`
batch/rows | count | Training rows without padding.
batch/tokens | tokens | Tokens: prompts, observations, responses. | | verl `perf/total_num_tokens`
batch/trained_tokens | tokens | Those with a loss.
batch/documents_per_step/{mean,min,max,overshoot} | count | Rollouts of an optimizer step; mean excess over
    `docs_per_step`. | with `trainer.docs_per_step`
score/policy_pass_skipped | share | Trained tokens whose log-probabilities before the update were not needed.
score/rollout_logprobs_used | share | 1 where the engine's log-probabilities stand in. | with `proximal=behaviour`
mismatch/logprob_diff_{mean,max} | nats | Difference of trainer's and engine's log-probability, before the update. |
    scored by the policy | TRL `sampling/sampling_logp_difference/mean`, `/max`; verl
    `training/rollout_probs_diff_mean`, `_max` (of probabilities); SkyRL `policy/rollout_train_logprobs_abs_diff_mean`
mismatch/ratio_mean | | Mean of the trainer's probability over the engine's. | scored by the policy | TRL
    `sampling/importance_sampling_ratio/mean`
mismatch/ratio_outside_10_percent | share | Trained tokens whose probabilities differ by over a tenth. | scored by the
    policy
kl/reference | nats | Mean estimate of KL(policy || reference) before the update. | where both scored the batch | TRL
    `kl`; verl `actor/reward_kl_penalty`; SkyRL `policy/policy_kl`
critic/explained_variance | share | Variance of returns that values explain, before the update; below 0: worse than the
    mean. | with a critic | verl `critic/vf_explained_var`
off_policy/age/{mean,max} | count | Versions between the learner and the weights that sampled a token. | with older
    weights | SkyRL `async/staleness_mean`, `async/staleness_max`
off_policy/share/age_<n> | share | Trained tokens of that age; from 16 on together. | with older weights
off_policy/in_flight/share | share | Trained tokens after an update within their turn. | with
    `trainer.in_flight_updates`
timing/tokens_per_s | tokens/s | `batch/tokens` over `timing/step` (supervised: collation and update). | | verl
    `perf/throughput` (per GPU)
timing/generated_tokens_per_s | tokens/s | `batch/trained_tokens` over `timing/generate`. | reinforcement learning
"""

RATIO_TOLERANCE = 0.1
"""A token whose probability under trainer and engine differs by more than this share counts as mismatched."""

EQUAL_GROUPS = 0.9
"""Share of a step's groups whose rewards are all equal that is said on the console."""


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Rewards, groups, the environments' own numbers, turns, lengths, stop reasons and failures."""
    kept = [trajectory for trajectory in rollouts.trajectories if not trajectory.failed]
    turns = [turn for trajectory in kept for turn in trajectory.turns]
    contexts = [t.prompt_lengths()[-1] + t.turns[-1].num_response_tokens for t in kept]
    return {
        **spread("reward", [trajectory.reward for trajectory in kept], "mean", "std", "max", "min"),
        **_component_metrics(kept),
        **_group_metrics(rollouts),
        **_environment_metrics(kept),
        **spread("turns", [len(trajectory.turns) for trajectory in kept], "mean", "max"),
        **spread("response_length", list(map(response_length, kept)), "mean", "max", "min"),
        **spread("context_length", contexts, "mean", "max"),
        **shares("stop", [turn.stop_reason.value for turn in turns]),
        **shares("outcome", [trajectory.outcome.value for trajectory in kept]),
        **_failure_metrics(rollouts.trajectories),
        **_dataset_metrics(rollouts),
    }


def _dataset_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Of each data set of a mix: prompts, rewards and lengths."""
    by_name: dict[str, list[tuple[Trajectory, ...]]] = defaultdict(list)
    for prompt, group in groups_of(rollouts):
        if prompt.dataset:
            by_name[prompt.dataset].append(group)
    metrics: dict[str, float] = {}
    for name, groups in sorted(by_name.items()):
        kept = [trajectory for group in groups for trajectory in group if not trajectory.failed]
        metrics |= {
            f"dataset/{name}/prompts": float(len(groups)),
            **spread(f"dataset/{name}/reward", [trajectory.reward for trajectory in kept], "mean"),
            **spread(f"dataset/{name}/response_length", list(map(response_length, kept)), "mean"),
        }
    return metrics


def batch_metrics(batch: TrainingInputBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """The batch's size; the ages of its tokens (`off_policy/age/{mean,max}` and the share of each,
    `off_policy/share/age_N`) where some may be above 0, and of those behind an update within their turn the share
    (`off_policy/in_flight/share`); how far the trainer's log-probabilities are from the engine's and from the reference's.

    `mismatch/` compares `old_logprobs` with `rollout_logprobs`, `kl/reference` with `ref_logprobs`, over trained
    tokens, before the first update of the step. `critic/explained_variance` is of the values before it, too.
    The first two are of the tokens that the policy scored, and left out where it need not score any
    (`score/policy_pass_skipped`); `policy/rollout_logprob_diff` and `loss/kl` are measured in the update, over all.
    """
    mask = batch["loss_mask"]
    scored = mask.clone()
    scored[: batch.row_offsets[batch.metadata.first_scored_row] if "old_logprobs" in batch else None] = False
    num_trained = int(mask.sum())
    metrics = {
        "batch/rows": float(batch.num_rows - int(batch["is_padding"].sum())),
        "batch/tokens": float(batch.num_tokens),
        "batch/trained_tokens": float(num_trained),
    }
    if num_trained:
        metrics["score/policy_pass_skipped"] = 1.0 - float(scored.sum()) / num_trained
        metrics |= {"score/rollout_logprobs_used": 1.0} if algorithm.proximal == "behaviour" else {}
    if num_trained and (ages := token_ages(batch)) is not None:
        metrics |= _ages(ages[mask])
        behind = float(behind_updates(batch).sum())
        metrics |= {"off_policy/in_flight/share": behind / num_trained} if behind else {}
    if bool(scored.any()) and "rollout_logprobs" in batch:
        metrics |= _mismatch(batch["old_logprobs"][scored].double() - batch["rollout_logprobs"][scored].double())
    if bool(scored.any()) and "ref_logprobs" in batch:
        metrics["kl/reference"] = mean_token_kl(batch["old_logprobs"], batch["ref_logprobs"], scored, algorithm)
    if "values" in batch and "returns" in batch:
        variance = explained_variance(batch["values"], batch["returns"], mask)
        metrics |= {} if variance is None else {"critic/explained_variance": variance}
    return metrics


def equal_groups(rollouts: RolloutBatch, algorithm: AlgorithmConfig, *, step: int | None = None) -> str:
    """A line where an estimator that compares the samples of a prompt finds almost nothing to compare: all samples of a
    prompt have the same reward in `EQUAL_GROUPS` of the groups, or more; else empty. `step`: of a step's rollouts."""
    groups = _comparable(rollouts)
    equal = [group for group in groups if min(group) == max(group)]
    if not estimator_reads(algorithm).whole_groups or not groups or len(equal) < EQUAL_GROUPS * len(groups):
        return ""
    values = {reward for group in equal for reward in group}
    each = f", {values.pop():g} in all of them" if len(values) == 1 else ""
    told = (
        f"the samples of a prompt all have the same reward in {len(equal)} of {len(groups)} groups{each}: with "
        f"advantage_estimator={split_spec(algorithm.advantage_estimator)[0]} such groups have no gradient. "
        f"{'Is' if step is None else f'Read rollouts/train_step_{step:06d}.parquet: is'} the reward the same for right and "
        "wrong answers, or the task too hard or too easy? A reward with steps between, more generator.n_samples_per_prompt, "
        "a higher generator.sampling.temperature or data.curriculum.enabled=true help."
    )
    if step is None:
        return told
    return f"step {step}: {told} (group/zero_variance has the share of each step; this is said once.)"


class StepWarnings:
    """What the steps of a run warn of. What would be said of many steps is said of the first."""

    def __init__(self, algorithm: AlgorithmConfig, *, is_recorded: bool) -> None:
        """`is_recorded`: rollouts are read, so that no engine is to blame."""
        self._algorithm, self._is_recorded = algorithm, is_recorded
        self._told_equal_groups = self._told_silence = False
        self._invalid: deque[tuple[float, float]] = deque(maxlen=8)

    def of(self, step: int, metrics: Mapping[str, float], rollouts: RolloutBatch) -> Iterator[str]:
        """Yield what this step warns of."""
        if (drift := engine_drift(metrics)) and not self._is_recorded:
            yield f"step {step}: {drift}"
        if not self._told_equal_groups and (told := equal_groups(rollouts, self._algorithm, step=step)):
            self._told_equal_groups = True
            yield told
        if "env/invalid_actions" in metrics and not self._told_silence:
            self._invalid.append((metrics["env/invalid_actions"], metrics["reward/mean"]))
            if told := silence_pays_text(tuple(self._invalid)):
                self._told_silence = True
                yield f"step {step}: {told}"


def document_metrics(batch: TrainingInputBatch, docs_per_step: int) -> dict[str, float]:
    """With `docs_per_step`: the documents of the policy's optimizer steps on this batch, and by how many they exceed the
    target in the mean."""
    boundaries = batch.metadata.policy_mini_batch_boundaries
    if not docs_per_step or not boundaries:
        return {}
    present, trajectories = ~batch["is_padding"], batch["trajectory_index"]
    counts = [len(set(trajectories[start:stop][present[start:stop]].tolist())) for start, stop in boundaries]
    overshoot = math.fsum(max(0, count - docs_per_step) for count in counts) / len(counts)
    name = "batch/documents_per_step"
    return {**spread(name, counts, "mean", "min", "max"), f"{name}/overshoot": overshoot}


def step_totals(everything: RolloutBatch, batch: TrainingInputBatch, *, optimizer_steps: int) -> Totals:
    """What one step consumed: everything that was generated, and the tokens that were trained on."""
    return Totals(
        prompts=len(everything.prompts),
        trajectories=len(everything.trajectories),
        tokens=batch.num_tokens,
        optimizer_steps=optimizer_steps,
        failed_trajectories=sum(trajectory.failed for trajectory in everything.trajectories),
    )


def speed_metrics(timings: Mapping[str, float], batch: TrainingInputBatch) -> dict[str, float]:
    """Rates, under `timing/` as all that depends on the machine is."""
    rates = {
        "timing/tokens_per_s": (batch.num_tokens, timings.get("timing/step", 0.0)),
        "timing/generated_tokens_per_s": (int(batch.loss_tokens().sum()), timings.get("timing/generate", 0.0)),
    }
    return {name: tokens / seconds for name, (tokens, seconds) in rates.items() if seconds > 0}


def spread(name: str, values: Sequence[float], *kinds: str) -> dict[str, float]:
    """`name/mean`, `name/std` (of the population), `name/max`, `name/min` as asked; nothing for no values."""
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    every = {
        "mean": mean,
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }
    return {f"{name}/{kind}": every[kind] for kind in kinds}


def shares(name: str, values: Iterable[str]) -> dict[str, float]:
    """`name/VALUE`: the share of each value."""
    counts = Counter(values)
    return {f"{name}/{value}": count / counts.total() for value, count in sorted(counts.items())}


def _group_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Groups of equal rewards teach nothing; so do groups of fewer than two trajectories."""
    groups = _comparable(rollouts)
    if not groups:
        return {}
    return {"group/zero_variance": sum(min(group) == max(group) for group in groups) / len(groups)}


def _comparable(rollouts: RolloutBatch) -> list[list[float]]:
    """Return the rewards of each group of two trajectories or more, without those that failed."""
    rewards = [[t.reward for t in group if not t.failed] for _, group in groups_of(rollouts)]
    return [group for group in rewards if len(group) > 1]


def _component_metrics(kept: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/NAME/mean` and so on of each reward of a function, over the trajectories that have it, before its weight."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in kept:
        for name, value in trajectory.rewards.items():
            values[name].append(value)
    spreads = [spread(f"reward/{name}", values[name], "mean", "std", "max", "min") for name in sorted(values)]
    return {name: value for each in spreads for name, value in each.items()}


def _environment_metrics(kept: Sequence[Trajectory]) -> dict[str, float]:
    """`env/NAME` (`tools/NAME`, of calls): mean over the trajectories that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in kept:
        for name, value in trajectory.metrics.items():
            values[name].append(value)
    means = {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}
    return {name if name.startswith("tools/") else f"env/{name}": mean for name, mean in means.items()}


def _failure_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    kinds = Counter(trajectory.failure.kind.value for trajectory in trajectories if trajectory.failure is not None)
    num_failed = sum(trajectory.outcome is Outcome.FAILED for trajectory in trajectories)
    return {
        "failures/count": float(num_failed),
        "failures/fraction": num_failed / len(trajectories),
        **{f"failures/{kind}": float(count) for kind, count in sorted(kinds.items())},
    }


def _ages(ages: Tensor) -> dict[str, float]:
    """`ages` is integer `[trained tokens]`; shares of ages that the ledger of the log-ratio shows, too."""
    shown = ages[ages >= 0].clamp(max=LARGEST_AGE_SHOWN)
    found, counts = torch.unique(shown, return_counts=True)
    return {
        "off_policy/age/mean": float(ages.double().mean()),
        "off_policy/age/max": float(ages.max()),
        **{f"off_policy/share/age_{age}": n / len(ages) for age, n in zip(found.tolist(), counts.tolist())},
    }


def _mismatch(log_ratio: Tensor) -> dict[str, float]:
    """`log_ratio` is float64 `[trained tokens]`: trainer minus engine."""
    ratio = log_ratio.exp()
    outside = (ratio < 1 - RATIO_TOLERANCE) | (ratio > 1 + RATIO_TOLERANCE)
    return {
        "mismatch/logprob_diff_mean": float(log_ratio.abs().mean()),
        "mismatch/logprob_diff_max": float(log_ratio.abs().max()),
        "mismatch/ratio_mean": float(ratio.mean()),
        "mismatch/ratio_outside_10_percent": float(torch.mean(outside.double())),
    }
