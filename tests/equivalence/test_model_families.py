"""Families that have no fused attention, or layers that carry a state: trained, exported, loaded again, and generated with,
they compute what the model computes on one row at a time in float64."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig, PolicyConfig
from skyrl_train.errors import ModelError
from skyrl_train.inference import Decoder, require_exact_cache
from skyrl_train.model import load_causal_lm, quiet_transformers, supported_layout
from skyrl_train.model.layers import say_eager
from skyrl_train.runs import train
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.command_runs import records
from tests.support.layout_cases import close, distance, flat_gradient, on_policy, tree_batch
from tests.support.learner_cases import make_learner
from tests.support.model_families import FAMILIES, build_family

IN_DEFAULT = ("bloom", "mamba2")
EAGER = ("bloom", "gpt_oss", "mamba2", "mamba", "falcon_mamba")
LARGEST = 1e-5
"""Difference of log-probabilities between engine, trainer and the model itself."""
PROMPTS: list[tuple[int, ...]] = [(2, 6, 4, 9), (2, 6, 4, 9, 20, 11, 30), (12,), (2, 6, 4, 9), (7, 8, 9, 10, 11, 12, 5)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in IN_DEFAULT else [pytest.mark.slow]) for name in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(family, tmp_path_factory.mktemp(family))


def oracle(folder: Path) -> PreTrainedModel:
    """The model as transformers loads it by itself, in float64."""
    with quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # grouped products know no float64
    return model


def logprobs_of_row(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Of all tokens but the first, by a forward over nothing else."""
    logits = model(input_ids=tokens[None].long(), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None].long()).squeeze(1)


def rows_of(batch: TrainingInputBatch) -> list[tuple[int, int]]:
    bounds = [int(offset) for offset in batch.row_offsets]
    return list(pairwise(bounds))


@pytest.mark.slow
def test_padded_rows_have_the_scores_and_the_gradient_of_rows_alone(folder: Path) -> None:
    batch = tree_batch(1)
    algorithm = AlgorithmConfig(kl_loss_coef=0.0, entropy_coef=0.0)
    learner = make_learner(folder, rows_per_micro_batch=4, algorithm=algorithm)
    scores = learner.forward(batch)
    mini_batch = close(on_policy(batch, scores))
    learner.forward_backward(mini_batch)
    gradient = flat_gradient(learner)
    names = list(learner.engine.parameters)

    model = oracle(folder)
    rows = mini_batch.batch
    for start, stop in rows_of(rows):
        mask = rows["loss_mask"][start + 1 : stop]
        found = logprobs_of_row(model, rows["input_ids"][start:stop])
        assert (found.detach() - scores[start + 1 : stop])[mask].abs().amax() < LARGEST if mask.any() else True
        weights = (rows["loss_weights"] * rows["advantages"])[start + 1 : stop]
        (-(weights * found)[mask].sum()).backward()
    own = dict(model.named_parameters())
    expected = [torch.zeros_like(own[name]) if own[name].grad is None else own[name].grad for name in names]
    assert distance(gradient.double(), torch.cat([each.flatten() for each in expected if each is not None])) < 1e-4


@pytest.mark.slow
def test_samples_have_the_model_s_log_probabilities_whatever_the_batch(folder: Path) -> None:
    with quiet_transformers():
        model = load_causal_lm(ModelConfig(path=str(folder)), "cpu").eval()

    def sample(prompts: list[tuple[int, ...]], first_seed: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        decoder = Decoder(model, eos_token_ids=frozenset([2]), pad_token_id=0, decode_text=str)
        requests = [
            GenerationRequest(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_generate_length=6 + 2 * index),
                seed=first_seed + index,
            )
            for index, prompt in enumerate(prompts)
        ]
        return [(response.token_ids, response.logprobs) for response in decoder.run(requests)]

    together = sample(PROMPTS, 1)
    exact = oracle(folder)
    for index, (prompt, (tokens, logprobs)) in enumerate(zip(PROMPTS, together)):
        with torch.no_grad():
            expected = logprobs_of_row(exact, torch.tensor([*prompt, *tokens]))[len(prompt) - 1 :]
        assert (torch.tensor(logprobs) - expected).abs().amax() < LARGEST
        assert sample([prompt], 1 + index)[0][0][:6] == tokens[:6]  # alone
    assert together[0][0][:6] != together[3][0][:6]  # the same prompt, another seed


@pytest.mark.slow
def test_a_step_of_grpo_trains_what_is_exported(
    family: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(output_dir=str(tmp_path / "run"))
    optimizer = OptimizerConfig(name="sgd", lr=1.0)
    sizes = {"total_steps": 1, "train_batch_size": 2, "policy_mini_batch_size": 2, "critic_mini_batch_size": 2}
    say_eager.cache_clear()
    with caplog.at_level(logging.INFO):
        train(
            replace(
                config,
                model=ModelConfig(path=str(folder)),
                data=replace(config.data, validation=(), max_train_prompts=2),
                environment=EnvironmentConfig(
                    env_class="tests.support.model_families:EvenCharacters", isolation="thread"
                ),
                generator=replace(
                    config.generator,
                    n_samples_per_prompt=3,
                    sampling=replace(config.generator.sampling, max_generate_length=6),
                ),
                trainer=replace(config.trainer, **sizes, policy=PolicyConfig(optimizer=optimizer)),  # type: ignore[arg-type]
            )
        )
    (step,) = [each for each in records(tmp_path / "run") if "policy/grad_norm" in each]
    assert step["policy/grad_norm"] > 0
    assert step["policy/rollout_logprob_diff_max"] < LARGEST
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "run" / "export"))
    assert set(after) == set(before)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    with quiet_transformers(), torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
        assert again(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    said = [each.getMessage() for each in caplog.records if "attention=auto: eager" in each.getMessage()]
    assert len(said) == (family in EAGER)


@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_merged_rows_are_refused_by_name_and_never_chosen(folder: Path, layout: str) -> None:
    with quiet_transformers():
        model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    assert supported_layout(model, "auto", name="its-name") == "padded"
    with pytest.raises(ModelError, match=r"its-name.*Set trainer\.layout=padded"):
        supported_layout(model, layout, name="its-name")  # type: ignore[arg-type]


def test_a_model_whose_cache_gives_other_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_causal_lm(ModelConfig(path=str(build_family("mamba2", tmp_path))), "cpu").eval()
    require_exact_cache(model)
    monkeypatch.setattr(
        "skyrl_train.inference.kv_cache.OwnCache.take_rows", lambda self, rows: self._cache.reorder_cache(rows.roll(1))
    )
    with pytest.raises(ModelError, match=r"cannot generate with a mamba2 model token by token.*Use generator=vllm"):
        require_exact_cache(model)
