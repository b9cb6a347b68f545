import ast
import base64
import hashlib
import json
import logging
import os
import random
import sys
import time
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest

from skyrl_train import trainers
from skyrl_train.config import Config
from skyrl_train.config.fields import walk
from skyrl_train.telemetry.logs import redaction
from skyrl_train.telemetry.logs.redaction import (
    RedactingFormatter,
    is_secret_name,
    learn_arguments,
    learn_secrets,
    redact,
    redact_text,
)
from tests.support.planted_secrets import planted


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_learned", [])


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
        "SSH_AUTH_SOCK",
        "",
    ],
)
def test_names_that_only_look_like_it(name):
    assert not is_secret_name(name)


def test_what_an_error_of_python_quotes_is_no_secret_of_its_class(monkeypatch):
    line = "score: KeyError: 'answr' at my_code.py:7 in score: return float(row[\"answr\"])"
    assert redact_text(line) == line
    assert redact_text("TokenError: 'not-a-key-1'") == "TokenError: 'not-a-key-1'"
    assert redact_text("key_error='hunter22' api_key: 'hunter22'") == "key_error=<redacted> api_key: <redacted>"
    assert redact_text("KeyError: 'hf_abcdefghijklmnopqrstuv'") == "KeyError: '<redacted>'"
    assert redact_text("KeyError=hunter22") == "KeyError=<redacted>"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["a", "--a", "token=${"])
def test_a_long_word_takes_time_in_proportion(word):
    long = word * (1_000_000 // len(word))
    began = time.process_time()
    assert redact_text(f"{long} api_key=abc").endswith("<redacted>")
    assert time.process_time() - began < 5.0  # 0.3 on a quiet processor, and hours where each letter begins a search


def test_flags_are_names_wherever_they_stand():
    assert redact_text("--password = hunter22 --token :abc") == "--password = <redacted> --token <redacted>"
    assert redact_text("run--api-key abc 2token=x1 \u00e9token=x1") == (
        "run--api-key <redacted> 2token=<redacted> \u00e9token=<redacted>"
    )


def test_no_setting_of_ours_is_taken_for_a_secret():
    assert [field.path for field in walk(Config) if is_secret_name(field.path.rpartition(".")[2])] == []


def test_secrets_are_replaced_at_any_depth_and_the_rest_is_kept():
    config = {
        "environment": {
            "kwargs": {"api_key": "abc", "urls": ("http://me:pw@host/x", "http://host/y"), "timeout": 3},
            "database": "host=db user=me password=pw dbname=x",
        },
        "headers": [{"Authorization": "Bearer abc"}],
        "token": None,
        "key": "",
    }
    assert redact(config) == {
        "environment": {
            "kwargs": {"api_key": "<redacted>", "urls": ["http://<redacted>@host/x", "http://host/y"], "timeout": 3},
            "database": "host=db user=me password=<redacted> dbname=x",
        },
        "headers": [{"Authorization": "<redacted>"}],
        "token": None,
        "key": "",
    }


def test_a_secret_list_is_redacted_entry_by_entry():
    assert redact({"tokens": ["kept"], "token": ["a", "b"]}) == {"tokens": ["kept"], "token": ["<redacted>"] * 2}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a1" * 15,
        "sk-" + "x" * 30,
        "sk-proj-" + "Ab1-" * 12 + "x" * 20,
        "sk-ant-api03-" + "Zz9_" * 10,
        "ghp_" + "0" * 36,
        "github_pat_" + "a0_" * 20,
        "glpat-" + "x1" * 10,
        "AKIA" + "Z" * 16,
        "AIza" + "b" * 35,
        "xoxb-1234567890-abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    ],
)
def test_a_secret_is_known_by_its_shape_wherever_it_stands(secret):
    assert redact({"command": f"run --with {secret} now"}) == {"command": "run --with <redacted> now"}
    assert redact_text(f"401 for url https://h/x?a={secret}&b=1") == "401 for url https://h/x?a=<redacted>&b=1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:p@ss@db:5432/x?y=1", "postgresql://<redacted>@db:5432/x?y=1"),
        ("mysql://me:p/w#1@db/x", "mysql://<redacted>@db/x"),
        ("https://hooks.example/x?token=abc&n=1", "https://hooks.example/x?token=<redacted>&n=1"),
        ("https://s3/x?X-Amz-Signature=00ffaa&X-Amz-Date=1", "https://s3/x?X-Amz-Signature=<redacted>&X-Amz-Date=1"),
        ("Server=db;Uid=me;Pwd=hunter2;", "Server=db;Uid=me;Pwd=<redacted>;"),
        ("password='two words' dbname=x", "password=<redacted> dbname=x"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": <redacted>, "n": 1}'),
        ("environment.env_class.api_key=abc seed=1", "environment.env_class.api_key=<redacted> seed=1"),
        (
            "environment.env_class={_target_: x, api_key: s3cr3t}",
            "environment.env_class={_target_: x, api_key: <redacted>}",
        ),
        ("token=secret=abc;x", "token=<redacted>;x"),
        ("curl --api-key abc --retry 3", "curl --api-key <redacted> --retry 3"),
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer <redacted>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nafter", "<redacted>\nafter"),
    ],
)
def test_texts_lose_their_secrets_and_nothing_else(text, expected):
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "generator.http.api_key: must be a text; got 3. Try generator.http.api_key=null",
        "an unknown token: the model has 512",
        "trainer.max_tokens_per_microbatch=4096 eos_token=2",
        "https://host:8080/a@b and https://example.org/@me, hf://datasets/owner/name@main",
        "api_key=${oc.env:MY_KEY}",
        "sk-learn-experiment-2024 in /data/sk-learn-experiments/task-1",
        "step  3/40  reward 0.412  kl 0.0011  ent 0.82  len 18.2  ctx 41.0  4.8k tok/s  1.3 s  0:48 left",
        "a secret of good cooking; the key to it is salt",
    ],
)
def test_other_texts_stay(text):
    assert redact_text(text) == text


