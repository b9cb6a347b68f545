"""Compares what trainer and engine make of the same texts, over the whole vocabulary at each position.

The trainer's side is the policy's learner with the configuration's type and layout; the engine's is the engine that a run
would have, or a server. Nothing is trained. Asked for in SkyRL's issue 2201.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_train.batch import BatchMetadata, TrainingInputBatch
from skyrl_train.config import Config
from skyrl_train.config.derived import learner_settings
from skyrl_train.data.tasks import Split, generate_problems
from skyrl_train.errors import DataError, EngineError
from skyrl_train.inference import HFEngine, build_hf_engine
from skyrl_train.inference.vllm import Ranked, prompt_distributions
from skyrl_train.learner import PolicyLearner, build_learner
from skyrl_train.model import load_tokenizer
from skyrl_train.runs.cli import checked_config
from skyrl_train.runs.construction import engine_settings
from skyrl_train.telemetry.trackers import new_figure
from skyrl_train.types import GenerationRequest, SamplingParams, Tokenizer

Floats = NDArray[np.float64]
_POSITIONS = (0, 16, 64, 256, 1024)
"""Where classes of positions and of lengths begin."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Every position of all texts, in columns of equal length."""

    text: NDArray[np.int64]
    """Index of the text among all, from 0."""
    position: NDArray[np.int64]
    """Of the token that is predicted, from 1."""
    length: NDArray[np.int64]
    """Number of tokens of the text."""
    kl: Floats
    """KL(trainer || engine) in nats; where the engine does not name all tokens, those that it does not name count as one."""
    overlap: Floats
    """Share of the trainer's `top_k` likeliest tokens that are among the engine's."""
    same_first: NDArray[np.bool_]
    trainer: Floats
    """Log-probability of the token that stands in the text."""
    engine: Floats
    """NaN where the engine does not name it."""
    token_ids: NDArray[np.int64]
    vocabulary: int
    named: int
    """Tokens that the engine names at a position."""
    top_k: int


def compare(
    model: str, engine: str, *, texts: Path | None, number: int, tokens: int, top_k: int, overrides: Sequence[str]
) -> tuple[Compared, Config, Tokenizer]:
    """Score texts with trainer and engine.

    Args:
        model: As `model.path`.
        engine: `hf`, `vllm`, or the URL of a server with `/v1/completions` whose model is this one.
        texts: A file with one text a line (or an object with `text`); None has the model write some.
        number: How many texts.
        tokens: The most tokens of a text.
        top_k: Of how many likeliest tokens the overlap is counted.
        overrides: Settings as on a command line: `model.dtype=bfloat16 trainer.layout=packed generator.vllm.dtype=float32`.

    Raises SkyrlTrainError.
    """
    chosen = ["generator=vllm"] if engine == "vllm" else []
    arguments = ["+experiment=gsm8k_multiturn", f"model.path={model}", "placement=inline", *chosen, *overrides]
    config = checked_config(arguments, config_name="config")
    if not isinstance(config, Config):
        raise TypeError(f"the configuration is {type(config).__name__}")
    tokenizer = load_tokenizer(config.model)
    learner = build_learner(learner_settings(config, "policy"))
    if not isinstance(learner, PolicyLearner):
        raise TypeError(f"the policy's learner is {type(learner).__name__}")
    own = build_hf_engine(engine_settings(config), tokenizer) if engine == "hf" or texts is None else None
    try:
        found = _read(texts, tokenizer, number, tokens) if texts else _written(own, tokenizer, number, tokens)
        if engine == "hf":
            others = _by_hf(own, found)
        elif engine == "vllm":
            others = prompt_distributions(engine_settings(config), found)
        else:
            others = _by_server(engine, model, found, top_k)
    finally:
        if own is not None:
            own.close()
    return compared(found, [_trainers(learner, ids) for ids in found], others, top_k), config, tokenizer


