"""What is measured, and who is told. Everything here may read, and changes nothing."""

import json

from skyrl_train.telemetry import Max, Mean


def lengths(facts, *, long=16):
    """A metric of a step of reinforcement learning, which has rollouts: typed reductions by name."""
    turns = [turn for trajectory in facts.rollouts.trajectories for turn in trajectory.turns]
    counts = [len(turn.response_token_ids) for turn in turns]
    return {
        "plugins/long_turns": Mean(float(sum(count >= long for count in counts)), float(len(counts))),
        "plugins/longest_turn": Max(float(max(counts, default=0))),
    }


def trained_share(facts, *, name):
    """A metric of either kind of training: the share of the batch's tokens that have a loss."""
    loss_mask = facts.batch["loss_mask"]
    return {name: Mean(float(loss_mask.sum()), float(len(loss_mask)))}


def diary(event, *, file):
    """A callback: told of start, steps, evaluations, checkpoints and the end."""
    with open(file, "a") as stream:
        stream.write(f"{event.kind} {event.step}/{event.total_steps}\n")


class Lines:
    """A tracker, made with the run's folder: one JSON line a step."""

    def __init__(self, folder, *, name="lines.jsonl", metric="reward/mean"):
        self._stream = open(folder / name, "a")  # closed in `close`
        self._metric = metric

    def log(self, metrics, *, step):
        self._stream.write(json.dumps({"step": step, self._metric: metrics.get(self._metric)}) + "\n")

    def close(self):
        self._stream.close()
