"""Optimizer: each parameter of AdamW, seen through log-probabilities alone; what a checkpoint keeps of it.

A gradient of exactly 0 (weights of 0) makes the second step a known multiple of the first, whatever the model: with
`b = beta1, c = beta2`, the second moves by `(b / (1 + b)) / sqrt(c / (1 + c))` of what the first moved by.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from driver import Run, Session, sequence
from measure import DATA, SEQUENCES, Noise, probe

STILL = [sequence(tokens, 0.0) for tokens in SEQUENCES]  # a gradient of 0
DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def scaled(weight: float) -> list[Any]:
    return [sequence(tokens, weight) for tokens in SEQUENCES]


def after(session: Session, *steps: tuple[Any, dict[str, Any]]) -> np.ndarray:
    """The probe of a new model after steps of (datums, AdamW's parameters)."""
    run = session.model()
    for data, adam in steps:
        run.forward_backward(data)
        run.step(**adam)
    return probe(run)


def inertia(beta1: float, beta2: float) -> float:
    return (beta1 / (1 + beta1)) / math.sqrt(beta2 / (1 + beta2))


def check_rate_of_zero(session: Session, noise: Noise) -> None:
    """A step at a learning rate of 0 moves nothing."""
    noise.same(after(session, (DATA, {"learning_rate": 0.0})), probe(session.model()))


def check_rate_is_of_its_step(session: Session, noise: Noise, lr: float) -> None:
    """Each step is at its own learning rate: a step at 0 after one at another moves nothing."""
    noise.same(
        after(session, (DATA, {"learning_rate": lr}), (DATA, {"learning_rate": 0.0})),
        after(session, (DATA, {"learning_rate": lr})),
    )


def check_rate_scales_the_step(session: Session, noise: Noise, lr: float) -> None:
    """Twice the learning rate moves about twice as far, as far as a step is small."""
    base = probe(session.model())
    small = lr / 10
    once, twice = (after(session, (DATA, {"learning_rate": rate})) - base for rate in (small, 2 * small))
    noise.differ(once, np.zeros_like(once))
    assert 1.8 < np.abs(twice).sum() / np.abs(once).sum() < 2.2


def check_first_step_ignores_scale(session: Session, noise: Noise, lr: float) -> None:
    """The first step is as long for a gradient ten times as large: Adam divides by it, and eps is tiny."""
    adam = {"learning_rate": lr}
    noise.same(after(session, (scaled(10.0), adam)), after(session, (DATA, adam)))


@pytest.mark.parametrize(("beta1", "beta2"), [(0.5, 0.5), (0.0, 0.999), (0.99, 0.9)])
def check_bias_correction(session: Session, noise: Noise, lr: float, beta1: float, beta2: float) -> None:
    """The first step with beta1={beta1}, beta2={beta2} is as long as with any other: no bias is left."""
    adam = {"learning_rate": lr, "beta1": beta1, "beta2": beta2}
    noise.same(after(session, (DATA, adam)), after(session, (DATA, {"learning_rate": lr})))


def check_beta1_of_zero(session: Session, noise: Noise, lr: float) -> None:
    """With beta1=0 a step by a gradient of 0 moves nothing."""
    adam = {"learning_rate": lr, "beta1": 0.0}
    noise.same(after(session, (DATA, adam), (STILL, adam)), after(session, (DATA, adam)))


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.8, 0.99), (0.5, 0.5), (0.9, 0.999)])
def check_betas(session: Session, noise: Noise, lr: float, beta1: float, beta2: float) -> None:
    """With beta1={beta1}, beta2={beta2} a step by a gradient of 0 goes on by the fraction of the first that AdamW says."""
    adam = {"learning_rate": lr, "beta1": beta1, "beta2": beta2}
    longer = {**adam, "learning_rate": lr * (1 + inertia(beta1, beta2))}
    two = after(session, (DATA, adam), (STILL, adam))
    noise.same(two, after(session, (DATA, longer)))
    noise.differ(two, after(session, (DATA, adam)))


def check_moments_without_a_move(session: Session, noise: Noise, lr: float) -> None:
    """A step at a learning rate of 0 is remembered by the moments."""
    two = after(session, (DATA, {"learning_rate": 0.0}), (STILL, {"learning_rate": lr}))
    noise.same(two, after(session, (DATA, {"learning_rate": lr * inertia(0.9, 0.95)})))


def check_large_eps(session: Session, noise: Noise) -> None:
    """With an eps far above the gradient, a step is in proportion to the gradient."""
    left, right = after(session, (DATA, noise.push(2))), after(session, (scaled(2.0), noise.push()))
    noise.same(left, right)
    noise.differ(left, after(session, (DATA, noise.push())))


