import pytest

from skyrl_train.config.fields import walk
from skyrl_train.config.schema import Config
from skyrl_train.telemetry.files import is_secret_name, redact


@pytest.mark.parametrize(
    "name", ["api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "password", "clientSecret", "Authorization", "key"]
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens_per_microbatch",
        "tokenizer_path",
        "keys_per_row",
        "monkey",
        "tokens",
        "api_key_env",
        "token_file",
        "",
    ],
)
def test_names_that_only_look_like_it(name):
    assert not is_secret_name(name)


def test_no_setting_of_ours_is_taken_for_a_secret():
    assert [field.path for field in walk(Config) if is_secret_name(field.path.rpartition(".")[2])] == []


def test_secrets_are_replaced_at_any_depth_and_the_rest_is_kept():
    config = {
        "environment": {"kwargs": {"api_key": "abc", "urls": ("http://me:pw@host/x", "http://host/y"), "timeout": 3}},
        "headers": [{"Authorization": "Bearer abc"}],
        "token": None,
        "key": "",
    }
    assert redact(config) == {
        "environment": {
            "kwargs": {"api_key": "<redacted>", "urls": ["http://<redacted>@host/x", "http://host/y"], "timeout": 3}
        },
        "headers": [{"Authorization": "<redacted>"}],
        "token": None,
        "key": "",
    }


def test_a_secret_list_is_redacted_entry_by_entry():
    assert redact({"tokens": ["kept"], "token": ["a", "b"]}) == {"tokens": ["kept"], "token": ["<redacted>"] * 2}


@pytest.mark.parametrize("secret", ["hf_" + "a1" * 15, "sk-" + "x" * 30, "ghp_" + "0" * 36, "AKIA" + "Z" * 16])
def test_a_secret_is_known_by_its_shape_wherever_it_stands(secret):
    assert redact({"command": f"run --with {secret} now"}) == {"command": "run --with <redacted> now"}
