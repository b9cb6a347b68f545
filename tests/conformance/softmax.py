"""The exact arithmetic of the reference server: a linear softmax over a decaying sum of embeddings.

The hidden state of a token is half of the one before plus the token's embedding, the logits are that state times a matrix,
and training moves the adapter that is added to the matrix: each gradient is one outer product, in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from wire import Json, Refused

VOCAB, WIDTH, CONTEXT, END = 64, 16, 4096, 0
LOSSES = {"cross_entropy": ("weights",)} | dict.fromkeys(
    ("importance_sampling", "ppo", "cispo", "dro"), ("logprobs", "advantages")
)
ADAMW = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}

_numbers = np.random.default_rng(7)
EMBEDDING, UNEMBEDDING = _numbers.normal(size=(VOCAB, WIDTH)), _numbers.normal(size=(WIDTH, VOCAB)) * 0.4


def zeros() -> np.ndarray:
    return np.zeros((WIDTH, VOCAB))


def require(holds: bool, message: str) -> None:
    if not holds:
        raise Refused(422, message)


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(kw_only=True)
class Weights:
    """What a training run learns: the adapter, the gradient since the last step, and AdamW's moments with their count."""

    weights: np.ndarray = field(default_factory=zeros)
    gradient: np.ndarray = field(default_factory=zeros)
    moments: tuple[np.ndarray, np.ndarray, int] = field(default_factory=lambda: (zeros(), zeros(), 0))


def hidden(tokens: np.ndarray) -> np.ndarray:
    """Hidden states `[T, WIDTH]`: each the half of the one before plus the token's embedding."""
    rows, state = np.zeros((len(tokens), WIDTH)), np.zeros(WIDTH)
    for position, token in enumerate(tokens):
        rows[position] = state = 0.5 * state + EMBEDDING[token]
    return rows


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def tokens_of(model_input: Json) -> np.ndarray:
    chunks = model_input["chunks"]
    require(
        all(chunk["type"] == "encoded_text" for chunk in chunks), "only encoded_text is served: no images, no audio"
    )
    tokens = np.array([token for chunk in chunks for token in chunk["tokens"]], int)
    require(bool(((tokens >= 0) & (tokens < VOCAB)).all()), f"a token lies outside the vocabulary of {VOCAB}")
    require(len(tokens) <= CONTEXT, f"the input is longer than {CONTEXT} tokens")
    return tokens


