"""Tiny models of images and text, images, and rollouts whose prompts and observations hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from skyrl_train.images import Image, ImageSpan
from skyrl_train.model import quiet_transformers
from skyrl_train.model.vision import add_vision
from skyrl_train.types import RolloutBatch, Trajectory, Turn

VOCABULARY, PLACEHOLDER = 50, 49
PATCH, MERGE = 2, 2
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 1,
    "window_size": 8,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.2,
}


def make_vlm(*, seed: int = 0, double: bool = False, text: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """A random Qwen2.5-VL of two layers whose tower has two more. `text`: what differs from `TEXT`."""
    sizes = {**TEXT, **(text or {})}
    torch.manual_seed(seed)
    with quiet_transformers():
        config = AutoConfig.for_model(
            "qwen2_5_vl",
            text_config=sizes,
            vision_config={**VISION, "out_hidden_size": sizes["hidden_size"]},
            image_token_id=PLACEHOLDER,
            video_token_id=48,
            vision_start_token_id=47,
            vision_end_token_id=46,
            tie_word_embeddings=True,
        )
        made: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    if double:
        make_double_vlm(made)
    add_vision(made)
    return made.eval()


def make_double_vlm(model: nn.Module) -> None:
    """Compute in float64 throughout, where transformers' norms and the tower's rotation would round to float32 inside."""
    modeling_qwen2_5_vl.apply_rotary_pos_emb_vision = _rotate  # which float32 goes through as before
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if "RMSNorm" in type(child).__name__:
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    model.double()


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turn = modeling_qwen2_5_vl.rotate_half
    found = [(each * cos + turn(each) * sin).to(each.dtype) for each in (query, key)]
    return found[0], found[1]


def make_image(number: int, rows: int = 2, columns: int = 2) -> Image:
    """A random image of so many rows and columns of tokens."""
    rng = np.random.default_rng(number)
    pixels = rng.standard_normal((rows * columns * MERGE**2, 3 * PATCH**2)).astype(np.float32)
    return Image(
        key=hashlib.sha256(f"{number} {rows} {columns}".encode()).hexdigest(),
        pixels=pixels,
        patches=(1, rows * MERGE, columns * MERGE),
        grid=(rows, columns),
        num_tokens=rows * columns,
    )


def with_images(batch_of: RolloutBatch, *, seed: int = 0) -> RolloutBatch:
    """The rollouts with images in their prompts (those of one prompt the same) and in some observations. Two prompts in
    three have one, and placeholders that no image stands for are there, too, as a policy may sample them."""
    rng = np.random.default_rng(seed)
    trajectories = [_with_images(each, rng) for each in batch_of.trajectories]
    return replace(batch_of, trajectories=tuple(trajectories))


def _with_images(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    number = int(trajectory.prompt_uid.removeprefix("p"))
    turns: list[Turn] = []
    for index, turn in enumerate(trajectory.turns):
        image = None
        if index == 0 and number % 3:
            image = make_image(number, rows=1 + number % 2, columns=3)
        elif index and rng.random() < 0.6:
            image = make_image(int(rng.integers(5, 7)))
        if image is not None:
            ids = [47, *[PLACEHOLDER] * image.num_tokens, *turn.added_token_ids.tolist()]
            turn = replace(turn, added_token_ids=np.array(ids, np.int32), images=(ImageSpan(1, image),))
        turns.append(turn)
    return replace(trajectory, turns=tuple(turns))


def own_arguments(ids: torch.Tensor, spans: tuple[ImageSpan, ...], dtype: torch.dtype) -> dict[str, Any]:
    """What transformers' own forward takes of one row `[1, tokens]` and its images."""
    kinds = torch.zeros_like(ids)
    for span in spans:
        kinds[0, span.start : span.stop] = 1
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.cat([torch.from_numpy(span.image.pixels) for span in spans]).to(dtype),
        "image_grid_thw": torch.tensor([span.image.patches for span in spans]),
    }


def make_gemma(*, seed: int = 0, double: bool = False) -> PreTrainedModel:
    """A random Gemma 3 of two layers, one of which sees a window, and a tower of one; an image has four tokens."""
    torch.manual_seed(seed)
    text = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
    with quiet_transformers():
        config = AutoConfig.for_model(
            "gemma3",
            text_config={
                **text,
                "model_type": "gemma3_text",
                "head_dim": 8,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 2,
            },
            mm_tokens_per_image=4,
            image_token_index=PLACEHOLDER,
            boi_token_index=47,
            eoi_token_index=46,
        )
        config.image_token_id = PLACEHOLDER
        made: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    if double:
        for module in made.modules():
            if type(module).__name__ == "Gemma3RMSNorm":
                module.forward = MethodType(_double_norm, module)
        made.double()
    with torch.no_grad():
        # which starts at 0, so that no image would matter
        made.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.3)  # type: ignore[union-attr]
    add_vision(made)
    return made.eval()


def _double_norm(self: Any, x: Tensor) -> Tensor:
    found: Tensor = self._norm(x) * (1.0 + self.weight)
    return found


def make_gemma_image(number: int) -> Image:
    """A random image of four tokens."""
    rng = np.random.default_rng(number)
    return Image(
        key=hashlib.sha256(f"gemma {number}".encode()).hexdigest(),
        pixels=rng.standard_normal((3, 8, 8)).astype(np.float32),
        num_tokens=4,
    )


def with_gemma_images(batch_of: RolloutBatch) -> RolloutBatch:
    """The rollouts with an image in each prompt but the first two trajectories', and some in a later turn."""
    trajectories = []
    for number, each in enumerate(batch_of.trajectories):
        turns = []
        for index, turn in enumerate(each.turns):
            # Without placeholders that no image stands for, which transformers' own forward refuses.
            turn = replace(turn, added_token_ids=turn.added_token_ids % PLACEHOLDER)
            if number > 1 and index != 1:
                ids = np.array([5, *[PLACEHOLDER] * 4, *turn.added_token_ids.tolist()], np.int32)
                image = make_gemma_image(int(each.prompt_uid[1:]) + 10 * index)
                turn = replace(turn, added_token_ids=ids, images=(ImageSpan(1, image),))
            turns.append(replace(turn, response_token_ids=turn.response_token_ids % PLACEHOLDER))
        trajectories.append(replace(each, turns=tuple(turns)))
    return replace(batch_of, trajectories=tuple(trajectories))
