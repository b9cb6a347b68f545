"""The reward of an existing environment, changed."""

from skyrl_train.rollout.envs import WordProblemsEnv


class ShortAnswers(WordProblemsEnv):
    """Takes something off per character, so that short solutions win."""

    def __init__(self, env_config, extras, *, per_character=0.001):
        super().__init__(env_config, extras)
        self.per_character = per_character

    def step(self, action):
        output = super().step(action)
        return {**output, "reward": output["reward"] - self.per_character * len(action)}
