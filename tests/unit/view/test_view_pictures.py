"""Images that the viewer shows: by their sums, from the run's own folder, and nothing that a browser would run."""

from __future__ import annotations

import io
import json
import re

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("starlette")

from PIL import Image as Pictures
from starlette.testclient import TestClient

from skyrl_train.telemetry.reading import find_runs
from skyrl_train.view.answers import Answers
from skyrl_train.view.export import write_report
from skyrl_train.view.rollouts import RolloutIndex
from skyrl_train.view.server import STATIC, make_app
from tests.support.pictured_runs import encoded, write_pictured_run

HOME = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, dict[str, str]]:
    root = tmp_path_factory.mktemp("pictured")
    sums = write_pictured_run(root / "run")
    (root / "scratch").mkdir()
    runs = find_runs([root / "run"])
    return Answers(runs, RolloutIndex(root / "scratch", runs), version="1"), sums


@pytest.fixture
def client(found: tuple[Answers, dict[str, str]]) -> TestClient:
    opened = TestClient(make_app(found[0], token="t"), base_url=HOME)
    opened.get("/?token=t")
    return opened


@pytest.mark.parametrize(("name", "kind"), [("png", "png"), ("jpeg", "jpeg"), ("tiff", "png")])
def test_an_image_is_served_as_what_it_is_decoded_to(
    client: TestClient, found: tuple[Answers, dict[str, str]], name: str, kind: str
) -> None:
    answer = client.get("/api/image", params={"run": "run", "sum": found[1][name]})
    assert (answer.status_code, answer.headers["content-type"]) == (200, f"image/{kind}")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert Pictures.open(io.BytesIO(answer.content)).size == (12, 10)
    assert (answer.content == encoded(name.upper())) == (name != "tiff")


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("missing", 404, "is missing: images/ of run"),
        ("changed", 400, "its file was changed"),
        ("cut", 400, "a damaged image"),
        ("svg", 400, "not an image"),
        ("html", 400, "not an image"),
    ],
)
def test_what_cannot_be_shown_is_named(
    client: TestClient, found: tuple[Answers, dict[str, str]], name: str, status: int, reason: str
) -> None:
    answer = client.get("/api/image", params={"run": "run", "sum": found[1][name]})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert reason in answer.json()["error"]
    assert found[1][name][:12] in answer.json()["error"]


@pytest.mark.parametrize(
    "name", ["../config.yaml", "config.yaml", "", "/etc/passwd", "A" * 64, "0" * 63, "..%2f..%2fx"]
)
def test_names_that_are_no_sums_lead_to_no_file(client: TestClient, name: str) -> None:
    answer = client.get("/api/image", params={"run": "run", "sum": name})
    assert answer.status_code == 400
    assert "must be the SHA-256 sum of an image" in answer.json()["error"]
    assert client.get("/api/image", params={"run": "../run", "sum": "0" * 64}).status_code == 404


def test_without_the_token_no_image_is_told(found: tuple[Answers, dict[str, str]]) -> None:
    stranger = TestClient(make_app(found[0], token="t"), base_url=HOME)
    assert stranger.get("/api/image", params={"run": "run", "sum": found[1]["png"]}).status_code == 403


def test_a_report_has_the_images_inside_or_says_what_is_wrong(found: tuple[Answers, dict[str, str]]) -> None:
    answers, sums = found
    report = write_report(answers, [], STATIC)
    data = re.search(r'id="skyrl-view-data">(.*?)</script>', report, re.DOTALL)
    assert data is not None
    held = json.loads(data[1])["answers"]
    images = {name: held[f"api/image?run=run&sum={each}"] for name, each in sums.items()}
    assert images["png"]["data"].startswith("data:image/png;base64,")
    assert images["tiff"]["data"].startswith("data:image/png;base64,")
    assert "is missing" in images["missing"]["error"]
    assert all("error" in images[name] for name in ("changed", "cut", "svg", "html"))
    assert "pwned" not in data[1]


def test_a_list_shows_the_text_of_a_prompt_with_an_image(found: tuple[Answers, dict[str, str]]) -> None:
    status, listed = found[0].answer("api/trajectories", [("run", "run")])
    assert (status, listed["rows"][0]["prompt_excerpt"]) == (200, "which colour?")
