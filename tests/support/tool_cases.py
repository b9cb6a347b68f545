"""Tools, environments with tools and a template that shows them, for worker processes and threads."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import skyrl_train.data.assets
from skyrl_train.rollout.tools import ToolUnavailable

ADD = "tests.support.tool_cases:add"
JUDGE = "tests.support.tool_cases:Judge"

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_with_tools(folder: Path) -> str:
    """Copy the bundled model to `folder`, with a chat template that shows tools; return its path."""
    shutil.copytree(Path(skyrl_train.data.assets.__path__[0]) / "tiny_qwen2", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Adds two numbers, after a while.

    Args:
        a: The one.
        b: The other.
    """
    await asyncio.sleep(0.2)
    return a + b


def fail() -> str:
    """Raises."""
    raise ValueError("no luck")


def long_text() -> str:
    """Returns much."""
    return "x" * 100_000


def down() -> str:
    """Depends on something that is down."""
    raise ToolUnavailable("the archive does not answer")


def hang() -> str:
    """Does not return."""
    time.sleep(60)
    return ""


def crash() -> str:
    """Ends its process."""
    os._exit(7)


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Adds.

    Args:
        a: A number.
    """
    return int(a)


def no_docstring(a: int) -> int:
    return a


class Counter:
    """An object with tools, of which each trajectory has its own."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def tools(self) -> list[Callable[..., Any]]:
        return [self.count_up]

    def count_up(self) -> int:
        """Counts."""
        self.count += 1
        return self.count


class Judge:
    """Scores 1 for the text in `extras["answer"]`; `extras["own"]`: it has a tool of its own."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self.answer, self.heard = extras.get("answer", "5"), 0
        self.tools = [self.secret] if extras.get("own") else []

    def secret(self) -> str:
        """Tells the answer."""
        return str(self.answer)

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        return prompt, {}

    def step(self, action: str) -> Any:
        self.heard += 1
        return {"observations": [], "reward": float(action.strip() == self.answer), "done": True}

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, float]:
        return {"heard": self.heard}
