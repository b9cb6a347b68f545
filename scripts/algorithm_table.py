"""Measures estimators and losses against their formulas and writes the table in docs/algorithms.md.

    python scripts/algorithm_table.py             # rewrite the table
    python scripts/algorithm_table.py --time      # also print times for a batch of 500,000 trained tokens

Errors are the largest absolute difference, in float64, between the tensor code and plain loops over the formulas
(`tests/support/advantage_oracles.py`, `tests/support/loss_oracles.py`) over random uneven batches, step-wise and not,
with gradients.
"""
# ruff: noqa: E402, RUF001  the repository's root comes first on the path; formulas are written as in the papers

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from skyrl_train.algorithms import AdvantageInputs
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.parts import ADVANTAGE_ESTIMATORS
from tests.support.advantage_oracles import (
    ADVANTAGE_ORACLES,
    Sample,
    Step,
    advantage_error,
    advantage_inputs_of,
)
from tests.support.loss_oracles import loss_error

DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- table: written by scripts/algorithm_table.py -->", "<!-- end of table -->"
NUM_CASES = 200


@dataclass(frozen=True)
class Entry:
    name: str
    source: str
    formula: str
    needs: str
    tested: str
    """Public functions it is compared with, beside the loops."""


ESTIMATORS = (
    Entry("gae", "arXiv:1506.02438", "`Σ (γλ)^l δ_(t+l)`, `δ_t = r_t + γV_(t+1) − V_t`", "values", "verl"),
    Entry("grpo", "arXiv:2402.03300, 2503.20783", "`(r − mean) / std`, or `r − mean`", "groups", "verl"),
    Entry("rloo", "arXiv:2402.14740", "`r − mean of the others`", "groups", "verl"),
    Entry("reinforce++", "arXiv:2501.03262", "`Σ γ^l r_(t+l)`, whitened over the batch", "", "verl"),
    Entry("reinforce++_baseline", "arXiv:2501.03262", "`r − mean`, whitened over the batch", "groups", "verl"),
    Entry("maxrl", "arXiv:2602.02710", "`(r − mean) / mean`", "groups, scores ≥ 0", ""),
    Entry("opo", "arXiv:2505.23585", "`r − Σ l_j r_j / Σ l_j`", "groups", "verl"),
    Entry("remax", "arXiv:2310.10505", "`r − r_greedy`", "a greedy sample", "verl"),
    Entry("grpo_pass_at_k", "arXiv:2503.19595", "`(r_max − r_second) / std` for the best, else 0", "groups", "verl"),
    Entry("gpg", "arXiv:2504.02546", "`α (r − mean)`, `α = B / (B − M)` over the batch", "groups", "verl"),
    Entry(
        "optimal_token_baseline",
        "arXiv:2602.07078",
        "`G_t − Σ_i G_it W_it / Σ_i W_it`, `W_t = Σ_{s≤t} (1 − 2π_s + Σ_v π_v²)`",
        "groups, `Σπ²`",
        "verl",
    ),
    Entry("gdpo", "arXiv:2601.05242", "`Σ_k w_k (r_k − mean) / std`, whitened over the batch", "groups", "verl"),
    Entry(
        "on_policy_distillation",
        "arXiv:2306.08543, 2306.13649",
        "`log π_teacher − log π_old` per token",
        "reference log-probs",
        "",
    ),
    Entry(
        "self_distillation",
        "arXiv:2601.19897",
        "`log π(· given context) − log π_old` per token",
        "`generator.privileged_context`",
        "",
    ),
)
LOSSES = (
    Entry("regular", "arXiv:1707.06347, 2503.14476", "`−min(ρA, clip(ρ)A)`", "", "TRL"),
    Entry("dual_clip", "arXiv:1912.09729", "`regular`, at most `−cA` where `A < 0`", "", "verl"),
    Entry("gspo", "arXiv:2507.18071", "`regular` with `ρ = exp(mean_seq log ρ_t)`", "", "verl, TRL"),
    Entry("gmpo", "arXiv:2507.20673", "`−A exp(mean_seq min(log ρ, clip))`", "", "verl"),
    Entry("vespo", "arXiv:2602.10693", "`−sg(w^k e^(λ(1−w))) A log π`, `w = Π_seq ρ_t`", "", "TRL"),
    Entry("cispo", "arXiv:2506.13585", "`−sg(clip(ρ)) A log π`", "", "verl, TRL"),
    Entry("sapo", "arXiv:2511.20347", "`−A (4/τ) σ(τ(ρ − 1))`", "", "verl, TRL"),
    Entry("clip_cov", "arXiv:2505.22617", "`regular`, 0 for tokens of high covariance", "", ""),
    Entry("kl_cov", "arXiv:2505.22617", "`−ρA`, `+ β|log ρ|` for tokens of highest covariance", "", ""),
    Entry(
        "rollout_is", "arXiv:2607.07508, 2510.18855", "`−sg(ρ_rollout · 1[in range]) A log π`", "rollout log-probs", ""
    ),
    Entry("dppo", "arXiv:2602.04879", "`−M sg(min(ρ_rollout, c)) A log π`", "rollout log-probs", "verl"),
    Entry("importance_sampling", "arXiv:1707.06347, eq. 6", "`−ρA`", "", ""),
    Entry("reinforce", "Williams, 1992", "`−A log π`", "", "verl"),
    Entry("cross_entropy", "maximum likelihood", "`−log π`", "", ""),
)
ADVANTAGE_CONFIGS = (
    AlgorithmConfig(gamma=0.9, gae_lambda=0.8),
    AlgorithmConfig(gamma=0.9, gae_lambda=0.8, step_rewards="turn_return", normalize_by_std=False),
)
LOSS_CONFIGS = (
    AlgorithmConfig(),
    AlgorithmConfig(clip_cov_low=0.1, clip_cov_share=0.3, kl_cov_share=0.3, eps_clip_low=0.1, eps_clip_high=0.4),
    AlgorithmConfig(dppo_divergence="kl", eps_clip_low=0.02, eps_clip_high=0.03, dppo_max_ratio=1.5),
    AlgorithmConfig(sequence_unit="trajectory"),
)


