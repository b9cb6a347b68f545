"""Tools that return images: the model reads them in the tool's message, or the trajectory fails with the reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skyrl_train.config.data import EnvironmentConfig, ImagesConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig
from skyrl_train.data.sources import ImageReading, ImageStore, references_in
from skyrl_train.images import Image
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout.chat_tokens import ChatTokens
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.tools.formats import make_parser
from skyrl_train.types import FailureKind, GenerationRequest, Outcome, Prompt, SamplingParams, Trajectory
from tests.support.fakes import FakeEngine
from tests.support.pictured_runs import encoded
from tests.support.tool_cases import JUDGE, TEMPLATE

MARK = "<|image|>"
WITH_PARTS = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}{MARK}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}",
)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture() -> list[Any]:
    """Shows a picture."""
    return ["here:", {"type": "image", "image": url(encoded("PNG"))}, {"seen": 1}]


def alone() -> Any:
    """Shows a picture and nothing else."""
    return {"type": "image", "image": url(encoded("PNG"))}


def broken() -> Any:
    """Shows what is none."""
    return {"type": "image", "image": url(b"no picture")}


def file() -> Any:
    """Names a file."""
    return {"type": "image", "path": "/etc/passwd"}


class Rollout:
    """One trajectory that calls a tool and then answers."""

    def __init__(self, template: str, *, reads_images: bool = True) -> None:
        self.tokenizer: Any = load_tokenizer(ModelConfig())
        self.tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
        self.tokenizer.chat_template = template
        self.placeholder = int(self.tokenizer.convert_tokens_to_ids(MARK))
        self.store = ImageStore()
        reading = ImageReading(self.placeholder, self._process, ImagesConfig(), self.store)
        self.engine = FakeEngine(lambda _: [])
        self.chat = ChatTokens(self.tokenizer, images=reading if reads_images else None)
        self.made: list[RolloutGenerator] = []

    def _process(self, data: bytes, key: str) -> Image:
        assert data == encoded("PNG")
        return Image(key=key, pixels=np.zeros((12, 12), np.float32), patches=(1, 2, 6), grid=(1, 3), num_tokens=3)

    def run(self, tool: str) -> Trajectory:
        texts = iter([f"<tool_call>{json.dumps({'name': tool, 'arguments': {}})}</tool_call>", "5"])

        def answer(_: GenerationRequest) -> list[int]:
            return [*self.tokenizer.encode(next(texts)), self.tokenizer.eos_token_id]

        self.engine = FakeEngine(answer)
        generator = RolloutGenerator(
            self.engine,
            self.tokenizer,
            GeneratorConfig(max_turns=3, max_context_length=1024),
            EnvironmentConfig(
                tools=(f"{__name__}:{tool}",), env_class=JUDGE, isolation="thread", max_failed_fraction=1.0
            ),
            0,
            parse_calls=make_parser("auto", self.tokenizer),
            chat=self.chat,
        )
        self.made.append(generator)
        prompt = Prompt(uid="p", messages=({"role": "user", "content": "2 + 3?"},))
        sampling = SamplingParams(max_generate_length=64)
        batch = generator.generate([prompt], n_samples_per_prompt=1, sampling=sampling, global_step=1, purpose="train")
        return batch.trajectories[0]


@pytest.fixture
def rollout() -> Iterator[Any]:
    made: list[Rollout] = []

    def make(template: str = WITH_PARTS, **settings: Any) -> Rollout:
        made.append(Rollout(template, **settings))
        return made[-1]

    yield make
    for each in made:
        for generator in each.made:
            generator.close()


@pytest.mark.parametrize(("tool", "parts"), [("picture", ["text", "image", "text"]), ("alone", ["image"])])
def test_the_model_reads_an_image_in_the_tools_message(rollout: Any, tool: str, parts: list[str]) -> None:
    made = rollout()
    trajectory = made.run(tool)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.DONE, 1.0)
    (message,) = trajectory.turns[0].observations
    assert (message["role"], [part["type"] for part in message["content"]]) == ("tool", parts)
    assert [made.store.read(each) for each in references_in([message])] == [encoded("PNG")]
    (span,) = trajectory.turns[1].images
    added = trajectory.turns[1].added_token_ids
    assert added[span.start : span.stop].tolist() == [made.placeholder] * 3
    assert (added == made.placeholder).sum() == 3
    later = made.engine.requests[1]
    assert [each.image.key for each in later.images] == [span.image.key]
    assert later.prompt_token_ids[later.images[0].start] == made.placeholder
    if tool == "picture":
        assert [message["content"][0]["text"], message["content"][2]["text"]] == ["here:", '{"seen": 1}']


@pytest.mark.parametrize(
    ("tool", "template", "reads_images", "reason"),
    [
        ("alone", TEMPLATE, True, "the chat template must write one for each image"),
        ("alone", WITH_PARTS, False, "an environment or a tool showed an image, and the model reads none"),
        ("broken", WITH_PARTS, True, "an image cannot be read: not an image that Pillow reads"),
        ("file", WITH_PARTS, True, "environments and tools give images as data: URLs"),
    ],
)
def test_what_cannot_be_shown_to_the_model_fails_the_trajectory_with_the_reason(
    rollout: Any, tool: str, template: str, reads_images: bool, reason: str
) -> None:
    trajectory = rollout(template, reads_images=reads_images).run(tool)
    assert (trajectory.outcome, trajectory.failure.kind) == (Outcome.FAILED, FailureKind.INVALID_OBSERVATION)
    assert reason in trajectory.failure.message
