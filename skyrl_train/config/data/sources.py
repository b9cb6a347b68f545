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
    """Choose prompts by estimated solve rate, the mean reward (cut to 0 to 1)."""
    target: Forks[Fraction] = 0.5
    """Preferred solve rate."""
    exploration: Forks[Fraction] = 0.25
    """Share of never-tried prompts in each batch, while there are any."""
    newest: Forks[Annotated[float, Range(0.0, 1.0, exclusive_min=True)]] = 0.5
    """Weight of the newest trial; 1 forgets the others."""
    solved_at: Forks[Fraction] = 0.95
    """Prompts with this solve rate rest."""
    rest_steps: Forks[NonNegativeInt] = 20
    """Steps until they are tried again."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """`data.images`: images of prompts, for models that read them (docs/vision.md)."""

    column: Free[str] = ""
    """Column with images: paths, bytes or addresses. Empty: `images` or `image` (docs/vision.md)."""
    urls: Free[tuple[str, ...]] = ()
    """Prefixes of addresses to fetch from, such as `[https://my.host/pictures/]`; empty fetches none."""
    max_bytes: Free[PositiveInt] = 20_000_000
    """Larger encoded images are refused."""
    max_pixels: Free[PositiveInt] = 50_000_000
    """Images with a larger width times height are refused."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """`data.reasoning_gym`: questions that the package reasoning-gym makes, with `data=reasoning_gym`
    (docs/environments.md)."""

    tasks: Free[tuple[Annotated[PartSpec, REASONING_TASKS], ...]] = ()
    """Names, or `{_target_: chain_sum, max_terms: 3, weight: 2}`, for `data=reasoning_gym` (docs/environments.md)."""
    train_size: Free[PositiveInt] = 1000
    """Training rows in all."""
    validation_size: Free[NonNegativeInt] = 200
    """Held-out rows in all; none is a training row."""
    seed: Free[NonNegativeInt] = 0
    """Rows follow from it, whatever `seed` is."""
    instruction: Free[str] = "Put the final answer between <answer> and </answer>."
    """Line behind each question; empty is none."""
    timeout_s: Free[Seconds] = 300.0
    """Deadline of making all rows."""


@dataclass(frozen=True, kw_only=True)
class SourcesConfig:
    """What `data` means alike in reinforcement learning and in supervised training."""

    train: Free[tuple[str, ...]] = ("builtin:word_problems/train",)
    """Parquet, Arrow, CSV, JSON or JSON-lines files, their folders, hub names (`owner/name:split`,
    `owner/name/config:split`), or `builtin:NAME/SPLIT`."""
    validation: Free[tuple[str, ...] | None] = None
    """Held-out data, each entry evaluated apart; empty: no evaluation. null: that of bundled data or GSM8K in `train`,
    else none."""
    reader: Free[Annotated[PartSpec, DATA_READERS]] = "by_name"
    """Inferred from an entry's name, one kind of file, or a function of the entry that yields rows."""
    shuffle: Forks[bool] = True
    """Another order each epoch, by `seed` or `order`; false: the data's."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images, for models that read them."""

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
    """Rows without `prompt`: `gsm8k` as published, or a custom function of a `Row` (`data/rows.py`) returning columns."""
    prompt_column: Free[str] = "prompt"
    """Prompt (text or messages), dots into nested columns; without `prompt`, `question`, `problem` or `query`."""
    answer_column: Free[str] = ""
    """Right answer, such as `extra_info.answer`, for environments and rewards; empty: inferred (docs/data.md)."""
    system_prompt: Free[str] = ""
    """Put before prompts without a system message."""
    examples: Free[tuple[tuple[str, str], ...]] = ()
    """Few-shot turns `[[QUESTION, ANSWER], ...]` before each prompt; not trained on."""
    prompt_format: Forks[Literal["auto", "chat", "text"]] = "auto"
    """chat: by the chat template; text: plain, for base models; auto: text where there is no template."""
    template_kwargs: Forks[Mapping[str, Any]] = field(default_factory=dict)
    """For the chat template, such as `{enable_thinking: false}`."""
    max_train_prompts: Free[NonNegativeInt] = 0
    """The first so many; 0 is all."""
    max_validation_prompts: Free[NonNegativeInt] = 0
    """The first so many; 0 is all."""
    max_prompt_length: Free[PositiveInt] = 256
    """Tokens of a first prompt."""
    over_long: Free[Literal["drop", "error"]] = "drop"
    """Longer ones are left out and counted, or refused before training."""
    order: Forks[Annotated[PartSpec, PROMPT_ORDERS]] = "by_seed"
    """Order of prompts in an epoch. by_seed: random, by `seed`."""
    curriculum: Annotated[CurriculumConfig, Of(".curriculum.enabled"), _SAMPLED] = field(
        default_factory=CurriculumConfig
    )
    """Choose prompts by how often they are solved."""
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    """What `reader=reasoning_gym` makes for `reasoning_gym:train` and `reasoning_gym:validation`."""
    mix: Annotated[Forks[tuple[Mapping[str, Any], ...]], _SAMPLED] = ()
    """Weighted data sets in place of `train` and `validation`, such as `[{train: a.jsonl, weight: 0.7}, {train:
    b.jsonl, weight: 0.3, environment: gsm8k}]` (docs/data.md)."""

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
    """Scores all rows: a built-in or skyrl-gym name, or a custom class, such as `{_target_: text2sql, db_path:
    /databases}`. null (`environment=by_row`): each row's own."""
    reward: Forks[Annotated[PartSpec | None, REWARDS]] = None
    """Scores finished trajectories: a built-in name, or a function of completion and columns (docs/rewards.md). Added
    to the environment's reward; without a chosen environment it is `single_turn`."""
    rewards: Forks[tuple[Annotated[PartSpec, REWARDS], ...]] = ()
    """Several, such as `[{_target_: my:score, weight: 0.5}, length_penalty]`. `weight` (1, or one per returned key) and
    `normalize` (group|none: algorithm=gdpo) are not passed on."""
    step_timeout_s: Free[Seconds] = 60.0
    """Deadline of each environment or reward call; exceeding it fails the trajectory."""
    isolation: Free[Literal["auto", "process", "thread"]] = "auto"
    """Where environments, tools and rewards run. process: in workers, killed at the deadline; thread: here, for trusted
    code; auto: thread for bundled environments without tools and reward functions, else process."""
    placement: Annotated[Free[Literal["local", "ray"]], _WORKERS] = "local"
    """Workers on this machine, or on every node of the Ray cluster."""
    num_workers: Free[PositiveCount | None] = None
    """Threads, or most processes. null: one per running trajectory, up to 1,024; 16 for slow starters."""
    python: Annotated[Free[str | None], _WORKERS] = None
    """Interpreter of workers, such as `/path/to/venv/bin/python`, for conflicting packages (docs/environments.md)."""
    worker_memory_gb: Annotated[
        Free[Annotated[PositiveFloat, Most(10**6, "no machine has more")]],
        _WORKERS,
    ] = 4.0
    """Memory of a worker; exceeding it fails the trajectory."""
    sandbox: Free[Literal["required", "best", "off"]] = "required"
    """Where code that the model wrote runs (docs/rewards.md). required: in namespaces (bubblewrap), or not at all;
    best: with the isolation there is; off: with limits alone."""
    variables: Free[tuple[str, ...]] = ()
    """Further variables that workers see, such as `[MY_API_KEY]`; other keys they do not."""
    allowed: Free[tuple[str, ...]] = ()
    """Custom environments (`package.module:attr`) that data rows may name; others must be registered, so that data
    chooses no code."""
    tools: Forks[tuple[Annotated[PartSpec, TOOLS], ...]] = ()
    """What the model may call (docs/tools.md): `my_code:calculator`, `{_target_: mcp, command: [PROGRAM, ...]}`,
    `{_target_: mcp, url: ...}`."""
    tool_format: Forks[str] = "auto"
    """`hermes` (Qwen), `llama3_json`, `mistral`, `deepseek_v3`, `harmony` (gpt-oss), `response_template` (the
    tokenizer's), `vllm:NAME` (vLLM's parser); auto: the chat template's."""
    max_tool_result_chars: Forks[PositiveInt] = 4000
    """Characters of a result that the model sees."""
    max_failed_fraction: Free[Fraction] = 0.5
    """Stop the run when a larger share of a batch's trajectories failed."""
