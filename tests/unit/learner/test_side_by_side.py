"""Passes of several adapters as one: each learner has the gradient that it would have alone, and nothing of the others'."""

from __future__ import annotations

import pytest
import torch

from skyrl_train import load_config
from skyrl_train.batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.derived import learner_settings
from skyrl_train.config.models import LoraConfig, OptimizerConfig
from skyrl_train.errors import NonFiniteError
from skyrl_train.learner import AdamWStep, AdapterLearners, AdapterPass

pytest.importorskip("peft")

from skyrl_train.model.lora import attach_adapters

NAMES = ("one", "two", "three")
ADAMW = OptimizerConfig(name="adamw")


def learners(layout: str = "auto") -> AdapterLearners:
    """Of ranks 2, 4 and 6, the last on attention alone, in float64; each unlike the others."""
    made = AdapterLearners(learner_settings(load_config(f"trainer.layout={layout}"), "policy"))
    for number, name in enumerate(NAMES):
        targets = made.targets(attention=True, mlp=number < 2)
        torch.manual_seed(number)
        lora = LoraConfig(rank=2 + 2 * number, targets=targets)
        made.create(name, lora, seed=number, optimizer=ADAMW)
        for key, parameter in made._learners[name].engine.parameters.items():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
    attach_adapters(made.model, NAMES)
    made.model.double()
    return made


def rows(number: int) -> TrainingInputBatch:
    """Rows of several lengths that begin as those of every other number do; the first tokens carry no loss."""
    lengths = [9, 4, 9, 6][: 2 + number]
    batch = batch_of_lengths(lengths)
    places = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.where(places < 3, places + 1, (places * 7 + number) % 50).to(torch.int32)
    ones = torch.ones(batch.num_tokens, dtype=torch.float64)
    return batch.with_columns(
        input_ids=ids,
        loss_mask=places > 2 + number % 2,
        loss_weights=ones / (1 + number),
        old_logprobs=(ones * -3).float(),
        advantages=(ones - 2 * (number % 2)).float(),
    )


def asked() -> dict[str, AdapterPass]:
    losses = ("cross_entropy", "importance_sampling", "cross_entropy")
    return {
        name: AdapterPass(batch=rows(number), loss=AlgorithmConfig(policy_loss=losses[number]))
        for number, name in enumerate(NAMES)
    }


def gradients(made: AdapterLearners) -> dict[str, torch.Tensor]:
    found = {}
    for name in NAMES:
        for key, parameter in made._learners[name].engine.parameters.items():
            if parameter.grad is not None:
                found[f"{name} {key}"] = parameter.grad.clone()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared"])
def test_one_pass_of_several_adapters_gives_each_what_its_own_pass_does(layout: str) -> None:
    """Twice, so that gradients add up; with equal beginnings, which no two adapters may share."""
    together, apart = learners(layout), learners(layout)
    for _ in range(2):
        found = together.forward_losses(asked(), backward=True)
        for name, each in asked().items():
            alone = apart._learners[name].forward_losses(each.batch, [each.loss], backward=True)
            torch.testing.assert_close(found[name].logprobs, alone.logprobs, rtol=0, atol=1e-12)
            torch.testing.assert_close(found[name].losses, alone.losses, rtol=0, atol=1e-12)
    expected = gradients(apart)
    assert gradients(together).keys() == expected.keys()
    for key, gradient in gradients(together).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-12)
    before = gradients(together)
    scored = together.forward_losses(asked(), backward=False)
    torch.testing.assert_close(scored["two"].logprobs, found["two"].logprobs, rtol=0, atol=1e-12)
    assert all(torch.equal(before[key], gradient) for key, gradient in gradients(together).items())
    for made in (together, apart):
        for name in NAMES:
            made._learners[name].optim_step(AdamWStep(lr=1e-2, betas=(0.9, 0.95), eps=1e-12))
    for key, tensor in together.tensors("three").items():
        torch.testing.assert_close(tensor, apart.tensors("three")[key], rtol=0, atol=1e-9)


def test_a_pass_that_finds_no_number_leaves_every_gradient_as_it_was() -> None:
    made = learners()
    made.forward_losses(asked(), backward=True)
    before = gradients(made)
    spoiled = next(iter(made._learners["one"].engine.parameters.values()))
    with torch.no_grad():
        spoiled[0] = float("nan")
    with pytest.raises(NonFiniteError, match="several adapters"):
        made.forward_losses(asked(), backward=True)
    assert all(torch.equal(before[key], gradient) for key, gradient in gradients(made).items())
    found = made.forward_losses({name: asked()[name] for name in ("two", "three")}, backward=True)
    assert torch.isfinite(found["two"].losses).all()


def test_a_model_holds_the_adapters_that_compute_and_as_many_modules_however_many_there_are() -> None:
    made = learners()

    def held() -> tuple[set[str], int]:
        names = {key.split(".")[-2] for key, _ in made.model.named_parameters() if ".lora_A." in key}
        return names, sum(1 for _ in made.model.modules())

    made.create("four", LoraConfig(rank=2, targets=made.targets(attention=True, mlp=True)), seed=4, optimizer=ADAMW)
    names, before = held()
    assert names == {"four"}
    for number in range(5, 15):
        lora = LoraConfig(rank=2, targets=made.targets(attention=True, mlp=True))
        made.create(f"of{number}", lora, seed=number, optimizer=ADAMW)
    assert held() == ({"of14"}, before)
    made.forward_losses(asked(), backward=False)
    assert held()[0] == set(NAMES)
    made.remove("four")
    made.forward_losses(asked(), backward=False)
    with pytest.raises(KeyError):
        made.tensors("four")
