"""Whole runs with images: tiny random models on disk, pictures, and an environment that shows the next one."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.door import load_root
from skyrl_train.data.sources import IMAGES
from skyrl_train.trainers import RunEvent
from tests.support import warm_python
from tests.support.vision_cases import PLACEHOLDER, make_gemma, make_vlm

BEGIN, END = 47, 46
WORDS = (
    "system",
    "user",
    "assistant",
    "tool",
    "\n",
    "1",
    "2",
    "3",
    "a",
    "b",
    "yes",
    "no",
    "colour",
    "red",
    "green",
    "next",
)
COLOURS = ((220, 30, 30), (30, 180, 40), (40, 60, 220), (230, 220, 40))
TEMPLATE = (
    "{%- for message in messages -%}{{- '<s>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- 'MARK' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}{{- '</s>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<s>assistant\\n' -}}{%- endif -%}"
)
MARKS = {"qwen": "<begin><image><end>", "gemma": "<begin>"}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "qwen": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 2,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 16, "longest_edge": 256},
    },
    "gemma": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 8, "width": 8}},
}


def save_model(folder: Path, family: str = "qwen", *, text: Mapping[str, Any] | None = None) -> str:
    """Write a random model of `family` with its tokenizer of words and its image processor; return its path. `text`: as of
    `make_vlm`, for Qwen2.5-VL."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<s>", "</s>", *WORDS, *(f"w{number}" for number in range(PLACEHOLDER - 6 - len(WORDS)))]
    vocabulary += ["<end>", "<begin>", "<video>", "<image>"]
    assert (vocabulary.index("<end>"), vocabulary.index("<image>")) == (END, PLACEHOLDER)
    bare = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocabulary)}, "<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<end>", "<begin>", "<video>", "<image>"],
        chat_template=TEMPLATE.replace("MARK", MARKS[family]),
    )
    (make_vlm(text=text) if family == "qwen" else make_gemma()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]), encoding="utf-8")
    return str(folder)


def png(number: int, size: int = 8) -> bytes:
    """A picture of one colour with a corner of another."""
    out = io.BytesIO()
    picture = Pictures.new("RGB", (size, size), COLOURS[number % len(COLOURS)])
    picture.paste((number, 0, 0), (0, 0, 2, 2))
    picture.save(out, format="PNG")
    return out.getvalue()


def data_url(data: bytes) -> str:
    """The picture as an environment or a tool gives it."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(url: str, text: str = "colour") -> dict[str, Any]:
    """A message with an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def write_rows(folder: Path, count: int = 4) -> tuple[str, str]:
    """Write prompts with pictures, and conversations about them; return both files."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, told = [], []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png(number))
        question = {
            "role": "user",
            "content": [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "a"}],
        }
        asked.append({"prompt": [question], "answer": "red", "number": number})
        told.append({"messages": [question, {"role": "assistant", "content": "red" if number % 2 else "green"}]})
    for name, rows in (("asked", asked), ("told", told)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / "asked.jsonl"), str(folder / "told.jsonl")


class NextPicture:
    """Shows another picture after the first answer; the reward depends on what was said of both."""

    def __init__(self, env_config: object, extras: Mapping[str, Any]) -> None:
        del env_config
        self.number, self.turns = int(extras["number"]), 0

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        return prompt, {}

    def step(self, action: str) -> Any:
        self.turns += 1
        reward = float(sum(map(ord, action)) % 5)
        if self.turns == 2:
            return {"observations": [], "reward": reward, "done": True}
        message = shown(data_url(png(10 + self.number + self.turns)), "next")
        return {"observations": [message], "reward": reward, "done": False}


def kill_after_a_step(event: RunEvent) -> None:
    """For `trainer.callbacks`: ends the process as kill -9 does after step 2, where that is asked for."""
    if event.kind == "step" and event.step == 2 and os.environ.get("KILL_AFTER_A_STEP"):
        os.kill(os.getpid(), signal.SIGKILL)


def tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        section = found
        for each in path:
            section = section.setdefault(each, {})
        section[last] = value
    return found


def rl_settings(model: str, rows: str) -> dict[str, Any]:
    """Two steps of four prompts, two samples each, of two turns."""
    return {
        "model.path": model,
        "data.train": [rows],
        "data.validation": [],
        "environment.env_class": "tests.support.vision_runs:NextPicture",
        "environment.isolation": "thread",
        "generator.max_turns": 3,
        "generator.max_context_length": 64,
        "generator.n_samples_per_prompt": 2,
        "generator.sampling.max_generate_length": 3,
        "generator.eval_sampling.max_generate_length": 3,
        "data.max_prompt_length": 32,
        "trainer.total_steps": 2,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.ckpt_interval": 0,
        "trainer.export_hf": False,
        "trainer.policy.optimizer.lr": 0.01,
    }


def rl_config(output: Path, settings: Mapping[str, Any]) -> Config:
    """Return the configuration of a run into `output`."""
    return load_root(tree({"output_dir": str(output), **settings}), Config)


def sft_settings(model: str, rows: str) -> dict[str, Any]:
    """Two steps of two conversations."""
    return {
        "model.path": model,
        "data.train": [rows],
        "data.validation": [],
        "trainer.num_steps": 2,
        "trainer.batch_size": 2,
        "trainer.ckpt_interval": 0,
        "trainer.export": "none",
        "trainer.optimizer.lr": 0.01,
    }


def sft_config(output: Path, settings: Mapping[str, Any]) -> SFTConfig:
    """The same of a supervised run."""
    return load_root(tree({"output_dir": str(output), **settings}), SFTConfig)


def command(
    module: str, output: Path, settings: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
) -> Any:
    """Run `python -m module` to its end; the completed process with what it printed."""
    words = [
        f"{name}={json.dumps(value) if isinstance(value, (list, bool)) else value}" for name, value in settings.items()
    ]
    return warm_python.run("-m", module, *words, f"hydra.run.dir={output}", environment=environment)


def forget_images(patch: pytest.MonkeyPatch) -> None:
    """Have this process know no image, as one that begins."""
    patch.setattr(IMAGES, "_held", {})
    patch.setattr(IMAGES, "recorded", [])
    patch.setattr(IMAGES, "folder", None)


def weights(folders: Sequence[Path]) -> list[bytes]:
    """The files of models in these folders."""
    return [file.read_bytes() for folder in folders for file in sorted(folder.rglob("*.safetensors"))]
