"""`data=` and `environment=`: prompts, and where answers are scored. Part of the schema; see `config/schema.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from skyrl_train.config.fields.fields import (
    Forks,
    Fraction,
    Free,
    Most,
    NonNegativeInt,
    Of,
    PositiveCount,
    PositiveFloat,
    PositiveInt,
    Range,
    Seconds,
)
from skyrl_train.parts import DATA_READERS, ENVIRONMENTS, PROMPT_ORDERS, REASONING_TASKS, REWARDS, ROW_FORMATS, TOOLS
from skyrl_train.registry import TARGET, PartSpec

_WORKERS = Of(".isolation", ("auto", "process"), why="threads are here, in this process")
_REPORTED = Of(
    "generator.agent_loop",
    ("agent",),
    write="generator=agent generator.agent_loop.run=my_code:play",
    values=("reported",),
    why="programs report rewards",
)
_SAMPLED = Of("generator.backend", ("hf", "vllm", "http"), why="recordings hold prompts")


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """`data.curriculum`: take prompts that the policy solves about half the time. Off unless enabled."""

    enabled: Forks[bool] = False
    """Keep an estimate of each prompt's solve rate (the mean of its rewards, each cut to 0 to 1) and choose by it."""
    target: Forks[Fraction] = 0.5
    """Solve rate that is preferred; the further off a prompt's is, the less often it is taken."""
    exploration: Forks[Fraction] = 0.25
    """Share of each batch that was never tried, as long as there are such prompts."""
    newest: Forks[Annotated[float, Range(0.0, 1.0, exclusive_min=True)]] = 0.5
    """What the newest trial counts in a prompt's estimate; 1 forgets those before it."""
    solved_at: Forks[Fraction] = 0.95
    """A prompt with this solve rate rests."""
    rest_steps: Forks[NonNegativeInt] = 20
    """For so many steps; then it is tried again."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """`data.images`: images of prompts, for models that read them (docs/vision.md)."""

    column: Free[str] = ""
    """Column with a row's images (a path, bytes, an address, or a list of them), for parts `{type: image}` of its messages,
    or put before its text. Empty: `images` or `image`, where that holds encoded images or the messages have such parts."""
    urls: Free[tuple[str, ...]] = ()
    """What addresses of images must begin with, e.g. `[https://my.host/pictures/]`. Empty: no image is fetched."""
    max_bytes: Free[PositiveInt] = 20_000_000
    """Size of an encoded image. A larger one is refused by its row."""
    max_pixels: Free[PositiveInt] = 50_000_000
    """Width times height of an image. A larger one is refused by its row."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """`data.reasoning_gym`: questions that the package reasoning-gym makes, with `data=reasoning_gym`
    (docs/environments.md)."""

    tasks: Free[tuple[Annotated[PartSpec, REASONING_TASKS], ...]] = ()
    """Their names, with arguments where they are not the package's own: `[gsm_symbolic, {_target_: chain_sum, max_terms: 3,
    weight: 2}]`. `weight` (1) is a task's share of the rows."""
    train_size: Free[PositiveInt] = 1000
    """Training rows of all tasks together."""
    validation_size: Free[NonNegativeInt] = 200
    """Held-out rows of all tasks together. Their seeds and their questions are no training row's."""
    seed: Free[NonNegativeInt] = 0
    """What all rows are derived from. It is not `seed`: runs with other seeds have the same rows."""
    instruction: Free[str] = "Put the final answer between <answer> and </answer>."
    """On a line of its own behind each question; empty is none."""
    timeout_s: Free[Seconds] = 300.0
    """Deadline of making all rows, by a process that is ended then."""


@dataclass(frozen=True, kw_only=True)
class SourcesConfig:
    """What `data` means alike in reinforcement learning and in supervised training."""

    train: Free[tuple[str, ...]] = ("builtin:word_problems/train",)
    """Parquet, Arrow, CSV, JSON or JSON-lines files, folders of them, hub names (`owner/name:split`,
    `owner/name/config:split`), or `builtin:NAME/SPLIT`."""
    validation: Free[tuple[str, ...] | None] = None
    """Held-out prompts, or examples, of which each entry is a set with a loss of its own; empty turns evaluation off. null:
    those that belong to `train` where that is bundled data or GSM8K, none with any other data."""
    reader: Free[Annotated[PartSpec, DATA_READERS]] = "by_name"
    """How an entry of `train` or `validation` is read: inferred from its name, as one kind of file whatever it is called,
    or by a custom function of the entry, which yields rows (mappings of columns to values)."""
    shuffle: Forks[bool] = True
    """Another order each epoch, derived from `seed` or as `order` says; false: the order of the data."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images of prompts or conversations, for models that read them."""

    @property
    def held_out(self) -> tuple[str, ...]:
        """What is evaluated on: `validation`, or what belongs to `train`."""
        if self.validation is not None:
            return self.validation
        return tuple(held_out for entry in self.train if (held_out := _held_out_of(entry)))


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourcesConfig):
    """`data=`: prompts for training and for evaluation."""

    row_format: Free[Annotated[PartSpec, ROW_FORMATS]] = "prompt"
    """What rows without a `prompt` are: `gsm8k`, as its makers publish it, or a custom function of a `Row`
    (`data/rows.py`), which returns the columns that it should have. `prompt` takes them as they are."""
    prompt_column: Free[str] = "prompt"
    """Column with the prompt (text or messages), with dots into nested ones. Where rows have no `prompt`: their `question`,
    `problem` or `query`."""
    answer_column: Free[str] = ""
    """Column with the right answer, e.g. `answer` or `extra_info.answer`: environments and rewards find it under `answer`
    and as `reward_spec.ground_truth`. Empty: what rows of verl, TRL and GSM8K have it under (docs/data.md)."""
    system_prompt: Free[str] = ""
    """Put before each prompt that has no system message of its own."""
    examples: Free[tuple[tuple[str, str], ...]] = ()
    """Worked examples, `[[QUESTION, ANSWER], ...]`, put as turns of a conversation before each prompt (few-shot): a small
    model works in steps where it is shown steps. Nothing of them is trained on."""
    prompt_format: Forks[Literal["auto", "chat", "text"]] = "auto"
    """chat: prompts are rendered by the tokenizer's chat template; text: they are the tokens of their text, for base
    models; auto: text where the tokenizer has no chat template."""
    template_kwargs: Forks[Mapping[str, Any]] = field(default_factory=dict)
    """Handed to the chat template, e.g. `{enable_thinking: false}`."""
    max_train_prompts: Free[NonNegativeInt] = 0
    """Use only the first so many training prompts; 0 is all."""
    max_validation_prompts: Free[NonNegativeInt] = 0
    """Use only the first so many held-out prompts; 0 is all."""
    max_prompt_length: Free[PositiveInt] = 256
    """Tokens. A longer first prompt is handled by `over_long`."""
    over_long: Free[Literal["drop", "error"]] = "drop"
    """What becomes of a prompt over `max_prompt_length`: left out and counted, or refused before training."""
    order: Forks[Annotated[PartSpec, PROMPT_ORDERS]] = "by_seed"
    """Order of the training prompts in an epoch. by_seed: random, derived from `seed`."""
    curriculum: Annotated[CurriculumConfig, Of(".curriculum.enabled"), _SAMPLED] = field(
        default_factory=CurriculumConfig
    )
    """Choose prompts by how often they are solved."""
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    """What `reader=reasoning_gym` makes for `reasoning_gym:train` and `reasoning_gym:validation`."""
    mix: Annotated[Forks[tuple[Mapping[str, Any], ...]], _SAMPLED] = ()
    """Several data sets in place of `train` and `validation`, e.g. `[{train: a.jsonl, weight: 0.7}, {train: b.jsonl,
    weight: 0.3, environment: gsm8k}]`: each entry has a weight, its data, and what it states of `environment`, `sampling`
    and `eval_sampling` for itself (docs/data.md)."""

    @property
    def reader_with_settings(self) -> PartSpec:
        """`reader`, with the settings that stand in a section of their own as its arguments."""
        return {TARGET: self.reader, **asdict(self.reasoning_gym)} if self.reader == "reasoning_gym" else self.reader


def is_own_data(entry: str) -> bool:
    """Whether an entry of `data.train` or `data.validation` is neither bundled data nor GSM8K."""
    is_gsm8k = Path(entry).parent.name == _GSM8K and Path(entry).name in ("train.parquet", "validation.parquet")
    return not (is_gsm8k or entry in _HELD_OUT or entry in _HELD_OUT.values())


NO_HELD_OUT = (
    "no held-out rows: data.train is data of your own and data.validation is not set, so that evaluation is off; "
    "data.validation=[FILE] turns it on"
)
"""Said of a run that states no `data.validation` and has no `held_out`."""
_GSM8K = "gsm8k"
"""The folder that scripts/prepare_gsm8k.py writes."""
_HELD_OUT = {
    "builtin:sums/train": "builtin:sums/validation",
    "builtin:word_problems/train": "builtin:word_problems/validation",
    "openai/gsm8k/main:train": "openai/gsm8k/main:test",
}
"""By entry of `data.train`, the held-out rows that belong to it."""


def _held_out_of(entry: str) -> str:
    """Return the held-out part of an entry of `data.train`; empty where none is known."""
    path = Path(entry).expanduser()
    if path.parent.name == _GSM8K and path.name == "train.parquet":
        beside = path.with_name("validation.parquet")
        return str(beside) if beside.is_file() else ""
    return _HELD_OUT.get(entry, "")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """`environment=`: where answers are scored."""

    env_class: Annotated[Forks[Annotated[PartSpec | None, ENVIRONMENTS]], _REPORTED] = "word_problems"
    """A built-in name, one registered in skyrl-gym, or a custom class; scores all rows, whatever they name. Its settings
    stand beside it, e.g. `{_target_: text2sql, db_path: /databases}`. null (`environment=by_row`) takes each row's own
    `env_class`."""
    reward: Forks[Annotated[PartSpec | None, REWARDS]] = None
    """What scores trajectories, once each has ended: a built-in name, or a custom function of the completion and of the
    row's columns (docs/rewards.md). Its value is added to the environment's own reward; where no environment is chosen,
    the environment is `single_turn`, which has none."""
    rewards: Forks[tuple[Annotated[PartSpec, REWARDS], ...]] = ()
    """Several of them, e.g. `[{_target_: my:score, weight: 0.5}, length_penalty]`. `weight` (1, or one for each key of what
    the function returns) and `normalize` (group|none: algorithm=gdpo) are not passed on."""
    step_timeout_s: Free[Seconds] = 60.0
    """Deadline of each `init`, `step` and `close`, and of each call of a reward function. What exceeds it fails its
    trajectory, not the run."""
    isolation: Free[Literal["auto", "process", "thread"]] = "auto"
    """Where environments run. process: in worker processes, which are killed at the deadline and take nothing else down;
    thread: on threads of this process, for trusted, cheap code; auto: threads for the bundled environments without
    tools and reward functions, processes for all others. Tools and reward functions run where the environment does."""
    placement: Annotated[Free[Literal["local", "ray"]], _WORKERS] = "local"
    """Where worker processes are: on this machine, or on every node of the Ray cluster."""
    num_workers: Free[PositiveCount | None] = None
    """Calls at a time: threads, or worker processes at most. null: as many as trajectories are under way, up to 1,024; 16
    where workers are slow to start, as each imports the environments by itself or starts a server of tools.
    Asynchronous environments are many to a process, and need no more processes than there are cores."""
    python: Annotated[Free[str | None], _WORKERS] = None
    """Interpreter that worker processes run under, if not this one, e.g. `/path/to/venv/bin/python`: for environments whose
    packages do not go with the trainer's (docs/environments.md). It needs numpy, and this package is not installed there."""
    worker_memory_gb: Annotated[
        Free[Annotated[PositiveFloat, Most(10**6, "no machine has more")]],
        _WORKERS,
    ] = 4.0
    """What a worker process may allocate. Beyond it is a MemoryError, which fails the trajectory."""
    sandbox: Free[Literal["required", "best", "off"]] = "required"
    """Where code that the model wrote runs: that of `code` rewards and of `searchcode`, `lcb` and `text2sql`. required: in
    namespaces (bubblewrap), or not at all; best: with whatever isolation there is here, which the header names; off: with
    limits alone (docs/rewards.md)."""
    variables: Free[tuple[str, ...]] = ()
    """Names of variables of the trainer's environment that worker processes get beside the listed ones, e.g.
    `[MY_API_KEY]`: they see none of its other keys (docs/environments.md)."""
    allowed: Free[tuple[str, ...]] = ()
    """Custom environments (`package.module:attr`) that data rows may name in `env_class`, which otherwise name registered
    ones alone: whoever writes data does not choose what code runs."""
    tools: Forks[tuple[Annotated[PartSpec, TOOLS], ...]] = ()
    """What the model may call: functions with type hints and a docstring, `my_code:calculator`; makers of tools, with their
    arguments; servers, `{_target_: mcp, command: [PROGRAM, ...]}` or `{_target_: mcp, url: ...}`. They run with the
    environment, which may have further ones of its own."""
    tool_format: Forks[str] = "auto"
    """How the model writes calls: `hermes` (Qwen, too), `llama3_json`, `mistral`, `deepseek_v3`, `harmony` (gpt-oss),
    `response_template` (the tokenizer's), or `vllm:NAME` for one of vLLM's parsers. auto: as the chat template writes
    them."""
    max_tool_result_chars: Forks[PositiveInt] = 4000
    """Characters of a tool's result that the model sees; what is beyond is cut off."""
    max_failed_fraction: Free[Fraction] = 0.5
    """Stop the run when a larger share of a batch's trajectories failed: something is broken for good."""
