"""Gemma 3, in which the tokens of an image see one another: padded rows have the gradient of transformers' own forward, the
engine the trainer's log-probabilities, and other layouts are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.algorithms.losses import PolicyLossInputs, policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError
from skyrl_train.images import ImageSpan
from skyrl_train.inference import Decoder
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.layout_cases import use_layout
from tests.support.layouts import (
    Layout,
    Step,
    assert_same_gradient,
    closed,
    fixed_rollouts,
    flat_gradient as gradient_of,
    learner_of,
)
from tests.support.vision_cases import PLACEHOLDER, make_gemma, make_gemma_image, with_gemma_images
from tests.support.vision_engines import (
    Prompt,
    difference,
    image_prompt,
    later_turns,
    learner_of as learner_of_model,
    requests_of,
)

STEP = Step(algorithm=AlgorithmConfig(loss_reduction="sequence_mean"))


def scores_of(model: PreTrainedModel, ids: Tensor, spans: tuple[ImageSpan, ...]) -> Tensor:
    """By transformers' own forward of one row."""
    kinds = torch.zeros_like(ids)
    for span in spans:
        kinds[0, span.start : span.stop] = 1
    pixels = torch.stack([torch.from_numpy(span.image.pixels) for span in spans]).to(model.dtype) if spans else None
    given = {"pixel_values": pixels, "token_type_ids": kinds} if spans else {}
    logits = model(input_ids=ids, **given).logits
    return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("step_wise", [False, True])
def test_padded_rows_have_the_gradient_of_rows_alone(step_wise: bool) -> None:
    model = make_gemma(double=True)
    batch = closed(STEP, with_gemma_images(fixed_rollouts()), Layout()).batch
    for row in range(batch.num_rows):
        one = batch.take([row])
        columns = {name: one.padded(name) for name in one.token_columns}
        spans = one.metadata.images[0] if one.metadata.images else ()
        scores = scores_of(model, columns["input_ids"].long(), spans)
        inputs = PolicyLossInputs(
            logprobs=torch.nn.functional.pad(scores, (1, 0)),
            old_logprobs=columns["old_logprobs"],
            advantages=columns["advantages"],
            loss_mask=columns["loss_mask"],
            rollout_logprobs=columns["rollout_logprobs"],
        )
        (columns["loss_weights"] * policy_loss(inputs, STEP.algorithm).token_losses).sum().backward()
    expected = gradient_of(model)
    learner = learner_of(model, STEP, Layout())
    use_layout(learner, "padded", merge=step_wise, rows=3)
    learner.engine.zero_grad()
    learner.forward_backward(closed(STEP, with_gemma_images(fixed_rollouts()), Layout(step_wise=step_wise)))
    assert_same_gradient(gradient_of(model), expected)


@pytest.mark.parametrize("name", ["packed", "prefix_shared"])
def test_other_layouts_are_refused_by_name(name: str) -> None:
    learner = learner_of(make_gemma(), STEP, Layout())
    use_layout(learner, name, rows=3)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"trainer\.layout=padded"):
        learner.forward_backward(closed(STEP, with_gemma_images(fixed_rollouts()), Layout()))


def test_the_engines_log_probabilities_are_those_of_the_forward() -> None:
    model = make_gemma()
    decoder = Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda ids: str(ids))
    prompts = [((5, *[PLACEHOLDER] * 4, 7, 8), (ImageSpan(1, make_gemma_image(1)),)), ((5, 6, 7, 8, 9), ())]
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=ids,
            sampling=SamplingParams(max_generate_length=8),
            seed=number,
            images=images,
        )
        for number, (ids, images) in enumerate(prompts)
    ]
    for (ids, images), response in zip(prompts, decoder.run(requests)):
        with torch.no_grad():
            expected = scores_of(model, torch.tensor([[*ids, *response.token_ids]]), images)[0, len(ids) - 1 :]
        assert np.abs(np.subtract(response.logprobs, expected.numpy())).max() < 1e-5


def test_the_engines_log_probabilities_are_the_trainers_in_a_later_turn_too() -> None:
    """What was computed in the turn before stands in front of the tokens of the next image."""
    model, trainer = make_gemma(), learner_of_model(make_gemma())
    decoder = Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda ids: str(ids))
    decoder.start_wave()
    prompts: list[Prompt] = [image_prompt(make_gemma_image(1), before=5, after=3), ((5, 6, 7, 8, 9), ())]
    first = decoder.run(requests_of(prompts))
    decoder.start_wave()
    later = later_turns(prompts, first, make_gemma_image(2))
    # Its observation is shorter than that of the others: no padding may stand within what a window counts.
    later.append(((*prompts[1][0], *first[1].token_ids, 9, 10), ()))
    for asked, answers in ((prompts, first), (later, decoder.run(requests_of(later)))):
        for each, answer in zip(asked, answers):
            assert difference(trainer, each, answer) < 1e-5
