"""Scores of conversations by a sequence-classification model of transformers, and what its weights are.

A conversation becomes tokens by the model's own chat template. Conversations are computed together by length. The score is
the logit of one label, without an activation, at the last token that is no padding.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ModelError
from skyrl_train.model.causal_lm import load_tokenizer, missing_files, quiet_transformers, resolve_model_path
from skyrl_train.system import WorkerThread
from skyrl_train.types import ChatMessage

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


class SequenceScorer:
    """A reward model in this process."""

    def __init__(
        self,
        path: str,
        *,
        revision: str | None,
        dtype: str,
        device: str,
        max_batch_tokens: int,
        label: int,
        weights: str,
    ) -> None:
        """
        Args:
            max_batch_tokens: Tokens, padding counted, that are computed together at most.
            label: Which of the model's labels is the score.
            weights: `weights_identity` of the model; empty is not checked.

        Raises ModelError where the folder is no such model, has no chat template, or has other weights.
        """
        self._max_batch_tokens, self._label, self._name = max_batch_tokens, label, f"the reward model {path!r}"
        found = weights_identity(path, revision)
        if weights and found != weights:
            raise ModelError(f"{self._name} has the weights {found}, and the run has scored with {weights}")
        source = ModelConfig(path=path, revision=revision)
        self._tokenizer = load_tokenizer(source)
        if not self._tokenizer.chat_template:
            raise ModelError(f"{self._name} has no chat template, by which a conversation becomes tokens")
        try:
            with quiet_transformers():
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    str(resolve_model_path(path, revision)),
                    dtype=getattr(torch, dtype),
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
            self._model, missing = loaded[0].to(device).eval(), sorted(loaded[1]["missing_keys"])
        except Exception as error:
            raise ModelError(f"{self._name} cannot be loaded: {type(error).__name__}: {error}") from error
        if missing:
            raise ModelError(f"{self._name} lacks {missing[0]}, which would be random. Is it a reward model?")
        if not 0 <= label < self._model.config.num_labels:
            raise ModelError(f"{self._name} has {self._model.config.num_labels} labels, and no number {label}")
        self._config = self._model.config.get_text_config()

        self._thread = WorkerThread("reward-model")

    async def score(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[float]:
        """The same as `score_now`, on a thread of the model's own."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.score_now, conversations)

    def close(self) -> None:
        """End the thread, once it has nothing to do."""
        self._thread.close(0.0)

    def score_now(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[float]:
        """Return the score of each conversation. Raises ModelError where one is longer than the model takes."""
        rows = [self._tokens(conversation) for conversation in conversations]
        scores = [0.0] * len(rows)
        for batch in batches_by_length([len(row) for row in rows], self._max_batch_tokens):
            for index, value in zip(batch, self._logits([rows[index] for index in batch])):
                scores[index] = value
        return scores

    def _tokens(self, conversation: Sequence[ChatMessage]) -> list[int]:
        messages = [dict(message) for message in conversation]
        row: list[int] = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)  # type: ignore[assignment]
        longest = getattr(self._config, "max_position_embeddings", None) or len(row)
        if len(row) > longest:
            raise ModelError(f"{self._name} takes {longest} tokens; a conversation has {len(row)}")
        while len(row) > 1 and row[-1] == self._config.pad_token_id:  # which the model looks past
            row.pop()
        return row

    @torch.inference_mode()
    def _logits(self, rows: Sequence[list[int]]) -> list[float]:
        """Padded with a token that is in none of the rows, since many models end turns with the one they pad with."""
        used = {token for row in rows for token in row}
        padding = next(token for token in range(len(used) + 1) if token not in used)
        before, self._config.pad_token_id = self._config.pad_token_id, padding
        width = max(map(len, rows))
        try:
            logits = self._model(
                input_ids=torch.tensor(
                    [row + [padding] * (width - len(row)) for row in rows], device=self._model.device
                ),
                attention_mask=torch.tensor(
                    [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._model.device
                ),
            ).logits
        finally:
            self._config.pad_token_id = before
        values: list[float] = logits[:, self._label].double().tolist()
        return values


def batches_by_length(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of rows that are computed together: like lengths, `max_batch_tokens` with their padding unless one
    alone has more."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if batch and lengths[index] * (len(batch) + 1) > max_batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def weights_identity(path: str, revision: str | None) -> str:
    """Return a digest of a model folder: of its config.json, and of each file of weights its size, its header and samples
    of its tensors, so that another training of the same model has another. Raises ModelError."""
    folder = resolve_model_path(path, revision)
    if missing := missing_files(folder):
        raise ModelError(f"model path {path!r}: {folder} lacks {', '.join(missing)}")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for sample in _samples(file):
            digest.update(sample)
    return f"sha256:{digest.hexdigest()[:32]}"


def _samples(file: Path) -> Iterator[bytes]:
    """Yield the header of a safetensors file, the first part of which it begins with, and stretches of the rest."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for number in range(_SAMPLES + 1):
            stream.seek(number * max(size - _SAMPLE_BYTES, 0) // _SAMPLES)
            yield stream.read(_SAMPLE_BYTES)
