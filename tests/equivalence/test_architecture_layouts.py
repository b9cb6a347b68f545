"""Which layouts the families take that docs/models.md says train with fused attention: in each of them, one gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ModelError
from skyrl_train.model import load_causal_lm, supported_layout
from tests.cluster.architectures import ARCHITECTURES, EAGER, build
from tests.support.layout_cases import close, distance, flat_gradient, on_policy, tree_batch
from tests.support.learner_cases import make_learner

pytestmark = pytest.mark.nightly

ROWS_ALONE = ("falcon",)
"""Their attention is not one that can be told which rows a position may see."""
LAYOUTS: tuple[LayoutChoice, ...] = ("packed", "prefix_shared")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in EAGER])
def test_scores_and_gradient_are_those_of_padded_rows(name: str, tmp_path: Path) -> None:
    folder = build(name, tmp_path)
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    if name in ROWS_ALONE:
        for layout in LAYOUTS:
            with pytest.raises(ModelError, match=r"Set trainer\.layout=padded"):
                supported_layout(model, layout, name=name)
        return

    batch = tree_batch(1)
    algorithm = AlgorithmConfig(kl_loss_coef=0.0, entropy_coef=0.0)
    padded = make_learner(folder, algorithm=algorithm)
    scores = padded.forward(batch)
    mini_batch = close(on_policy(batch, scores))
    padded.forward_backward(mini_batch)
    gradient = flat_gradient(padded)
    for layout in LAYOUTS:
        assert supported_layout(model, layout, name=name) == layout
        learner = make_learner(folder, algorithm=algorithm, layout=layout)
        found = learner.forward(batch)
        assert (found - scores)[batch["loss_mask"]].abs().amax() < 1e-5, layout
        learner.forward_backward(mini_batch)
        assert distance(flat_gradient(learner), gradient) < 1e-4, layout
