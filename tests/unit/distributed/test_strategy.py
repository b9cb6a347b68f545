"""What ranks make of their gradients, on two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from skyrl_train.config import Config
from skyrl_train.config.models import PlacementConfig, StrategyConfig
from skyrl_train.config.rules import validate_config
from skyrl_train.distributed.fsdp import hold_whole_gradients, whole_gradients
from skyrl_train.distributed.gather import own_box
from skyrl_train.distributed.strategy import ModelStrategy, RankContext, Replicated, SingleProcess, make_strategy
from skyrl_train.errors import ConfigError
from tests.support.fake_ranks import as_rank
from tests.support.gloo_ranks import on_ranks


def reduce_own(rank: int, folder: Path) -> list[Tensor]:
    """Gradients after the reduction, of which this rank computed `rank + 1` times a ramp; the second has another type."""
    parameters = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        parameter = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        parameter.grad = (rank + 1) * torch.arange(6, dtype=dtype).view(2, 3)
        parameters.append(parameter)
    Replicated().reduce_gradients([*parameters, nn.Parameter(torch.zeros(1))])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def test_replicas_add_their_gradients_and_do_not_average_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denominators were counted over the whole mini-batch, so that the sum is the gradient."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for gradients in on_ranks(reduce_own, tmp_path):
        assert [gradient.tolist() for gradient in gradients] == [[[0, 3, 6], [9, 12, 15]]] * 3


def test_a_rank_hands_over_the_rows_that_it_has_and_where_they_begin() -> None:
    with as_rank(1, 2) as mesh:
        rows = torch.ones(2, 3)
        whole = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1))
        found = own_box(whole, share=1, num_shares=2)
    assert found is not None
    assert (found[0].shape, found[1]) == ((2, 3), (3, 0))


def test_gradients_that_wait_for_their_sum_begin_as_zeros_of_the_whole_shape() -> None:
    with as_rank(0, 2) as mesh:
        module = nn.Linear(3, 4, bias=False)
        fully_shard(module, mesh=mesh)
        hold_whole_gradients(module)
        assert [gradient.tolist() for gradient in whole_gradients(module)] == [[[0.0] * 3] * 4]


class Lone(SingleProcess):
    def __init__(self, ranks: RankContext, *, name: str = "") -> None:
        self.settings, self.name = ranks, name


def none(ranks: RankContext) -> None:
    return None


ALONE = RankContext(num_ranks=1, device=torch.device("cpu"), dtype=torch.bfloat16)


def test_a_custom_strategy_is_told_of_its_ranks_and_given_its_arguments() -> None:
    made = make_strategy(StrategyConfig(name={"_target_": "test_strategy:Lone", "name": "x"}), ALONE)
    assert isinstance(made, ModelStrategy)
    assert vars(made) == {"settings": ALONE, "name": "x"}


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.name: must make a ModelStrategy; got NoneType"):
        make_strategy(StrategyConfig(name="test_strategy:none"), ALONE)


def test_a_custom_strategy_may_be_of_one_process_or_of_many_and_its_arguments_are_checked() -> None:
    custom = StrategyConfig(name={"_target_": "test_strategy:Lone", "name": "x"}, cpu_offload=True)
    many = PlacementConfig(backend="ray", policy_num_workers=2)
    for placement in (PlacementConfig(), many):
        assert validate_config(Config(strategy=custom, placement=placement)) == []
    misspelt = StrategyConfig(name={"_target_": "test_strategy:Lone", "nam": "x"})
    (violation,) = validate_config(Config(strategy=misspelt))
    assert "strategy.name.nam: is no argument of test_strategy:Lone" in str(violation)
    assert "Did you mean 'name'?" in str(violation)