def _read(path: Path, tokenizer: Tokenizer, number: int, tokens: int) -> list[list[int]]:
    """Return the tokens of a file's texts. Raises DataError naming the line that has none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:number]
    except (OSError, ValueError) as error:
        raise DataError(f"--texts={path} cannot be read: {error}") from error
    found = []
    for index, line in enumerate(lines, start=1):
        try:
            content = json.loads(line) if line.lstrip().startswith("{") else {"text": line}
        except ValueError:
            content = {"text": line}
        ids = tokenizer(str(content.get("text") or ""))["input_ids"][:tokens]
        if len(ids) < 2:
            raise DataError(f"--texts={path}, line {index}: must have a text of two tokens or more")
        found.append(list(map(int, ids)))
    if not found:
        raise DataError(f"--texts={path} has no text: give one a line")
    return found


def _written(engine: HFEngine | None, tokenizer: Tokenizer, number: int, tokens: int) -> list[list[int]]:
    """Have the model answer questions; the texts are questions and answers."""
    if engine is None:
        raise DataError("--texts is needed where there is no engine that writes")
    prompts = []
    for problem in generate_problems(Split.TRAIN, number, seed=0):
        messages = [{"role": "user", "content": problem.question}]
        rendered: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tuple(map(int, tokenizer(rendered, add_special_tokens=False)["input_ids"])))

    async def ask() -> list[list[int]]:
        async def one(index: int, prompt: tuple[int, ...]) -> list[int]:
            sampling = SamplingParams(temperature=1.0, max_generate_length=tokens)
            request = GenerationRequest(
                request_id=f"text-{index}", prompt_token_ids=prompt, sampling=sampling, seed=index
            )
            answer = await engine.generate(request)
            return [*prompt, *map(int, answer.token_ids)]

        return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))

    return asyncio.run(ask())


def _trainers(learner: PolicyLearner, ids: Sequence[int]) -> Floats:
    """Return the trainer's log-probabilities, `[num_tokens - 1, vocabulary]`."""
    count = len(ids)
    batch = TrainingInputBatch(
        token_columns={
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            "loss_mask": torch.arange(count) > 0,
            "rewards": torch.zeros(count),
        },
        row_columns={
            **{name: torch.zeros(1, dtype=torch.int32) for name in ("prompt_index", "trajectory_index", "step_index")},
            "is_last_step": torch.ones(1, dtype=torch.bool),
            "is_padding": torch.zeros(1, dtype=torch.bool),
        },
        row_offsets=torch.tensor([0, count]),
        metadata=BatchMetadata(uids=("text",), global_step=0, weight_version=0),
    )
    return learner.forward_distributions(batch)[1:].double().numpy()


def _by_hf(engine: HFEngine | None, texts: Sequence[Sequence[int]]) -> list[Ranked]:
    if engine is None:
        raise EngineError("there is no engine")

    async def score() -> list[Ranked]:
        found = []
        for ids in texts:
            scored = await engine.score(ids, top_k=2**31 - 1)
            found.append((scored.top_token_ids.astype(np.int64), scored.top_logprobs.astype(np.float64)))
        return found

    return asyncio.run(score())


def _by_server(url: str, model: str, texts: Sequence[Sequence[int]], top_k: int) -> list[Ranked]:
    """Ask `/v1/completions` to score each text. Raises EngineError where it gives no likeliest tokens."""
    import httpx

    found = []
    for ids in texts:
        asked = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 0,
            "echo": True,
            "logprobs": top_k,
            "temperature": 1.0,
            "return_tokens_as_token_ids": True,
        }
        try:
            reply = httpx.post(f"{url.rstrip('/')}/v1/completions", json=asked, timeout=_TIMEOUT_S)
            reply.raise_for_status()
            likeliest = reply.json()["choices"][0]["logprobs"]["top_logprobs"][1 : len(ids)]
            rows = [_ranked(each) for each in likeliest]
            least = min(map(len, rows))
            token_ids = np.array([[token for token, _ in row[:least]] for row in rows], np.int64)
            found.append((token_ids, np.array([[value for _, value in row[:least]] for row in rows], np.float64)))
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"--engine={url}: /v1/completions must score a prompt of token ids (echo, logprobs={top_k}, "
                f"return_tokens_as_token_ids), as vLLM's server does: {type(error).__name__}: {error}"
            ) from error
    return found


