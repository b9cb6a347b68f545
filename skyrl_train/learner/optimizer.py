"""The optimizer, its parameter groups, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.config.models import STATE_BUCKET_BYTES, OptimizerConfig
from skyrl_train.distributed import by_mesh
from skyrl_train.errors import CheckpointError, ConfigError, SkyrlTrainError, Violation
from skyrl_train.parts import OPTIMIZERS
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
        # A group for each mesh: the fused kernel takes tensors of one at a time.
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


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """What one step of AdamW is made with, where whoever trains states it for each (Loshchilov and Hutter, arXiv:1711.05101,
    decoupled decay)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0
    """Of matrices; biases and norms never decay."""
    max_grad_norm: float = 0.0
    """Gradients are clipped to this norm, all together; 0 clips none."""

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the next step of the optimizer made so. Raises SkyrlTrainError for another than AdamW."""
        if not isinstance(optimizer, torch.optim.AdamW):
            raise SkyrlTrainError(f"settings of a step are AdamW's; the optimizer is {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            decay = self.weight_decay if group["params"][0].ndim >= 2 else 0.0
            group.update(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=decay)


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


def step_from_host(optimizer: torch.optim.Optimizer) -> None:
    """Steps an optimizer whose averages are in the host: they come to the device and leave it a bucket of parameters at a
    time. Drops each gradient as soon as it was used.

    The optimizer itself updates the parameters of a bucket, on the device and from the same numbers, so that the update is
    bit for bit that of averages which stay there. State of one number, as AdamW's count of steps, does stay there.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    devices = {parameter.device for parameter in gradients if parameter.is_cuda}
    for parameter in gradients:
        parameter.grad = None
    # The optimizer passes by what has no gradient. So each step below is of the
    # bucket that was given its gradients back, and `pop` lets go of them behind it.
    for bucket in _buckets(optimizer, list(gradients)):
        _step_of_bucket(optimizer, {parameter: gradients.pop(parameter) for parameter in bucket})
    for device in devices:  # copies go in the order of its work, and checkpoints are written from what they leave
        torch.cuda.current_stream(device).synchronize()


def _step_of_bucket(optimizer: torch.optim.Optimizer, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Nothing of what it brings to the device is there after it."""
    in_host = {parameter: _averages(optimizer, parameter) for parameter in gradients}
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
        for kind, memory in in_host[parameter].items():
            optimizer.state[parameter][kind] = memory.to(parameter.device, non_blocking=True, copy=True)
    optimizer.step()
    for parameter in gradients:
        parameter.grad = None
        for kind, value in _averages(optimizer, parameter).items():
            own = in_host[parameter].get(kind)
            optimizer.state[parameter][kind] = _to_host(value, own, pinned=parameter.is_cuda)


def _buckets(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """AdamW updates each parameter by itself. Of another optimizer nothing is known: it has them all at once."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return [parameters]
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        # AdamW has two averages of each parameter, of its size.
        num_bytes = 2 * _local(parameter).nbytes
        if num_bytes > room or not buckets:
            buckets.append([])
            room = STATE_BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= num_bytes
    return buckets


def _averages(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What of a parameter's state is more than a number, by kind."""
    state = optimizer.state.get(parameter, {})
    return {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.ndim}


def _to_host(value: Tensor, memory: Tensor | None = None, *, pinned: bool) -> Tensor:
    """Copies a tensor into `memory` of the host, or takes some for it; of a sharded one this rank's part."""
    if memory is None:
        memory = torch.empty_like(value, device="cpu", pin_memory=pinned)
    _local(memory).copy_(_local(value), non_blocking=True)
    return memory


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`{"exp_avg.model.norm.weight": tensor, ...}`: every tensor of the state; empty before the first step."""
    return {
        f"{kind}.{name}": value
        for name, parameter in parameters.items()
        for kind, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    *,
    in_host: bool = False,
) -> None:
    """Inverse of `optimizer_tensors`; `in_host`: for `step_from_host`. Raises CheckpointError for an unknown parameter,
    another shape, or state that AdamW would find missing in its next step."""
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
        stays = in_host and value.ndim
        placed = _to_host(value, pinned=parameter.is_cuda) if stays else value.to(parameter.device)
        states.setdefault(parameter, {})[kind] = placed
    if isinstance(optimizer, torch.optim.AdamW) and states:
        for name, parameter in parameters.items():
            for kind in ("step", "exp_avg", "exp_avg_sq"):
                if kind not in states.get(parameter, {}):
                    raise CheckpointError(f"the optimizer's state lacks {kind}.{name}: it was cut or changed")
    # Only now, as everything was checked: a checkpoint that is refused leaves the state as it was.
    optimizer.state.clear()
    optimizer.state.update(states)
