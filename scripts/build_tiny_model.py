"""Build the bundled tiny model: a Qwen2 of about a million parameters, its tokenizer and its chat template.

    python scripts/build_tiny_model.py --output skyrl_train/data/assets/tiny_qwen2

Everything follows from RECIPE: the tokenizer's words are those of the bundled word problems, the weights start from a
fixed seed, and a supervised warm start (`python -m skyrl_train.main_sft`'s own trainer) on demonstrations of mixed style
teaches the environment's format and the arithmetic, but mostly to guess. That leaves reinforcement learning something to
discover. Takes minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from skyrl_train.config import ConsoleConfig, SFTConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.data.tasks import Split, WordProblem, draw_problem, generate_problems, to_row, write_demonstration
from skyrl_train.rollout.envs import WordProblemsEnv
from skyrl_train.runs import train_sft
from skyrl_train.system import derive_seed

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

NUM_VOCABULARY_CONVERSATIONS = 5000
LARGEST_VOCABULARY = 1024
"""Far more than is needed: training ends when every word is one token."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting of the bundled model. `recipe.json` beside the weights must say the same."""

    seed: int = 0
    hidden_size: int = 192
    num_hidden_layers: int = 2
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    intermediate_size: int = 512
    max_position_embeddings: int = 1024
    initializer_range: float = 0.05
    num_worked_steps: int = 1900
    """First steps, in which every demonstration is worked step by step: they teach the arithmetic."""
    num_mixed_steps: int = 300
    """Last steps, of mixed style: they teach to guess, and what a second try looks like."""
    worked_share: float = 0.2
    """Share of answers in the mixed demonstrations that are worked; the others are wrong guesses."""
    conversations_per_step: int = 32
    learning_rate: float = 1.5e-3
    final_learning_rate_share: float = 0.1
    num_warmup_steps: int = 20
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    bucketed_steps: int = 16
    """Conversations of so many steps are drawn together and dealt to steps by length."""
    tokens_per_micro_batch: int = 2048

    @property
    def num_steps(self) -> int:
        return self.num_worked_steps + self.num_mixed_steps


RECIPE = Recipe()


def build_tokenizer(recipe: Recipe) -> Qwen2Tokenizer:
    """A byte-level tokenizer of the Qwen2 class: words of the problems are one token, digits one each, any text works.

    It has the class that `AutoTokenizer` picks for Qwen2 models; a tokenizer of another kind beside a Qwen2 config
    would be read as this one, with another splitting.
    """
    rng = random.Random(derive_seed(recipe.seed, "vocabulary"))
    conversations = [write_demonstration(draw_problem(rng), 0.5, rng) for _ in range(NUM_VOCABULARY_CONVERSATIONS)]
    texts = [message["content"] for messages in conversations for message in messages]
    splitter = Qwen2Tokenizer().backend_tokenizer
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = splitter.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bare.train_from_iterator([*texts, *["system", "user", "assistant"] * len(texts)], trainer)
    learned = json.loads(bare.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=recipe.max_position_embeddings,
    )


def build_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """The untrained model, from the recipe's seed."""
    torch.manual_seed(derive_seed(recipe.seed, "initial weights"))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.max_position_embeddings,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def draw_conversation(worked_share: float, rng: random.Random) -> list[Mapping[str, Any]]:
    """One demonstration on a problem of the training split."""
    problem = draw_problem(rng)
    while problem.split is not Split.TRAIN:
        problem = draw_problem(rng)
    return list(write_demonstration(problem, worked_share, rng))


def draw_steps(
    tokenizer: Qwen2Tokenizer, recipe: Recipe, num_steps: int, worked_share: float
) -> Iterator[list[list[Mapping[str, Any]]]]:
    """`num_steps` times the conversations of one step, which are of similar length."""
    rng = random.Random(derive_seed(recipe.seed, f"demonstrations with {worked_share} worked"))
    size = recipe.conversations_per_step
    for first_step in range(0, num_steps, recipe.bucketed_steps):
        num_drawn = min(recipe.bucketed_steps, num_steps - first_step)
        pool = [draw_conversation(worked_share, rng) for _ in range(size * num_drawn)]
        pool.sort(key=lambda messages: len(tokenizer.apply_chat_template(messages)["input_ids"]))
        steps = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(steps)
        yield from steps


def draw_all_steps(tokenizer: Qwen2Tokenizer, recipe: Recipe) -> Iterator[list[list[Mapping[str, Any]]]]:
    """The conversations of every step in turn: worked ones first, then of mixed style."""
    yield from draw_steps(tokenizer, recipe, recipe.num_worked_steps, worked_share=1.0)
    yield from draw_steps(tokenizer, recipe, recipe.num_mixed_steps, recipe.worked_share)


