"""Data rows to prompts, and prompts to batches whose order is a pure function of the seed and the epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal

from skyrl_train.config.data import DataConfig
from skyrl_train.data.columns import (
    answer_columns,
    chat_messages,
    extract_gsm8k_answer,
    look_up,
    names_of,
    near_column,
    prompt_column,
    tools_of,
)
from skyrl_train.data.rows import Row, find_sources, read_rows
from skyrl_train.data.sources.images import with_references
from skyrl_train.errors import ConfigError, DataError, Violation, counted
from skyrl_train.parts import PROMPT_ORDERS, ROW_FORMATS
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.system import derive_seed
from skyrl_train.system.files import json_problem, shown
from skyrl_train.types import ChatMessage, Prompt

GSM8K_INSTRUCTION = "Think step by step, and end with the answer on a line of its own, written as `#### ANSWER`."
GSM8K_HUB = "openai/gsm8k/main"
"""Name and configuration of the data set on the hub."""
GSM8K_SPLITS = {"train": "train", "test": "validation"}
"""Their names there, and ours."""
GSM8K_ENV_CLASS = "gsm8k_multi_turn"
"""Named in each row: the environment of `+experiment=gsm8k_multiturn` on GPUs."""
_TAKEN = ("prompt", "env_class", "uid", "tools", "completion")
"""Columns that are fields of a prompt, or that rewards are given under these names, and that extras leave out."""
_DEFAULTS = DataConfig()


def load_prompts(sources: Sequence[str], data: DataConfig = _DEFAULTS, *, limit: int | None = None) -> list[Prompt]:
    """Return all prompts of `sources`, every row checked.

    Args:
        sources: Parquet, Arrow, CSV, `.jsonl` or `.json` files, folders of them, `owner/name:split` on the hub, or
            `builtin:NAME/SPLIT`; whatever a custom reader takes.
        data: How a source is read, and what its rows are: settings of the section `data`.
        limit: Stop after so many; 0 or None is all.

    Raises:
        DataError: A file is missing or damaged, or a row lacks what it needs; names file, row and remedy.
        ConfigError: There is no such format.
    """
    with_prompt: Callable[[Row], Mapping[str, Any]] = ROW_FORMATS.resolve(data.row_format)
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for source in find_sources(sources, data.reader_with_settings):
        for row in read_rows(source):
            named = look_up(row.values, data.prompt_column) is not None
            formed = row if named else _formatted(row, with_prompt, part_name(data.row_format))
            prompt = make_prompt(with_references(formed, data.images), data)
            if prompt.uid in places:
                raise DataError(
                    f"{row.place}: uid {prompt.uid!r} is also that of {places[prompt.uid]}. "
                    "Make uids unique, or drop the column to have them made."
                )
            places[prompt.uid] = row.place
            prompts.append(prompt)
            if limit and len(prompts) >= limit:
                return prompts
    if not prompts:
        raise DataError(f"{', '.join(sources) or 'data'}: no rows. Give at least one row with a prompt.")
    return prompts


def _formatted(row: Row, with_prompt: Callable[[Row], Mapping[str, Any]], row_format: str) -> Row:
    try:
        return replace(row, values=with_prompt(row))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{row.place}: is no row of data.row_format={row_format} ({type(error).__name__}: {error}); it has "
            f"{names_of(row.values)}. Give it a prompt, or set data.row_format"
        ) from error


def own_columns(row: Row) -> Mapping[str, Any]:
    """The row format `prompt`: a row is what it is."""
    return row.values


def gsm8k_row(
    question: str, solution: str, *, split: str, index: int, env_class: str = GSM8K_ENV_CLASS
) -> dict[str, Any]:
    """Return one data row of GSM8K as `make_prompt` reads it. Raises ValueError for a solution without an answer."""
    return {
        "uid": f"gsm8k-{split}-{index}",
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": extract_gsm8k_answer(solution)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


def published_gsm8k_row(row: Row) -> dict[str, Any]:
    """The row format `gsm8k`: GSM8K as its makers publish it, with the columns `question` and `answer`.

    The split is the last part of the source's name (`openai/gsm8k/main:test`). The same as `scripts/prepare_gsm8k.py`
    writes, uids included. Raises KeyError, ValueError.
    """
    split = row.source.rpartition(":")[2].partition("[")[0]
    return gsm8k_row(
        row.values["question"], row.values["answer"], split=GSM8K_SPLITS.get(split, split), index=row.index
    )


def make_prompt(row: Row, data: DataConfig = _DEFAULTS) -> Prompt:
    """Return the prompt of a row: its prompt (chat messages or text), its answer where it has one, perhaps `tools`,
    `env_class`, `uid`, and the rest.

    Raises DataError naming the row, what it has and what it needs, or the column whose value no rollout file can hold.
    """
    if problem := json_problem(row.values):
        raise DataError(f"{row.place}: column {problem}. Write null or a text in its place, or leave the column out.")
    column = prompt_column(row.values, data)
    if column is None:
        raise _without_prompt(row, data)
    env_class = row.values.get("env_class")
    if env_class is not None and not isinstance(env_class, str):
        raise DataError(f"{row.place}: 'env_class' must be a name; got {shown(env_class)}.")
    uid = row.values.get("uid")
    if isinstance(uid, bool) or not isinstance(uid, (str, int, float, NoneType)):
        raise DataError(f"{row.place}: 'uid' must be a text or a number; got {shown(uid)}.")
    extras = {**row.values, **answer_columns(row, data)}
    return Prompt(
        uid=str(uid) if uid is not None else f"{row.source}-{row.index}",
        messages=_messages(look_up(row.values, column), row.place, column, data),
        tools=tools_of(row),
        env_class=env_class or None,
        extras={name: value for name, value in extras.items() if name not in _TAKEN},
        place=row.place,
        is_text=isinstance(look_up(row.values, column), str),
    )


def _without_prompt(row: Row, data: DataConfig) -> DataError:
    texts = [name for name, value in row.values.items() if isinstance(value, (str, list)) and value]
    naming = (
        f"or name its column: data.prompt_column={texts[0]}" if texts else "or name its column (data.prompt_column)"
    )
    return DataError(
        f"{row.place}: has no {data.prompt_column!r}; it has {names_of(row.values)}. "
        f"{near_column(data.prompt_column, row.values)}"
        f'Give each row a prompt, [{{"role": "user", "content": "..."}}] or a text, {naming}.'
    )


def _messages(value: object, place: str, column: str, data: DataConfig) -> tuple[ChatMessage, ...]:
    text = isinstance(value, str)
    messages = ({"role": "user", "content": value},) if text else chat_messages(value, place, column)
    system: tuple[ChatMessage, ...] = ()
    if messages[0]["role"] == "system":
        system, messages = messages[:1], messages[1:]
    elif data.system_prompt:
        system = ({"role": "system", "content": data.system_prompt},)
    examples = [
        {"role": role, "content": content}
        for example in data.examples
        for role, content in zip(("user", "assistant"), example)
    ]
    return (*system, *examples, *messages)


@dataclass(frozen=True, kw_only=True)
class LengthFilter:
    """What became of a data set's over-long prompts."""

    prompts: list[Prompt]
    num_dropped: int
    longest: int
    """Tokens of the longest prompt seen."""


