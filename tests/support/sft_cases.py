"""Tokenizers and chat templates of several families, made from scratch, and small data sets for supervised training."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_train.data import Row
from skyrl_train.data.sft import ExampleSet, SourcePart, TokenStore, store_of

SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|User|>",
    "<|Assistant|>",
]
_TEXT = [
    "user assistant model system tool think hello there good bye what is the answer to this question",
    "one two three four five six seven eight nine ten eleven twelve\n1 + 2 = 3\n#### 3\n\n<think>\n\n</think>\n\n",
]

CHATML = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

MARKED_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

HEADERS = """\
{{- '<s>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

TURNS = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- raise_exception('no system message') -}}{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

INSTRUCTIONS = """\
{%- set ns = namespace(system='') -%}
{{- '<s>' -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = message.content + '\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{- '[INST] ' + (ns.system if loop.last or messages[-2:][0] == message else '') + message.content + '[/INST]' -}}
{%- else -%}
{{- ' ' + message.content | trim + '</s>' -}}
{%- endif -%}
{%- endfor -%}
"""
"""No generation prompt; the system's text stands in the last user message, so that earlier prompts are no prefix."""

REASONING = """\
{%- set ns = namespace(last_question=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set answer = message.content -%}
{%- set thought = '' -%}
{%- if message.role == 'assistant' and '</think>' in answer -%}
{%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- set answer = answer.split('</think>')[-1].strip() -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.last_question -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Drops the reasoning of earlier turns, and gives the last turn an empty one where it has none."""

OPENED_REASONING = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<|User|>' + message.content -}}
{%- else -%}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '</s>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
"""
"""The generation prompt opens a reasoning that no rendered answer contains."""

PLAIN_ROLES = """\
{%- for message in messages -%}
{{- message.role + ': ' + message.content + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""
"""Nothing ends a turn but the end of a line."""


@functools.cache
def byte_level(template: str | None = CHATML, *, eos: str = "<|im_end|>", bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT, Llama 3 and Qwen have it."""
    raw = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?\p{L}+|\p{N}|\s+(?!\S)|\s+| ?[^\s\p{L}\p{N}]+"), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_TEXT * 20, trainer)
    raw.decoder = decoders.ByteLevel()
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
        )
    return _wrap(raw, template, eos, bos="<s>" if bos else None)


@functools.cache
def metaspace(template: str | None, *, eos: str = "</s>", prepend: str = "first") -> PreTrainedTokenizerFast:
    """BPE whose words carry the blank before them, as SentencePiece models have it. `prepend`: a text gets a blank at
    its beginning (`first`), so does what follows a special token (`always`), or not (`never`)."""
    raw = Tokenizer(models.BPE(unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    raw.decoder = decoders.Metaspace(prepend_scheme=prepend)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    raw.train_from_iterator(_TEXT * 20, trainer)
    return _wrap(raw, template, eos)


@functools.cache
def eager_specials() -> PreTrainedTokenizerFast:
    """Special tokens swallow the blanks after them, as in Phi."""
    raw = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    raw.add_special_tokens([AddedToken(text, rstrip=True, special=True) for text in SPECIAL[3:]])
    return _wrap(raw, CHATML, "<|im_end|>")


def _wrap(raw: Tokenizer, template: str | None, eos: str, bos: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, bos_token=bos, pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def row(values: Mapping[str, Any], index: int = 0) -> Row:
    return Row(source="train", index=index, place=f"train.jsonl, line {index + 1}", values=values)


def chat(*texts: str, system: str = "") -> dict[str, Any]:
    """A row with a conversation whose messages take turns, the user first."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return {"messages": [*first, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]}


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(values) + "\n" for values in rows), encoding="utf-8")
    return path


def trained_texts(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """The text of each run of tokens with loss."""
    runs: list[list[int]] = []
    for position, (token, trained) in enumerate(zip(ids, mask)):
        if trained and (position == 0 or not mask[position - 1]):
            runs.append([])
        if trained:
            runs[-1].append(int(token))
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def example(store: TokenStore, index: int) -> tuple[list[int], list[bool]]:
    start, stop = store.offsets[index], store.offsets[index + 1]
    return store.input_ids[start:stop].tolist(), store.loss_mask[start:stop].tolist()


def examples(*lengths: int) -> ExampleSet:
    """Example i holds the tokens `10 * i + 1, 10 * i + 2, ...`, all but the first trained."""
    store = store_of(
        ([10 * index + 1 + offset for offset in range(length)], [False] + [True] * (length - 1))
        for index, length in enumerate(lengths)
    )
    return ExampleSet([SourcePart(name="train", store=store, rows=np.arange(len(lengths)), max_length=1000)])


def indices(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)