def table(num_cases: int) -> str:
    """The two tables as Markdown."""
    lines: list[str] = []
    groups = (
        ("Advantage estimator", ESTIMATORS, advantage_error, ADVANTAGE_CONFIGS),
        ("Policy loss", LOSSES, loss_error, LOSS_CONFIGS),
    )
    for title, entries, error_of, configs in groups:
        lines += [
            f"| {title} | Source | Formula | Needs | Tested against | Largest error |",
            "|---|---|---|---|---|---|",
        ]
        for entry in entries:
            error = max(error_of(entry.name, seed, config) for config in configs for seed in range(num_cases))
            tested = f"loops, {entry.tested}" if entry.tested else "loops"
            formula = entry.formula.replace("|", "\\|")
            lines.append(f"| `{entry.name}` | {entry.source} | {formula} | {entry.needs} | {tested} | {error:.1e} |")
        lines.append("")
    return "\n".join(lines)


def rewrite(document: str, content: str) -> str:
    """`document` with what stands between the marks replaced."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


def timing_samples(num_trajectories: int, num_actions: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(num_trajectories):
        values = torch.randn(num_actions, generator=generator).tolist()
        step = Step(context=16, values=values, reward=float(number % 3), old_logprobs=values, ref_logprobs=values)
        samples.append(Sample(prompt=number // 8, steps=[step]))
    return samples


def print_times() -> None:
    """Processor time for 1,000 trajectories of 500 tokens, best of five, and its ratio to loops over lists."""
    samples = timing_samples(1000, 500)
    inputs: AdvantageInputs = advantage_inputs_of(samples, step_wise=False, dtype=torch.float32)
    config = AlgorithmConfig(gamma=1.0, gae_lambda=0.95)
    for name in ("gae", "grpo"):
        ours = min(_seconds(lambda: ADVANTAGE_ESTIMATORS[name](inputs, config)) for _ in range(5))  # noqa: B023
        loops = _seconds(lambda: ADVANTAGE_ORACLES[name](samples, config))  # noqa: B023
        print(f"{name}: {1000 * ours:.0f} ms, loops {1000 * loops:.0f} ms, ratio {loops / ours:.1f}")


def _seconds(run: object) -> float:
    start = time.process_time()
    run()  # type: ignore[operator]
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="also print times for 500,000 trained tokens")
    arguments = parser.parse_args()
    DOCUMENT.write_text(rewrite(DOCUMENT.read_text(encoding="utf-8"), table(NUM_CASES)), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    if arguments.time:
        print_times()


if __name__ == "__main__":
    main()