def filter_by_length(
    prompts: Sequence[Prompt],
    count_tokens: Callable[[Prompt], int],
    *,
    max_prompt_length: int,
    over_long: Literal["drop", "error"],
    of_each: str = "",
) -> LengthFilter:
    """Drop (or refuse) prompts of more than `max_prompt_length` tokens.

    Args:
        count_tokens: Tokens of a prompt as the model will see it, e.g. `len(chat_tokens.data_prompt(prompt))`.
        of_each: What stands in every prompt beside its messages, for the message: ` (120 of them are ...)`.

    Raises:
        DataError: With `over_long="error"` for the first prompt that is too long; always where none is left.
    """
    lengths = [count_tokens(prompt) for prompt in prompts]
    kept = [prompt for prompt, length in zip(prompts, lengths) if length <= max_prompt_length]
    longest = max(lengths, default=0)
    if over_long == "error" and len(kept) < len(prompts):
        uid, length = next((p.uid, n) for p, n in zip(prompts, lengths) if n > max_prompt_length)
        raise DataError(
            f"prompt {uid} has {counted(length, 'token')}{of_each}, more than data.max_prompt_length={max_prompt_length} "
            f"({len(prompts) - len(kept)} of {len(prompts)} do). "
            f"Raise data.max_prompt_length (the longest has {longest}) or set data.over_long=drop."
        )
    if prompts and not kept:
        raise DataError(
            f"all {len(prompts)} prompts have more than data.max_prompt_length={max_prompt_length} tokens{of_each}. "
            f"Raise it: the shortest has {min(lengths)}."
        )
    return LengthFilter(prompts=kept, num_dropped=len(prompts) - len(kept), longest=longest)


class PromptSource:
    """Batches of prompts, epoch after epoch. The incomplete last batch of an epoch is left out.

    There is no state to save: `batch(position)` is a pure function of the prompts, the seed and the position.
    """

    def __init__(
        self, prompts: Sequence[Prompt], batch_size: int, shuffle: bool, seed: int, order: PartSpec = "by_seed"
    ) -> None:
        """Raises ConfigError where there are fewer prompts than a batch holds."""
        if len(prompts) < batch_size:
            rule = f"must be at most the number of prompts, {len(prompts)}"
            remedy = f"Try trainer.train_batch_size={max(len(prompts), 1)}, or give more data"
            raise ConfigError([Violation.of("trainer.train_batch_size", batch_size, rule, remedy)])
        self._prompts = list(prompts)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._order_by = order
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def num_batches_per_epoch(self) -> int:
        return len(self._prompts) // self._batch_size

    def batch(self, position: int) -> list[Prompt]:
        """Return the prompts of the batch after `position` batches were consumed, over all epochs."""
        epoch, place = divmod(position, self.num_batches_per_epoch)
        order = self._epoch_order(epoch)
        return [self._prompts[index] for index in order[place * self._batch_size : (place + 1) * self._batch_size]]

    def first_epoch(self) -> list[Prompt]:
        """Return all prompts in the order of the first epoch."""
        return [self._prompts[index] for index in self._epoch_order(0)]

    def _epoch_order(self, epoch: int) -> list[int]:
        """Raises DataError where a custom order leaves prompts out or repeats them."""
        count = len(self._prompts)
        if not self._shuffle:
            return list(range(count))
        if self._order[0] != epoch:
            order = list(PROMPT_ORDERS.resolve(self._order_by)(count, epoch, self._seed))
            if sorted(order) != list(range(count)):
                raise DataError(
                    f"data.order={part_name(self._order_by)} must name each of {count} prompts once in epoch {epoch}; "
                    f"it named {len(order)}, {len(set(order))} of them different"
                )
            self._order = (epoch, order)
        return self._order[1]


def by_seed(num_prompts: int, epoch: int, seed: int) -> list[int]:
    """Return the order of an epoch, sorted by random keys rather than shuffled: `random.random()` is what Python
    promises not to change.
    """
    generator = random.Random(derive_seed(seed, "prompt_order", epoch))
    keys = [generator.random() for _ in range(num_prompts)]
    return sorted(range(num_prompts), key=keys.__getitem__)
