"""Which experts each layer of a mixture sends a token to: recorded where tokens are sampled, replayed where they are
trained.

A router of transformers picks its experts by one `torch.topk` over a score of each, whatever it computes before and after
that. While a router runs, that call is answered here: by the recorded experts where there are some, and with the current
scores at these. What becomes of the scores stays the family's own arithmetic, and carries gradients. So tokens go where they
went when they were sampled, and how much each expert counts there is the trained model's to say: rollout routing replay (R3,
arXiv:2510.11370), routing replay in GSPO's report (arXiv:2507.18071).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from skyrl_train.batch import ROUTED, TrainingInputBatch, moved
from skyrl_train.batch.layouts import Layout
from skyrl_train.config.rules import num_experts
from skyrl_train.errors import BatchError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUTING = "_skyrl_expert_routing"
"""Attribute of a model whose routers are followed."""
_OFF = "Set trainer.moe_routing_replay=false"


class ExpertRouting:
    """The routers of one model, and what they are to do in the forward that runs."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Raises ModelError for a model without experts."""
        config = model.config.get_text_config()
        self.num_experts = num_experts(config.to_dict())
        routers = {
            int(number[1]): module
            for key, module in model.named_modules()
            if "Router" in type(module).__name__ and (number := re.search(r"layers\.(\d+)\.", key))
        }
        self.top_k = int(getattr(config, "num_experts_per_tok", None) or 0)
        if not (self.num_experts and routers and self.top_k):
            raise ModelError(
                f"model path {name!r}: trainer.moe_routing_replay=true, but {type(model).__name__} has no router that "
                f"chooses among experts. {_OFF}"
            )
        self.num_layers = int(config.num_hidden_layers)
        self.given: Tensor | None = None
        """int16 `[positions, layers * top_k]`: experts of each position of the running forward; -1: the router's own."""
        self.taken: Tensor | None = None
        """The same of those that were chosen, where it `records`; 0 in layers without experts."""
        self.records = False
        for layer, router in routers.items():
            self._follow(router, layer)

    @property
    def width(self) -> int:
        """Expert ids that are recorded for each token: `num_layers * top_k`."""
        return self.num_layers * self.top_k

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return int64 `[positions, top_k]`: the experts of a layer, `own` where none are given."""
        columns = slice(layer * self.top_k, (layer + 1) * self.top_k)
        chosen = own
        if self.given is not None:
            given = self.given[:, columns].to(own.dtype)
            chosen = torch.where(given >= 0, given, own)
        if self.records:
            if self.taken is None or len(self.taken) != len(own):
                self.taken = own.new_zeros((len(own), self.width), dtype=torch.int16)
            self.taken[:, columns] = chosen
        return chosen

    def _follow(self, router: nn.Module, layer: int) -> None:
        compute = router.forward

        def forward(*args: Any, **named: Any) -> Any:
            if self.given is None and not self.records:
                return compute(*args, **named)
            selection = _Selection(self, layer)
            with selection:
                found = compute(*args, **named)
            if selection.count != 1:
                raise ModelError(
                    f"{type(router).__name__} chooses its experts in another way than by one top-{self.top_k} of "
                    f"{self.num_experts} scores, so that its routing cannot be replayed. {_OFF}"
                )
            return found

        router.forward = forward


class _Selection(TorchFunctionMode):
    """Answers the `topk` that is over all experts; groups of experts may be chosen by others before it."""

    def __init__(self, routing: ExpertRouting, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        own = found.indices
        if own.shape != (len(scores), self._routing.top_k) or scores.shape[-1] != self._routing.num_experts:
            return found
        self.count += 1
        chosen = self._routing.choose(self._layer, own)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@torch.no_grad()
def follow_routing(model: PreTrainedModel, *, name: str, try_it: bool = True) -> ExpertRouting:
    """Have the routers of `model` do as its `ExpertRouting` says, which is returned.

    `try_it`: compute a few tokens, which a model without weights cannot. Raises ModelError for a model that has no experts,
    or whose routers do something else than choose the best.
    """
    routing = ExpertRouting(model, name)
    if try_it:
        routing.records = True
        model.base_model(input_ids=torch.arange(4, device=model.device).unsqueeze(0), use_cache=False)
        routing.taken, routing.records = None, False
    setattr(model, _ROUTING, routing)
    return routing


def record_routing(model: PreTrainedModel, *, name: str) -> None:
    """Have each forward of `model` with a cache note where its tokens went, in that cache. Raises ModelError as
    `follow_routing`."""
    routing = follow_routing(model, name=name)
    routing.records = True

    def note(_model: nn.Module, _args: Any, named: dict[str, Any], _output: Any) -> None:
        taken, routing.taken = routing.taken, None
        cache = named.get("past_key_values")
        if cache is not None and taken is not None:
            columns = taken.view(*named["input_ids"].shape, routing.num_layers, -1).transpose(1, 2)
            cache.routed.update(columns, columns[..., :0])

    model.register_forward_hook(note, with_kwargs=True)


def replayed(model: PreTrainedModel, batch: TrainingInputBatch) -> TrainingInputBatch:
    """Return the batch without recorded experts where the model follows none.

    Raises BatchError where it does and they are those of another model.
    """
    routing: ExpertRouting | None = getattr(model, _ROUTING, None)
    if routing is None or ROUTED not in batch:
        return batch.without_columns(ROUTED)
    column = batch[ROUTED]
    if column.shape[1] != routing.width or (len(column) and int(column.max()) >= routing.num_experts):
        raise BatchError(
            f"recorded experts: {column.shape[1]} for each token, up to number {int(column.max())}, where the model has "
            f"{routing.width}, below {routing.num_experts}. Were these rollouts made with another model?"
        )
    return batch


@contextmanager
def replaying(model: PreTrainedModel, rows: TrainingInputBatch, layout: Layout, device: torch.device) -> Iterator[None]:
    """Forwards of `layout` inside, and their backwards, send tokens to the experts that `rows` have recorded, and others
    where they will. Rows and layout are on the CPU, the model on `device`."""
    routing: ExpertRouting | None = getattr(model, _ROUTING, None)
    if routing is None or ROUTED not in rows:
        yield
        return
    column = rows[ROUTED]
    given = column.new_full((layout.num_positions, routing.width), -1)
    # Tokens at one position have the same experts, there and before it: `prefix_tree.sharing_keys`.
    given[layout.position_of_token] = column
    own = layout.own_columns(torch.arange(layout.num_positions)).flatten()
    routing.given = moved(given[own], device)
    try:
        yield
    finally:
        routing.given = None
