"""The optimizer, its parameter groups, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.config.parts import OPTIMIZERS
from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.distributed.mesh import by_mesh
from skyrl_train.errors import CheckpointError, ConfigError, Violation
from skyrl_train.registry import part_name


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The configured optimizer. Weight decay reaches matrices only: biases and norms have one dimension.

    Raises ConfigError where a custom part makes something else.
    """
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups: ParameterGroups = [
        {"params": alike, "weight_decay": decay}
        for chosen, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        for alike in by_mesh(chosen)
    ]
    made = OPTIMIZERS.resolve(config.name)(groups, config)
    if not isinstance(made, torch.optim.Optimizer):
        rule, remedy = "must make a torch.optim.Optimizer", "Return one that was given the groups"
        value = f"{type(made).__name__} from {part_name(config.name)}"
        raise ConfigError([Violation(field=OPTIMIZERS.setting, rule=rule, value=value, remedy=remedy)])
    return made


ParameterGroups = list[dict[str, Any]]
"""As torch's optimizers take them: `params`, and the `weight_decay` of those."""


def adamw(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, with the fused kernel."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def sgd(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Plain gradient descent: the update is the gradient."""
    return torch.optim.SGD(groups, lr=config.lr)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that AdamW's first step would make, all zeros, so that memory holds it from the start."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`{"exp_avg.model.norm.weight": tensor, ...}`: every tensor of the state; empty before the first step."""
    return {
        f"{kind}.{name}": value
        for name, parameter in parameters.items()
        for kind, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Inverse of `optimizer_tensors`. Raises CheckpointError for an unknown parameter, another shape, or state that AdamW
    would find missing in its next step."""
    states: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if name not in parameters:
            raise CheckpointError(f"optimizer state of {name!r}: the model has no such parameter")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state {key!r} has shape {list(value.shape)}; the parameter {list(parameter.shape)}"
            )
        states.setdefault(parameter, {})[kind] = value.to(parameter.device)
    if isinstance(optimizer, torch.optim.AdamW) and states:
        for name, parameter in parameters.items():
            for kind in ("step", "exp_avg", "exp_avg_sq"):
                if kind not in states.get(parameter, {}):
                    raise CheckpointError(f"the optimizer's state lacks {kind}.{name}: it was cut or changed")
    optimizer.state.clear()
    optimizer.state.update(states)
