"""Loading models: what works, and what is refused with which words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ModelError
from skyrl_train.model import causal_lm
from skyrl_train.model.causal_lm import (
    check_head,
    empty_causal_lm,
    from_pretrained,
    last_hidden_state,
    load_causal_lm,
    load_tokenizer,
    output_head,
    resolve_model_path,
)
from skyrl_train.model.value_model import load_value_model
from tests.support.learner_cases import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub whose every request fails at once, and an empty cache."""

    def refuse(repo_id: str, **_: object) -> str:
        raise ConnectionError("Name or service not known\nand a second line")

    monkeypatch.setattr("skyrl_train.model.causal_lm.snapshot_download", refuse)
    monkeypatch.setattr(causal_lm, "is_reachable", lambda: True)
    monkeypatch.setattr(causal_lm, "problem_of", lambda name, *, dataset: "")


def test_a_folder_loads_in_float32_without_dropout_and_trainable(folder: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert model.model.layers[0].self_attn.attention_dropout == 0.0


def test_a_bfloat16_checkpoint_gets_float32_master_weights(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(ModelConfig(path=str(copy)), "cpu")
    assert next(model.parameters()).dtype == torch.float32


def test_builtin_models_lie_in_the_package() -> None:
    folder = resolve_model_path("builtin:tiny_qwen2")
    assert folder.parts[-4:] == ("skyrl_train", "data", "assets", "tiny_qwen2")
    assert (folder / "config.json").is_file()


def test_padding_on_the_right_changes_no_hidden_state(folder: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu").double()
    short = last_hidden_state(model, torch.tensor([[5, 6, 7]]))
    padded = last_hidden_state(model, torch.tensor([[5, 6, 7, 0, 0], [9, 8, 7, 6, 5]]))
    torch.testing.assert_close(padded[0, :3], short[0], rtol=1e-12, atol=1e-12)


def test_gradient_checkpointing_gives_the_same_gradient(folder: Path) -> None:
    def gradient(checkpointing: bool) -> torch.Tensor:
        model = load_causal_lm(ModelConfig(path=str(folder), gradient_checkpointing=checkpointing), "cpu")
        assert model.is_gradient_checkpointing is checkpointing
        last_hidden_state(model, torch.tensor([[5, 6, 7, 8]])).square().sum().backward()
        grad = model.model.layers[0].mlp.up_proj.weight.grad
        assert grad is not None
        return grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("builtin:giant", "no such built-in model; there are: .*builtin:tiny_qwen2"),
        ("/nowhere/at/all", "no such folder, and not a hub name"),
        ("./relative/nothing", "no such folder, and not a hub name"),
        ("two words", "no such folder, and not a hub name"),
        (__file__, "is a file; give the folder"),
    ],
)
def test_a_path_that_is_no_model_is_refused_by_name(path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        load_causal_lm(ModelConfig(path=path), "cpu")
    assert repr(path) in str(error.value)


def test_a_hub_name_without_network_fails_at_once_and_says_why(offline_hub: None) -> None:
    with pytest.raises(ModelError) as error:
        load_causal_lm(ModelConfig(path="some-owner/some-model"), "cpu")
    text = str(error.value)
    assert "'some-owner/some-model': no such folder here, not in the local cache" in text
    assert "ConnectionError: Name or service not known" in text
    assert "second line" not in text


def test_a_cached_hub_model_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached_only(repo_id: str, *, local_files_only: bool = False, **_: object) -> str:
        assert local_files_only
        return str(folder)

    monkeypatch.setattr("skyrl_train.model.causal_lm.snapshot_download", cached_only)
    assert resolve_model_path("some-owner/some-model") == folder


def test_missing_files_are_listed(copy: Path, tmp_path: Path) -> None:
    (copy / "config.json").unlink()
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks config.json, model.safetensors. Give the folder"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002.safetensors"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_pickled_weights_are_refused_with_the_way_to_convert_them(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled; convert them"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_cut_weights_are_refused(copy: Path) -> None:
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_weights_that_would_start_at_random_are_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 parameters, e.g. model.layers.1.mlp.up_proj.weight"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_weights_that_are_not_finite_are_refused_by_the_name_of_the_tensor(
    copy: Path, spoilt: float, load: Callable[..., PreTrainedModel]
) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] = spoilt
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model.norm.weight has 1 of \d+ values that are not finite"):
        load(ModelConfig(path=str(copy)), "cpu")


def test_a_value_head_that_is_not_finite_is_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["score.weight"] = torch.full((1, weights["model.norm.weight"].numel()), math.nan)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"score.weight has \d+ of \d+ values that are not finite"):
        load_value_model(ModelConfig(path=str(copy)), "cpu")


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(ModelError, match=str(copy)):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_a_model_that_is_not_a_causal_lm_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    with pytest.raises(ModelError, match=r"cannot be loaded: ValueError"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_a_broken_config_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        load_causal_lm(ModelConfig(path=str(copy)), "cpu")


def test_a_family_whose_logits_have_an_unknown_twist_is_refused(folder: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 3.0)
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM is not supported: log-probabilities .* differ"):
        check_head(model, name="twisted")


def test_a_device_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be put on device 'cuda:99': .* Set platform.device"):
        load_causal_lm(ModelConfig(path=str(folder)), "cuda:99")


def test_gemma2_caps_its_logits() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=2.0,
        initializer_range=1.0,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config).eval()
    assert output_head(model).softcap == 2.0
    check_head(model, name="gemma2")


