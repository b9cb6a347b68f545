"""Where a model comes from, and how it is spread over ranks."""

import torch
from transformers import AutoModelForCausalLM

from skyrl_train.distributed import Sharded, SingleProcess


def perturbed(folder, dtype, model, *, noise):
    """The model in `folder` with a little noise on its weights, the same on every rank."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return loaded, []


class ClampedAlone(SingleProcess):
    """One process; no element of a gradient is beyond `largest`."""

    def __init__(self, largest):
        self.largest = largest

    def reduce_gradients(self, parameters):
        clamp(parameters, self.largest)


class ClampedShards(Sharded):
    """FSDP2, whose backward pass has summed the gradients over ranks; no element is beyond `largest`."""

    def __init__(self, largest, **settings):
        super().__init__(**settings)
        self.largest = largest

    def reduce_gradients(self, parameters):
        clamp(parameters, self.largest)


def clamp(parameters, largest):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.clamp_(-largest, largest)


def clamped(ranks, *, largest=1.0):
    """`ranks` says over how many, where and in which type the model is spread."""
    if ranks.num_ranks == 1:
        return ClampedAlone(largest)
    return ClampedShards(largest, device=ranks.device, dtype=ranks.dtype, cpu_offload=ranks.cpu_offload)
