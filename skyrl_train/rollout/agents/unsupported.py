"""What requests say of how tokens are drawn and answers are shaped, beyond what bounds an answer: the trainer's sampling is
what is trained on, so that this is not done. It is counted by name, and told once, or refused, as is chosen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from skyrl_train.system.files import shown
from skyrl_train.types import SamplingParams

logger = logging.getLogger(__name__)

_TRAINERS = ("temperature", "top_p", "top_k", "min_p")
"""They are as the trainer's settings say; the same value may be asked for."""
_AS_IT_IS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_TRAINERS, ()),
    "seed": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    "max_tool_calls": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "thinking": ({"type": "disabled"},),
    "chat_template_kwargs": ({},),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Parameters of the three APIs, and of vLLM's, with the values that ask for what is done anyway; null is one of each."""


def unsupported(body: Mapping[str, Any], sampling: SamplingParams) -> dict[str, str]:
    """Return, by name, what a request asks for and does not get, and what it gets instead."""
    found: dict[str, str] = {}
    for name, values in _AS_IT_IS.items():
        value = body.get(name)
        own = getattr(sampling, name) if name in _TRAINERS else None
        if value is None or value in values or (own is not None and value == own):
            continue
        instead = f"it is {own:g} here" if own is not None else "it is not done here"
        found[name] = f"{name}={shown(value)}: {instead}, as answers are trained on as generator.sampling draws them"
    return found


def tell_once(found: Mapping[str, str]) -> None:
    """Log each name the first time that this process sees it."""
    for name, what in found.items():
        if name not in _TOLD:
            _TOLD.add(name)
            logger.warning(
                "an agent asks for %s. Counted as env/agent/ignored/%s, and not told again; "
                "generator.agent_loop.unsupported=refuse refuses such requests",
                what,
                name,
            )


_TOLD: set[str] = set()
