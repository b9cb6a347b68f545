"""Which rows of one rank go into one forward: speed and memory, never the gradient."""

from skyrl_train.batch.planner import Forward
from skyrl_train.registry import reads


@reads("memory_budget")
def in_order(rows, *, most=64):
    """Rows with a common beginning are neighbours in `rows.order`: as many as fit the memory, and at most so many."""
    forwards, taken = [], []
    for row in rows.order.tolist():
        if len(taken) == most or not rows.fits([*taken, row]):
            forwards.append(Forward(taken))
            taken = []
        taken.append(row)
    return [*forwards, Forward(taken)]
