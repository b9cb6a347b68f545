"""Checkpoints at `s3://`, through s3fs, in a server of moto whose connections are cut: each is whole, or not there.

Needs what no extra has, in folders of their own (`scripts/nightly.sh` makes them): SKYRL_TRAIN_S3FS, where
`pip install --target` put s3fs, and SKYRL_TRAIN_MOTO_SERVER, the program of `moto[server]`.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import SaveError
from skyrl_train.trainers.checkpoints.folder import latest_checkpoint
from tests.support.fakes_trainer import FakeRun, fake_run, make_config, records_without_timings

pytestmark = pytest.mark.nightly
S3FS, MOTO = os.environ.get("SKYRL_TRAIN_S3FS", ""), os.environ.get("SKYRL_TRAIN_MOTO_SERVER", "")
BUCKET = "bucket"


class Cutting:
    """A proxy before a server, which cuts every connection once so many bytes passed through it, either way."""

    def __init__(self, port: int) -> None:
        self.left: int | None = None
        """Bytes until everything is cut, and stays so; None cuts nothing."""
        self.passed = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self.left is not None and self.left <= 0:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to), timeout=10)
            except OSError:
                return
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1024):
                if self.left is not None:
                    data, self.left = data[: max(self.left, 0)], self.left - len(data)
                target.sendall(data)
                self.passed += len(data)
                if self.left is not None and self.left <= 0:
                    break
        except OSError:
            pass
        for each in (source, target):
            each.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cutting]:
    if not (os.path.isdir(S3FS) and os.path.isfile(MOTO)):
        pytest.skip("SKYRL_TRAIN_S3FS or SKYRL_TRAIN_MOTO_SERVER is not set, or what it names is not there")
    sys.path.append(S3FS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path_factory.mktemp("moto") / "log").open("wb") as log:
        process = subprocess.Popen([MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    proxy = Cutting(port)
    try:
        ends = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.1)
        yield proxy
    finally:
        proxy.close()
        process.kill()
        process.wait()
        sys.path.remove(S3FS)


@pytest.fixture
def proxy(server: Cutting, monkeypatch: pytest.MonkeyPatch) -> Cutting:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    import fsspec

    server.left = None
    fsspec.filesystem("s3").mkdirs(BUCKET, exist_ok=True)
    return server


def run_in(folder: Path, url: str, **trainer: Any) -> FakeRun:
    settings = {
        "ckpt_interval": 1,
        "checkpoint_url": url,
        "checkpoint_timeout_s": 60.0,
        "max_failed_saves": 1,
        **trainer,
    }
    return fake_run(folder, config=make_config(folder, **settings))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_in(folder, "").run()
    return folder


def require_same(folder: Path, alone: Path) -> None:
    assert records_without_timings(folder / "metrics.jsonl") == records_without_timings(alone / "metrics.jsonl")
    assert (folder / "export" / "model.json").read_bytes() == (alone / "export" / "model.json").read_bytes()


def test_a_lost_folder_goes_on_from_s3(tmp_path: Path, proxy: Cutting, alone: Path) -> None:
    url = f"s3://{BUCKET}/whole"
    run_in(tmp_path / "first", url).run()
    require_same(tmp_path / "first", alone)
    assert run_in(tmp_path / "second", url).start().global_step == 4
    shutil.rmtree(tmp_path / "first")
    run_in(tmp_path / "second", url).run()
    require_same(tmp_path / "second", alone)


@pytest.mark.parametrize("number", range(8))
def test_cut_anywhere_the_run_says_so_and_what_is_there_is_whole(
    tmp_path: Path, proxy: Cutting, alone: Path, number: int
) -> None:
    """The network is gone behind so many bytes, and comes back: in the same folder, and in another where that was lost."""
    url = f"s3://{BUCKET}/run-{number}"
    proxy.left = random.Random(number).randint(0, 150_000)
    with pytest.raises(SaveError, match=rf"\A(?!.*\n).*{url}/checkpoints"):
        run_in(tmp_path / "run", url, checkpoint_timeout_s=6.0).run()
    assert proxy.left <= 0
    proxy.left = None
    local = latest_checkpoint(tmp_path / "run" / "checkpoints")
    there = run_in(tmp_path / "another", url).start()
    if there.checkpoint is not None and local is not None:
        assert there.global_step <= int(local.name.removeprefix("step_"))
    folder = tmp_path / random.Random(number).choice(("run", "another"))
    run_in(folder, url).run()
    require_same(folder, alone)
