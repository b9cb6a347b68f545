"""Measures how far the trainer's log-probabilities are from the engine's, where routers choose and with recorded experts.

    python scripts/bench/moe_routing.py
    python scripts/bench/moe_routing.py --dtype float32 --rollouts 4

A random mixture of experts (`--layers`, `--experts`, `--top-k`) answers the bundled problems with `generator=hf`, which
records where it sent each token; then the same rollouts are trained on for one step without and with
`trainer.moe_routing_replay`. The weights are the same ones, so that what differs is numerics: engine and trainer compute the
same tokens in other shapes, round otherwise, and where two experts score nearly alike, send a token to another one. Real
models score experts further apart than random ones, and have more layers in which it may happen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch

from skyrl_train.config import Config
from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_tokenizer, quiet_transformers
from skyrl_train.runs import train
from skyrl_train.telemetry import read_metrics

TOKENIZER = "builtin:tiny_qwen2"
SHOWN = {
    "off_policy/numerics_abs_mean": "mean difference",
    "off_policy/numerics_abs_max": "largest",
}
"""Metrics of a step, and what the table calls them."""


def save_mixture(folder: Path, args: argparse.Namespace) -> None:
    """A random Qwen3-MoE with the bundled tokenizer."""
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    tokenizer = load_tokenizer(ModelConfig(path=TOKENIZER))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        initializer_range=0.1,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with quiet_transformers():
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def make_config(
    model: Path, folder: Path, args: argparse.Namespace, *, replays: bool, recording: Path | None
) -> Config:
    """One step, which generates, or takes the rollouts of a recording."""
    config = Config(output_dir=str(folder), model=ModelConfig(path=str(model), dtype=args.dtype))
    sampling = replace(config.generator.sampling, max_generate_length=args.length)
    given: dict[str, Any] = {} if recording is None else {"backend": "replay", "replay_path": str(recording)}
    return replace(
        config,
        data=replace(config.data, validation=()),
        environment=replace(config.environment, isolation="thread"),
        generator=replace(config.generator, n_samples_per_prompt=2, sampling=sampling, **given),
        trainer=replace(
            config.trainer,
            total_steps=1,
            train_batch_size=args.rollouts // 2,
            policy_mini_batch_size=args.rollouts // 2,
            critic_mini_batch_size=args.rollouts // 2,
            moe_routing_replay=replays,
            eval_before_train=False,
            ckpt_interval=0,
            export_hf=False,
        ),
    )


def step_of(config: Config) -> Mapping[str, Any]:
    """The metrics of the run's step."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(config)
    return read_metrics(Path(config.output_dir) / "metrics.jsonl")[-1]


def measure(args: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """The metrics of the step without and with replay, of the same rollouts."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        save_mixture(root / "model", args)
        step_of(make_config(root / "model", root / "made", args, replays=True, recording=None))
        recording = root / "made" / "rollouts"
        return {
            name: step_of(
                make_config(root / "model", root / name, args, replays=name == "recorded", recording=recording)
            )
            for name in ("chosen", "recorded")
        }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of engine and trainer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--top-k", type=int, default=4, help="experts that a token is sent to")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of a response")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    args = parse(arguments)
    found = measure(args)
    title = f"{args.dtype}, {args.layers} layers, {args.top_k} of {args.experts} experts"
    table = harness.Table("experts", *SHOWN.values(), title=title)
    for name, metrics in found.items():
        table.row(name, *(f"{metrics[metric]:.2g}" for metric in SHOWN))


if __name__ == "__main__":
    harness.run(main)
