"""The small models that the settings begin with, beside the bundled one: made once, kept in a folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import build_tiny_model
from scripts.build_tiny_model import Recipe
from skyrl_train.data.tasks import WordProblem, draw_problem

VEHICLES = ("bus", "train", "ferry", "tram", "lift", "boat", "coach", "plane")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Elif", "Finn", "Gus", "Hana", "Ivo", "Juno", "Kai", "Lena")
FRUIT = ("plums", "figs", "pears", "limes", "dates", "kiwis", "grapes", "cherries")
TOWNS = ("Aden", "Bern", "Cork", "Doha", "Essen", "Faro", "Graz", "Hull", "Izmir", "Jena", "Kyoto", "Lodz")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SECOND = Recipe(
    seed=5,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=384,
    num_worked_steps=900,
    num_mixed_steps=60,
    worked_share=0.6,
    learning_rate=3e-3,
)
"""The model of the second setting: another size, another tokenizer, another task."""
THIRD = Recipe(
    seed=23,
    hidden_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=448,
    num_worked_steps=800,
    num_mixed_steps=60,
    worked_share=0.7,
    learning_rate=2.5e-3,
)
"""Of the third: another again, with fewer heads of keys than of queries."""
FOURTH = Recipe(
    seed=61,
    hidden_size=144,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    intermediate_size=400,
    num_worked_steps=620,
    num_mixed_steps=160,
    worked_share=0.3,
    learning_rate=2e-3,
)
"""Of the fourth: it knows how to work an answer out, and guesses most of the time."""
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}OPEN{{ call.function | tojson }}CLOSE{% endfor %}<|im_end|>"
    "{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def passengers(rng: random.Random) -> WordProblem:
    """The task of the second setting: who gets on, who gets off."""
    vehicle, town, total = rng.choice(VEHICLES), rng.choice(TOWNS), rng.randint(3, 18)
    told, lines = [f"A {vehicle} leaves {town} with {total} people."], []
    for _ in range(rng.randint(1, 3)):
        amount, stop = rng.randint(1, 7), rng.choice(TOWNS)
        is_off = total > amount and rng.random() < 0.5
        after = total - amount if is_off else total + amount
        told.append(f"In {stop} {amount} get {'off' if is_off else 'on'}.")
        lines.append(f"{total}{'-' if is_off else '+'}{amount}={after}")
        total = after
    told.append(f"How many are on the {vehicle}?")
    return WordProblem(question=" ".join(told), solution_lines=tuple(lines), answer=total, template="passengers")


def jars(rng: random.Random) -> WordProblem:
    """The task of the third setting: so many in each, and what comes to it or goes."""
    name, fruit = rng.choice(NAMES), rng.choice(FRUIT)
    number, each = rng.randint(2, 9), rng.randint(2, 9)
    total = number * each
    told, lines = [f"{name} fills {number} jars with {each} {fruit} each."], [f"{number}*{each}={total}"]
    for _ in range(rng.randint(1, 2)):
        amount = rng.randint(1, 9)
        is_less = total > amount and rng.random() < 0.6
        after = total - amount if is_less else total + amount
        told.append(f"{amount} {fruit} are {'eaten' if is_less else 'picked'}.")
        lines.append(f"{total}{'-' if is_less else '+'}{amount}={after}")
        total = after
    told.append(f"What number of {fruit} does {name} have?")
    return WordProblem(question=" ".join(told), solution_lines=tuple(lines), answer=total, template="jars")


def pages(rng: random.Random) -> WordProblem:
    """The task of the fourth setting: what is left of a book, or of several alike."""
    name, day = rng.choice(NAMES), rng.choice(DAYS)
    total = rng.randint(12, 40)
    told, lines = [f"A book of {name} has {total} pages."], []
    if rng.random() < 0.4:
        told, total = [f"A book of {name} has {total} pages, and there are 2 alike."], 2 * total
        lines.append(f"{total // 2}*2={total}")
    for _ in range(rng.randint(1, 2)):
        amount = rng.randint(2, 9)
        is_read = rng.random() < 0.7
        after = total - amount if is_read else total + amount
        told.append(f"On {day} {name} {'reads' if is_read else 'adds'} {amount}.")
        lines.append(f"{total}{'-' if is_read else '+'}{amount}={after}")
        total, day = after, rng.choice(DAYS)
    told.append("How many pages are left?")
    return WordProblem(question=" ".join(told), solution_lines=tuple(lines), answer=total, template="pages")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the small models of one setting are made from."""

    recipe: Recipe
    draw: Callable[[random.Random], WordProblem]
    """The task."""
    call: tuple[str, str]
    """What stands before and after the call of a tool."""


