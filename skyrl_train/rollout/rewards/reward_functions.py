"""Reward functions where they run: what they are, what they need, and one call of one.

Nothing here checks what a function returned: `rollout/boundary` does, on both sides of a worker's connection. Functions of
TRL's and verl's signatures are told by their parameters, and called as those trainers call them:

    TRL     f(prompts, completions, **columns) -> list       a list for each argument, None where a reward does not apply
    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float, or {"score": float, ...}

Source: TRL 1.16, `GRPOTrainer._calculate_rewards`; verl 0.9.1, `NaiveRewardManager.run_single`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Literal, cast

from skyrl_train.errors import ConfigError, Violation
from skyrl_train.parts import REWARDS
from skyrl_train.registry import PartSpec, argument_violations, import_attr, split_spec, unknown_name
from skyrl_train.rollout.boundary import numbers_only
from skyrl_train.rollout.rewards import HeldReward
from skyrl_train.system import install_command
from skyrl_train.system.sandbox import sandbox
from skyrl_train.types import ChatMessage

Convention = Literal["own", "trl", "verl"]
"""Whose way of calling a reward function has."""
SCORE = "score"
"""The key of what verl's functions return that is the reward; others are reported."""
OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes beside the columns."""
OF_VERL = ("solution_str", "extra_info")
"""What verl makes beside the columns."""


def trl_arguments(
    prompt: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], *, as_text: bool | None
) -> dict[str, Any]:
    """Return all that TRL passes: one entry a sample for each column.

    Args:
        prompt: The row's columns with `prompt` (messages), `prompt_is_text` and `global_step`.
        samples: Facts of each trajectory, with `completion_ids`.
        as_text: Whether prompts and completions are texts rather than messages, where annotations say so; None is as in
            the row.
    """
    given_as_text = prompt["prompt_is_text"] if as_text is None else as_text
    last_user = next((m["content"] for m in reversed(prompt["prompt"]) if m.get("role") == "user"), "")
    columns = {name: value for name, value in prompt.items() if name not in ("prompt", "prompt_is_text", "global_step")}
    return {
        **{name: [value] * len(samples) for name, value in columns.items()},
        "prompts": [last_user if given_as_text else prompt["prompt"]] * len(samples),
        "completions": [one["completion" if given_as_text else "completion_messages"] for one in samples],
        "completion_ids": [one["completion_ids"] for one in samples],
        "trainer_state": None if prompt["global_step"] is None else SimpleNamespace(global_step=prompt["global_step"]),
        "log_extra": _not_logged,
        "log_metric": _not_logged,
    }


def verl_arguments(prompt: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's columns and what verl makes of a trajectory: the text of all that followed the prompt."""
    model, told = prompt.get("reward_model"), prompt.get("extra_info")
    texts = [message["content"] for message in sample["completion_messages"] if isinstance(message["content"], str)]
    found = {
        **prompt,
        "solution_str": "\n".join(texts),
        "extra_info": {**(told if isinstance(told, Mapping) else {}), "num_turns": sample["num_turns"]},
    }
    if isinstance(model, Mapping) and "ground_truth" in model:
        found["ground_truth"] = model["ground_truth"]
    return found


def peer_answer(convention: Convention, answer: Any) -> Any:
    """Return what such a function returned as `check_scores` takes it: TRL's arrays and generators as lists, and of a
    mapping of verl's the score with the numbers beside it."""
    if convention == "verl" and isinstance(answer, Mapping):
        others = {name: value for name, value in answer.items() if name != SCORE}
        return {**({SCORE: answer[SCORE]} if SCORE in answer else {}), **numbers_only(others)}
    if convention == "trl" and not isinstance(answer, (str, Mapping)):
        as_list = answer.tolist() if hasattr(answer, "tolist") else answer
        return list(as_list) if hasattr(as_list, "__iter__") else as_list
    return answer


def _not_logged(*_: object) -> None:
    """What TRL's functions log beside their rewards is kept nowhere."""


Form = Literal["each", "batched", "group"]
"""What a function is called with: one trajectory, several, or all of a prompt."""
OF_PROMPT = ("prompt", "uid")
OF_TRAJECTORY = ("completion", "completion_messages", "messages", "stop_reason", "response_length", "num_turns")
PLURALS = {"completions": "completion", "prompts": "prompt"}
"""Names that functions of several trajectories may use, too."""
LIBRARIES = {"math_verify": ("math_verify", "math"), "json_schema": ("jsonschema", "jsonschema")}
"""Modules that rewards of this package import where they are used, and the extra that installs them."""
_GIVEN = (*OF_PROMPT, *OF_TRAJECTORY)


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """What a run has to know of a reward function before it is called."""

    form: Form
    columns: tuple[str, ...]
    """Columns of the data that it cannot be called without."""
    convention: Convention = "own"
    """Whose trainer's signature the function has."""
    range: tuple[float, float] | None = None
    """The lowest and the highest value that it declares; None where it declares none."""
    counts: tuple[str, ...] = ()
    """Of the names that it returns, those that are reported and are no rewards."""


