"""The prompts of a run, or of one data set of a mix, measured in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.config.data import NO_HELD_OUT, DataConfig, EnvironmentConfig, ImagesConfig
from skyrl_train.config.models import ModelConfig, StrategyConfig
from skyrl_train.config.rules import layout_violations
from skyrl_train.data import filter_by_length
from skyrl_train.data.sources import IMAGES, references_in
from skyrl_train.errors import ConfigError, DataError, Violation, counted
from skyrl_train.images import with_pixels
from skyrl_train.inference.vllm import make_tool_parser
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import check_token_ids, image_reader, pads_rows
from skyrl_train.registry import PartSpec, part_name, split_spec
from skyrl_train.rollout import check_tools
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.rollout.tools import tool_schemas
from skyrl_train.runs.construction.parts import chat_tokens
from skyrl_train.runs.resolving import CheckedRows
from skyrl_train.types import Prompt


def measure_prompts(
    model: ModelConfig,
    data: DataConfig,
    environment: EnvironmentConfig,
    rows: CheckedRows,
    notes: list[str],
    name: str = "",
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training and held-out prompts of `rows` that are not too long: of a run, or of its data set `name`, which
    their uids then begin with.

    What was left out is added to `notes`, a line each. Raises DataError, ModelError (the tokenizer), ConfigError.
    """
    train = _measured(model, data, environment, rows.train, f"{name} train".strip(), notes)
    if not train:
        raise DataError(f"data.train={list(data.train)} has no prompts")
    try:
        validation = _measured(model, data, environment, rows.validation, f"{name} validation".strip(), notes)
    except DataError as error:
        raise DataError(
            f"{error} It is of data.validation; data.validation=[] goes without held-out prompts."
        ) from error
    if data.validation is None and not data.held_out:
        notes.append(NO_HELD_OUT)
    if not name:
        return train, validation
    named = [[replace(each, dataset=name, uid=f"{name}/{each.uid}") for each in part] for part in (train, validation)]
    return named[0], named[1]


def _measured(
    model: ModelConfig,
    data: DataConfig,
    environment: EnvironmentConfig,
    prompts: Sequence[Prompt],
    name: str,
    notes: list[str],
) -> list[Prompt]:
    """Return the prompts that are not too long."""
    if not prompts:
        return []
    tokenizer = load_tokenizer(model)
    chat, tools = chat_tokens(data, tokenizer, model), tool_schemas(environment.tools)
    check_tools(
        prompts,
        tools,
        chat,
        reads_calls=make_tool_parser(environment.tool_format, tokenizer) is not None,
        environment=environment.env_class,
    )
    largest = (-1, "")

    def count_tokens(prompt: Prompt) -> int:
        nonlocal largest
        token_ids = chat.data_prompt(prompt, prompt.tools or tools)
        largest = max(largest, (int(token_ids.max(initial=0)), prompt.uid))
        return len(token_ids)

    of_each = ""
    if schemas := prompts[0].tools or tools:
        bare = replace(prompts[0], tools=())
        of_tools = len(chat.data_prompt(bare, schemas)) - len(chat.data_prompt(bare))
        of_each = f" ({of_tools} of them tell the model of its {counted(len(schemas), 'tool')})"
    result = filter_by_length(
        prompts, count_tokens, max_prompt_length=data.max_prompt_length, over_long=data.over_long, of_each=of_each
    )
    check_token_ids(largest[0], model, f"prompt {largest[1]}")
    own = environment.env_class
    named = None if own is None else split_spec(own)[0]
    num_others = sum(prompt.env_class not in (None, named) for prompt in result.prompts)
    if named is not None and num_others:
        notes.append(
            f"another env_class is named by {counted(num_others, f'{name} row')}; environment.env_class={named} scores "
            "them all (environment=by_row takes their own)"
        )
    if result.num_dropped:
        notes.append(
            f"left out: {counted(result.num_dropped, f'{name} prompt')} of more than data.max_prompt_length="
            f"{data.max_prompt_length} tokens{of_each} (the longest has {result.longest})"
        )
    return result.prompts


def has_images(prompts: Sequence[Prompt]) -> bool:
    """Whether a prompt has an image."""
    return any(references_in(prompt.messages) for prompt in prompts)


def require_exact_images(
    model: ModelConfig,
    layout: str,
    strategy: StrategyConfig,
    others: Sequence[Violation] = (),
    backend: PartSpec = "hf",
) -> None:
    """Raises ConfigError where rows with images are not exact for the family of the model, or for `others`. `backend`: of
    the engine, if there is one."""
    found = list(others)
    if pads_rows(model):
        found += layout_violations(layout, strategy.sequence_parallel_size, part_name(backend))
    if found:
        raise ConfigError(found)


def check_recorded_images(
    recording: ReplayGenerator, model: ModelConfig, settings: ImagesConfig, layout: str, strategy: StrategyConfig
) -> None:
    """Read each image of a recording, whose run kept them. Raises DataError where one is missing or changed, or has another
    number of tokens; ModelError for a model that reads none; ConfigError as `require_exact_images` does."""
    if not recording.images:
        return
    IMAGES.recorded.append(recording.images_folder)
    try:
        with_pixels(recording.images, image_reader(model, settings))
    except ValueError as error:
        raise DataError(f"generator.replay_path: {error}") from error
    require_exact_images(model, layout, strategy)