def harmless_values():
    """1,000 values that look random and are no secrets, as the system makes them."""
    random.seed(0)
    for number in range(125):
        text = random.randbytes(16)
        yield from (
            hashlib.sha256(text).hexdigest(),
            hashlib.sha1(text).hexdigest(),
            hashlib.md5(text).hexdigest()[:12],
            str(uuid.UUID(bytes=text)),
            f"/data/{uuid.UUID(bytes=text).hex}/runs/2026-11-22_081253/checkpoints/step_{number:06d}",
            uuid.UUID(bytes=text).hex[:12],
            f"gsm8k-{text.hex()[:8]}-seed{number}",
            f"s3://bucket-{text.hex()[:6]}/skyrl_train/export/model-{number:05d}-of-00125.safetensors",
        )


def test_a_thousand_digests_commits_uuids_paths_and_names_of_runs_stay():
    values = list(harmless_values())
    assert len(values) == 1000
    assert [value for value in values if redact(value, "value") != value] == []
    for template in ("sha256={}", "resuming from {}, after step 3", "commit: {}", '{{"run_id": "{}"}}', "{}@{}"):
        texts = [template.format(value, value) for value in values]
        assert [text for text in texts if redact_text(text) != text] == []


def test_secrets_of_the_command_line_and_the_environment_are_found_wherever_they_stand():
    digest = "0f" * 20
    learn_arguments(
        ["environment.env_class.key=tangerine-7", "+db=postgres://me:pa55w0rd@h/x", "data.train=[x.jsonl]", "seed=1"],
        {"WANDB_API_KEY": digest, "HOME": "/home/someone", "SSL_KEY_FILE": "/etc/key.pem", "AUTH_MODE": "token"},
    )
    said = f"no key tangerine-7 of {digest} with pa55w0rd, but tangerine-77, /etc/key.pem, token, x.jsonl"
    assert (
        redact_text(said)
        == "no key <redacted> of <redacted> with <redacted>, but tangerine-77, /etc/key.pem, token, x.jsonl"
    )


