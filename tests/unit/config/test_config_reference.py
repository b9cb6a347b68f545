from __future__ import annotations

from pathlib import Path

import pytest

from scripts.make_config_reference import documentation, reference, type_text
from skyrl_train.config.fields.fields import SchemaField, walk
from skyrl_train.config.schema import Config
from skyrl_train.runs.cli import conf_dir

ROOT = Path(__file__).resolve().parents[3]
FIELDS = {field.path: field for field in walk(Config)}


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_every_field_has_a_docstring(field: SchemaField) -> None:
    assert documentation(field).endswith((".", ")"))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("trainer.train_batch_size", "integer, at least 1"),
        ("generator.sampling.top_p", "number, greater than 0 and at most 1"),
        ("model.revision", "text, or null"),
        ("model.dtype", "`float32`, `bfloat16`"),
        ("data.train", "list of text"),
        ("trainer.policy.optimizer.betas", "list of number, at least 0 and below 1, 2 of them"),
        ("generator.vllm.engine_args", "mapping, any key"),
        ("data.shuffle", "true or false"),
    ],
)
def test_types_are_told_in_words(path: str, text: str) -> None:
    assert type_text(FIELDS[path]) == text


def test_the_reference_lists_every_setting_and_every_choice() -> None:
    document = reference()
    repeated = {"generator.eval_sampling.", "critic.optimizer.", "critic.model.lora."}
    for path, field in FIELDS.items():
        if not field.section and not path.startswith(tuple(repeated)):
            assert f"| `{path}` |" in document
    for file in conf_dir().glob("[!h]*/*.yaml"):
        assert f"| `{file.stem}` |" in document


def test_the_reference_in_the_repository_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python scripts/make_config_reference.py"
