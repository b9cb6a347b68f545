"""Supervised training side by side with TRL's SFTTrainer: same model, data, order, tokens and optimizer.

    python scripts/bench/sft_vs_trl.py --data data/gsm8k/train.jsonl --steps 20

Needs `pip install '.[bench]'` (TRL). Rows have `question` and `answer`; both trainers render them with the model's chat
template and train on the assistant's tokens. Compared are the token ids of each step, the loss of each step, and tokens
a CPU second of the update (one thread, variants interleaved, medians), which other jobs on the machine change least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from update_trl import NOTHING_BESIDE

from skyrl_train.config import SFTConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.data import SFTBatch
from skyrl_train.interfaces import Learner
from skyrl_train.model import resolve_model_path
from skyrl_train.runs import train_sft
from skyrl_train.telemetry import read_metrics
from skyrl_train.trainers import sft

LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run."""

    losses: tuple[float, ...]
    cpu_s: tuple[float, ...]
    """Of each update."""
    token_sums: tuple[int, ...]
    """Sum of the token ids of each step: equal where the tokens are."""
    num_tokens: tuple[int, ...]
    """Tokens of each step's examples."""

    @property
    def tokens_per_cpu_s(self) -> float:
        """Median over the steps but the first."""
        return statistics.median(n / s for n, s in zip(self.num_tokens[1:], self.cpu_s[1:]))


def read_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` rows as conversations."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, count)]
    return [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
    ]


def run_ours(rows: Sequence[dict[str, Any]], args: argparse.Namespace, layout: str) -> Curve:
    """`train_sft`, as the command line runs it, in a temporary folder."""
    cpu_s: list[float] = []
    sums: list[int] = []
    update = sft.update

    def timed(policy: Learner, batch: SFTBatch) -> dict[str, float]:
        sums.append(int(batch.mini_batch.batch["input_ids"].sum()))
        begun = time.process_time()
        metrics = update(policy, batch)
        cpu_s.append(time.process_time() - begun)
        return metrics

    with tempfile.TemporaryDirectory(prefix="bench-sft-") as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = SFTConfig(output_dir=f"{folder}/run", model=ModelConfig(path=args.model))
        trainer = replace(
            config.trainer,
            num_steps=args.steps,
            batch_size=args.batch_size,
            layout=layout,
            max_tokens_per_microbatch=args.tokens,
            eval_before_train=False,
            export="none",
            ckpt_interval=0,
            optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0, max_grad_norm=1.0),
        )
        source = replace(
            config.data, train=(str(data),), validation=(), shuffle=False, cache=False, max_length=args.max_length
        )
        sft.update = timed
        try:
            train_sft(replace(config, data=source, trainer=trainer))
        finally:
            sft.update = update
        records = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    return Curve(
        losses=tuple(record["train/loss"] for record in records),
        cpu_s=tuple(cpu_s),
        token_sums=tuple(sums),
        num_tokens=tuple(int(record["batch/tokens"]) for record in records),
    )


def run_trl(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> Curve:
    """TRL's trainer, fed the same conversations in the same order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig as TRLConfig, SFTTrainer

    folder = resolve_model_path(args.model)
    accumulate, rest = divmod(args.batch_size, args.trl_micro_batch_size)
    if rest:
        raise SystemExit("--trl-micro-batch-size must divide --batch-size")
    cpu_s: list[float] = []
    sums, counts = [0] * args.steps, [0] * args.steps

    class Recording(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            mask = inputs["attention_mask"].bool()
            sums[self.state.global_step] += int(inputs["input_ids"][mask].sum())
            counts[self.state.global_step] += int(mask.sum())
            return super().training_step(model, inputs, *rest, **named)

    class Clock(TrainerCallback):  # type: ignore[misc]
        begun = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            cpu_s.append(time.process_time() - self.begun)

    with tempfile.TemporaryDirectory(prefix="bench-sft-trl-") as output:
        trainer = Recording(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(folder),
            train_dataset=Dataset.from_list(list(rows)),
            callbacks=[Clock()],
            args=TRLConfig(
                output_dir=output,
                max_steps=args.steps,
                per_device_train_batch_size=args.trl_micro_batch_size,
                gradient_accumulation_steps=accumulate,
                learning_rate=LEARNING_RATE,
                weight_decay=0.0,
                max_length=args.max_length,
                assistant_only_loss=True,
                bf16=False,
                logging_steps=1,
                **NOTHING_BESIDE,
            ),
        )
        trainer.train()
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return Curve(losses=tuple(losses), cpu_s=tuple(cpu_s), token_sums=tuple(sums), num_tokens=tuple(counts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--model", default="builtin:tiny_qwen2", help="folder, hub name or builtin:NAME")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="examples per optimizer step")
    parser.add_argument("--trl-micro-batch-size", type=int, default=8, help="examples per forward of TRL's")
    parser.add_argument("--tokens", type=int, default=4096, help="token positions per forward of ours")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of an example")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each variant, interleaved")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = read_rows(args.data, args.steps * args.batch_size)

    def measure(name: str, _: int) -> Curve:
        return run_trl(rows, args) if name == "TRL" else run_ours(rows, args, name)

    curves, _ = harness.in_turns(("TRL", "padded", "packed"), range(args.rounds), measure)
    trl = curves["TRL"][0]
    table = harness.Table("step", "tokens", *curves, title="Loss")
    for step, tokens in enumerate(trl.num_tokens):
        table.row(step + 1, tokens, *(f"{runs[0].losses[step]:.5f}" for runs in curves.values()))
    rate = statistics.median(curve.tokens_per_cpu_s for curve in curves["TRL"])
    for name, runs in curves.items():
        curve = runs[0]
        same = curve.token_sums == trl.token_sums and curve.num_tokens == trl.num_tokens
        furthest = max(abs(a - b) / b for a, b in zip(curve.losses, trl.losses))
        speed = statistics.median(one.tokens_per_cpu_s for one in runs)
        print(
            f"{name:>8}: {speed:8.0f} tokens a CPU second, {speed / rate:5.2f}x TRL; "
            f"tokens of every step {'equal' if same else 'DIFFER'}; losses within {furthest:.2e}"
        )


if __name__ == "__main__":
    harness.run(main)
