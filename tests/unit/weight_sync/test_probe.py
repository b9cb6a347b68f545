"""What goes wrong in a weight sync without an error, and the probe that names it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config.models import GeneratorConfig, LoraConfig
from skyrl_train.distributed import SingleProcess
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import EngineError
from skyrl_train.inference import Decoder, HFEngine
from skyrl_train.model.lora import adapter_tensors, add_adapter
from skyrl_train.types import SamplingParams
from skyrl_train.weight_sync.device_sharing import DeviceSharing
from skyrl_train.weight_sync.probe import WeightSyncProbe
from skyrl_train.weight_sync.receiver import UpdatableEngine, WholeWeights
from skyrl_train.weight_sync.sender import RankSender
from skyrl_train.weight_sync.transport import Probed
from skyrl_train.weights import ModelWeights, WeightSender
from tests.support.fakes import make_tiny_model, make_tokenizer
from tests.support.moe_cases import make_moe

Weights = dict[str, Tensor]
Fault = Callable[[Weights, Weights], Weights]
"""What an engine loads of what is sent, and of what it was sent first."""


class OtherEngine(WholeWeights):
    """Of another name."""


class Run:
    """A model that takes steps of random signs, and engines that began with the same weights."""

    def __init__(self, model: nn.Module, *engines: HFEngine, faults: Sequence[Fault | None]) -> None:
        self.model, self.version, self.rng = model, -1, torch.Generator().manual_seed(3)
        kinds = (WholeWeights, OtherEngine)
        self.engines = [kind(each.generate, loader(each, fault)) for kind, each, fault in zip(kinds, engines, faults)]
        endpoint = LocalEndpoint[UpdatableEngine](*self.engines)
        self.probe = WeightSyncProbe(
            lambda: endpoint,
            DeviceSharing(),
            GeneratorConfig(max_context_length=64),
            seed=1,
            vocabulary=60,
            vocabulary_size=60,
            tolerance=0.5,
            model="tiny",
        )
        self.probe(self.weights(), -1)

    def weights(self) -> ModelWeights:
        sender = RankSender(self.model, SingleProcess(), torch.device("cpu"))
        return ModelWeights(LocalEndpoint[WeightSender](sender), scores=self._scores)

    @torch.no_grad()
    def _scores(self, batch: TrainingInputBatch) -> Tensor:
        token_ids = batch["input_ids"].long()
        logprobs = self.model(token_ids[None]).logits[0].float().log_softmax(-1)
        return torch.cat([torch.zeros(1), logprobs[:-1].gather(1, token_ids[1:, None])[:, 0]])

    def step(self, size: float = 1e-3) -> Probed:
        """Move each trained parameter, sync, and probe; the first call syncs the weights as they were loaded."""
        self.version += 1
        trained = adapter_tensors(self.model) or dict(self.model.named_parameters())
        with torch.no_grad():
            for parameter in trained.values() if self.version else ():
                parameter.add_(torch.randn(parameter.shape, generator=self.rng).sign(), alpha=size)
        for engine in self.engines:
            engine._load_weights([(name, tensor.clone()) for name, tensor in self.weights()], self.version)
        found = self.probe(self.weights(), self.version)
        assert found is not None
        return found


def loader(engine: HFEngine, fault: Fault | None) -> Callable[[Iterable[tuple[str, Tensor]], int], None]:
    first: Weights = {}

    def load(weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        sent = dict(weights)
        first.update({} if first else sent)
        engine.load_weights((sent if fault is None else fault(sent, first)).items(), version)

    return load


def tiny() -> PreTrainedModel:
    return make_tiny_model(vocab_size=60)


def rounded() -> PreTrainedModel:
    model = tiny()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def mixture() -> PreTrainedModel:
    """So flat that no log-probability moves by what a tolerance without a measurement would refuse."""
    return make_moe(vocab_size=60, initializer_range=0.05)


def with_adapter() -> PreTrainedModel:
    model = tiny()
    add_adapter(model, LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj")), seed=0)
    return model


@contextlib.contextmanager
def running(
    *faults: Fault | None, model: PreTrainedModel | None = None, copy: Callable[[], PreTrainedModel] = tiny
) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        engines = [HFEngine(copy(), make_tokenizer(), max_batch_size=4) for _ in faults]
        for engine in engines:
            stack.callback(engine.close)
        yield Run(model or tiny(), *engines, faults=faults)


def nothing(sent: Weights, first: Weights) -> Weights:
    return first


def all_but_the_last(sent: Weights, first: Weights) -> Weights:
    *_, last = sent
    return {**sent, last: first[last]}


def experts_permuted(sent: Weights, first: Weights) -> Weights:
    return {name: tensor.flip(0) if ".experts." in name else tensor for name, tensor in sent.items()}


def test_engines_that_take_the_weights_move_as_the_trainer_does() -> None:
    with running(None, None) as run:
        found = [run.step() for _ in range(3)]
    assert [each.probe_unseen for each in found] == [0, 0, 0]
    assert all((each.probe_difference or 0) < 1e-5 for each in found)
    assert found[0].probe_moved == 0.0
    assert all((each.probe_moved or 0) > 1e-2 for each in found[1:])


def test_an_engine_of_rounded_numbers_is_held_to_what_its_rounding_makes() -> None:
    with running(None, copy=rounded) as run:
        found = [run.step(1e-2) for _ in range(5)]
    assert all((each.probe_noise or 0) > 1e-3 for each in found)


def test_an_adapter_that_is_never_delivered_is_named_at_its_first_step() -> None:
    with running(nothing, model=with_adapter()) as run:
        run.step()
        with pytest.raises(EngineError, match=r"the WholeWeights: after a weight sync .* does not take all weights"):
            run.step()


def test_one_engine_of_two_that_is_skipped_is_named() -> None:
    with running(None, nothing) as run:
        run.step()
        with pytest.raises(EngineError, match=r"^the OtherEngine: .*which moved by 0\.\d+, and rounding makes 1e-05"):
            run.step()


def test_a_last_tensor_that_does_not_arrive_is_seen() -> None:
    with running(all_but_the_last) as run:
        run.step()
        with pytest.raises(EngineError, match="does not take all weights"):
            run.step()


def test_experts_that_arrive_in_another_order_are_seen_at_the_first_sync() -> None:
    seen = pytest.raises(EngineError, match="which moved by 0, and rounding makes 1e-05")
    with running(experts_permuted, model=mixture(), copy=mixture) as run, seen:
        run.step()


def fill_cache(run: Run) -> None:
    """Ask for a token after the beginning of the probe's prompt until it is the one that follows there."""
    request = run.probe._request(0)
    begun = replace(
        request, prompt_token_ids=request.prompt_token_ids[:40], sampling=SamplingParams(max_generate_length=1)
    )
    for seed in range(1000):
        output = asyncio.run(run.engines[0].generate(replace(begun, seed=seed)))
        if output.token_ids == request.prompt_token_ids[40:41]:
            return
    raise AssertionError("no seed samples it")


def test_a_prefix_cache_that_keeps_keys_of_older_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forget", lambda self: None)
    with running(None) as run:
        run.step()
        fill_cache(run)
        with pytest.raises(EngineError, match="its prefix cache older keys"):
            run.step()


def test_a_trainer_that_stands_still_shows_nothing_and_that_is_told_after_ten(caplog: pytest.LogCaptureFixture) -> None:
    with running(nothing) as run:
        found = [run.step(0.0) for _ in range(11)]
    assert [each.probe_unseen for each in found] == list(range(11))
    assert len(caplog.records) == 1
    assert "in 10 probed weight syncs the trainer's log-probabilities moved by 0 nats" in caplog.text


def test_small_steps_add_up_until_they_show() -> None:
    with running(nothing, model=with_adapter()) as run:
        run.step()
        assert run.step(1e-6).probe_unseen == 1
        with pytest.raises(EngineError, match="which moved by"):
            [run.step(1e-5) for _ in range(20)]
