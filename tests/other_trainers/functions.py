"""The public functions of verl, TRL, OpenRLHF and SkyRL, called on plain tensors. None of them needs a trainer or a GPU.

Only what the functions themselves need is imported: packages that a function's module imports for other things (DeepSpeed,
FlashAttention, a configuration tree) are stood in for by empty modules where they are not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.losses import PolicyLossInputs


@cache
def module_of(name: str) -> Any:
    """The module. Raises ImportError where its package is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ImportError(f"{name.partition('.')[0]} is not installed")
    if name.startswith("openrlhf.models"):
        _bare_package("openrlhf.models")
        with _stand_in("deepspeed"):
            return importlib.import_module(name)
    if name.startswith("skyrl."):
        _bare_package("skyrl.backends")
        _bare_package("skyrl.backends.skyrl_train")
        _bare_package("skyrl.backends.skyrl_train.utils")
        with _stand_in("skyrl.train"), _stand_in("skyrl.train.config", AlgorithmConfig=object):
            return importlib.import_module(name)
    return importlib.import_module(name)


def _bare_package(name: str) -> None:
    """Makes the submodules of a package importable without running its `__init__`, which imports all of them."""
    parent, _, own = name.rpartition(".")
    places = importlib.import_module(parent).__path__
    package = ModuleType(name)
    package.__path__ = [str(Path(place) / own) for place in places]
    sys.modules.setdefault(name, package)


@contextmanager
def _stand_in(name: str, **attributes: Any) -> Iterator[None]:
    """An empty module of that name with these attributes, for as long as the context lasts."""
    before = sys.modules.get(name)
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def verl_policy_loss(name: str, inputs: PolicyLossInputs, base: Tensor, **changes: Any) -> Tensor:
    """`compute_policy_loss_NAME` with token-mean aggregation, ratios against `base`; 0.2 and 0.28 as bounds."""
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **changes}
    config = module_of("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
    )
    function = getattr(module_of("verl.trainer.ppo.core_algos"), f"compute_policy_loss_{name}")
    loss: Tensor = function(base, inputs.logprobs, inputs.advantages, inputs.loss_mask.double(), "token-mean", config)[
        0
    ]
    return loss


def trl_loss(
    loss_type: str,
    inputs: PolicyLossInputs,
    *,
    entropies: Tensor | None = None,
    ref: Tensor | None = None,
    **changes: Any,
) -> Tensor:
    """TRL's loss of these log-probabilities, called on a stand-in for its trainer. Advantages are one per row."""
    trainer = module_of("trl.trainer.grpo_trainer").GRPOTrainer
    rows, width = inputs.logprobs.shape
    nothing = torch.zeros(rows, width, dtype=inputs.logprobs.dtype)
    scores = (inputs.logprobs, nothing if entropies is None else entropies, None)
    settings = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 1.28 if loss_type == "cispo" else 0.28,
        **changes,
    }
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        reduce=lambda value, **_: value,
        pad_across_processes=lambda value, **_: value,
    )
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: scores,
        loss_type=loss_type,
        args=SimpleNamespace(
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
            use_bias_correction_kl=True,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=False),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        _metrics={"eval": _Anything(), "train": _Anything()},
        **settings,
    )
    for name in ("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"):
        function = getattr(trainer, name)
        is_static = isinstance(vars(trainer)[name], staticmethod)
        setattr(stand_in, name, function if is_static else function.__get__(stand_in))
    given = {
        "prompt_ids": torch.zeros(rows, 1),
        "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(rows, width),
        "completion_mask": inputs.loss_mask.double(),
        "advantages": inputs.advantages[:, 0],
        "old_per_token_logps": inputs.old_logprobs,
        "num_items_in_batch": inputs.loss_mask.sum(),
    }
    if inputs.rollout_logprobs is not None:
        given["sampling_per_token_logps"] = inputs.rollout_logprobs
    if ref is not None:
        given["ref_per_token_logps"] = ref
    loss: Tensor = trainer._compute_loss(stand_in, None, given)
    return loss


class _Anything(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def openrlhf_loss(inputs: PolicyLossInputs, **settings: Any) -> Tensor:
    """`PolicyLoss` with 0.2 and 0.28 as bounds."""
    policy_loss = module_of("openrlhf.models.loss").PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, **settings)
    loss: Tensor = policy_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        action_mask=inputs.loss_mask.double(),
        rollout_log_probs=inputs.rollout_logprobs,
    )[0]
    return loss


def skyrl_loss(function: str, inputs: PolicyLossInputs, **settings: Any) -> Tensor:
    """A policy loss of SkyRL, which is a sum over tokens; 0.2 and 0.28 as bounds."""
    correction = SimpleNamespace(
        tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
    )  # fmt: skip
    config = SimpleNamespace(
        **{
            "eps_clip_low": 0.2,
            "eps_clip_high": 0.28,
            "clip_ratio_c": 3.0,
            "loss_reduction": "sequence_mean",
            "off_policy_correction": correction,
            **settings,
        }
    )
    ppo_utils = module_of("skyrl.backends.skyrl_train.utils.ppo_utils")
    loss: Tensor = getattr(ppo_utils, function)(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, config, inputs.loss_mask.double(), None
    )[0]
    return loss
