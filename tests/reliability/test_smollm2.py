"""SmolLM2-135M-Instruct from the package index: what is trained is what transformers reads of the GGUF, and an export is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.config.models import ModelConfig
from skyrl_train.model import PYPI, WHEELS
from skyrl_train.system.files import cache_folder

NAME = "SmolLM2-135M-Instruct"
PATH = f"{PYPI}{NAME}"
FILE = cache_folder("models") / Path(WHEELS[NAME].member).name
TEXT = "<|im_start|>user\nWhat is 17 plus 5?<|im_end|>\n<|im_start|>assistant\n22<|im_end|>\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"not fetched; run: python -m skyrl_train.model.gguf {PATH} (93 MB)"),
]


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)


def test_log_probabilities_are_those_that_transformers_computes_from_the_gguf(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skyrl_train.model import load_causal_lm, load_tokenizer
    from skyrl_train.model.files import export_model

    config = ModelConfig(path=PATH)
    tokenizer = load_tokenizer(config)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|im_end|>", 2, 1)
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert str(chat).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = torch.tensor([tokenizer.encode(TEXT)])
    assert ids[0, 0] == 1

    own = load_causal_lm(config, "cpu").eval()
    assert sum(each.numel() for each in own.parameters()) == 134_515_008
    found = logprobs(own, ids)
    export_model(tmp_path, own, own.state_dict(keep_vars=True), config)
    del own
    theirs = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()
    torch.testing.assert_close(found, logprobs(theirs, ids), rtol=0, atol=1e-5)
    del theirs
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(found, logprobs(exported, ids), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXT) == ids[0].tolist()


@pytest.mark.nightly
def test_half_of_its_recipe_teaches_it_to_add(tmp_path: Path) -> None:
    from skyrl_train.api import load_config, train

    shorter = {"trainer.total_steps": 12, "data.max_validation_prompts": 100, "trainer.export_hf": False}
    result = train(load_config("+experiment=smollm2", settings={**shorter, "output_dir": str(tmp_path)}))
    correct = [record["reward/correct/mean"] for record in result.metrics if "reward/correct/mean" in record]
    assert len(correct) == 12
    assert sum(correct[-3:]) / 3 > sum(correct[:3]) / 3 + 0.2
    before, after = (each for record in result.metrics if (each := record.get("eval/accuracy")) is not None)
    assert after > before + 0.2
