"""Layers that torch compiles: the same gradient, one set of graphs for all sizes, or a refusal that says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from skyrl_train.errors import ModelError
from skyrl_train.learner import PolicyLearner, compile_layers
from skyrl_train.model.layers import attention
from tests.support.layout_cases import close, distance, flat_gradient, tree_batch, use_layout
from tests.support.learner_cases import make_learner, save_tiny_model


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling changes what is registered."""
    monkeypatch.setattr(attention, "_registered", dict(attention._registered))


@pytest.fixture
def learner(tmp_path: Path) -> PolicyLearner:
    return make_learner(save_tiny_model(tmp_path), double=True)


def test_without_a_compiler_it_is_refused(learner: PolicyLearner) -> None:
    from torch._inductor import config

    missing = r"model.compile=true, but torch finds no C\+\+ compiler .* Install one \(g\+\+\)"
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ModelError, match=missing):
        compile_layers(learner.engine.model, name="some/model")


def test_a_model_without_decoder_layers_is_refused() -> None:
    class Other(nn.Linear):
        device = torch.device("cpu")

    with pytest.raises(ModelError, match=r"Other declares no decoder layers to compile. Set model.compile=false"):
        compile_layers(Other(2, 2), name="some/model")  # type: ignore[arg-type]


def test_a_torch_whose_folder_has_a_blank_is_refused(learner: PolicyLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/home/a user/torch/__init__.py")
    with pytest.raises(
        ModelError, match=r"installed in '/home/a user/torch', whose blank .* Or set model.compile=false"
    ):
        compile_layers(learner.engine.model, name="some/model")


@pytest.mark.nightly
@pytest.mark.skipif(" " in torch.__file__, reason="torch compiles nothing where its own folder has a blank in its path")
@pytest.mark.slow
def test_the_gradient_is_the_same_and_no_micro_batch_is_compiled_anew(learner: PolicyLearner, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    def gradient(of: PolicyLearner, layout: str, seed: int) -> torch.Tensor:
        use_layout(of, layout, rows=5)  # type: ignore[arg-type]
        of.forward_backward(close(tree_batch(seed)))
        return flat_gradient(of)

    layouts = ("packed", "prefix_shared", "padded")
    expected = {(layout, seed): gradient(learner, layout, seed) for layout in layouts for seed in range(4)}
    counters.clear()
    compiled = make_learner(tmp_path, double=True, compiled=True)
    assert list(compiled.engine.parameters) == list(learner.engine.parameters)
    for layout in layouts:
        assert distance(gradient(compiled, layout, 0), expected[layout, 0]) < 1e-10
        graphs = counters["stats"]["unique_graphs"]
        for seed in range(1, 4):
            assert distance(gradient(compiled, layout, seed), expected[layout, seed]) < 1e-10
        assert counters["stats"]["unique_graphs"] == graphs, layout
