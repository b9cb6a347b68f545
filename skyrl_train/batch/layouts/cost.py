"""What a forward and backward cost: one model, for dealing rows to ranks, for choosing a layout, and for a plan's times.

    seconds = positions * linear layers + pairs * attention + loss tokens * head + calls * starting a kernel

`positions` are what a forward computes, padding included; `pairs` are tokens that attend to one another; `loss tokens`
are those that the head predicts; `calls` are attention kernels of a layer. Factors follow from the model's own
configuration (`ModelShape`) and from what its device computes in a second (`DeviceRates`). The rates are stated for a
kind of device, or were measured beforehand (`python -m skyrl_train.selftest --measure`) and recorded with the run as
`platform.rates`. They are never measured in a run: what a micro-batch holds decides the order of sums, and a run that is
resumed must cut as it did before. A wrong cost costs speed, never correctness. Imports neither torch nor a model.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.config.fields import LayoutName
from skyrl_train.config.models import RATE_NAMES
from skyrl_train.system.files import cache_folder

Counts = NDArray[np.int64] | NDArray[np.float64]

_BACKWARD = 2
"""A backward computes each product twice: for the input and for the weight. Attention's computes scores again, too."""
ATTENTION_BACKWARD = 2.5
"""The backward of fused attention has five products for two in the forward."""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device computes in a second where it is busy."""

    linear_flops: float
    """Floating-point operations of large matrix products."""
    attention_flops: float
    """The same of the attention kernel of padded and packed rows, masked pairs left out; forward and backward together."""
    kernel_s: float
    """Seconds to start a kernel."""
    read_bytes: float
    """Bytes of memory that are read."""
    flex_flops: float | None = None
    """Those of the kernel of prefix trees, flex attention; None where it is the same kernel, as on a CPU."""


CPU = DeviceRates(linear_flops=7.5e10, attention_flops=5.3e10, kernel_s=1.3e-5, read_bytes=1e10)
"""One core with AVX-512, float32, measured: the best of several rounds."""

_FLEX = (1 + ATTENTION_BACKWARD) / (1 + 2 * ATTENTION_BACKWARD)
"""Flex attention over flash attention, taken to be as fast in the forward and half as fast in the backward. Stated, not
measured."""

RATES: dict[str, DeviceRates] = {
    "H200": DeviceRates(
        linear_flops=6.5e14, attention_flops=3.5e14, flex_flops=3.5e14 * _FLEX, kernel_s=5e-6, read_bytes=3.2e12
    ),
    "H100": DeviceRates(
        linear_flops=6.0e14, attention_flops=3.5e14, flex_flops=3.5e14 * _FLEX, kernel_s=5e-6, read_bytes=2.2e12
    ),
    "A100": DeviceRates(linear_flops=2.4e14, attention_flops=1.5e14, kernel_s=6e-6, read_bytes=1.3e12),
    "": DeviceRates(linear_flops=1.0e14, attention_flops=6e13, kernel_s=6e-6, read_bytes=6e11),
}
"""bfloat16, by what the device's name contains; the last is any other accelerator. About two thirds of the data sheets'
rates, not measured. Where flex attention is not stated it is taken for as fast as flash attention."""


def rates_of(device_name: str, recorded: Mapping[str, Any] | None = None) -> DeviceRates:
    """The rates of a device: those `recorded` with a run (`platform.rates`), or else those that are stated of `cpu`, or of a
    name as `torch.cuda.get_device_name` tells it."""
    if recorded:
        return DeviceRates(**{name: recorded[name] for name in RATE_NAMES})
    if device_name == "cpu":
        return CPU
    # The last name is empty, and so in every device's.
    return next(rates for name, rates in RATES.items() if name in device_name)


def rates_file(device_name: str) -> Path:
    """Return where it is kept what was measured of devices of this name."""
    return cache_folder("rates") / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_name)}.json"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `python -m skyrl_train.selftest --measure` found of a device (`rates.json`)."""

    rates: Mapping[str, Any] | None = None
    """For `platform.rates`; None where nothing was measured."""
    updates: tuple[Mapping[str, Any], ...] = ()
    """Each with its `hidden_size`, `layout`, `compiled`, `checkpointing`, `positions` and `tokens_per_s`."""

    @classmethod
    def of_device(cls, device_name: str) -> Measured:
        """Of devices of this name, as it is kept for this user; nothing where there is no such file."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(rates_file(device_name).read_text(encoding="utf-8"))
            updates = (each for each in content["pieces"] if each.get("tokens_per_s"))
            return cls(rates=content["rates"], updates=tuple(updates))
        return cls()

    def compiled_gain(self, hidden_size: int, layout: LayoutName) -> float:
        """How many times as fast compiled layers are as eager ones, in this layout at the nearest hidden size that was
        measured with both; 0 where none was."""
        found: dict[tuple[Any, ...], dict[bool, float]] = defaultdict(dict)
        for each in self.updates:
            if each["layout"] == layout:
                key = (each["hidden_size"], each["checkpointing"], each["positions"])
                found[key][bool(each["compiled"])] = each["tokens_per_s"]
        both = {key: rates[True] / rates[False] for key, rates in found.items() if len(rates) == 2}
        # Nearest as a ratio: from 1024, 2048 is as far as 512.
        nearest = min({key[0] for key in both}, key=lambda size: abs(math.log(size / hidden_size)), default=0)
        return min((gain for key, gain in both.items() if key[0] == nearest), default=0.0)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a decoder computes, in floating-point operations of a forward."""

    num_layers: int
    linear_flops_per_token: float
    """Of all layers: twice the parameters that a token passes, in a mixture of experts those of its active ones."""
    attention_flops_per_pair: float
    """Of all layers, for a token and one that it attends to: scores and their values, twice each."""
    head_flops_per_token: float
    """Of the last layer, for a token that is predicted."""
    hidden_size: int = 0
    kv_numbers_per_token: int = 0
    """Keys and values of all layers."""

    @property
    def parameters(self) -> float:
        """That a token passes, the head among them."""
        return (self.linear_flops_per_token + self.head_flops_per_token) / 2

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Of a model's configuration file; of the text model where there are others.

        Raises KeyError for a configuration that names no hidden size, layers or heads.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        hidden, layers, heads = (
            int(text[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        head = int(text.get("head_dim") or hidden // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        # Query and output have all heads; key and value are shared by groups of them.
        projections = hidden * head * (2 * heads + 2 * kv_heads)
        feed_forward = sum(_feed_forward_width(text, layer) for layer in range(layers))
        return cls(
            num_layers=layers,
            # Gate, up and down: three products of the same size.
            linear_flops_per_token=2.0 * (layers * projections + 3 * hidden * feed_forward),
            attention_flops_per_pair=4.0 * heads * head * layers,
            head_flops_per_token=2.0 * hidden * int(text.get("vocab_size") or 0),
            hidden_size=hidden,
            kv_numbers_per_token=2 * kv_heads * head * layers,
        )


def _feed_forward_width(text: Mapping[str, Any], layer: int) -> int:
    """Features between the products of a layer that a token passes: all of a dense layer, those of the active experts and
    of the shared one where the layer has experts."""
    hidden = int(text["hidden_size"])
    dense = int(text.get("intermediate_size") or 4 * hidden)
    active = int(text.get("num_experts_per_tok") or 0)
    # Families name layers without experts in three ways: the first ones, by number, or all but every n-th.
    every = int(text.get("decoder_sparse_step") or 1)
    is_dense = layer < int(text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or ())
    if not active or is_dense or (layer + 1) % every:
        return dense
    each = int(text.get("moe_intermediate_size") or dense)
    shared = int(text.get("shared_expert_intermediate_size") or each * int(text.get("n_shared_experts") or 0))
    return active * each + shared


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a forward and backward, in seconds, or in any other unit: only ratios decide what is planned.

    The default is that of a decoder of hidden size 2048 in units of a position: with `24 h^2` operations per position
    and `4 h` per pair in a layer, a pair costs `1 / (6 h)` of a position.
    """

    per_position: float = 1.0
    per_pair: float = 1.0 / (6 * 2048)
    per_loss_token: float = 0.0
    per_call: float = 2.0
    """Of one attention kernel in every layer: what a small model waits for it, and a large one hides."""
    tree_pair: float = 1.0
    """What a pair costs in a prefix tree, whose kernel is another, over what it costs elsewhere."""

    @classmethod
    def of_config(
        cls, config: Mapping[str, Any], *, device: str, recorded: Mapping[str, Any] | None = None
    ) -> CostModel:
        """The cost of the model that has this configuration file on a device (`rates_of`); the default for a configuration
        that does not tell its sizes in the usual words."""
        try:
            return cls.of_model(ModelShape.of_config(config), rates_of(device, recorded))
        except (KeyError, TypeError, ValueError):
            return cls()

    @classmethod
    def of_model(cls, model: ModelShape, rates: DeviceRates) -> CostModel:
        """In seconds of a forward and its backward."""
        passes = 1 + _BACKWARD
        return cls(
            per_position=passes * model.linear_flops_per_token / rates.linear_flops,
            per_pair=(1 + ATTENTION_BACKWARD) * model.attention_flops_per_pair / rates.attention_flops,
            per_loss_token=passes * model.head_flops_per_token / rates.linear_flops,
            per_call=passes * model.num_layers * rates.kernel_s,
            tree_pair=rates.attention_flops / (rates.flex_flops or rates.attention_flops),
        )

    def of(
        self,
        positions: Counts,
        pairs: Counts,
        calls: Counts,
        loss_tokens: Counts | int = 0,
        *,
        layout: LayoutName = "packed",
    ) -> NDArray[np.float64]:
        """Elementwise, of the counts of forwards of this layout."""
        per_pair = self.per_pair * (self.tree_pair if layout == "prefix_shared" else 1.0)
        cost: NDArray[np.float64] = (
            positions * self.per_position + pairs * per_pair + calls * self.per_call + loss_tokens * self.per_loss_token
        )
        return cost

    def of_rows(self, lengths: NDArray[np.int64], *, in_tree: bool = False) -> NDArray[np.float64]:
        """`[rows]`: what a row of each length adds to a forward, starting kernels and the head left out."""
        exact = lengths.astype(np.float64)
        per_pair = self.per_pair * (self.tree_pair if in_tree else 1.0)
        # Each token attends to itself and to those before it: about n^2 / 2 pairs of a row of n.
        cost: NDArray[np.float64] = self.per_position * exact + per_pair / 2 * exact * exact
        return cost
