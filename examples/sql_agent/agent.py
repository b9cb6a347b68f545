"""The environment, with its tool."""

from __future__ import annotations

import sqlite3

MAX_ROWS = 20
MAX_STEPS = 1_000_000
"""Of SQLite's machine, for one query: a query without end is an error that the model is told."""


class Database:
    """One question about a database of its own; 1 for the right answer after `####`."""

    def __init__(self, env_config, extras):  # noqa: ARG002 - part of the protocol
        self.answer = str(extras["answer"])
        self.database = sqlite3.connect(":memory:")
        self.database.executescript(extras["database"])
        self.database.execute("PRAGMA query_only = on")
        self.queries = 0

    def tools(self):
        """The model may call these; they are described to it as their docstrings say."""
        return [self.query]

    def query(self, sql: str) -> str:
        """Reads the database.

        Args:
            sql: One SELECT statement.
        """
        self.queries += 1
        self.database.set_progress_handler(lambda: 1, MAX_STEPS)
        cursor = self.database.execute(sql)
        names = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchmany(MAX_ROWS)
        return "\n".join(", ".join(map(str, row)) for row in [names, *rows])

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        right = action.rpartition("####")[2].strip() == self.answer
        return {"observations": [], "reward": float(right), "done": True, "metadata": {}}

    def close(self):
        self.database.close()

    def get_metrics(self):
        return {"queries": self.queries}
