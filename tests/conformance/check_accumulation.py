"""Accumulation: gradients add up until optim_step, in any split and order, and nothing else adds to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Run, Session, datum, sequence
from expect import refused
from measure import CAPS, DATA, PROBES, SEQUENCES, Noise, probe


def after(session: Session, noise: Noise, *passes: Any) -> np.ndarray:
    """The probe of a new model after passes over these lists of datums and one step in proportion to their gradient."""
    run = session.model()
    for data in passes:
        run.forward_backward(data)
    run.step(**noise.push())
    return probe(run)


@pytest.mark.parametrize("kind", ["forward", "training", "sampling"])
def check_noise(noise: Noise, kind: str) -> None:
    """What the server's own answers differ by ({kind}) is below the cap of its precision."""
    assert getattr(noise, kind) <= CAPS[noise.dtype][kind]


def check_training_moves(session: Session, noise: Noise) -> None:
    """A pass and a step move the log-probabilities: without that, nothing below would show anything."""
    noise.differ(after(session, noise, DATA), probe(session.model()))


@pytest.mark.parametrize("chunks", [2, 3, 6])
def check_chunks_add_up_to_one(session: Session, noise: Noise, chunks: int) -> None:
    """A batch in {chunks} chunks leaves the weights of the batch in one."""
    split = [DATA[start::chunks] for start in range(chunks)]
    noise.same(after(session, noise, *split), after(session, noise, DATA))


def check_chunks_in_any_order(session: Session, noise: Noise) -> None:
    """Chunks in the opposite order leave the same weights."""
    noise.same(
        after(session, noise, DATA[4:], DATA[2:4], DATA[:2]), after(session, noise, DATA[:2], DATA[2:4], DATA[4:])
    )


def check_last_chunk_first(session: Session, noise: Noise) -> None:
    """Chunks whose first is sent last, as the SDK sends them, leave the weights of the batch in one."""
    run = session.model()
    promises = [run.submit_pass(DATA[2:4], seq=2), run.submit_pass(DATA[4:], seq=3), run.submit_pass(DATA[:2], seq=1)]
    for promise in promises:
        run.server.wait(promise)
    run.seq = 4
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, DATA))


def check_forward_adds_nothing(session: Session, noise: Noise) -> None:
    """A pass with forward_only adds no gradient."""
    run = session.model()
    run.forward_backward(DATA[:2])
    run.forward(DATA)
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, DATA[:2]))


def check_step_clears_the_gradient(session: Session, noise: Noise) -> None:
    """Nothing of a gradient is left after the step that used it."""
    run = session.model()
    run.forward_backward(DATA)
    run.step(**noise.push(), beta1=0.0)
    before = probe(run)
    run.forward_backward([sequence(tokens, 0.0) for tokens in SEQUENCES])
    run.step(**noise.push(), beta1=0.0)
    noise.same(probe(run), before)


def check_second_step_sees_its_own_gradient(session: Session, noise: Noise) -> None:
    """The second step is by the gradient of the passes since the first one alone."""
    probes = []
    for data in (DATA[:1], DATA[1:]):
        run = session.model()
        run.forward_backward(data)
        run.step(learning_rate=0.0, beta1=0.0, beta2=0.0)
        run.forward_backward(DATA[2:4])
        run.step(**noise.push(), beta1=0.0, beta2=0.0)
        probes.append(probe(run))
    noise.alike(probes)


def check_gradient_is_a_sum_over_datums(session: Session, noise: Noise) -> None:
    """A datum sent twice in a batch pulls twice as much as once: gradients are summed, not averaged."""
    twice = [sequence(tokens, 2.0) for tokens in SEQUENCES]
    doubled = after(session, noise, DATA + DATA)
    noise.same(doubled, after(session, noise, twice))
    noise.differ(doubled, after(session, noise, DATA))


def check_gradient_is_a_sum_over_tokens(session: Session, noise: Noise) -> None:
    """A token pulls as much in a long datum as in a short one: nothing is divided by the number of tokens."""
    tokens = PROBES[0]
    short, long = tokens[:4], tokens
    weights = [1.0, 1.0, 1.0] + [0.0] * (len(long) - 4)
    noise.same(after(session, noise, [sequence(long, weights)]), after(session, noise, [sequence(short)]))


def check_weights_of_zero_pull_nothing(session: Session, noise: Noise) -> None:
    """A batch whose weights are all 0 moves nothing, even by a step that ignores the gradient's size."""
    run = session.model()
    before = probe(run)
    run.forward_backward([sequence(tokens, 0.0) for tokens in SEQUENCES])
    run.step(learning_rate=0.01)
    noise.same(probe(run), before)


def check_losses_accumulate_together(session: Session, noise: Noise) -> None:
    """Passes of two losses before one step add up."""
    run = session.model()
    old = run.forward(DATA).logprobs
    reinforce = [
        datum(each[:-1], each[1:], logprobs=one, advantages=[1.0] * len(one)) for each, one in zip(SEQUENCES, old)
    ]
    run.forward_backward(DATA)
    run.forward_backward(reinforce, "importance_sampling")
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, [sequence(tokens, 2.0) for tokens in SEQUENCES]), scale=2)


def check_failed_pass_adds_nothing(session: Session, noise: Noise) -> None:
    """A pass that fails at its last datum leaves no part of its gradient."""
    run = session.model()
    run.forward_backward(DATA[:2])
    bad = datum([5, 6, 7], [6, 7, 8], weights=[1.0, float("nan"), 1.0])
    refused(lambda: run.forward_backward([*DATA[2:], bad]))
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, DATA[:2]))


def check_empty_datum(session: Session, noise: Noise) -> None:
    """A datum without tokens is answered by no log-probabilities, and adds nothing."""
    run = session.model()
    empty = datum([], [], weights=[])
    output = run.forward_backward([DATA[0], empty, DATA[1]])
    assert [len(each) for each in output.logprobs] == [len(SEQUENCES[0]) - 1, 0, len(SEQUENCES[1]) - 1]
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, DATA[:2]))


def check_sampling_between_passes(session: Session, noise: Noise) -> None:
    """Snapshots, saves and samples between two passes leave the gradient as it is."""
    run = session.model()
    run.forward_backward(DATA[:3])
    run.snapshot().sample(PROBES[0])
    run.save("between")
    run.forward_backward(DATA[3:])
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, DATA))


def check_models_apart(session: Session, noise: Noise) -> None:
    """Passes on another model of the session add nothing to this one."""
    run, neighbour = session.model(), session.model()
    run.forward_backward(DATA[:2])
    neighbour.forward_backward(DATA)
    run.step(**noise.push())
    noise.same(probe(run), after(session, noise, DATA[:2]))


def check_a_large_batch(run: Run, noise: Noise) -> None:
    """A batch of 256 datums is answered as its datums are alone."""
    data = [sequence(PROBES[index % 4][: 3 + index % 9]) for index in range(256)]
    output = run.forward_backward(data)
    assert len(output.logprobs) == 256
    for index in (0, 77, 255):
        noise.same(output.logprobs[index], run.forward([data[index]]).logprobs[0], "forward")


def check_loss_goes_down(run: Run, lr: float) -> None:
    """Ten steps of cross-entropy lower the loss at every second one: the sign of the update is right."""
    losses = []
    for _ in range(10):
        losses.append(run.forward_backward(DATA).loss)
        run.step(learning_rate=lr)
    assert losses[-1] < losses[4] < losses[2] < losses[0]
