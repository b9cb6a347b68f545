"""How weights move."""

import torch


def adagrad(groups, config, *, initial=0.1):
    """`groups` are the parameters, with their weight decay."""
    return torch.optim.Adagrad(groups, lr=config.lr, initial_accumulator_value=initial, eps=config.eps)


def halving(progress, floor, *, times=3):
    """Factor on the learning rate, from 1 at progress 0; halved so many times until progress 1, never below `floor`."""
    return max(floor, 0.5 ** int(times * progress))
