"""The hub of Hugging Face: whether it can be had and what is here already, known in seconds; and rows read from it."""

from __future__ import annotations

import functools
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError

_TIMEOUT_S = 2.0


def endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the hub, or of a mirror that `HF_ENDPOINT` names."""
    return environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@functools.cache
def is_reachable() -> bool:
    """Whether the hub answers at all, within two seconds; asked once for each process. Not with `HF_HUB_OFFLINE`.

    Where it does not, `HF_HUB_OFFLINE` is set for whatever is imported later: the hub's library would try for minutes
    and then take what is in its cache.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint(), method="HEAD"), timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except (OSError, ValueError):
            return
        answers.append(True)

    # On a thread: looking up a name knows no deadline.
    asking = threading.Thread(target=ask, name="ask-the-hub", daemon=True)
    asking.start()
    asking.join(_TIMEOUT_S)
    if not answers:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return bool(answers)


def is_cached(name: str, *, dataset: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether something of the repository `owner/name` is in this machine's caches of the hub."""
    home = Path(environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    files = Path(environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    prepared = Path(environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    kind = "datasets" if dataset else "models"
    folders = [files / f"{kind}--{name.replace('/', '--')}" / "snapshots"]
    if dataset:
        folders.append(prepared / name.replace("/", "___"))
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def fetch_config(name: str, *, revision: str | None = None) -> bool:
    """Put the config of a model on the hub, and nothing else of it, into the cache; return whether it is there then."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or not is_reachable():
        return False
    import huggingface_hub

    try:
        huggingface_hub.hf_hub_download(name, "config.json", revision=revision, etag_timeout=_TIMEOUT_S)
    except (OSError, ValueError, huggingface_hub.errors.EntryNotFoundError):  # of its own errors most are OSErrors
        return False
    return True


def read_hub(location: str) -> Iterator[Any]:
    """The reader `hub`: one split of a data set, `owner/name:split` or `owner/name/config:split`."""
    import datasets

    address, _, split = location.partition(":")
    owner, name, *config = address.split("/")
    try:
        rows = datasets.load_dataset(f"{owner}/{name}", *config, split=split)
    except Exception as error:
        # Whatever the hub client raises (no network, no such repository, gated): one line a person can act on.
        first_line = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{location}: the hub data set cannot be loaded ({type(error).__name__}: {first_line}). "
            "Check the name, the split and the network (owner/name/config:split where it has several configurations), "
            "or download it and give its folder."
        ) from error
    yield from rows
