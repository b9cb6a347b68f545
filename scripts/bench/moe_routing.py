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
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch

from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_tokenizer, quiet_transformers

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


def step_of(folder: Path, args: argparse.Namespace, *settings: str) -> dict[str, Any]:
    """The metrics of the one step of a run with the mixture beside `folder`."""
    prompts = args.rollouts // 2
    records = harness.trained(
        folder,
        *("platform=cpu", "tracker.console.enabled=false", "trainer.layout=padded", "environment.isolation=thread"),
        *(f"model.path={folder.parent / 'model'}", f"model.dtype={args.dtype}", "data.validation=[]"),
        *("generator.n_samples_per_prompt=2", f"generator.sampling.max_generate_length={args.length}"),
        *(f"trainer.train_batch_size={prompts}", f"trainer.policy_mini_batch_size={prompts}"),
        *(f"trainer.critic_mini_batch_size={prompts}", "trainer.total_steps=1", "trainer.eval_before_train=false"),
        *("trainer.ckpt_interval=0", "trainer.export_hf=false", "trainer.policy.optimizer.lr=1e-6"),
        *settings,
        experiment="",
    )
    return records[-1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of engine and trainer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--top-k", type=int, default=4, help="experts that a token is sent to")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of a response")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        save_mixture(root / "model", args)
        step_of(root / "made", args, "trainer.moe_routing_replay=true")
        title = f"{args.dtype}, {args.layers} layers, {args.top_k} of {args.experts} experts"
        table = harness.Table("experts", *SHOWN.values(), title=title)
        again = ("generator.backend=replay", f"generator.replay_path={root / 'made' / 'rollouts'}")
        for name, replays in (("chosen", "false"), ("recorded", "true")):
            found = step_of(root / name, args, *again, f"trainer.moe_routing_replay={replays}")
            table.row(name, *(f"{found[metric]:.2g}" for metric in SHOWN))


if __name__ == "__main__":
    harness.run(main)
