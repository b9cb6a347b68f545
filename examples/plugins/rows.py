"""Which rows a batch is made of: from trajectories to training rows, and which of them are trained on."""


def chunks(trajectory, *, turns=2):
    """At most so many turns in a row. Each turn goes into one row, in order."""
    return [trajectory.turns[start : start + turns] for start in range(0, len(trajectory.turns), turns)]


def not_empty(rollouts, *, min_tokens=2):
    """A filter: trajectories with an answer of hardly any tokens are not trained on."""
    return [
        all(len(turn.response_token_ids) >= min_tokens for turn in trajectory.turns)
        for trajectory in rollouts.trajectories
    ]


def easiest_first(num_prompts, epoch, seed, *, epochs=1):
    """The order of an epoch: as the data are, in the first epochs; backwards later."""
    numbers = list(range(num_prompts))
    return numbers if epoch < epochs else numbers[::-1]
