"""The prompts of a run, or of one data set of a mix: read, checked, and measured in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_train.config.data import DataConfig, EnvironmentConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import DataError
from skyrl_train.registry import split_spec
from skyrl_train.rollout.row_checks import checked_prompts
from skyrl_train.runs.build import build_tool_parser, chat_tokens

if TYPE_CHECKING:
    from skyrl_train.types import Prompt


def load_prompts(
    model: ModelConfig, data: DataConfig, environment: EnvironmentConfig, notes: list[str], name: str = ""
) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and held-out prompts of a run, or of its data set `name`, which their uids then begin with.

    What was left out is added to `notes`, a line each. Raises DataError, ModelError (the tokenizer), ConfigError.
    """
    train = _measured(model, data, environment, data.train, data.max_train_prompts, f"{name} train".strip(), notes)
    if not train:
        raise DataError(f"data.train={list(data.train)} has no prompts")
    try:
        validation = _measured(
            model, data, environment, data.validation, data.max_validation_prompts, f"{name} validation".strip(), notes
        )
    except DataError as error:  # often the bundled file, which nobody thought of who gave a file to train on
        raise DataError(
            f"{error} It is of data.validation; data.validation=[] goes without held-out prompts."
        ) from error
    if not name:
        return train, validation
    named = [[replace(each, dataset=name, uid=f"{name}/{each.uid}") for each in part] for part in (train, validation)]
    return named[0], named[1]


def _measured(
    model: ModelConfig,
    data: DataConfig,
    environment: EnvironmentConfig,
    sources: Sequence[str],
    limit: int,
    name: str,
    notes: list[str],
) -> list[Prompt]:
    """Return the prompts of `sources` that are not too long. `limit`: at most so many rows are read; 0 is all."""
    from skyrl_train.data.prompts import filter_by_length
    from skyrl_train.model.causal_lm import load_tokenizer
    from skyrl_train.model.vocabulary import check_token_ids
    from skyrl_train.rollout.chat_tokens import check_tools
    from skyrl_train.rollout.tools.toolbox import tool_schemas

    if not sources:
        return []
    prompts = checked_prompts(data, sources, limit, environment)
    tokenizer = load_tokenizer(model)
    chat, tools = chat_tokens(data, tokenizer), tool_schemas(environment.tools)
    check_tools(
        prompts,
        tools,
        chat,
        parse_calls=build_tool_parser(environment.tool_format, tokenizer),
        environment=environment.env_class,
    )
    largest = (-1, "")

    def count_tokens(prompt: Prompt) -> int:
        nonlocal largest
        token_ids = chat.data_prompt(prompt, prompt.tools or tools)
        largest = max(largest, (int(token_ids.max(initial=0)), prompt.uid))
        return len(token_ids)

    result = filter_by_length(prompts, count_tokens, max_prompt_length=data.max_prompt_length, over_long=data.over_long)
    check_token_ids(largest[0], model, f"prompt {largest[1]}")
    own = environment.env_class
    named = None if own is None else split_spec(own)[0]
    num_others = sum(prompt.env_class not in (None, named) for prompt in result.prompts)
    if named is not None and num_others:
        notes.append(
            f"{num_others} {name} rows name another env_class; environment.env_class={named} scores them all "
            "(environment=by_row takes their own)"
        )
    if result.num_dropped:
        notes.append(
            f"{result.num_dropped} {name} prompts have more than data.max_prompt_length="
            f"{data.max_prompt_length} tokens and are left out (the longest has {result.longest})"
        )
    return result.prompts
