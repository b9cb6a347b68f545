"""Memory asked of a compiler. The probe is tested on a small causal model in plain JAX."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.learner.memory.fit import fit_memory_model, probes_at_the_limit
from skyrl_train.learner.memory.sizing import SizingLimits, size_all
from skyrl_train.model.sizes import sizes_of_model
from tests.support.learner_cases import make_learner, save_tiny_model

if TYPE_CHECKING:
    from skyrl_train.learner.memory.xla import CompiledProbe


def test_without_jax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "skyrl_train.learner.memory.xla", raising=False)
    with pytest.raises(SkyrlTrainError, match=r"pip install 'jax[<>]"):
        import_module("skyrl_train.learner.memory.xla")


# With JAX

HIDDEN, LAYERS, VOCABULARY = 32, 1, 64


def causal_lm_loss(parameters: dict[str, Any], tokens: Any) -> Any:
    """Mean cross-entropy of the next token, of a causal model of single-head attention and a gated product."""
    import jax
    import jax.numpy as jnp

    hidden = parameters["embedding"][tokens]
    mask = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), dtype=bool))
    for layer in range(LAYERS):
        query, key, value = (hidden @ parameters[f"{name}{layer}"] for name in ("query", "key", "value"))
        scores = jnp.where(mask, jnp.einsum("bqh,bkh->bqk", query, key) / HIDDEN**0.5, -jnp.inf)
        hidden = hidden + jax.nn.softmax(scores) @ value
        hidden = hidden + jax.nn.silu(hidden @ parameters[f"up{layer}"]) @ parameters[f"down{layer}"]
    log_p = jax.nn.log_softmax(hidden[:, :-1] @ parameters["embedding"].T)
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()


def shapes(rows: int, length: int) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    sizes = {"embedding": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        sizes |= {f"{name}{layer}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
        sizes |= {f"up{layer}": (HIDDEN, 4 * HIDDEN), f"down{layer}": (4 * HIDDEN, HIDDEN)}
    parameters = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    return parameters, jax.ShapeDtypeStruct((rows, length), jnp.int32)


def jax_probe(*, training: bool) -> CompiledProbe:
    jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
    from skyrl_train.learner.memory.xla import CompiledProbe

    function = jax.value_and_grad(causal_lm_loss) if training else causal_lm_loss
    return CompiledProbe(function, shapes, training=training)


@pytest.mark.slow
def test_a_compiled_backward_pass_takes_more_than_a_forward() -> None:
    assert jax_probe(training=True)(2, 64).peak_bytes > jax_probe(training=False)(2, 64).peak_bytes


def test_compiled_attention_keeps_the_scores_of_a_block_of_queries_and_not_of_all() -> None:
    jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
    from skyrl_train.learner.memory.xla import _attention

    length, heads = 512, 4
    states = jax.ShapeDtypeStruct((1, length, heads, 8), "float32")
    stats = jax.jit(_attention).lower(states, states, states).compile().memory_analysis()
    assert stats.temp_size_in_bytes < length * length * heads * 4 / 4


@pytest.mark.slow
def test_compiled_memory_grows_with_rows_and_faster_than_linearly_with_length() -> None:
    probe = jax_probe(training=True)
    small = probe(2, 128).peak_bytes
    assert probe(4, 128).peak_bytes > 1.5 * small
    assert probe(2, 256).peak_bytes > 2 * small


@pytest.mark.slow
def test_what_is_resident_is_added() -> None:
    jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
    from skyrl_train.learner.memory.xla import CompiledProbe

    plain = jax_probe(training=True)(1, 16).peak_bytes
    with_state = CompiledProbe(jax.value_and_grad(causal_lm_loss), shapes, training=True, resident_bytes=12_345)
    assert with_state(1, 16).peak_bytes == plain + 12_345


@pytest.mark.slow
def test_micro_batches_under_the_budget_of_compiled_probes_fit() -> None:
    probe = jax_probe(training=True)
    limit = probe(3, 128).peak_bytes
    model = fit_memory_model(probes_at_the_limit(probe, [64, 128], limit, max_rows=1 << 20), margin=0.02)
    budget = model.token_budget(limit, 128)
    for length in (64, 100, 128):
        assert probe(max(1, budget // length), length).peak_bytes <= limit


@pytest.mark.nightly
@pytest.mark.slow
def test_xla_sizes_the_micro_batches_of_a_model_of_the_same_sizes(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="the extra `jax` is not installed")
    from skyrl_train.learner.memory.xla import CompiledModel

    limits = SizingLimits(longest=5, max_rows=64, limit_bytes=1 << 20, margin=0.05, retries=3)
    learner = make_learner(save_tiny_model(tmp_path), role="reference")
    measured = size_all([learner], limits, {})["reference"]
    compiled = size_all([learner], replace(limits, source="xla"), {})["reference"]
    assert compiled.forward.probes == ()
    assert "compiled by XLA, nothing was run" in compiled.line()
    # the layers are the same, the buffers are another library's
    assert 0.4 < compiled.forward.tokens / measured.forward.tokens < 2.5
    facts = replace(sizes_of_model(learner.engine.model), family="gpt2")
    model = CompiledModel(model=facts, compute_bytes=4, checkpointing=False)
    with pytest.raises(ModelError, match=r"model_type='gpt2' are not written in JAX.*Set trainer\.memory_probe=trace"):
        model.probe(training=False, resident_bytes=0)
