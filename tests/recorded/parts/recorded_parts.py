"""What the recorded runs name as a user's own: found by either commit, so that it imports nothing of the project."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def play(task: Any, address: Any) -> float:
    """An agent's program: two questions, the second going on from the first's answer."""
    messages = list(task["prompt"])
    for _ in range(2):
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(f"{address.session_url}/chat/completions", body)
        with urllib.request.urlopen(request, timeout=60) as response:
            said = json.load(response)["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "And now?"}]
    return float(len(said["content"]) % 3)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


def length(completion: str) -> float:
    """A reward that differs between samples."""
    return float(len(completion) % 5) / 4
