"""Environments of gymnasium that can be played in text: `environment.env_class=gymnasium:ID`.

    environment.env_class='{_target_: gymnasium, id: FrozenLake-v1, actions: [left, down, right, up], render: ansi}'

What the model is told is the observation, where that is a text, the environment's drawing (`render: ansi`), or what a
function of yours makes of the observation (`describe: my_code:describe`). What it does is read from its answer: of a list
`actions` the one that it names last, of other discrete actions the last whole number, of text actions the answer itself. An
answer without an action does not move the environment: it earns `invalid_reward` and is told which actions there are. By
default that is less than any step earns, so that saying nothing never beats playing badly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_train.errors import Violation
from skyrl_train.registry import import_attr
from skyrl_train.system import install_command
from skyrl_train.types import ChatMessage

SETTING = "environment.env_class"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")
_INVALID_REWARD = -1.0
_TRIED_STEPS = 200
_NUMBER = re.compile(r"-?\d+")
_MAX_DIGITS = 18
"""Of the number of an action: Python refuses to read integers of thousands of digits."""


class GymnasiumEnvironment:
    """One episode. It starts from the row's `seed`, so that all samples of a prompt start alike."""

    deterministic = True
    """As gymnasium's are by their seed; one that is not is found out by what it observes."""

    def __init__(
        self,
        env_config: Any,
        extras: Mapping[str, Any],
        *,
        id: str,
        actions: Sequence[str] = (),
        render: str | None = None,
        describe: str | None = None,
        invalid_reward: float = _INVALID_REWARD,
        seed: int = 0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            id: As in `gymnasium.make`; `package:ID` imports the package that registers it.
            actions: Names of the discrete actions, in their order.
            render: `ansi`: its drawing, without colours, is what the model sees; a single coloured character is put in
                brackets.
            describe: `package.module:function` of the observation, which returns a text.
            invalid_reward: For an answer that names no action, each time.
            seed: For rows without a column of that name.
            kwargs: Further arguments of `gymnasium.make`.
        """
        del env_config
        import gymnasium

        self._environment = gymnasium.make(id, **_made_with(render, kwargs))
        self._actions, self._render, self._invalid_reward = list(actions), render, invalid_reward
        self._describe: Any = import_attr(describe, field=f"{SETTING}.describe") if describe else None
        self._seed = int(extras.get("seed", seed))
        self._start = int(getattr(self._environment.action_space, "start", 0))
        self._num_invalid = 0

    @staticmethod
    def violations(**arguments: Any) -> Iterator[Violation]:
        """What is wrong with the arguments: an unknown ID, or an environment that cannot be told or played in text."""
        environment: Any = None
        try:
            import gymnasium

            made_with = _made_with(arguments.get("render"), arguments.get("kwargs"))
            environment = gymnasium.make(arguments["id"], **made_with)
            yield from _unreadable(gymnasium, environment, arguments)
            yield from _worse_than_silence(environment, arguments)
        except Exception as error:  # whatever the makers of environments raise
            missing = isinstance(error, ImportError) and "gymnasium" in str(error)
            remedy = install_command("gymnasium") if missing else f"{type(error).__name__}: {error}"
            rule = "needs the package gymnasium" if missing else "must be an environment that gymnasium can make"
            yield Violation.of(f"{SETTING}.id", arguments["id"], rule, " ".join(remedy.split()))
        finally:
            if environment is not None:
                environment.close()

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        """The prompt, whose last message goes on with the first observation."""
        observation, information = self._environment.reset(seed=self._seed)
        *before, last = prompt
        content = f"{last['content']}\n{self._text(observation)}"
        return [*before, {**last, "content": content}], information

    def step(self, action: str) -> dict[str, Any]:
        chosen = self._chosen(action)
        if chosen is None:
            self._num_invalid += 1
            known = (
                f"Name one of: {', '.join(self._actions)}." if self._actions else "Answer with a number of an action."
            )
            return {"observations": [_user(known)], "reward": self._invalid_reward, "done": False}
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        return {
            "observations": [_user(self._text(observation))],
            "reward": reward,
            "done": terminated,
            "truncated": truncated,
        }

    def close(self) -> None:
        self._environment.close()

    def get_metrics(self) -> dict[str, float]:
        return {"invalid_actions": float(self._num_invalid)}

    def _text(self, observation: object) -> str:
        if self._describe is not None:
            return str(self._describe(observation))
        if self._render:
            drawing = str(self._environment.render())
            return _COLORS.sub("", _HIGHLIGHTED.sub(r"[\1]", drawing)).strip()
        return str(observation)

    def _chosen(self, answer: str) -> Any:
        """Return the action in an answer, or None."""
        if self._actions:
            named = "|".join(re.escape(each) for each in sorted(self._actions, key=len, reverse=True))
            found = re.findall(rf"(?<!\w)(?:{named})(?!\w)", answer, re.IGNORECASE)
            lower = [each.lower() for each in self._actions]
            return self._start + lower.index(found[-1].lower()) if found else None
        if not hasattr(self._environment.action_space, "n"):
            return answer.strip()
        numbers = _NUMBER.findall(answer)
        if not numbers or len(numbers[-1]) > _MAX_DIGITS:
            return None
        chosen = int(numbers[-1])
        return chosen if self._environment.action_space.contains(chosen) else None


def _made_with(render: str | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of `gymnasium.make`: an environment that is not drawn need not know of `render_mode`."""
    return {**({"render_mode": render} if render else {}), **(kwargs or {})}


def _unreadable(gymnasium: Any, environment: Any, arguments: Mapping[str, Any]) -> Iterator[Violation]:
    spaces, name = gymnasium.spaces, arguments["id"]
    is_text = isinstance(environment.observation_space, spaces.Text)
    if not (is_text or arguments.get("render") == "ansi" or arguments.get("describe")):
        rule = f"must be told in text, and its observations are {environment.observation_space}"
        remedy = "add render: ansi, or describe: my_code:function beside it (docs/environments.md)"
        yield Violation.of(f"{SETTING}.id", name, rule, remedy)
    space, actions = environment.action_space, arguments.get("actions") or ()
    if actions and len(actions) != getattr(space, "n", None):
        rule, remedy = f"must name the actions of {space}, in their order", "give it a name for each"
        yield Violation.of(f"{SETTING}.actions", list(actions), rule, remedy)
    if not actions and not isinstance(space, (spaces.Discrete, spaces.Text)):
        rule, remedy = f"must have discrete or text actions, and has {space}", "wrap it in an environment of your own"
        yield Violation.of(f"{SETTING}.id", name, rule, remedy)


def _worse_than_silence(environment: Any, arguments: Mapping[str, Any]) -> Iterator[Violation]:
    """Play at random for a while: a step must not cost more than an answer without an action does by default."""
    if "invalid_reward" in arguments or not hasattr(environment.action_space, "n"):  # every text is an action
        return
    environment.action_space.seed(0)
    environment.reset(seed=0)
    lowest = 0.0
    for _ in range(_TRIED_STEPS):
        _, reward, terminated, truncated, _ = environment.step(environment.action_space.sample())
        lowest = min(lowest, float(reward))
        if terminated or truncated:
            environment.reset()
    if lowest < _INVALID_REWARD:
        rule = f"must be at most what a step earns, or saying nothing pays; random play has one of {lowest:g}"
        yield Violation.of(f"{SETTING}.invalid_reward", _INVALID_REWARD, rule, f"set invalid_reward: {lowest:g}")


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}