KINDS: Mapping[str, Kind] = {
    "first": Kind(recipe=Recipe(seed=3), draw=draw_problem, call=("<tool_call>", "</tool_call>")),
    "second": Kind(recipe=SECOND, draw=passengers, call=("[TOOL_CALLS][", "]")),
    "third": Kind(recipe=THIRD, draw=jars, call=("<|python_tag|>", "")),
    "fourth": Kind(recipe=FOURTH, draw=pages, call=("<tool_call>", "</tool_call>")),
}
"""By the setting's name."""


def trained_model(folder: Path, setting: str) -> str:
    """Train the model of a later setting, unless it is there; return its path. Five minutes of one core."""
    return _saved(folder, KINDS[setting], build_tiny_model.warm_start)


def untrained_model(folder: Path, setting: str) -> str:
    """Save a model that has learned nothing, for supervised runs; return its path."""
    return _saved(folder, KINDS[setting])


def _saved(folder: Path, kind: Kind, train: Callable[..., object] = lambda *_: None) -> str:
    if not (folder / "config.json").is_file():
        build_tiny_model.draw_problem = kind.draw  # type: ignore[assignment]  # of which tokenizer and demonstrations are made
        tokenizer = build_tiny_model.build_tokenizer(kind.recipe)
        model = build_tiny_model.build_model(kind.recipe, tokenizer)
        train(model, tokenizer, kind.recipe)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return str(folder)


def calling_model(folder: Path, setting: str, start: str) -> str:
    """Teach a model to call a tool that adds, unless it is there; return its path."""
    if (folder / "export" / "config.json").is_file():
        return str(folder / "export")
    from transformers import AutoTokenizer

    from skyrl_train.api import load_config, train_sft
    from skyrl_train.model import resolve_model_path

    begin, end = KINDS[setting].call
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(start))
    tokenizer.chat_template = TOOL_TEMPLATE.replace("OPEN", begin).replace("CLOSE", end)
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = random.Random(setting)
    settings = {
        "model.path": start,
        "model.tokenizer_path": str(folder / "tokenizer"),
        # the tool is told as it is in the run: what the model has learnt goes with these tokens
        "data.train": [{"messages": sum_with_call(rng, begin, end)[0], "tools": [_ADD]} for _ in range(4000)],
        "data.validation": [],
        "trainer.eval_samples": 0,
        "trainer.num_steps": 160,
        "trainer.batch_size": 24,
        "trainer.ckpt_interval": 0,
        "trainer.optimizer.lr": 1.5e-3,
        "output_dir": str(folder),
    }
    train_sft(load_config("+experiment=sft_gsm8k", settings=settings, sft=True))
    return str(folder / "export")


def sum_with_call(rng: random.Random, begin: str, end: str) -> tuple[list[Mapping[str, Any]], int]:
    """One conversation that adds two numbers by a tool, and the sum."""
    left, right = rng.randint(1, 30), rng.randint(1, 30)
    call = json.dumps({"name": "add", "arguments": {"a": left, "b": right}})
    return [
        {"role": "user", "content": f"{left}+{right}?"},
        {"role": "assistant", "content": f"{begin}{call}{end}"},
        {"role": "tool", "content": str(left + right)},
        {"role": "assistant", "content": f"#### {left + right}"},
    ], left + right
