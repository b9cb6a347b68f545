"""A tiny model of images and text learns to name colours, on a CPU: shown answers first, half of them wrong, then GRPO.

    python examples/vlm_colours/train.py [--seed 0] [--warm-up-steps 100] [--output runs/colours] [KEY=VALUE ...]

Each picture is a noisy patch of one of six colours, and the question asks which. The model is Qwen2.5-VL's architecture with
0.1 million random numbers, made here with its tokenizer and its image processor. In its warm-up, supervised training on
conversations with images, half of the answers are right and half are drawn. GRPO learns from the reward alone what is right.
KEY=VALUE are settings of the latter run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (40, 60, 220),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
    "yellow": (230, 220, 40),
}
QUESTION = "colour"
SIZE = 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def save_model(folder: Path, seed: int) -> None:
    """Write the random model, its tokenizer of words, and its image processor."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    words = ["system", "user", "assistant", "\n", "1", "2", "3", "a", "b", QUESTION, *COLOURS]
    bare = Tokenizer(models.WordLevel({token: number for number, token in enumerate([*SPECIAL, *words])}, SPECIAL[0]))
    bare.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        unk_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=TEMPLATE,
    )
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "initializer_range": 0.05,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            **dict.fromkeys(("eos_token_id",), tokenizer.eos_token_id),
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "window_size": 16,
            "fullatt_block_indexes": [0],
            "initializer_range": 0.05,
        },
        image_token_id=SPECIAL.index("<|image_pad|>"),
        vision_start_token_id=SPECIAL.index("<|vision_start|>"),
        vision_end_token_id=SPECIAL.index("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    config.text_config.bos_token_id = 1  # the family's own default is a token that there is not
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    processor: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def draw(file: Path, rng: random.Random) -> str:
    """Write a picture of one noisy colour, and return which."""
    import numpy as np
    from PIL import Image

    colour = rng.choice(list(COLOURS))
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-15, 16, (SIZE, SIZE, 3))
    Image.fromarray((noise + COLOURS[colour]).clip(0, 255).astype(np.uint8)).save(file)
    return colour


def conversation(file: Path, rng: random.Random) -> tuple[list[dict[str, Any]], str]:
    """Draw a picture; return the question about it, and the answer."""
    content = [{"type": "image", "path": f"pictures/{file.name}"}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}], draw(file, rng)


def write_rows(folder: Path, rng: random.Random) -> None:
    """Write the conversations that are shown, and the questions that are asked."""
    (folder / "pictures").mkdir(exist_ok=True)
    shown, asked = [], []
    for number in range(1200):
        question, answer = conversation(folder / "pictures" / f"{number}.png", rng)
        if number < 800:
            said = answer if rng.random() < 0.5 else rng.choice(list(COLOURS))
            shown.append({"messages": [*question, {"role": "assistant", "content": said}]})
        else:
            asked.append({"prompt": question, "answer": answer})
    for name, rows in (("shown", shown), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(module: str, *settings: str) -> None:
    """Run one command line."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([sys.executable, "-m", module, *settings], check=True, env=environment)


def main() -> None:
    """Make model and data, show, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up-steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/colours"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", arguments.seed)
    write_rows(folder, random.Random(arguments.seed))
    run(
        "skyrl_train.main_sft",
        f"output_dir={folder / 'warm_up'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'shown.jsonl'}]",
        "data.validation=[]",
        f"trainer.num_steps={arguments.warm_up_steps}",
        "trainer.batch_size=32",
        "trainer.layout=packed",
        "trainer.optimizer.lr=3e-3",
        "trainer.optimizer.warmup_steps=20",
        "trainer.optimizer.schedule=cosine",
        "trainer.ckpt_interval=0",
    )
    run(
        "skyrl_train.main",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'warm_up' / 'export'}",
        f"data.train=[{folder / 'asked.jsonl'}]",
        "data.validation=[]",
        "environment.reward=exact_match",
        "generator.n_samples_per_prompt=8",
        "generator.sampling.max_generate_length=4",
        "trainer.total_steps=30",
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=16",
        "trainer.policy.optimizer.lr=1e-3",
        "trainer.ckpt_interval=0",
        "trainer.export_hf=false",
        *arguments.settings,
    )


if __name__ == "__main__":
    main()
