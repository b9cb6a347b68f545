"""An agent of LangGraph's with two tools, started as a command; it knows nothing of training.

    python agent.py TASK_FILE REPORT_FILE

`ChatOpenAI` finds the model by the variables OPENAI_BASE_URL and OPENAI_API_KEY, as it always does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def price(item: str) -> str:
    """Tells what an item costs."""
    return str(PRICES.get(item, "there is no such item"))


@tool
def add(numbers: list[int]) -> str:
    """Adds numbers."""
    return str(sum(numbers))


task_file, report_file = map(Path, sys.argv[1:])
task = json.loads(task_file.read_text())
PRICES = task["prices"]
agent = create_agent(ChatOpenAI(model="policy"), tools=[price, add])
said = agent.invoke({"messages": task["prompt"]})["messages"][-1].content
report_file.write_text(json.dumps({"reward": float(said.rpartition("####")[2].strip() == task["answer"])}))
