"""The options, the fixtures and the report of the suite. See README.md."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from driver import Run, Server, Session
    from measure import Noise

HERE = Path(__file__).parent
NOT_CLAIMED = "not claimed: "
# Flags of the client's configuration without which a feature is denied; else it is claimed unless `not_supported` names it.
FLAGS = {"retrieve_futures": "sample_use_retrieve_futures", "join_sampling_session": "sample_join_sampling_session"}
DYNAMIC_FLAGS = {"cancel": "sample_cancel_enabled"}


def pytest_configure(config: pytest.Config) -> None:
    if config.rootpath == HERE and importlib.util.find_spec("tinker") is None:
        raise pytest.UsageError(
            f"Tinker's SDK is not installed for {sys.executable}, so no check can run: pip install tinker"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--server", help="address of the server; without it the reference server is started")
    group.addoption("--key", default="tml-reference", help="its key")
    group.addoption("--other-key", help="a key of another tenant; without it the checks that need two are not run")
    group.addoption("--model", help="the base model to train; the first of the capabilities by default")
    group.addoption("--profile", choices=("core", "full"), default="full")
    group.addoption("--sdk", help="version of the SDK to speak as; the installed one by default")
    group.addoption("--dtype", choices=("float32", "bfloat16"), default="float32", help="what the server computes in")
    group.addoption("--lr", type=float, default=0.01, help="learning rate that moves log-probabilities by some percent")
    group.addoption("--restart", help="command that kills the server and starts it again with the same state")
    group.addoption(
        "--tokenizer", help="folder or tokenizer.json of the model; without it stop strings are not checked"
    )
    group.addoption("--report", help="write the report to this path with .json and .md added")
    group.addoption("--reference", default=str(HERE / "reference.py"), help="the reference server to start")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def sdk_version(config: pytest.Config) -> str:
    return str(config.getoption("--sdk") or importlib.metadata.version("tinker"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any(item.path.name.startswith("check_") for item in items):
        return
    kept, dropped = [], []
    reference, sdk = config.getoption("--server") is None, version(sdk_version(config))
    for item in items:
        since = item.get_closest_marker("since")
        if (
            (item.get_closest_marker("full") and config.getoption("--profile") == "core")
            or (item.get_closest_marker("needs_restart") and not (reference or config.getoption("--restart")))
            or (item.get_closest_marker("needs_other_key") and not (reference or config.getoption("--other-key")))
            or (item.get_closest_marker("needs_tokenizer") and not (reference or config.getoption("--tokenizer")))
            or (since and sdk < version(since.args[0]))
        ):
            dropped.append(item)
        else:
            kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


class ReferenceServer:
    """The reference server as a process of its own, which can be killed and started again with the same state."""

    def __init__(self, script: str, folder: Path) -> None:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        journal = ["--journal", str(folder / "journal")]
        self.command = [sys.executable, script, "--port", str(self.port), *journal]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the reference server did not start"

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="session")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReferenceServer | None]:
    if request.config.getoption("--server"):
        yield None
        return
    server = ReferenceServer(request.config.getoption("--reference"), tmp_path_factory.mktemp("reference"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def capabilities(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("get_server_capabilities")
    return found


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, started: ReferenceServer | None) -> Server:
    from driver import Server

    option = request.config.getoption
    json_wire = version(sdk_version(request.config)) < (0, 25)
    found = Server(option("--server") or started.url, option("--key"), option("--model") or "", json_wire)  # type: ignore[union-attr]
    if not found.model:
        models = found.get("get_server_capabilities")["supported_models"]
        found.model = next(each["model_name"] for each in models if each.get("trainable") is not False)
    return found


@pytest.fixture(scope="session")
def other(request: pytest.FixtureRequest, server: Server) -> Server:
    """The same server, as another tenant sees it."""
    return server.with_key(request.config.getoption("--other-key") or "tml-other")


@pytest.fixture
def restart(request: pytest.FixtureRequest, started: ReferenceServer | None, server: Server) -> Any:
    from driver import DEADLINE_S

    def run() -> None:
        if started is not None:
            started.restart()
        else:
            subprocess.run(shlex.split(request.config.getoption("--restart")), check=True)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if server.send("GET", "healthz").status == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the server did not come back within {DEADLINE_S:g} s")

    return run


@pytest.fixture(scope="session")
def decode(request: pytest.FixtureRequest, started: ReferenceServer | None) -> Any:
    """A function from token ids to their text."""
    if started is not None:
        from softmax import text_of

        return text_of
    from tokenizers import Tokenizer

    path = Path(request.config.getoption("--tokenizer"))
    loaded = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    return lambda tokens: loaded.decode(list(tokens), skip_special_tokens=False)


@pytest.fixture(scope="session")
def session(server: Server) -> Session:
    return server.session()


@pytest.fixture
def run(session: Session) -> Run:
    """A new model, as it is made."""
    return session.model()


@pytest.fixture(scope="session")
def lr(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--lr"))


@pytest.fixture(scope="session")
def noise(session: Session, lr: float, request: pytest.FixtureRequest) -> Noise:
    from measure import measure

    found = measure(session, request.config.getoption("--dtype"), lr)
    request.config.stash[NOISE] = found
    return found


NOISE: pytest.StashKey[Any] = pytest.StashKey()
RESULTS: pytest.StashKey[list[dict[str, Any]]] = pytest.StashKey()


@pytest.fixture(autouse=True)
def claimed(request: pytest.FixtureRequest) -> None:
    """Ends a check of what the server says that it does not do. A check of `core` has nothing to ask."""
    full = request.node.get_closest_marker("full")
    needs = full.kwargs.get("needs") if full else None
    if needs is None:
        return
    needs = needs.format(**getattr(request.node, "callspec", argparse_free()).params)
    server = request.getfixturevalue("server")
    denied = needs in request.getfixturevalue("capabilities").get("not_supported", [])
    for flags, route in ((FLAGS, "client/config"), (DYNAMIC_FLAGS, "client/dynamic_config")):
        if needs in flags:
            denied = denied or not server.call(route, {"sdk_version": sdk_version(request.config)}).get(flags[needs])
    if denied:
        pytest.skip(f"{NOT_CLAIMED}{needs}")


class argparse_free:
    """What stands for the parameters of a check that has none."""

    params: dict[str, Any] = {}  # noqa: RUF012


def sentence(item: pytest.Item) -> str:
    text = " ".join((getattr(item, "function").__doc__ or "").split())  # noqa: B009
    return text.format(**getattr(item, "callspec", argparse_free()).params)


def name_of(item: pytest.Item) -> str:
    return f"{item.path.stem.removeprefix('check_')}.{item.name.removeprefix('check_')}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if not item.path.name.startswith("check_") or (report.when != "call" and report.passed):
        return
    why = str(call.excinfo.value) if call.excinfo is not None else ""
    core = item.get_closest_marker("full") is None
    if report.skipped and (core or not why.startswith(NOT_CLAIMED)):
        report.outcome, report.longrepr = "failed", f"a check may not be skipped: {why}"
    verdict = "not claimed" if report.skipped else report.outcome.removesuffix("ed")
    results = item.config.stash.setdefault(RESULTS, [])
    if results and results[-1]["check"] == name_of(item):
        results[-1]["verdict"] = "fail" if "fail" in (verdict, results[-1]["verdict"]) else verdict
        return
    results.append(
        {
            "check": name_of(item),
            "group": name_of(item).partition(".")[0],
            "profile": "core" if core else "full",
            "says": sentence(item),
            "verdict": verdict,
            "why": why.splitlines()[0][:300] if why else "",
            "seconds": round(report.duration, 3),
        }
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--report", None)
    results = session.config.stash.get(RESULTS, [])
    if not path:
        return
    noise = session.config.stash.get(NOISE, None)
    about = {
        "server": session.config.getoption("--server") or "reference",
        "sdk": sdk_version(session.config),
        "profile": session.config.getoption("--profile"),
        "dtype": session.config.getoption("--dtype"),
        "noise": {name: getattr(noise, name) for name in ("forward", "training", "sampling")} if noise else None,
        "tolerance": {name: noise.tolerance(name) for name in ("forward", "training", "sampling")} if noise else None,
    }
    counts = {
        verdict: sum(each["verdict"] == verdict for each in results) for verdict in ("pass", "fail", "not claimed")
    }
    Path(f"{path}.json").write_text(json.dumps({**about, "counts": counts, "checks": results}, indent=1) + "\n")
    Path(f"{path}.md").write_text(markdown(about, counts, results))


def markdown(about: dict[str, Any], counts: dict[str, int], results: list[dict[str, Any]]) -> str:
    lines = [
        f"Server {about['server']}, SDK {about['sdk']}, profile {about['profile']}, {about['dtype']}: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + ".",
        "",
        f"Noise {about['noise']}, tolerance {about['tolerance']}.",
        "",
        "| group | pass | fail | not claimed |",
        "|---|---|---|---|",
    ]
    for group in dict.fromkeys(each["group"] for each in results):
        of = [each["verdict"] for each in results if each["group"] == group]
        lines.append(f"| {group} | {of.count('pass')} | {of.count('fail')} | {of.count('not claimed')} |")
    lines += ["", "| check | what it says | verdict |", "|---|---|---|"]
    for each in results:
        verdict = each["verdict"] if each["verdict"] != "fail" else f"**fail**: {each['why']}".replace("|", "\\|")
        lines.append(f"| `{each['check']}` | {each['says']} | {verdict} |".replace("\n", " "))
    return "\n".join(lines) + "\n"
