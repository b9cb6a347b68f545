"""Conversations with images as tokens, and a trajectory whose environment answers with an image."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures

from skyrl_train.config.data import ImagesConfig
from skyrl_train.data.sources import ImageReading, ImageStore, references_in
from skyrl_train.errors import DataError
from skyrl_train.images import Image, find_spans
from skyrl_train.rollout.boundary import EnvironmentFailed
from skyrl_train.rollout.chat_tokens import ChatTokens
from skyrl_train.types import Prompt, find_parent

PLACEHOLDER, BEGIN, END, NEWLINES = 5, 6, 7, 8
TOKENS = {"<u>": 1, "<a>": 2, "</s>": 3, "<p>": PLACEHOLDER, "<b>": BEGIN, "<e>": END, "\n\n": NEWLINES}


@dataclass
class Words:
    """A tokenizer of single characters and a few marks, whose template writes `mark` for an image."""

    mark: str = "<p>"
    chat_template: Any = "there is one"
    eos_token_id: Any = 3
    pad_token_id: Any = 0

    def __call__(self, text: Any, **_: Any) -> Any:
        ids: list[int] = []
        while text:
            known = next((each for each in TOKENS if text.startswith(each)), text[0])
            ids.append(TOKENS[known] if known in TOKENS else 20 + ord(known))
            text = text[len(known) :]
        return {"input_ids": ids}

    def apply_chat_template(self, conversation: Any, **named: Any) -> Any:
        text = ""
        for message in conversation:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            said = "".join(self.mark if part["type"] == "image" else part["text"] for part in parts)
            text += ("<a>" if message["role"] == "assistant" else "<u>") + said + "</s>"
        text += "<a>" if named.get("add_generation_prompt") else ""
        return self(text)["input_ids"] if named.get("tokenize") else text

    def decode(self, token_ids: Any, **_: Any) -> str:
        names = {number: name for name, number in TOKENS.items()}
        return "".join(names.get(each, chr(each - 20) if each >= 20 else "") for each in token_ids)

    def __len__(self) -> int:
        return 300


def png(red: int) -> bytes:
    out = io.BytesIO()
    Pictures.new("RGB", (4, 4), (red, 0, 0)).save(out, format="PNG")
    return out.getvalue()


def reading(marks: tuple[int, int] | None = None) -> ImageReading:
    def process(data: bytes, key: str) -> Image:
        assert data
        return Image(key=key, pixels=np.zeros((12, 12), np.float32), patches=(1, 2, 6), grid=(1, 3), num_tokens=3)

    return ImageReading(PLACEHOLDER, process, ImagesConfig(), ImageStore(), marks)


def shown(reference: str, text: str = "x") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": reference}, {"type": "text", "text": text}]}


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_a_prompts_tokens_have_room_for_its_image() -> None:
    images = reading()
    chat = ChatTokens(Words(), images=images)
    messages = [shown(images.store.add(png(1)))]
    ids = chat.first_prompt(messages)
    assert ids.tolist() == [1, *[PLACEHOLDER] * 3, 20 + ord("x"), 3, 2]
    (span,) = chat.images_in(ids, messages)
    assert (span.start, span.stop) == (1, 4)


def test_a_template_that_writes_only_where_an_image_begins() -> None:
    images = reading(marks=(BEGIN, END))
    chat = ChatTokens(Words(mark="<b>"), images=images)
    messages = [shown(images.store.add(png(1)))]
    ids = chat.first_prompt(messages)
    assert ids.tolist() == [1, NEWLINES, BEGIN, *[PLACEHOLDER] * 3, END, NEWLINES, 20 + ord("x"), 3, 2]
    assert [span.start for span in chat.images_in(ids, messages)] == [3]


def test_an_observation_with_an_image_is_appended_and_the_turns_part_where_images_differ() -> None:
    images = reading()
    chat = ChatTokens(Words(), images=images)
    first = [shown(images.store.add(png(1)))]
    prompt = chat.first_prompt(first)
    said: dict[str, Any] = {"role": "assistant", "content": "y"}
    (seen,) = chat.with_references([shown(data_url(png(2)), "z")])
    assert references_in([seen]) == [images.store.add(png(2))]
    response = (20 + ord("y"), 3)
    later = chat.next_prompt(context=prompt, response=response, history=[*first, said], observations=[seen])
    start = len(prompt) + len(response)
    spans = (*chat.images_in(prompt, first), *chat.images_in(later, [seen], start=start))
    assert [span.start for span in spans] == [1, start + 1]
    assert later.tolist()[start:] == [1, *[PLACEHOLDER] * 3, 20 + ord("z"), 3, 2]
    assert find_parent([], later, spans)[0] is None


@pytest.mark.parametrize("value", ["no.png", "https://a.b/c.png", data_url(b"no image")])
def test_an_observations_image_that_cannot_be_read_breaks_its_trajectory(value: str) -> None:
    with pytest.raises(EnvironmentFailed, match="an observation: an image cannot be read"):
        ChatTokens(Words(), images=reading()).with_references([shown(value)])


def test_a_row_with_images_is_refused_for_a_model_that_reads_none() -> None:
    images = reading()
    prompt = Prompt(uid="p", messages=(shown(images.store.add(png(1))),), place="a.jsonl, line 3")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: .*the model reads none"):
        ChatTokens(Words()).data_prompt(prompt)


def test_a_text_that_holds_the_placeholder_is_refused() -> None:
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "<p>"},), place="a.jsonl, line 3")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: .*1 placeholders"):
        ChatTokens(Words(), images=reading()).data_prompt(prompt)
    with pytest.raises(ValueError, match="placeholders"):
        find_spans([1, PLACEHOLDER, 2], PLACEHOLDER, [])