def objective(loss: str, config: Json, logprobs: np.ndarray, inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Each token's loss and its derivative by the log-probability, by the formulas of the public documentation."""
    if loss == "cross_entropy":
        return -inputs[0] * logprobs, -inputs[0]
    sampled, advantages = inputs
    ratio = np.exp(logprobs - sampled)
    if loss == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    if loss == "dro":
        beta, distance = float(config.get("beta", 0.05)), logprobs - sampled
        return -(logprobs * advantages - 0.5 * beta * distance**2), -(advantages - beta * distance)
    clipped = np.clip(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    if loss == "cispo":
        return -clipped * logprobs * advantages, -clipped * advantages
    free = ratio * advantages <= clipped * advantages
    return -np.minimum(ratio * advantages, clipped * advantages), np.where(free, -ratio * advantages, 0.0)


def forward_backward(model: Weights, given: Json, backward: bool) -> Json:
    """Log-probabilities of every datum's targets and the summed loss; adds the gradient if `backward`."""
    loss, outputs, total, gradient = given["loss_fn"], [], 0.0, zeros()
    require(loss in LOSSES, f"loss_fn {loss!r} is not served: choose from {', '.join(LOSSES)}")
    require(len(given["data"]) > 0, "data is empty: send at least one datum")
    for datum in given["data"]:
        tokens, fields = tokens_of(datum["model_input"]), []
        for name in ("target_tokens", *LOSSES[loss]):
            require(name in datum["loss_fn_inputs"], f"loss_fn_inputs lacks {name!r}, which {loss} needs")
            fields.append(np.asarray(datum["loss_fn_inputs"][name]["data"], float))
            require(len(fields[-1]) == len(tokens), f"{name} is not as long as model_input")
            require(bool(np.isfinite(fields[-1]).all()), f"{name} holds a number that is not finite")
        targets = tokens_of({"chunks": [{"type": "encoded_text", "tokens": fields[0]}]})
        rows = hidden(tokens)
        every = log_softmax(rows @ (UNEMBEDDING + model.weights))
        logprobs = every[np.arange(len(tokens)), targets]
        losses, slopes = objective(loss, given.get("loss_fn_config") or {}, logprobs, fields[1:])
        total += float(losses.sum())
        gradient += rows.T @ ((np.eye(VOCAB)[targets] - np.exp(every)) * slopes[:, None])
        outputs.append({"logprobs": {"data": logprobs.tolist(), "dtype": "float32", "shape": [len(tokens)]}})
    if backward:
        model.gradient = model.gradient + gradient
    return {"loss_fn_output_type": "TorchLossReturn", "loss_fn_outputs": outputs, "metrics": {"loss:sum": total}}


def optim_step(model: Weights, given: Json) -> Json:
    """One step of AdamW as torch writes it, on the gradient since the last one."""
    params = {name: given.get(name, default) for name, default in ADAMW.items()}
    for name, value in params.items():
        most = 1 if name.startswith("beta") else math.inf
        require(isinstance(value, int | float) and 0 <= value < most, f"adam_params.{name} must lie in [0, {most})")
    lr, beta1, beta2, eps, decay, clip = params.values()
    gradient, norm = model.gradient, float(np.sqrt((model.gradient**2).sum()))
    if clip > 0 and norm > clip:
        gradient = gradient * (clip / norm)
    mean, square, steps = model.moments
    mean, square, steps = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2, steps + 1
    update = (mean / (1 - beta1**steps)) / (np.sqrt(square / (1 - beta2**steps)) + eps)
    model.weights = model.weights * (1 - lr * decay) - lr * update
    model.moments = (mean, square, steps)
    model.gradient = zeros()
    return {"metrics": {"grad_norm:mean": norm}}


def sample(weights: np.ndarray, given: Json, name: str, over: Callable[[], bool]) -> Json:
    """`num_samples` continuations of a prompt, and what was asked about the prompt itself."""
    params, prompt, count = given["sampling_params"], tokens_of(given["prompt"]), given.get("num_samples", 1)
    limit = params["max_tokens"] if params.get("max_tokens") is not None else CONTEXT - len(prompt)
    temperature, top_p, top_k = params.get("temperature", 1), params.get("top_p", 1), params.get("top_k", -1)
    require(len(prompt) > 0, "the prompt is empty")
    require(count >= 1 and limit >= 1, "num_samples and max_tokens must be at least 1")
    require(len(prompt) + limit <= CONTEXT, f"prompt and max_tokens take more than the context of {CONTEXT} tokens")
    require(temperature >= 0 and 0 < top_p <= 1 and top_k != 0, "temperature, top_p or top_k is out of range")
    stop = params.get("stop")
    texts = [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]
    ends = {END} if stop is None or texts else set(stop)
    seed = int(short(name), 16) if params.get("seed") is None else abs(params["seed"])
    rows, matrix, sequences = hidden(prompt), UNEMBEDDING + weights, []
    for index in range(count):
        numbers, state, scores = np.random.default_rng([seed, index]), rows[-1], []
        tokens: list[int] = []
        while len(tokens) < limit and not (tokens and ended(tokens, ends, texts)):
            require(not over(), "cancelled by the client")
            scores.append(log_softmax(state @ matrix))
            tokens.append(draw(scores[-1], temperature, top_k, top_p, numbers))
            state = 0.5 * state + EMBEDDING[tokens[-1]]
        logprobs = [float(each[token]) for each, token in zip(scores, tokens)]
        reason = "stop" if ended(tokens, ends, texts) else "length"
        sequences.append({"stop_reason": reason, "tokens": tokens, "logprobs": logprobs})
        if given.get("topk_sample_logprobs"):
            sequences[-1]["topk_logprobs"] = [best(each, given["topk_sample_logprobs"]) for each in scores]
    answer: Json = {"type": "sample", "sequences": sequences}
    scored = log_softmax(rows[:-1] @ matrix)  # row i is the distribution of the prompt's token i + 1
    first = len(prompt) - (given.get("prompt_logprobs_last_n") or len(prompt) - 1)
    require(first >= 1 or len(prompt) == 1, "prompt_logprobs_last_n is more than the prompt's length less one")
    if given.get("prompt_logprobs"):
        each = scored[np.arange(len(prompt) - 1), prompt[1:]].tolist()
        answer["prompt_logprobs"] = [None] * first + each[first - 1 :]
    if wide := given.get("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = [None] * first + [best(row, wide) for row in scored[first - 1 :]]
    return answer


def text_of(tokens: list[int]) -> str:
    """What tokens say, in the simplest of all languages."""
    return "".join(f"<{token}>" for token in tokens)


def ended(tokens: list[int], ends: set[int], texts: list[str]) -> bool:
    written = text_of(tokens)
    return tokens[-1] in ends or any(text in written for text in texts)


def draw(logprobs: np.ndarray, temperature: float, top_k: int, top_p: float, numbers: np.random.Generator) -> int:
    order = np.argsort(-logprobs, kind="stable")[: top_k if top_k > 0 else None]
    if temperature == 0:
        return int(order[0])
    chances = np.exp(log_softmax(logprobs[order] / temperature))
    chances = np.where(np.cumsum(chances) - chances < top_p, chances, 0.0)
    return int(numbers.choice(order, p=chances / chances.sum()))


def best(logprobs: np.ndarray, width: int) -> list[tuple[int, float]]:
    return [(int(token), float(logprobs[token])) for token in np.argsort(-logprobs, kind="stable")[:width]]