def check_eps_outside_the_root(session: Session, noise: Noise) -> None:
    """eps is added to the root of the second moment: where it is huge, a step is by the learning rate over eps."""
    steps = ({"learning_rate": noise.rate * eps, "eps": eps} for eps in (1e7, 1e8))
    noise.alike(after(session, (DATA, adam)) for adam in steps)


def check_weight_decay_to_the_base(session: Session, noise: Noise, lr: float) -> None:
    """A decay of one over the learning rate takes the adapter back to the base model: it is decoupled from the gradient."""
    decay = {"learning_rate": 0.5, "weight_decay": 2.0, "beta1": 0.0}
    noise.same(after(session, (DATA, {"learning_rate": lr, "beta1": 0.0}), (STILL, decay)), probe(session.model()))


def check_weight_decay_of_zero(session: Session, noise: Noise, lr: float) -> None:
    """Without decay a trained adapter stays where it is."""
    trained = (DATA, {"learning_rate": lr, "beta1": 0.0})
    noise.same(after(session, trained, (STILL, {"learning_rate": 0.5, "beta1": 0.0})), after(session, trained))


def check_weight_decay_shrinks(session: Session, noise: Noise, lr: float) -> None:
    """A decay of half of that takes the adapter a part of the way back."""
    base, trained = probe(session.model()), (DATA, {"learning_rate": lr, "beta1": 0.0})
    far = np.abs(after(session, trained) - base).sum()
    near = np.abs(
        after(session, trained, (STILL, {"learning_rate": 0.5, "weight_decay": 1.0, "beta1": 0.0})) - base
    ).sum()
    assert 0.1 * far < near < 0.9 * far


@pytest.fixture(scope="module")
def clipped(session: Session, noise: Noise) -> dict[str, float]:
    """AdamW's parameters of a step that is clipped to a norm of 0.01, and that is visible all the same."""
    base = probe(session.model())
    for times in 10.0 ** np.arange(8):
        adam = {**noise.push(times), "grad_clip_norm": 0.01}
        if np.abs(after(session, (DATA, adam)) - base).max() >= 0.01:
            return adam
    raise AssertionError("a clipped step moves nothing at any learning rate")


def check_clip_of_zero(session: Session, noise: Noise) -> None:
    """A clip of 0 clips nothing."""
    noise.same(after(session, (DATA, {**noise.push(), "grad_clip_norm": 0.0})), after(session, (DATA, noise.push())))


def check_clip_above_the_norm(session: Session, noise: Noise) -> None:
    """A clip above the gradient's norm changes nothing."""
    noise.same(after(session, (DATA, {**noise.push(), "grad_clip_norm": 1e9})), after(session, (DATA, noise.push())))


def check_clip_fixes_the_norm(session: Session, noise: Noise, clipped: dict[str, float]) -> None:
    """Below its norm a clipped gradient is the same whether it was ten times as large or not; unclipped it is not."""
    noise.same(after(session, (scaled(10.0), clipped)), after(session, (DATA, clipped)))
    noise.differ(after(session, (scaled(10.0), noise.push())), after(session, (DATA, noise.push())))


def check_clip_scales(session: Session, noise: Noise, clipped: dict[str, float]) -> None:
    """Half the clip at twice the learning rate is the same step, with an eps far above the gradient."""
    half = {**clipped, "learning_rate": 2 * clipped["learning_rate"], "grad_clip_norm": clipped["grad_clip_norm"] / 2}
    noise.same(after(session, (DATA, half)), after(session, (DATA, clipped)))


def check_clip_keeps_the_direction(session: Session, noise: Noise, clipped: dict[str, float]) -> None:
    """A clipped gradient points where the whole one does: its norm is one number over all parameters."""
    base = probe(session.model())
    left, right = (after(session, (DATA, adam)) - base for adam in (clipped, noise.push()))
    cosine = float((left * right).sum() / np.sqrt((left**2).sum() * (right**2).sum()))
    assert cosine > 0.99, cosine


@pytest.mark.parametrize("name", list(DEFAULTS))
def check_defaults(session: Session, noise: Noise, lr: float, name: str) -> None:
    """A step that does not say {name} takes {name} by the SDK's default."""
    probes = []
    for left_out in (False, True):
        run = session.model()
        adam: dict[str, Any] = {**DEFAULTS, "learning_rate": lr} if name != "learning_rate" else dict(DEFAULTS)
        if left_out:
            del adam[name]
        for data in (DATA, scaled(3.0)):
            run.forward_backward(data)
            run.server.wait(run.submit_step(**adam))
        probes.append(probe(run))
    noise.alike(probes)


def check_step_metrics_are_numbers(run: Run) -> None:
    """The metrics of a step, if there are any, are finite numbers."""
    run.forward_backward(DATA)
    assert all(math.isfinite(value) for value in (run.step(learning_rate=1e-4).get("metrics") or {}).values())


