"""What pip's configuration becomes for uv."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "_package_index.py"


@pytest.fixture
def package_index(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_STRATEGY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("package_index", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_every_index_of_pip(package_index: ModuleType) -> None:
    pip = {
        "find-links": "/a\n/b",
        "index-url": "https://mirror",
        "extra-index-url": "https://x https://y",
        "cert": "/c",
    }

    assert package_index.uv_settings(pip, "https://cpu") == {
        "UV_FIND_LINKS": "/a,/b",
        "UV_DEFAULT_INDEX": "https://mirror",
        "UV_INDEX": "https://x https://y https://cpu",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/c",
    }


def test_what_the_user_set_for_uv_stays(package_index: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", "/mine")

    assert "UV_FIND_LINKS" not in package_index.uv_settings({"find-links": "/a"}, "")


def test_a_variable_beats_the_configuration_file(
    package_index: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nfind-links = /from-file\nindex-url = https://from-file\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/from-variable")
    pip = package_index.pip_config()
    if not pip:
        pytest.skip("this environment has no pip")

    assert pip["find-links"] == "/from-variable"
    assert pip["index-url"] == "https://from-file"


def test_a_host_that_does_not_exist_does_not_answer(package_index: ModuleType) -> None:
    assert package_index.answers("http://127.0.0.1:9/") is False