def _ranked(named: dict[str, float]) -> list[tuple[int, float]]:
    """Return `{"token_id:7": -0.1, ...}` as pairs, the likeliest first."""
    pairs = [(int(name.removeprefix("token_id:")), float(value)) for name, value in named.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


def compared(
    texts: Sequence[Sequence[int]], trainer: Sequence[Floats], engine: Sequence[Ranked], top_k: int
) -> Compared:
    """Compare distributions, text by text: the trainer's `[num_tokens - 1, vocabulary]` and the engine's."""
    columns: dict[str, list[Any]] = {name: [] for name in Compared.__dataclass_fields__}
    for index, (ids, own, (token_ids, logprobs)) in enumerate(zip(texts, trainer, engine)):
        count, k = len(own), min(top_k, token_ids.shape[1])
        taken = np.take_along_axis(own, token_ids, axis=1)
        # Without what adds up to 0 over all tokens, a term's rounding would be larger than the divergence of two roundings.
        terms = np.exp(taken) * (taken - logprobs) - np.exp(taken) + np.exp(logprobs)
        kl = np.sum(terms, axis=1)
        if token_ids.shape[1] < own.shape[1]:
            rests = [np.log(np.maximum(1e-12, 1 - np.exp(each).sum(axis=1))) for each in (taken, logprobs)]
            kl += np.exp(rests[0]) * (rests[0] - rests[1]) - np.exp(rests[0]) + np.exp(rests[1])
        likeliest = np.argsort(-own, axis=1)[:, :k]
        pairs = zip(likeliest.tolist(), token_ids[:, :k].tolist())
        columns["overlap"].append([len(set(own_k) & set(other_k)) / k for own_k, other_k in pairs])
        targets = np.array(ids[1:], np.int64)
        there = token_ids == targets[:, None]
        columns["engine"].append(np.where(there.any(axis=1), np.where(there, logprobs, 0.0).sum(axis=1), np.nan))
        columns["trainer"].append(own[np.arange(count), targets])
        columns["same_first"].append(likeliest[:, 0] == token_ids[:, 0])
        columns["kl"].append(kl)
        columns["token_ids"].append(targets)
        columns["text"].append(np.full(count, index))
        columns["length"].append(np.full(count, len(ids)))
        columns["position"].append(np.arange(1, count + 1))
    whole: dict[str, Any] = {name: np.concatenate(values) for name, values in columns.items() if values}
    return Compared(**whole, vocabulary=trainer[0].shape[1], named=engine[0][0].shape[1], top_k=top_k)


def table(found: Compared, tokenizer: Tokenizer, *, worst: int = 5) -> str:
    """Return the differences as a table: of all positions, by length of the text, by position; then the worst tokens."""
    named = "the whole vocabulary" if found.named >= found.vocabulary else f"the {found.named} likeliest tokens"
    heads = (
        "",
        "positions",
        "KL",
        "KL, 99%",
        "KL, most",
        f"top {found.top_k} alike",
        "same first",
        "token's, mean",
        "most",
    )
    rows = [("all", *_figures(found, np.ones(len(found.kl), bool)))]
    for what, values in (("length", found.length), ("position", found.position)):
        for begin, end in zip(_POSITIONS, (*_POSITIONS[1:], 2**62)):
            chosen = (values > begin) & (values <= end)
            if chosen.any():
                name = f"{what} {begin + 1} to {end}" if end < 2**62 else f"{what} above {begin}"
                rows.append((name, *_figures(found, chosen)))
    widths = [max(len(row[index]) for row in [heads, *rows]) for index in range(len(heads))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in [heads, *rows]]
    lines += ["", f"KL(trainer || engine) in nats over {named} of {found.vocabulary}; the worst positions:"]
    for index in np.argsort(-found.kl)[:worst].tolist():
        before = found.token_ids[max(0, index - 6) : index][found.text[max(0, index - 6) : index] == found.text[index]]
        context, token = (tokenizer.decode(list(map(int, ids))) for ids in (before, [found.token_ids[index]]))
        lines.append(
            f"  text {found.text[index]}, position {found.position[index]}: KL {found.kl[index]:.3g}; {token!r} after "
            f"{context!r}: trainer {found.trainer[index]:.4f}, engine {found.engine[index]:.4f}"
        )
    return "\n".join(lines)


def _figures(found: Compared, chosen: NDArray[np.bool_]) -> tuple[str, ...]:
    kl, apart = found.kl[chosen], np.abs(found.trainer - found.engine)[chosen]
    apart = apart[np.isfinite(apart)]
    return (
        str(int(chosen.sum())),
        *(f"{value:.2e}" for value in (kl.mean(), np.quantile(kl, 0.99), kl.max())),
        f"{found.overlap[chosen].mean():.2%}",
        f"{found.same_first[chosen].mean():.2%}",
        *((f"{apart.mean():.2e}", f"{apart.max():.2e}") if len(apart) else ("", "")),
    )


def draw(found: Compared, file: Path, title: str) -> None:
    """Draw the KL of each position and its mean by position, on a logarithmic scale, into a PNG or SVG file."""
    figure = new_figure((8.0, 4.5), title)
    axes = figure.subplots()
    floor = 1e-16
    axes.scatter(found.position, np.maximum(found.kl, floor), s=6, alpha=0.4, label="each token")
    places = np.unique(found.position)
    means = [max(floor, float(found.kl[found.position == place].mean())) for place in places]
    axes.plot(places, means, color="black", linewidth=1.5, label="mean of a position")
    axes.set_yscale("log")
    axes.set_xlabel("Position")
    axes.set_ylabel("KL(trainer || engine), nats")
    axes.legend()
    figure.savefig(file)
