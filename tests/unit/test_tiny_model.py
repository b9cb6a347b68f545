"""The bundled tiny model: the script's recipe, a tokenizer that loses nothing, and answers that can be read."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config import Config
from skyrl_train.config.data import DataConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.data.tasks import Split, generate_problems
from skyrl_train.errors import ModelError
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import check_special_tokens, vocabulary_size
from skyrl_train.rollout.envs import parse_answer
from skyrl_train.runs import load_data

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "skyrl_train" / "data" / "assets" / "tiny_qwen2"
CONVERSATION = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "Ana has 3 pens. Ana buys 12 more. How many pens does Ana have now?"},
    {"role": "assistant", "content": "#### 14"},
    {"role": "user", "content": "Wrong. Try again."},
    {"role": "assistant", "content": "3+12=15\n#### 15"},
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_tiny_model", ROOT / "scripts" / "build_tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_tiny_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads((FOLDER / "recipe.json").read_text(encoding="utf-8"))
    return recipe


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def test_the_recorded_recipe_is_the_scripts(script: ModuleType, recorded: dict[str, Any]) -> None:
    assert recorded["settings"] == json.loads(json.dumps(script.settings_of(script.RECIPE)))


def test_the_bundled_tokenizer_is_what_the_script_builds(script: ModuleType, tokenizer: Any) -> None:
    rebuilt = script.build_tokenizer(script.RECIPE)
    assert rebuilt.get_vocab() == tokenizer.get_vocab()
    assert rebuilt.chat_template == tokenizer.chat_template
    assert (
        json.loads(rebuilt.backend_tokenizer.to_str())["model"]["merges"]
        == (json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"])
    )


def test_the_untrained_model_of_the_recipe_has_the_bundled_shapes(
    script: ModuleType, tokenizer: Any, model: Any
) -> None:
    untrained = script.build_model(script.RECIPE, tokenizer)
    assert {name: tensor.shape for name, tensor in untrained.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


def test_it_has_about_a_million_parameters_in_a_few_megabytes(model: Any) -> None:
    assert 800_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_200_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5_000_000
    assert model.config.model_type == "qwen2"
    assert model.config.use_cache is True
    assert model.config.max_position_embeddings >= 512
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_end_and_padding_are_different_tokens(model: Any, tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_text_survives_a_round_trip(tokenizer: Any) -> None:
    texts = ["  two  spaces\n\nand\ttab", "Zoë paid €4.50 for 1,000", "<<48/2=24>>24 clips"]
    for problem in generate_problems(Split.VALIDATION, 200, seed=9):
        texts += [problem.question, problem.solution]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_words_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("Ana has 12 pens.\n#### 12") == [
        *("Ana", "Ġhas", "Ġ", "1", "2", "Ġpens", ".", "Ċ"),
        *("####", "Ġ", "1", "2"),
    ]


def test_each_conversation_is_a_prefix_of_the_longer_one(tokenizer: Any) -> None:
    whole = tokenizer.apply_chat_template(CONVERSATION)["input_ids"]
    for length in range(1, len(CONVERSATION)):
        ids = tokenizer.apply_chat_template(CONVERSATION[:length])["input_ids"]
        assert whole[: len(ids)] == ids
        if CONVERSATION[length]["role"] == "assistant":
            opened = tokenizer.apply_chat_template(CONVERSATION[:length], add_generation_prompt=True)["input_ids"]
            assert whole[: len(opened)] == opened


def test_a_prompt_with_the_generated_tokens_is_a_prefix_of_the_next_prompt(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True)["input_ids"]
    generated = [*tokenizer.encode("#### 14"), tokenizer.eos_token_id]
    following = tokenizer.apply_chat_template(CONVERSATION[:4], add_generation_prompt=True)["input_ids"]
    assert following[: len(prompt) + len(generated)] == prompt + generated


def test_the_template_marks_what_the_assistant_says_with_its_end(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"]) if mask]
    assert tokenizer.decode(said) == "#### 14<|im_end|>3+12=15\n#### 15<|im_end|>"


def test_most_sampled_answers_can_be_read_and_end(model: Any, tokenizer: Any, script: ModuleType) -> None:
    torch.manual_seed(0)
    conversations = [
        [{"role": "user", "content": problem.question}] for problem in generate_problems(Split.VALIDATION, 64, seed=0)
    ]
    responses = script.respond(model, tokenizer, conversations, greedy=False)
    assert sum(parse_answer(response) is not None for response in responses) >= 60
    assert any("=" in response for response in responses)
    assert sum(response.startswith("#### ") for response in responses) > len(responses) / 2


def test_the_recorded_accuracy_is_that_of_a_model_that_guesses(recorded: dict[str, Any]) -> None:
    measured = recorded["measured_on_held_out"]
    assert 0.1 < measured["sampled"]["solved_first_turn"] < 0.5
    assert measured["sampled"]["solved"] >= measured["sampled"]["solved_first_turn"]


@pytest.mark.parametrize(
    ("file", "entry", "stated", "named"),
    [
        ("config.json", "eos_token_id", 70000, 70000),
        ("config.json", "bos_token_id", -1, -1),
        ("generation_config.json", "eos_token_id", [2, 66000], 66000),
        ("generation_config.json", "pad_token_id", 10**9, 10**9),
    ],
)
def test_special_tokens_outside_of_the_embedding_are_refused_by_file_and_entry(
    file: str, entry: str, stated: Any, named: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    model = ModelConfig(path=str(folder))
    check_special_tokens(model)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, entry: stated}))
    with pytest.raises(ModelError) as error:
        load_data(Config(model=model))
    assert str(error.value).startswith(f"{folder / file}: {entry} is {named}, and the embedding of ")
    assert "ids from 0 to" in str(error.value)
    assert str(error.value).endswith("Correct the entry in that file")


def test_a_tokenizer_whose_special_token_has_no_embedding_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer = load_tokenizer(ModelConfig(path=str(FOLDER)))
    tokenizer.add_special_tokens({"eos_token": "<another end>"})
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"the tokenizer at .*: eos_token_id is \d+, .* Set model.tokenizer_path"):
        load_data(Config(model=ModelConfig(path=str(FOLDER), tokenizer_path=str(folder))))


def test_a_tokenizer_with_tokens_that_the_model_has_no_embedding_of_is_refused_before_training(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    assert vocabulary_size(ModelConfig(path=str(FOLDER))) == config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    data = DataConfig(train=("builtin:word_problems/train",), validation=(), max_train_prompts=32)
    with pytest.raises(
        ModelError, match=r"prompt .* has the token id \d+, and the embedding of .* has 8 rows.* of 492 tokens"
    ):
        load_data(Config(model=ModelConfig(path=str(folder)), data=data))