def test_logs_lose_secrets_tracebacks_included():
    learn_secrets({"api_key": "tangerine-7"})
    formatter = RedactingFormatter(logging.Formatter("%(levelname)s %(message)s"))
    try:
        raise ValueError("refused tangerine-7")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "with %s", ("tangerine-7",), sys.exc_info())
    said = formatter.format(record)
    assert said.startswith("ERROR with <redacted>\nTraceback")
    assert said.endswith("ValueError: refused <redacted>")


def test_two_hundred_planted_secrets_of_forty_kinds_are_found_however_they_are_written():
    secrets = list(planted())
    assert (len(secrets), len({each.kind for each in secrets})) == (200, 40)
    learn_arguments([], {each.name: each.text for each in secrets})
    for each in secrets:
        pair = base64.b64encode(f"me:{each.secret}".encode()).decode()
        written = {
            "as it is": (f"refused {each.text} twice", each.secret),
            "alone": (each.secret, each.secret),
            "within a URL": (f"https://h/x/{quote(each.text, safe='')}/y", quote(each.secret, safe="")),
            "as JSON": (json.dumps({"said": each.text}), json.dumps(each.secret)[1:-1]),
            "as Python": (f"ValueError({each.text!r})", repr(each.secret)[1:-1]),
            "as base64": (f"Cookie {pair}", pair),
        }
        assert [how for how, (text, secret) in written.items() if secret in redact_text(text)] == [], each
        assert each.secret not in json.dumps(redact({"place": [each.text]}), ensure_ascii=False), each


def test_every_text_of_this_package_stays():
    texts = sorted(
        node.value
        for path in Path(trainers.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "api_key" not in node.value
    )
    learn_arguments([], {each.kind: each.text for each in planted()})
    changed = {text[:60] for text in texts if redact_text(text) != text}
    assert len(texts) > 500
    assert {text for text in changed if "-----BEGIN" not in text and "password=" not in text} == set()


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint step_3: KeyError: models is missing",
        "missing token: step_3 of 4",
        "secrets: `.hydra/*.yaml`, `multirun.yaml` of a sweep",
        "https://example.org/search?key=colour&page=2",
        "Authorization: required; cookie: none; signature: (completion, answer)",
        "reward_function.py:12 in score: return scores[key=3]",
    ],
)
def test_sentences_that_name_a_secret_without_one_stay(text):
    assert redact_text(text) == text


def test_common_values_of_variables_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "research-team-7")
    learn_arguments(
        [],
        {
            "PGPASSWORD": "research-team-7",
            "AUTH": "disabled",
            "KEY": "Production",
            "TOKEN": "a1b2c3",
            "GIT_COMMIT": "0f1e2d3c4b" * 4,
            "JOB_NAME": "MyExperiment-Qwen2.5-7B-GRPO-20260101",
            "POD": "trainer-6d4cf56db6-x7k2p",
            "LS_COLORS": "rs=0:di=01;34:ln=01;36:mh=00:pi=40;33",
            "JAVA_HOME": "/opt/Java17x64A1b2C3d4E5f6G7h8",
        },
    )
    said = f"research-team-7 disabled Production a1b2c3 {'0f1e2d3c4b' * 4} MyExperiment-Qwen2.5-7B-GRPO-20260101"
    assert redact_text(said) == said
    assert redaction._learned == []


def test_the_variable_that_a_setting_names_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_JUDGE", "plain words here")
    learn_secrets({"environment": {"reward": {"_target_": "judge", "api_key_env": "OF_THE_JUDGE"}}})
    assert redact_text("refused 'plain words here'") == "refused '<redacted>'"
    assert os.environ["OF_THE_JUDGE"] == "plain words here"
