"""Where answers are scored."""

import re


class CountLetters:
    """'How many letters has WORD?'; part of the reward for a number that is off by one, and a second try."""

    def __init__(self, env_config, extras, *, near_miss=0.5):
        self.length = int(extras["reward_spec"]["ground_truth"])
        self.max_turns = extras["max_turns"]
        self.near_miss = near_miss
        self.turns = 0
        self.solved = 0.0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        numbers = re.findall(r"\d+", action)
        error = abs(int(numbers[-1]) - self.length) if numbers else None
        reward = {0: 1.0, 1: self.near_miss}.get(error, 0.0)
        self.solved = float(error == 0)
        done = error == 0 or self.turns == self.max_turns
        hint = {"role": "user", "content": "wrong. try again"}
        return {"observations": [] if done else [hint], "reward": reward, "done": done, "metadata": {}}

    def close(self):
        pass

    def get_metrics(self):
        return {"solved": self.solved, "turns": self.turns}
