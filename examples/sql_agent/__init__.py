"""Questions about a database, answered with SQL: an environment with a tool of its own, `query`.

    PYTHONPATH=examples python -m sql_agent [--steps 2] [--output runs/sql_agent]

Each row has a database (as SQL), a question and its answer. The environment makes the database in memory, for one
trajectory, and lets the model read it. The model here is far too small to write SQL: no learning is shown at this size. So
an engine that follows a script stands in for sampling: every other sample of a prompt looks the answer up and is right, the
others guess and are wrong, with the log-probabilities that the model gives to those tokens. What the run then shows, and
`__main__.py` checks, is that trained tokens are the sampled ones, turn by turn; that rewards are exactly those of the
script; and that the groups have a gradient.
"""