class SingleTurn:
    """The environment of a run that has rewards and no environment: one response, and no reward of its own."""

    deterministic = True

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        """Takes its arguments for the protocol's sake."""

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        return prompt, {}

    def step(self, _action: str) -> dict[str, Any]:
        return {"observations": [], "reward": 0.0, "done": True, "metadata": {}}

    def close(self) -> None:
        """Nothing is held."""

    def get_metrics(self) -> dict[str, float]:
        return {}


class Reported(SingleTurn):
    """The environment of programs that report their rewards (`generator.agent_loop=agent`)."""

    def step(self, _action: str) -> dict[str, Any]:
        """Raises ValueError: what was not reported is no reward of 0."""
        raise ValueError("the agent reported no reward, and nothing else gives one; environment.reward would score it")


def reward_function(spec: PartSpec) -> Callable[..., Any]:
    """Return what `spec` names, made once in a process: a function with its arguments bound, or an object of a class.

    Raises ConfigError where nothing has that name; whatever a constructor raises passes through.
    """
    return _made(json.dumps(spec if isinstance(spec, str) else dict(spec), sort_keys=True))


@functools.cache
def _made(spec: str) -> Callable[..., Any]:
    target, arguments = split_spec(json.loads(spec))
    part = _part(target, REWARDS.setting)
    if inspect.isclass(part):
        made: Any = part(**arguments)
        return cast("Callable[..., Any]", made)
    return functools.partial(part, **arguments) if arguments else part


def forget_rewards() -> None:
    """Have those of a run before this one in the same process be made anew."""
    _made.cache_clear()


def _part(target: str, setting: str) -> Callable[..., Any]:
    """Return the class or function itself. Raises ConfigError naming the setting."""
    if target not in REWARDS and ":" not in target:
        raise unknown_name(target, REWARDS, field=setting)
    part: object = REWARDS[target] if target in REWARDS else import_attr(target, field=setting)
    if not callable(part):
        rule, remedy = "must name a function or a class", "point it at the function itself, e.g. my_code:score"
        raise ConfigError([Violation.of(setting, target, f"{rule}, and this is {type(part).__name__}", remedy)])
    return cast("Callable[..., Any]", part)


def reward_violations(spec: PartSpec, setting: str) -> list[Violation]:
    """Return what is wrong with the choice of a reward: its name, its arguments, or what its function does not take."""
    target, arguments = split_spec(spec)
    try:
        part = _part(target, setting)
    except ConfigError as error:
        return list(error.violations)
    module, extra = LIBRARIES.get(target, ("", ""))
    if module and find_spec(module) is None:
        rule = f"needs the library {module}, which is not installed here"
        return [Violation.of(setting, target, rule, install_command(extra))]
    if target == "code" and (found := sandbox.violations(arguments.get("sandbox", "required"), "the reward code")):
        return found
    if inspect.isclass(part):
        if found := list(argument_violations(part, arguments, field=setting, name=target)):
            return found
        if not any("__call__" in vars(base) for base in part.__mro__):
            return [
                Violation.of(setting, target, "must be callable", "give the class a method __call__(self, completion)")
            ]
        if target in REWARDS:  # what is made of ours loads nothing, and refuses arguments
            try:
                part(**arguments)
            except Exception as error:
                remedy = f"{type(error).__name__}: {error}"
                return [Violation.of(setting, arguments, f"must be what {target} takes", remedy)]
        arguments = {}
    return list(_signature_violations(_signature(part), arguments, setting, target))


def _signature_violations(
    called: _Signature, arguments: Mapping[str, Any], setting: str, target: str
) -> Iterator[Violation]:
    parameters, form = called.parameters, called.form
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    signature = f"{target}({', '.join(str(one).partition(':')[0] for one in parameters)})"
    first = "completion" if form == "each" else "completions"
    if not takes_any and not {*OF_TRAJECTORY, *OF_VERL, *(PLURALS if form != "each" else ())} & set(names):
        remedy = f"name that parameter {first}; docs/rewards.md says what else there is"
        yield Violation(field=setting, rule=f"must take {first}, by that name", value=signature, remedy=remedy)
    for one in parameters:
        if one.kind is one.POSITIONAL_ONLY:
            rule, remedy = f"is called by keyword, and {one.name} can only be given by position", "drop the / after it"
            yield Violation(field=setting, rule=rule, value=signature, remedy=remedy)
    for key, value in arguments.items():
        if key not in names and not takes_any:
            rule = f"is no argument of {target}, which takes {', '.join(names) or 'none'}"
            yield Violation.of(f"{setting}.{key}", value, rule, f"drop {key}, or give the function a parameter for it")