def test_the_tokenizer_comes_with_the_model_or_from_its_own_path(folder: Path, copy: Path) -> None:
    assert load_tokenizer(ModelConfig(path=str(folder))).encode("w7 w9") == [7, 9]
    assert load_tokenizer(ModelConfig(path=str(copy), tokenizer_path=str(folder))).encode("w7 w9") == [7, 9]


def test_the_bundled_tokenizer_splits_into_words_and_survives_a_round_trip() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny_qwen2"))
    ids = tokenizer.encode("Cara has 12 apples.\n#### 12")
    assert tokenizer.decode(ids) == "Cara has 12 apples.\n#### 12"
    assert len(ids) == 12


def test_a_model_without_tokenizer_is_refused(copy: Path) -> None:
    with pytest.raises(
        ModelError, match=r"holds no tokenizer: none of tokenizer.json, .* Give one with model.tokenizer_path"
    ):
        load_tokenizer(ModelConfig(path=str(copy)))


def test_a_broken_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no usable tokenizer"):
        load_tokenizer(ModelConfig(path=str(copy)))


def halved(
    folder: Path, dtype: torch.dtype, model: ModelConfig, *, share: float = 0.5
) -> tuple[PreTrainedModel, list[str]]:
    loaded, missing = from_pretrained(folder, dtype, model)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(share)
    return loaded, missing


def half_precision(folder: Path, dtype: torch.dtype, model: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    return from_pretrained(folder, torch.bfloat16, model)


def model_alone(folder: Path, dtype: torch.dtype, model: ModelConfig) -> PreTrainedModel:
    return from_pretrained(folder, dtype, model)[0]


def three_things(folder: Path, dtype: torch.dtype, model: ModelConfig) -> tuple[PreTrainedModel, list[str], list[str]]:
    return *from_pretrained(folder, dtype, model), []


def no_model(folder: Path, dtype: torch.dtype, model: ModelConfig) -> tuple[object, list[str]]:
    return folder, []


def lacking(folder: Path, dtype: torch.dtype, model: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    return from_pretrained(folder, dtype, model)[0], ["model.norm.weight"]


def unreadable(folder: Path, dtype: torch.dtype, model: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    raise OSError(f"{folder} is encrypted")


def test_a_custom_loader_reads_the_weights_of_whatever_is_loaded(folder: Path) -> None:
    plain = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    model = ModelConfig(path=str(folder), loader={"_target_": "test_causal_lm:halved", "share": 0.25})
    for found in (load_causal_lm(model, "cpu"), empty_causal_lm(model), load_value_model(model, "cpu")):
        name = "model.norm.weight"
        assert torch.equal(found.get_parameter(name), 0.25 * plain.get_parameter(name))


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ("half_precision", "gave parameters of type torch.bfloat16; its second argument asks for torch.float32"),
        ("model_alone", "gave Qwen2ForCausalLM, not \\(model, names of parameters"),
        ("three_things", "gave tuple, not \\(model, names of parameters"),
        ("no_model", "gave PosixPath in place of a transformers.PreTrainedModel"),
        ("lacking", "lack 1 parameters, e.g. model.norm.weight"),
        ("unreadable", "cannot be loaded: OSError: .* is encrypted"),
    ],
)
def test_what_a_custom_loader_may_not_give_is_refused(folder: Path, loader: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        load_causal_lm(ModelConfig(path=str(folder), loader=f"test_causal_lm:{loader}"), "cpu")
