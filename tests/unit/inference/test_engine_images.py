"""Engines with images: log-probabilities of `generator=hf` are the trainer's, whatever it kept from the turn before."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from skyrl_train.config.models import HTTPConfig
from skyrl_train.errors import EngineError
from skyrl_train.images import ImageSpan
from skyrl_train.inference.decode import Decoder
from skyrl_train.inference.http import HTTPEngine
from skyrl_train.inference.http_images import image_body
from tests.support.vision_cases import PLACEHOLDER, make_image, make_vlm
from tests.support.vision_engines import (
    SMALL,
    WIDE,
    Prompt,
    difference,
    image_prompt,
    later_turns,
    learner_of,
    requests_of,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = make_vlm()
    return Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda ids: str(ids))


def test_log_probabilities_are_the_trainers_in_a_later_turn_too(decoder: Decoder) -> None:
    trainer = learner_of(make_vlm())
    decoder.forget()
    decoder.start_wave()
    prompts = [image_prompt(WIDE, before=2, after=3), image_prompt(SMALL, before=5, after=1), ((5, 6, 7), ())]
    first = decoder.run(requests_of(prompts))
    for each, response in zip(prompts, first):
        assert difference(trainer, each, response) < 1e-5
    decoder.start_wave()
    later = later_turns(prompts, first)
    for each, response in zip(later, decoder.run(requests_of(later))):
        assert difference(trainer, each, response) < 1e-5


def test_prompts_of_the_same_tokens_and_other_images_are_other_prompts(decoder: Decoder) -> None:
    trainer = learner_of(make_vlm())
    decoder.forget()
    other = make_image(7)
    prompts: list[Prompt] = [
        ((3, *[PLACEHOLDER] * 4, 4), (ImageSpan(1, SMALL),)),
        ((3, *[PLACEHOLDER] * 4, 4), (ImageSpan(1, other),)),
        ((3, *[PLACEHOLDER] * 4, 4), ()),
    ]
    for each, response in zip(prompts, decoder.run(requests_of(prompts))):
        assert difference(trainer, each, response) < 1e-5


def http_engine(status: int, answer: dict[str, Any], asked: list[tuple[str, Any]]) -> HTTPEngine:
    def serve(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(status, json=answer)

    options = HTTPConfig(url="http://server", model="served", max_retries=0)
    return HTTPEngine(options, stop_token_ids=(2,), timeout_s=5.0, transport=httpx.MockTransport(serve))


def test_a_server_is_told_tokens_and_pixels_and_not_what_to_make_of_an_image() -> None:
    asked: list[tuple[str, Any]] = []
    content = [{"token_id": 8, "logprob": -0.5}, {"token_id": 2, "logprob": -1.0}]
    answer = {"choices": [{"token_ids": [8, 2], "logprobs": {"content": content}, "finish_reason": "stop"}]}
    (request,) = requests_of([image_prompt(WIDE, before=2, after=3)])
    output = asyncio.run(http_engine(200, answer, asked).generate(request))
    assert (output.token_ids, output.logprobs) == ((8, 2), (-0.5, -1.0))
    ((path, body),) = asked
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == list(request.prompt_token_ids)
    assert body["sampling_params"]["max_tokens"] == 6
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": 2, "length": 4}]}
    assert body["features"]["mm_hashes"] == {"image": [WIDE.key]}
    item = msgpack.unpackb(base64.b64decode(body["features"]["kwargs_data"]["image"][0]))
    kind, shape, pixels = item["pixel_values"]["data"]
    assert (kind, shape, pixels.data) == ("float32", list(WIDE.pixels.shape), WIDE.pixels.tobytes())
    assert pixels.code == 3, "CUSTOM_TYPE_RAW_VIEW of vllm/v1/serial_utils.py, release 0.32"
    assert np.frombuffer(item["image_grid_thw"]["data"][2].data, np.int64).tolist() == [1, 2, 8]


def test_pixels_go_under_the_code_by_which_the_installed_vllm_reads_bytes() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the extra `vllm` is not installed")
    source = (Path(spec.submodule_search_locations[0]) / "v1" / "serial_utils.py").read_text()
    (code,) = re.findall(r"^CUSTOM_TYPE_RAW_VIEW = (\d+)$", source, re.MULTILINE)
    (request,) = requests_of([image_prompt(WIDE, before=2, after=3)])
    completion = {"model": "m", "prompt": [], "return_token_ids": True, "request_id": "r", "stop": None}
    encoded = image_body(request, completion)["features"]["kwargs_data"]["image"][0]
    assert msgpack.unpackb(base64.b64decode(encoded))["pixel_values"]["data"][2].code == int(code)


def test_a_server_without_that_interface_is_told_how_to_start() -> None:
    with pytest.raises(EngineError, match="--enable-scale-out"):
        asyncio.run(http_engine(404, {}, []).generate(requests_of([image_prompt(SMALL, before=2, after=3)])[0]))