def reward_facts(spec: PartSpec) -> RewardFacts:
    """Return the facts of a reward that has no violations."""
    target, arguments = split_spec(spec)
    part = _part(target, REWARDS.setting)
    signature = _signature(part)
    bound = set() if inspect.isclass(part) else set(arguments)
    columns = [
        one.name
        for one in signature.parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.default is one.empty
    ]
    form, convention = signature.form, signature.convention
    of_peers = {"own": (), "trl": OF_TRL, "verl": OF_VERL}[convention]
    given = {*_GIVEN, *bound, *(PLURALS if form != "each" else ()), *of_peers}
    # Those of ours that are held say it of their settings; nothing else is made for it.
    declares = reward_function(spec) if isinstance(part, type) and issubclass(part, HeldReward) else part
    return RewardFacts(
        form=form,
        columns=tuple(name for name in columns if name not in given),
        convention=convention,
        range=getattr(declares, "reward_range", None),
        counts=getattr(declares, "reward_counts", ()),
    )


def call_reward(spec: PartSpec, prompt: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> object:
    """Call a reward function and return what it returned: for one trajectory, or a list for several.

    Args:
        spec: As in the configuration, without what belongs to the list.
        prompt: `OF_PROMPT` and every column of the row.
        samples: `OF_TRAJECTORY` of each trajectory.
    """
    score = reward_function(spec)
    answer = score(**_named(score, prompt, samples))
    if inspect.isawaitable(answer):
        answer = asyncio.run(_awaited(answer))
    return peer_answer(_signature(score).convention, answer)


async def call_reward_here(spec: PartSpec, prompt: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> object:
    """The same on the running event loop, for the rewards of this package that wait for others."""
    score = reward_function(spec)
    answer = score(**_named(score, prompt, samples))
    return await answer if inspect.isawaitable(answer) else answer


async def _awaited(answer: Any) -> object:
    return await answer


def _named(
    score: Callable[..., Any], prompt: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the arguments that the function's signature names, in the form that it takes."""
    signature = _signature(score)
    form, hints, convention = signature.form, signature.hints, signature.convention
    parameters = {one.name: one for one in signature.parameters}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    of_each = [_as_annotated({**prompt, **sample}, hints, several=form != "each") for sample in samples]
    if convention == "trl":
        hint = hints.get("completions")
        as_text = False if _is_list(hint, 2) else True if hint == list[str] else None
        given = trl_arguments(prompt, samples, as_text=as_text)
    elif convention == "verl":
        given, takes_any = verl_arguments(prompt, samples[0]), False
    elif form == "each":
        (given,) = of_each
    else:
        singly = (*prompt,) if form == "group" else ()
        given = {name: of_each[0][name] if name in singly else [one[name] for one in of_each] for name in of_each[0]}
        given |= {plural: given[name] for plural, name in PLURALS.items()}
    bound = score.keywords if isinstance(score, functools.partial) else {}
    return {name: value for name, value in given.items() if name not in bound and (takes_any or name in parameters)}


def _as_annotated(facts: dict[str, Any], hints: Mapping[str, Any], *, several: bool) -> dict[str, Any]:
    """Return the facts of one trajectory with completion and prompt as text or messages."""
    names = {"completion": ("completion", "completions"), "prompt": ("prompt", "prompts")}
    wanted = {name: next((hints[each] for each in either if each in hints), None) for name, either in names.items()}
    last_user = next((m["content"] for m in reversed(facts["prompt"]) if m.get("role") == "user"), "")
    as_messages = _is_list(wanted["completion"], 2 if several else 1)
    as_text = wanted["prompt"] is str or (several and wanted["prompt"] == list[str])
    return {
        **facts,
        "completion": facts["completion_messages"] if as_messages else facts["completion"],
        "prompt": last_user if as_text else facts["prompt"],
    }


def _is_list(hint: Any, depth: int) -> bool:
    """Whether an annotation is a list of lists ... `depth` deep."""
    for _ in range(depth):
        origin = typing.get_origin(hint) or hint
        if not (inspect.isclass(origin) and issubclass(origin, Sequence) and not issubclass(origin, str)):
            return False
        hint = next(iter(typing.get_args(hint)), None)
    return True


@dataclass(frozen=True)
class _Signature:
    """What a reward is called with: a function, with or without arguments bound, a class, or an object of one."""

    parameters: Sequence[inspect.Parameter]
    form: Form
    convention: Convention
    """By its parameters' names; one with a decorator is written for this package."""
    hints: Mapping[str, Any]
    """Annotations; none where their names cannot be found."""


def _signature(part: Any) -> _Signature:
    inner = part.func if isinstance(part, functools.partial) else part
    called = inner if inspect.isroutine(inner) else (inner if inspect.isclass(inner) else type(inner)).__call__
    form: Form | None = getattr(called, "reward_form", None)
    convention: Convention = "own"
    try:
        given = inspect.signature(part.__call__ if inspect.isclass(part) else part).parameters.values()
    except (TypeError, ValueError):  # some callables written in C say nothing of their parameters
        given = {}.values()
    parameters = list(given)[1 if inspect.isclass(part) else 0 :]
    names = {one.name for one in parameters}
    if form is None and "completion" not in names:
        convention = "trl" if "completions" in names else "verl" if "solution_str" in names else "own"
    try:
        hints = typing.get_type_hints(called)
    except Exception:
        hints = {}
    form = form or ("batched" if convention == "trl" else "each")
    return _Signature(parameters, form, convention, hints)