def training_config(recipe: Recipe, folder: Path) -> SFTConfig:
    """One pass over `demonstrations.jsonl` in its order, from the model in `start/`."""
    config = SFTConfig(
        run_name="tiny_qwen2",
        seed=recipe.seed,
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(folder / "start")),
    )
    optimizer = OptimizerConfig(
        lr=recipe.learning_rate,
        betas=recipe.adam_betas,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        warmup_steps=recipe.num_warmup_steps,
        schedule="cosine",
        min_lr_ratio=recipe.final_learning_rate_share,
    )
    trainer = replace(
        config.trainer,
        num_steps=recipe.num_steps,
        batch_size=recipe.conversations_per_step,
        layout="packed",
        max_tokens_per_microbatch=recipe.tokens_per_micro_batch,
        optimizer=optimizer,
        ckpt_interval=0,
    )
    data = replace(
        config.data,
        train=(str(folder / "demonstrations.jsonl"),),
        validation=(),
        shuffle=False,
        cache=False,
        max_length=recipe.tokens_per_micro_batch,
    )
    tracker = replace(config.tracker, console=ConsoleConfig(enabled=True))
    return replace(config, data=data, trainer=trainer, tracker=tracker)


def warm_start(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, recipe: Recipe) -> None:
    """Supervised training on the assistant's tokens, in place."""
    with tempfile.TemporaryDirectory(prefix="tiny-model-") as name:
        folder = Path(name)
        model.save_pretrained(folder / "start")
        tokenizer.save_pretrained(folder / "start")
        with (folder / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
            for messages in itertools.chain.from_iterable(draw_all_steps(tokenizer, recipe)):
                file.write(json.dumps({"messages": messages}) + "\n")
        train_sft(training_config(recipe, folder))
        model.load_state_dict(Qwen2ForCausalLM.from_pretrained(folder / "run" / "export").state_dict())


@torch.no_grad()
def respond(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    greedy: bool,
) -> list[str]:
    """One response to each conversation."""
    encoded = tokenizer.apply_chat_template(
        [list(messages) for messages in conversations],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**encoded, max_new_tokens=48, do_sample=not greedy, top_k=None)
    return tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[WordProblem], greedy: bool
) -> dict[str, float]:
    """Mean of the environment's metrics, and of the first responses' length in tokens."""
    model.eval()
    rows = [to_row(problem, problem.split, index) for index, problem in enumerate(problems)]
    environments = [WordProblemsEnv(extras=row) for row in rows]
    conversations = [list(row["prompt"]) for row in rows]
    waiting, lengths = list(range(len(rows))), []
    while waiting:
        responses = respond(model, tokenizer, [conversations[index] for index in waiting], greedy)
        lengths = lengths or [len(tokenizer.encode(response)) for response in responses]
        still_waiting = []
        for index, response in zip(waiting, responses):
            outcome = environments[index].step(response)
            conversations[index] += [{"role": "assistant", "content": response}, *outcome["observations"]]
            if not outcome["done"]:
                still_waiting.append(index)
        waiting = still_waiting
    metrics = [environment.get_metrics() for environment in environments]
    means = {name: sum(metric[name] for metric in metrics) / len(metrics) for name in metrics[0]}
    means["first_response_tokens"] = sum(lengths) / len(lengths)
    return {name: round(value, 4) for name, value in means.items()}


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What `recipe.json` records: the recipe, and a digest of what it trains on, which follows the problems' code."""
    tokenizer = build_tokenizer(recipe)
    steps = [
        *draw_steps(tokenizer, recipe, 1, worked_share=1.0),
        *draw_steps(tokenizer, recipe, 1, recipe.worked_share),
    ]
    digest = hashlib.blake2b(json.dumps(steps).encode(), digest_size=16).hexdigest()
    return {**asdict(recipe), "digest_of_first_demonstrations": digest}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    output = parser.parse_args(arguments).output
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(RECIPE)
    model = build_model(RECIPE, tokenizer)
    warm_start(model, tokenizer, RECIPE)
    torch.manual_seed(derive_seed(RECIPE.seed, "measure"))
    held_out = generate_problems(Split.VALIDATION, 256, seed=0)
    measured = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sampled": measure(model, tokenizer, held_out, greedy=False),
        "greedy": measure(model, tokenizer, held_out, greedy=True),
    }
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    recipe = {"settings": settings_of(RECIPE), "measured_on_held_out": measured}
    (output / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
