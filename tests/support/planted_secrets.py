"""Forty kinds of secrets, as services make them, with the name that each stands under; `planted()` has five of each."""

from __future__ import annotations

import base64
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_ALNUM, _HEX = string.ascii_letters + string.digits, "0123456789abcdef"
_URL_SAFE, _BASE64 = f"{_ALNUM}-_", f"{_ALNUM}+/"


@dataclass(frozen=True, kw_only=True)
class Planted:
    kind: str
    name: str
    """Of the variable, or the argument, that holds it."""
    text: str
    """What it holds."""
    secret: str
    """The part of it that must be found nowhere."""


def _of(letters: str, count: int) -> Callable[[random.Random], str]:
    return lambda draws: "".join(draws.choices(letters, k=count))


def _random(letters: str, count: int) -> Callable[[random.Random], str]:
    def make(draws: random.Random) -> str:
        return "aZ3" + "".join(draws.choices(letters, k=count - 6)) + "9xB"

    return make


# In brackets stands the secret itself.
_BY_SHAPE: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "huggingface": ("[hf_{}]", _of(_ALNUM, 34)),
    "openai": ("[sk-{}]", _of(_ALNUM, 48)),
    "openai project": ("[sk-proj-{}]", _of(_URL_SAFE, 80)),
    "anthropic": ("[sk-ant-api03-{}]", _of(_URL_SAFE, 80)),
    "stripe": ("[sk_live_{}]", _of(_ALNUM, 24)),
    "github": ("[ghp_{}]", _of(_ALNUM, 36)),
    "github fine-grained": ("[github_pat_{}]", _of(_ALNUM, 60)),
    "gitlab": ("[glpat-{}]", _of(_URL_SAFE, 20)),
    "aws id": ("[AKIA{}]", _of(string.ascii_uppercase + string.digits, 16)),
    "google": ("[AIza{}]", _of(_URL_SAFE, 35)),
    "slack": ("[xoxb-{}]", _of(_ALNUM, 40)),
    "wandb self-hosted": ("[local-{}]", _of(_HEX, 40)),
    "groq": ("[gsk_{}]", _of(_ALNUM, 52)),
    "nvidia": ("[nvapi-{}]", _of(_URL_SAFE, 60)),
    "npm": ("[npm_{}]", _of(_ALNUM, 36)),
    "pypi": ("[pypi-{}]", _of(_URL_SAFE, 120)),
    "json web token": ("[eyJhbGciOiJIUzI1NiJ9.eyJ{0}.{0}]", _of(_ALNUM, 30)),
    "digitalocean": ("[dop_v1_{}]", _of(_HEX, 64)),
    "vault": ("[hvs.{}]", _of(_URL_SAFE, 90)),
    "sendgrid": ("[SG.{}]", _of(_ALNUM, 60)),
    "google oauth": ("[ya29.{}]", _of(_URL_SAFE, 80)),
    "telegram": ("https://api.telegram.org/[bot123456789:{}]/sendMessage", _of(_ALNUM, 35)),
    "slack webhook": ("https://hooks.slack.com/[services/T01ABCDEF/B01ABCDEF/{}]", _of(_ALNUM, 24)),
    "discord webhook": ("https://discord.com/api/webhooks/[112233445566778899/{}]", _of(_URL_SAFE, 68)),
    "url key": ("https://api.example.org/v1?n=1&key=[{}]", _of(_ALNUM, 20)),
    "url signature": ("https://b.blob.core.windows.net/c/x?sv=2024-01-01&sig=[{}%3D]&se=2027", _of(_ALNUM, 43)),
    "url token": ("https://example.org/hook?token=[{}]&n=1", _of(_HEX, 24)),
    "aws url": ("https://s3.amazonaws.com/b/x?X-Amz-Date=1&X-Amz-Signature=[{}]", _of(_HEX, 64)),
    "password of a url": ("postgresql://me:[{}]@db:5432/x", _of(_ALNUM, 14)),
    "azure storage": ("DefaultEndpointsProtocol=https;AccountName=x;AccountKey=[{}];EndpointSuffix=y", _of(_ALNUM, 88)),
}
_BY_NAME: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "wandb": ("WANDB_API_KEY", _of(_HEX, 40)),
    "aws secret": ("AWS_SECRET_ACCESS_KEY", _random(_BASE64, 40)),
    "uuid key": ("COHERE_API_KEY", lambda draws: str(uuid.UUID(int=draws.getrandbits(128)))),
    "password of words": (
        "PGPASSWORD",
        lambda draws: "correct horse " + "".join(draws.choices(_ALNUM, k=4)) + ' "x" ä&b',
    ),
    "short password": ("DB_PASS", _of(_ALNUM + "!$%", 8)),
    "session": ("SESSION_COOKIE", _of(_URL_SAFE, 30)),
    "webhook of one's own": ("ALERT_WEBHOOK", lambda draws: f"https://n8n.example.org/x/{draws.getrandbits(60)}"),
    "base64 secret": ("SIGNING_SECRET", lambda draws: base64.b64encode(draws.randbytes(32)).decode()),
}
_BY_LOOK: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "nameless": ("MY_SERVICE_A", _random(_ALNUM, 40)),
    "nameless base64": ("MY_SERVICE_B", lambda draws: "aZ3bC4dE5fG6hJ7kL8m" + "".join(draws.choices(_ALNUM, k=20))),
}


def planted() -> Iterator[Planted]:
    """Yield 200 secrets: by shape, by the name of what holds them, by their look alone."""
    draws = random.Random(0)
    for number in range(5):
        for index, (kind, (shape, make)) in enumerate(_BY_SHAPE.items()):
            before, secret, after = re.split(r"[\[\]]", shape.format(make(draws)))
            yield Planted(kind=kind, name=f"PLACE_{index}_{number}", text=before + secret + after, secret=secret)
        for kind, (name, make) in {**_BY_NAME, **_BY_LOOK}.items():
            secret = make(draws)
            head, _, last = name.rpartition("_")
            yield Planted(
                kind=kind, name=f"{head}_{number}_{last}" if head else f"X{number}_{name}", text=secret, secret=secret
            )
