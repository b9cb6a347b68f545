"""An agent that knows nothing of training: the `openai` package in a loop with a tool."""

from __future__ import annotations

import ast
import json
import operator

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def solve(question: str, client: openai.OpenAI, model: str, most_turns: int = 3) -> str:
    """Ask, run what is called, and ask again, until an answer calls nothing."""
    messages = [{"role": "user", "content": question}]
    for _ in range(most_turns):
        message = client.chat.completions.create(model=model, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculator(json.loads(call.function.arguments).get("expression", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def calculator(expression: str) -> str:
    """A sum or product of two whole numbers, or what is wrong."""
    try:
        term = ast.parse(expression, mode="eval").body
        return str(_OPERATORS[type(term.op)](term.left.value, term.right.value))
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError):
        return "Error: a sum or product of two whole numbers is asked for"


def play(task: dict, address) -> float:
    """What training calls, `generator.agent_loop.run`: 1 for the right number after `####`."""
    with openai.OpenAI(base_url=address.base_url, api_key=address.api_key) as client:
        said = solve(task["prompt"][-1]["content"], client, address.model)
    return float(said.rpartition("####")[2].strip() == task["answer"])
