"""What becomes of checkpoints once they are saved: how long they live, copies of them, their files for others.

A download is an address that needs no key, as SDKs read it: it is signed, names one file of one checkpoint, and ends after
an hour, or with the process. The files are PEFT's, or those of a whole model: safetensors and JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import shutil
import tarfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.config.models import LoraConfig
from skyrl_train.errors import CheckpointError, SkyrlTrainError
from skyrl_train.learner import read_model
from skyrl_train.model.lora import write_adapter
from skyrl_train.serve.asked import Copy, TimeToLive, checked
from skyrl_train.serve.models import ALPHA, Bases
from skyrl_train.serve.records import Checkpoint, Records, as_time
from skyrl_train.serve.refusals import Refused, not_there

ADDRESS_S = 3600.0
"""How long a download may be begun."""
_SWEEP_S = 60.0
"""Between looks for checkpoints whose time is over. They are not there from that moment on; their files are until then."""
ARCHIVE = "archive.tar"

logger = logging.getLogger(__name__)


class Checkpoints:
    """Those of all tenants, on one event loop."""

    def __init__(
        self,
        records: Records,
        folder: Path,
        note: Callable[[Mapping[str, Any]], Awaitable[None]],
        bases: Bases,
    ) -> None:
        """`note` brings a line of the journal to disk and has the records take it."""
        self._records, self._folder, self._note, self._bases = records, folder, note, bases
        self._secret = secrets.token_bytes(32)
        self._writing = asyncio.Lock()

    async def delete(self, tenant: str, path: str) -> None:
        """Forget a checkpoint and remove its files. Samplers of it fail from here on."""
        await self._remove(self._records.checkpoint(tenant, path))

    async def set_ttl(self, tenant: str, path: str, content: Mapping[str, Any]) -> None:
        """Give a checkpoint this many seconds from now, or, with None, all of them. Raises Refused."""
        checkpoint = self._records.checkpoint(tenant, path)
        seconds = checked(TimeToLive, content, "ttl").ttl_seconds
        await self._note({"ttl": checkpoint.path, "expires_at": None if seconds is None else time.time() + seconds})

    async def sweep(self) -> None:
        """Remove what expires, until cancelled."""
        while True:
            for checkpoint in [each for each in self._records.checkpoints.values() if not each.lives]:
                try:
                    await self._remove(checkpoint)
                except SkyrlTrainError as error:
                    logger.warning("%s has expired and is still on disk: %s", checkpoint.path, error)
            await asyncio.sleep(_SWEEP_S)

    async def copy(self, tenant: str, content: Mapping[str, Any], key: str) -> dict[str, str]:
        """Copy a checkpoint into a new training run, which has nothing else and is not trained. `key`: the same one gives
        the same copy. Raises Refused."""
        asked = checked(Copy, content, "copy_weights")
        source = self._records.checkpoint(tenant, asked.source_path)
        if asked.session_id is not None:
            session, number = self._records.session(tenant, asked.session_id).session_id, asked.model_seq_id
        else:
            session, number = _digest(f"{tenant} {key or uuid.uuid4()}"), 0
        model_id = f"{session}:train:{number}"
        path = "/".join(["tinker:/", model_id, *source.path.split("/")[3:]])
        async with self._writing:
            known = self._records.checkpoints.get(path)
            if known is not None and known.copied_from == source.path:
                return {"tinker_path": path}
            if model_id in self._records.models:
                raise Refused(f"{model_id} is there already: a copy is a training run of its own", status=422)
            folder, at = f"copies/{_digest(model_id)}", time.time()
            await asyncio.to_thread(_link, self._folder / source.folder, self._folder / folder)
            made = {
                **asdict(source),
                "path": path,
                "model_id": model_id,
                "folder": folder,
                "at": at,
                "is_named": True,
                "copied_from": source.path,
                "expires_at": None if asked.ttl_seconds is None else at + asked.ttl_seconds,
            }
            await self._note({"copy": model_id, "tenant": tenant, "at": at, "checkpoint": made})
        return {"tinker_path": path}

    async def urls(self, tenant: str, path: str, base: str, *, archive: bool) -> dict[str, Any]:
        """Return addresses below `base` of a checkpoint's files, by name, or the one of its archive. Raises Refused."""
        checkpoint = self._records.checkpoint(tenant, path)
        if not archive and checkpoint.kind != "external":
            raise Refused("only what save_weights_external saved has files of its own; load it and save that")
        async with self._writing:
            try:
                exported = await asyncio.to_thread(self._export, checkpoint)
            except CheckpointError as error:  # it was deleted meanwhile
                raise not_there("checkpoint", path) from error
        names = [ARCHIVE] if archive else sorted(each.name for each in exported.iterdir() if each.name != ARCHIVE)
        expires = int(time.time() + ADDRESS_S)
        below = checkpoint.path.removeprefix("tinker://")
        urls = {name: f"{base}/download/{expires}/{self._sign(expires, below, name)}/{below}/{name}" for name in names}
        told = {"url": urls[ARCHIVE]} if archive else {"urls": urls}
        return {**told, "expires": as_time(expires)}

    def file(self, address: Mapping[str, str]) -> Path:
        """Return the file that a signed address names. Raises Refused, with 404 whatever is wrong with it."""
        below = f"{address['model']}/{address['part']}/{address['name']}"
        checkpoint = self._records.checkpoints.get(f"tinker://{below}")
        expires = address["expires"] if re.fullmatch("[0-9]{1,12}", address["expires"]) else "0"
        signature = self._sign(int(expires), below, address["file"])
        is_signed = hmac.compare_digest(signature.encode(), address["signature"].encode())
        if not is_signed or int(expires) < time.time() or checkpoint is None or not checkpoint.lives:
            raise not_there("file", address["file"])
        return self._folder / checkpoint.folder / "peft" / address["file"]

    def _sign(self, expires: int, below: str, name: str) -> str:
        return hmac.new(self._secret, f"{expires} {below} {name}".encode(), hashlib.sha256).hexdigest()

    def _export(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint as PEFT or transformers read it, and all of it as one file, unless it is there."""
        folder = self._folder / checkpoint.folder
        exported, unfinished = folder / "peft", folder / ".peft.tmp"
        if exported.is_dir():
            return exported
        shutil.rmtree(unfinished, ignore_errors=True)
        if checkpoint.facts.is_full:
            self._bases.of(checkpoint.facts.base).export(folder, unfinished)
        else:
            lora = LoraConfig(rank=checkpoint.facts.rank, alpha=ALPHA)
            write_adapter(unfinished, dict(read_model(folder)), lora)
            config = unfinished / "adapter_config.json"
            named = {"base_model_name_or_path": self._bases.name(checkpoint.facts.base)}
            config.write_text(json.dumps({**json.loads(config.read_bytes()), **named}, indent=1))
        (unfinished / "README.md").unlink(missing_ok=True)
        names = [each.name for each in unfinished.iterdir()]
        (unfinished / "checkpoint_complete").touch()
        with tarfile.open(unfinished / ARCHIVE, "w") as archive:
            for name in sorted([*names, "checkpoint_complete"]):
                archive.add(unfinished / name, arcname=name, filter=_without_owner)
        (unfinished / "checkpoint_complete").unlink()
        unfinished.replace(exported)
        return exported

    async def _remove(self, checkpoint: Checkpoint) -> None:
        await self._note({"deleted": checkpoint.path})
        await asyncio.to_thread(shutil.rmtree, self._folder / checkpoint.folder, True)


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Who runs the server is nobody's business."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _link(source: Path, target: Path) -> None:
    """Give the files a second name, so that a copy takes no room and outlives what it is of. Raises Refused."""
    shutil.rmtree(target, ignore_errors=True)  # of a copy that was cut off before it was journaled
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except FileNotFoundError:
        raise not_there("checkpoint", source.name) from None
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise Refused(f"the copy cannot be made: {error.strerror}", status=503, category="server") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
