"""The hub of Hugging Face: whether it can be had and what is here already, known in seconds; and rows read from it."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError, DeadlineError
from skyrl_train.system import in_time, require

_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 4.0
_PAUSES_S = (1.0, 2.0)
"""Before a data set is asked for again."""

logger = logging.getLogger(__name__)


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

    def ask() -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint(), method="HEAD"), timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except (OSError, ValueError):
            return False
        return True

    try:  # on a thread: looking up a name knows no deadline
        answers = in_time(ask, what="the hub", timeout_s=_TIMEOUT_S)
    except DeadlineError:
        answers = False
    if not answers:
        _go_offline()
    return answers


def _go_offline() -> None:
    """Have the hub's libraries take what is in their cache: those imported later, and those that were imported before."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            vars(sys.modules[name])["HF_HUB_OFFLINE"] = True


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
    if problem_of(name, dataset=False):
        return False
    import huggingface_hub

    try:
        huggingface_hub.hf_hub_download(name, "config.json", revision=revision, etag_timeout=_TIMEOUT_S)
    except (OSError, ValueError, huggingface_hub.errors.EntryNotFoundError):  # of its own errors most are OSErrors
        return False
    return True


def read_hub(location: str) -> Iterator[Any]:
    """The reader `hub`: one split of a data set, `owner/name:split` or `owner/name/config:split`.

    Raises DataError within 20 seconds where the hub does not answer for it and nothing of it is in the cache.
    """
    address, _, split = location.partition(":")
    owner, name, *config = address.split("/")
    if not is_reachable():
        if not is_cached(f"{owner}/{name}", dataset=True):
            raise DataError(
                f"{location}: {endpoint()} does not answer, and the data set is not in the cache. {_REMEDY}"
            )
    elif (problem := problem_of(f"{owner}/{name}", dataset=True)) and not is_cached(f"{owner}/{name}", dataset=True):
        raise DataError(f"{location}: the hub does not give the data set ({problem}). {_REMEDY}")
    elif problem:
        logger.warning("%s: %s; what is in the cache is taken", location, problem)
        _go_offline()
    require("datasets")
    import datasets

    for library in ("huggingface_hub", "datasets"):  # each writes by itself what the run's own log writes again
        if logging.getLogger().hasHandlers():
            logging.getLogger(library).handlers.clear()
    try:
        rows = datasets.load_dataset(f"{owner}/{name}", *config, split=split)
    except Exception as error:
        # Whatever the hub client raises (no network, no such repository, gated): one line a person can act on.
        raise DataError(
            f"{location}: the hub data set cannot be loaded ({_first_line(error)}). Check the name, the split and the "
            f"configuration (owner/name/config:split where it has several). {_REMEDY}"
        ) from error
    yield from rows


_REMEDY = (
    "Check the name and the network (HF_TOKEN for gated data, HF_ENDPOINT for a mirror), or download it and give its "
    "folder"
)


@functools.cache
def problem_of(name: str, *, dataset: bool) -> str:
    """Return why the hub, which answers, does not tell of a data set or a model, empty where it does. Asked up to three
    times, each of them said once, and once for each process: the hub's own client would try each of its files for minutes.
    """
    import huggingface_hub

    api, problem = huggingface_hub.HfApi(endpoint()), ""
    tell = api.dataset_info if dataset else api.model_info
    for pause in (*_PAUSES_S, None):
        try:
            in_time(lambda: tell(name, timeout=_ANSWER_TIMEOUT_S), what="the hub", timeout_s=_ANSWER_TIMEOUT_S)
            return ""
        except huggingface_hub.errors.RepositoryNotFoundError as error:
            return _first_line(error)
        except Exception as error:  # whatever its client raises
            problem = _first_line(error)
            if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403, 404):
                return problem
        if pause is not None:
            logger.warning("%s: %s; asked again in %g s", name, problem, pause)
            time.sleep(pause)
    return problem


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