def stepped(session: Session, lr: float, steps: int = 2) -> Run:
    run = session.model()
    for _ in range(steps):
        run.forward_backward(DATA)
        run.step(learning_rate=lr)
    return run


def nudge(run: Run, lr: float) -> np.ndarray:
    """The probe after a step by a gradient of 0, which moves by the moments alone."""
    run.forward_backward(STILL)
    run.step(learning_rate=lr)
    return probe(run)


@pytest.mark.parametrize("optimizer", [True, False])
def check_load_restores_weights(session: Session, noise: Noise, lr: float, optimizer: bool) -> None:
    """A model loaded with optimizer={optimizer} answers as the one that was saved."""
    run = stepped(session, lr)
    loaded = session.load(run.save(f"weights-{optimizer}"), optimizer)
    noise.same(probe(loaded), probe(run))


@pytest.mark.parametrize("sent", ["false", "nothing"])
def check_load_without_optimizer(session: Session, noise: Noise, lr: float, sent: str) -> None:
    """A model loaded with {sent} said of the optimizer has moments of 0: a step by a gradient of 0 moves nothing."""
    loaded = session.load(stepped(session, lr).save(f"cold-{sent}"), False if sent == "false" else None)
    before = probe(loaded)
    noise.same(nudge(loaded, lr), before)


def check_load_without_optimizer_starts_over(session: Session, noise: Noise, lr: float) -> None:
    """A model loaded without its optimizer takes a first step: it is as long for a gradient ten times as large."""
    path, probes = stepped(session, lr).save("over"), []
    for data in (DATA, scaled(10.0)):
        loaded = session.load(path, False)
        loaded.forward_backward(data)
        loaded.step(learning_rate=lr)
        probes.append(probe(loaded))
    noise.alike(probes)


def check_load_with_optimizer(session: Session, noise: Noise, lr: float) -> None:
    """A model loaded with its optimizer goes on by its moments exactly as the one that was saved."""
    run = stepped(session, lr)
    loaded = session.load(run.save("warm"), True)
    before = probe(loaded)
    moved = nudge(loaded, lr)
    noise.same(moved, nudge(run, lr))
    noise.differ(moved, before)


def check_load_with_optimizer_goes_on(session: Session, noise: Noise, lr: float) -> None:
    """Two more steps after loading with the optimizer leave the weights of a run that was never interrupted."""
    run = stepped(session, lr)
    loaded = session.load(run.save("on"), True)
    for each in (run, loaded):
        for data in (scaled(0.5), DATA):
            each.forward_backward(data)
            each.step(learning_rate=lr)
    noise.same(probe(loaded), probe(run))


@pytest.mark.parametrize("optimizer", [True, False])
def check_load_into_a_new_model(session: Session, noise: Noise, lr: float, optimizer: bool) -> None:
    """load_weights as the first request to a created model, with optimizer={optimizer}, does the same."""
    run = stepped(session, lr)
    path, loaded = run.save("first"), session.model()
    loaded.server.wait(loaded.submit("load_weights", {"path": path, "optimizer": optimizer, "type": "load_weights"}))
    before = probe(loaded)
    noise.same(before, probe(run))
    noise.same(nudge(loaded, lr), nudge(run, lr) if optimizer else before)


def check_load_into_a_trained_model(session: Session, noise: Noise, lr: float) -> None:
    """load_weights into a model that was trained is refused, or leaves neither its weights nor its moments."""
    from driver import RequestFailed, StatusError
    from expect import refused

    path, run = stepped(session, lr, 1).save("late"), stepped(session, lr)
    before = probe(run)

    def load() -> None:
        run.server.wait(run.submit("load_weights", {"path": path, "optimizer": False, "type": "load_weights"}))

    try:
        load()
    except (RequestFailed, StatusError):
        refused(
            lambda: run.server.wait(
                run.submit("load_weights", {"path": path, "optimizer": False, "type": "load_weights"})
            )
        )
        noise.same(probe(run), before)
        return
    loaded = probe(run)
    noise.same(loaded, probe(session.load(path, False)))
    noise.same(nudge(run, lr), loaded)


def check_saving_leaves_the_optimizer(session: Session, noise: Noise, lr: float) -> None:
    """A save between two steps changes nothing of the second."""
    run = stepped(session, lr, 1)
    run.save("aside")
    run.save_for_sampler("aside")
    noise.same(nudge(run, lr), nudge(stepped(session, lr, 1), lr))


def check_gradient_is_not_saved(session: Session, noise: Noise, lr: float) -> None:
    """A checkpoint holds weights and moments, and no gradient that waits for its step."""
    run = stepped(session, lr, 1)
    run.forward_backward(DATA)
    loaded = session.load(run.save("pending"), True)
    noise.same(nudge(loaded, lr), nudge(stepped(session, lr, 1), lr))
