"""The viewer's page as a person uses it: a real browser, a real server, runs on disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")

from tests.support.browser_pages import PHONE, Page, export, served
from tests.support.pictured_runs import write_pictured_run
from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, play_two_tenants
from tests.support.view_runs import append_records, write_large_run, write_run

pytestmark = pytest.mark.browser

ENTER, ESCAPE, TAB, RIGHT = "\ue007", "\ue00c", "\ue004", "\ue014"
VIEWS = {
    "overview": {},
    "groups": {},
    "group": {"purpose": "train", "step": 2, "uid": "train-1"},
    "trajectories": {},
    "trajectory": {"purpose": "train", "step": 2, "uid": "train-1", "sample": 0},
    "failures": {},
    "findings": {},
}
HOSTILE_PROMPTS = 4
FIRST_VIEW_MS = 10_000
"""On a machine that does other things as well; scripts measure what it takes on a quiet one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, another one, one without anything in it, and one whose files are damaged."""
    root = tmp_path_factory.mktemp("runs")
    runs = {
        "demo": write_run(root / "demo", steps=12, prompts=6, samples=6, turns=4),
        "other": write_run(root / "other", steps=6, prompts=2, samples=2, seed=1),
        "empty": root / "empty",
        "damaged": write_run(root / "damaged", steps=3, seed=2),
    }
    runs["empty"].mkdir()
    broken = runs["damaged"] / "rollouts" / "train_step_000002.parquet"
    broken.write_bytes(broken.read_bytes()[:300])
    with (runs["damaged"] / "metrics.jsonl").open("a") as metrics:
        metrics.write('not JSON\n{"step": 4, "reward/mea')
    (runs["damaged"] / "plan.json").write_text("{")
    return runs


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    with served(*folders.values()) as found:
        yield found


@pytest.fixture
def page(chromium: Any, address: str) -> Iterator[Page]:
    opened = Page(chromium, address)
    yield opened
    assert opened.errors() == []


def test_clicks_lead_from_the_overview_to_the_numbers_of_a_token(page: Page) -> None:
    page.open("overview", run="demo", **{"with": "other", "smooth": 0.4})

    assert page.texts("h1")[0].startswith("demo")
    assert {"reward/mean", "policy/entropy", "response_length/mean"} <= set(page.texts("figure .title"))
    assert page.js("return document.querySelectorAll('figure canvas').length") >= 5
    assert {"phases", "waits for environments, added up over trajectories"} <= set(page.texts("figure .title"))
    assert page.js("return document.querySelectorAll('.steps a').length") == 13
    assert page.js("return document.querySelectorAll('.gantt rect').length") > 10
    assert "seed" in page.until(
        "return document.querySelector('details.section td') && document.querySelector('details.section').innerText"
    )

    page.follow("#nav a:nth-of-type(2)").until("return document.querySelector('a.group')")
    page.follow("a.group")
    rewards = [float(text) for text in page.texts(".sample-column .reward") if text[0].isdigit()]
    assert len(rewards) >= 4
    assert rewards == sorted(rewards, reverse=True)
    assert page.texts("figure .title")[0].startswith("solved over steps")

    page.follow(".sample-column a")
    assert "reward" in page.texts("aside dt")
    shades = "return [...document.querySelectorAll('.tokens span[data-n]')].map((e) => e.style.background).join()"
    by_advantage = page.js(shades)
    choice = (
        "const s = document.querySelector('.sticky select'); s.value = 'entropy'; s.dispatchEvent(new Event('change'))"
    )
    page.js(choice)
    assert page.js(shades) != by_advantage
    assert "colour=entropy" in page.js("return location.hash")
    assert len(page.texts(".ramp")) == 1

    page.click(".tokens span[data-n]")
    tip = page.until("const t = document.getElementById('tip'); return !t.hidden && t.innerText")
    assert all(label in tip for label in ("log-prob, engine", "advantage", "entropy", "weight version"))

    page.follow("#nav a:nth-of-type(4)")
    assert "environment_error" in page.texts("td a")
    assert any("NonFiniteError" in text for text in page.texts(".log li"))


def test_findings_are_listed_and_lead_to_the_rows_that_show_them(page: Page) -> None:
    page.open("findings", run="demo")
    assert page.texts(".finding h2")[0].startswith("problem: Numbers are not finite")
    assert "not_finite" in page.texts(".finding .muted")[0]
    assert page.texts("#nav a[aria-current]") == ["Findings"] or "Findings" in page.texts("#nav a")
    page.follow(".finding a.jump")
    assert page.js("return location.hash").startswith("#/trajectory?")
    assert "reward" in page.texts("aside dt")
    page.open("findings", run="empty")
    assert "Nothing is found to be wrong." in page.js("return document.getElementById('main').innerText")


def test_turns_that_share_a_prefix_are_shown_as_a_tree(page: Page) -> None:
    rows = page.js(
        "return (async () => (await (await fetch('api/trajectories?run=demo&turns_min=4&limit=500')).json()).rows)()"
    )
    forked = next(
        row for row in rows if row["uid"] in ("train-0", "train-3", "train-6", "train-9") and row["outcome"] == "done"
    )
    where = {name: forked[name] for name in ("purpose", "step", "uid", "sample")}
    page.open("trajectory", run="demo", **where)

    assert "Tree of turns" in page.texts("aside h2")
    assert page.js("return document.querySelectorAll('.tree ul li').length") >= 2
    assert page.js("return document.querySelectorAll('.turn.off').length") == 0

    page.follow(".tree ul a")
    assert "turn=1" in page.js("return location.hash")
    assert page.js("return document.querySelectorAll('.turn.off').length") >= 1
    assert page.js("return !document.querySelector('#turn-0').classList.contains('off')")


def test_a_link_brings_back_the_same_list(page: Page) -> None:
    page.open("trajectories", run="demo").until("return document.querySelector('a.trajectory')")
    for field, text in (("#search", "#### (15|17)"), ("input[aria-label='reward, lowest']", "1")):
        before = page.texts(".found")[0]
        page.click(field).press(text).until(
            f"return ![{before!r}, ''].includes(document.querySelector('.found').innerText)"
        )
    page.until("return location.hash.includes('reward_min=1') && document.querySelector('a.trajectory')")
    found, link = page.texts(".found")[0].split(" in ")[0], page.js("return location.hash")

    page.open("overview", run="demo")
    page.js("location.hash = arguments[0]", link)
    page.settled().until("return document.querySelector('a.trajectory')")

    assert page.texts(".found")[0].split(" in ")[0] == found
    assert page.js("return document.getElementById('search').value") == "#### (15|17)"
    assert set(page.texts("a.trajectory .reward")) == {"1"}


def test_lists_are_narrowed_and_sorted_by_metrics_cut_answers_and_age(page: Page) -> None:
    drawn = "return document.querySelector('a.trajectory')"
    remarks = "return document.querySelector('a.trajectory .remarks').innerText"
    page.open("trajectories", run="demo", metric="turns", sort="metric desc").until(drawn)
    assert "turns 4" in page.js(remarks)
    assert {"highest turns", "lowest turns", "most cut answers", "oldest weights"} <= {*page.texts("select option")}
    page.open("trajectories", run="demo", metric="rewards/environment", metric_min=1).until(drawn)
    assert {*page.texts("a.trajectory .remarks")} <= {
        text for text in page.texts("a.trajectory .remarks") if "rewards/environment 1" in text
    }
    page.open("trajectories", run="demo", sort="cut desc").until(drawn)
    assert re.match(r"[1-4]\S cut", page.js(remarks))
    page.open("trajectories", run="demo", age_min=1).until(drawn)
    assert all("age 1" in text for text in page.texts("a.trajectory .remarks"))
    page.open("groups", run="demo", metric="solved", sort="metric asc").until(
        "return document.querySelector('a.group')"
    )
    assert "solved 0" in page.texts("a.group .remarks")[0]


def test_a_wrong_regular_expression_is_told_and_can_be_corrected(page: Page) -> None:
    page.open("trajectories", run="demo").until("return document.querySelector('a.trajectory')")
    page.click("#search").press("(").until("return document.querySelector('.list .empty')")
    assert "missing )" in page.texts(".list .empty")[0]
    assert page.js("return document.activeElement.id") == "search"
    page.press("cups)").until("return document.querySelector('a.trajectory')")
    assert page.driver.get_log("browser")  # the refused request, status 400


def test_the_page_is_used_without_a_pointer(page: Page) -> None:
    page.open("overview", run="demo").press("?")
    assert page.js("return document.getElementById('help').open")
    page.press(ESCAPE, "3").until("return location.hash.startsWith('#/trajectories')")
    page.settled().until("return document.querySelector('a.trajectory')")
    page.press("j", "j", "j", "k").until("return document.activeElement.matches('a.trajectory')")
    assert page.js("return document.activeElement.parentElement.getAttribute('aria-posinset')") == "2"
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"

    page.press(ENTER).until("return location.hash.startsWith('#/trajectory?')")
    page.settled()
    first = page.js("return location.hash")
    page.press(RIGHT).until(f"return location.hash !== {first!r}")
    page.settled().js("document.querySelector('.content.tokens').focus()")
    page.press(RIGHT, RIGHT)
    assert "number 1" in page.texts("#tip")[0]
    page.press("u").until("return location.hash.startsWith('#/trajectories')")
    page.settled().press("/")
    assert page.js("return document.activeElement.id") == "search"
    page.press(ESCAPE, "t")
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    page.settled().press("t")
    assert page.js("return document.querySelectorAll('main, nav, [role=search], [aria-live]').length") >= 4
    unnamed = """return [...document.querySelectorAll('input, select, button, a')].filter((e) =>
        !(e.innerText || e.ariaLabel || e.title || (e.labels && e.labels[0] && e.labels[0].innerText))).length"""
    assert page.js(unnamed) == 0


def test_a_run_that_goes_on_is_followed_without_losing_the_place(chromium: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=4, prompts=4, samples=2, complete=False)
    (run / ".lock").write_text(str(os.getpid()))
    with served(run) as address:
        page = Page(chromium, address).open("overview", run="live")
        assert page.texts("#live") == ["live"]
        page.js("scrollTo(0, 400); window.canvas = document.querySelector('figure canvas')")
        append_records(run, range(5, 8), num_trajectories=8)
        page.until("return document.querySelectorAll('.steps a').length === 8")
        assert page.js("return scrollY") == 400
        assert page.js("return window.canvas.isConnected")  # the curve was added to, not drawn anew

        page.open("trajectories", run="live").until("return document.querySelector('a.trajectory')")
        before = page.texts(".found")[0].split(" in ")[0]
        page.until("return document.getElementById('live').dataset.polled > 0")
        source = run / "rollouts" / "train_step_000004.parquet"
        (run / "rollouts" / "train_step_000005.parquet").write_bytes(source.read_bytes())
        page.until("return !document.querySelector('.fresh').hidden")
        assert page.texts(".found")[0].split(" in ")[0] == before
        page.click(".fresh").until(f"return !document.querySelector('.found').innerText.startsWith({before!r})")

        (run / "complete.json").write_text(json.dumps({"global_step": 7}))
        page.until("return document.getElementById('live').innerText === 'finished'")
        assert page.errors() == []


def test_an_exported_report_needs_no_server(chromium: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    export(report, [folders["demo"], folders["other"]], limit=30)
    page = Page(chromium, report.as_uri())

    for view, state in VIEWS.items():
        chosen = state
        if view in ("group", "trajectory"):  # the report has the last steps
            chosen = {"purpose": "train", "step": 12, "uid": "train-0"} | (
                {"sample": 0} if view == "trajectory" else {}
            )
        page.open(view, run="demo", **chosen)
        assert "cannot be shown" not in page.js("return document.getElementById('main').innerText"), view
    page.open("overview", run="demo", **{"with": "other"})
    assert page.js("return document.querySelectorAll('figure canvas').length") >= 5
    page.open("trajectories", run="demo", reward_max=0).until("return document.querySelector('a.trajectory')")
    assert set(page.texts("a.trajectory .reward")) == {"0"}
    held = page.js(
        "return JSON.parse(document.getElementById('skyrl-view-data').textContent)"
        ".answers['api/trajectories?run=demo'].rows"
    )
    for name in ("dataset", "stop_reason", "sample"):
        for value in {row[name] for row in held} - {None}:
            chosen = sum(row[name] == value for row in held)
            assert chosen < len(held)
            page.open("trajectories", run="demo", **{name: value}).until(
                "return document.querySelector('a.trajectory')"
            )
            assert page.texts(".found") == [f"{chosen} trajector{'y' if chosen == 1 else 'ies'}"]
    page.open("groups", run="demo", sample=3, stop_reason="stop").until("return document.querySelector('a.group')")
    page.open("trajectories", run="demo", text="(?i)LET ME THINK").until(
        "return document.querySelector('a.trajectory')"
    )
    page.follow("a.trajectory")
    assert any("Let me think." in text for text in page.texts(".turn"))

    assert page.texts("#live")[0].startswith("report of")
    assert page.js("return performance.getEntriesByType('resource').length") == 0
    assert page.js("return window.pwned") is None
    assert page.errors() == []


def test_what_a_search_finds_is_marked_in_the_trajectory(page: Page) -> None:
    marked = "return [...(CSS.highlights.get('found') || [])].map((range) => range.toString())"
    page.open("trajectories", run="demo", text=r"think\.\n6.7=").until("return document.querySelector('a.trajectory')")
    page.follow("a.trajectory")
    assert {text.replace("↵", "") for text in page.js(marked)} == {"think.\n6*7="}
    assert page.texts("#found")[0].endswith(r"of think\.\n6.7=")
    page.press(RIGHT).settled()
    assert "text=think" in page.js("return location.hash")

    page.open("trajectory", run="demo", purpose="train", step=2, uid="train-0", sample=0, text="<script>|(?:think)")
    assert "<script>" in page.js(marked)
    assert page.js("return window.pwned") is None
    page.open("trajectory", run="demo", purpose="train", step=2, uid="train-0", sample=0, text="(a*)*b")
    assert (page.js(marked), "by the server alone" in page.texts("#found")[0]) == ([], True)
    page.open("trajectory", run="demo", purpose="train", step=2, uid="train-0", sample=0)
    assert (page.js(marked), page.texts("#found")) == ([], [""])


def test_text_of_a_model_never_becomes_markup(page: Page) -> None:
    scripts = page.js("return document.scripts.length")
    for prompt in range(HOSTILE_PROMPTS):
        for view in ("group", "trajectory"):
            sample = {"sample": 0} if view == "trajectory" else {}
            page.open(view, run="demo", purpose="train", step=2, uid=f"train-{prompt}", **sample)
            page.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
            assert page.js("return [window.pwned, document.images.length, document.scripts.length]") == [
                None,
                0,
                scripts,
            ]
    assert any("<script>" in text for text in page.open("failures", run="demo").texts("td"))
    page.open("trajectories", run="demo", text="onerror").until("return document.querySelector('a.trajectory')")
    assert any("<img src=x onerror=" in text for text in page.texts("a.trajectory .text"))
    assert page.js("return [window.pwned, document.images.length, document.scripts.length]") == [None, 0, scripts]


@pytest.mark.parametrize("is_dark", [False, True])
def test_no_view_is_wider_than_a_phone(page: Page, is_dark: bool) -> None:
    page.size(PHONE)
    page.dark(is_dark)
    for view, state in VIEWS.items():
        page.open(view, run="demo", **state)
        assert page.js("return document.documentElement.scrollWidth <= innerWidth"), view
    for uid in ("train-2", "train-3"):  # text from the right, and a line without an end
        page.open("trajectory", run="demo", purpose="train", step=2, uid=uid, sample=0)
        assert page.js("return document.documentElement.scrollWidth <= innerWidth"), uid
    background = page.js("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 26)" if is_dark else "rgb(246, 246, 244)")
    page.dark(False)


@pytest.mark.parametrize(
    ("trainer", "curves", "prompt"),
    [
        ("trl", {"reward/mean", "reward/ends/mean", "reward/short_reward/mean"}, "What is 0 + 1?"),
        ("verl", {"reward/mean"}, "What is "),  # `acc` and `score` repeat it
    ],
)
def test_of_another_trainers_run_what_it_dumped_is_shown_and_nothing_else(
    chromium: Any, trainer: str, curves: set[str], prompt: str
) -> None:
    with served(Path(__file__).parents[1] / "other_trainers/dumps" / trainer) as address:
        page = Page(chromium, address).open("overview")
        assert page.texts(".facts dt") == ["step", "reward", "failed trajectories"]
        assert curves | {"response_length/characters"} <= {*page.texts("figure .title")}
        page.open("groups").until("return document.querySelector('a.group')")
        page.follow("a.group").follow("a.jump")
        assert page.texts(".message .role")[1].startswith("assistant")
        assert prompt in page.texts(".message .content")[0]
        assert "Reward components" in page.texts("aside summary")
        assert page.texts("aside .copyable") == []
        assert page.errors() == []


def test_a_supervised_run_shows_its_losses_and_no_empty_panel(chromium: Any, tmp_path: Path) -> None:
    settings = ("sft_platform=cpu", "trainer.num_steps=3", "trainer.eval_interval=1", f"output_dir={tmp_path / 'sft'}")
    subprocess.run([sys.executable, "-m", "skyrl_train.main_sft", *settings], check=True, timeout=300)
    with served(tmp_path / "sft") as address:
        page = Page(chromium, address).open("overview")
        assert {"loss", "held-out loss"} <= {*page.texts(".facts dt")}
        assert page.texts("figure .title")[0] == "train/loss"
        assert page.texts("section:not([hidden]) > div > .empty") == []
        page.open("groups").until("return document.querySelector('.list .empty')")
        assert "supervised training has none" in page.texts(".list .empty")[0]
        assert page.errors() == []


@pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
def test_of_a_server_its_tenants_losses_queues_and_samples_are_shown(chromium: Any, tmp_path: Path) -> None:
    play_two_tenants(tmp_path / "served")
    with served(tmp_path / "served") as address:
        page = Page(chromium, address).open("overview")
        assert page.texts("h1")[0].startswith("ann-000000")
        assert {"serve/loss_sum", "serve/samples"} <= {*page.texts("figure .title")}
        assert page.texts("section:not([hidden]) > div > .empty") == []
        page.open("trajectories", run="bob-000001").until("return document.querySelector('a.trajectory')")
        page.follow("a.trajectory")
        assert page.texts(".message .role")[1].startswith("assistant")
        assert page.errors() == []


def test_an_empty_and_a_damaged_run_say_what_they_lack(page: Page) -> None:
    page.open("overview", run="empty")
    assert "No step has been recorded yet." in page.texts(".empty")
    page.open("trajectories", run="empty").until("return document.querySelector('.list .empty')")
    page.open("failures", run="empty")
    assert "No trajectory failed." in page.texts(".empty")

    page.open("overview", run="damaged")
    assert page.js("return document.querySelectorAll('figure canvas').length") >= 4
    assert any("plan.json" in text for text in page.texts("#notices"))
    page.open("trajectories", run="damaged").until("return document.querySelector('a.trajectory')")
    assert any("train_step_000002.parquet" in text for text in page.texts("#notices"))
    page.open("trajectory", run="demo", purpose="train", step=99, uid="nobody", sample=0)
    assert page.texts("h1") == ["This cannot be shown"]
    page.errors()  # the request for a trajectory that there is not


def test_a_hundred_thousand_turns_are_shown_and_scrolled_through(chromium: Any, tmp_path: Path) -> None:
    with served(write_large_run(tmp_path / "large", turns=100_000)) as address:
        page = Page(chromium, address)
        assert 0 < page.opened_in_ms["first-contentful-paint"] < FIRST_VIEW_MS
        assert page.opened_in_ms["shown"] < FIRST_VIEW_MS
        assert page.js("return document.querySelectorAll('figure canvas').length") >= 5
        page.open("trajectories", run="large")
        page.until("return document.querySelector('a.trajectory')")
        total = page.js("return Number(document.querySelector('.row').getAttribute('aria-setsize'))")
        assert total > 40_000
        assert page.js("return document.querySelectorAll('.row').length") < 60
        page.js("scrollTo(0, document.querySelector('.list').offsetHeight / 2)")
        middle = "return [...document.querySelectorAll('.row')].some((e) => Math.abs(e.ariaPosInSet - %d) < 40)"
        page.until(middle % (total // 2))
        assert page.js("return document.querySelectorAll('.row').length") < 60
        assert page.errors() == []


def test_images_stand_where_messages_have_them_and_what_is_damaged_is_named(chromium: Any, tmp_path: Path) -> None:
    sums = write_pictured_run(tmp_path / "pictured")
    export(tmp_path / "report.html", [tmp_path / "pictured"], limit=5)
    where = {"run": "pictured", "purpose": "train", "step": 1, "uid": "p"}
    sizes = "return [...document.images].map((e) => [e.complete, e.naturalWidth, e.naturalHeight])"
    with served(tmp_path / "pictured") as address:
        for page in (Page(chromium, address), Page(chromium, (tmp_path / "report.html").as_uri())):
            for view, sample in (("trajectory", {"sample": 0}), ("group", {})):
                page.open(view, **where, **sample)
                page.until("return document.querySelectorAll('.picture .missing').length === 5")
                page.until("return [...document.images].every((e) => e.complete)")
                assert page.js(sizes) == [[True, 12, 10]] * 3
                said = page.texts(".picture .missing")
                names = ("changed", "cut", "svg", "html", "missing")
                assert [text.split()[1] for text in said] == [sums[name][:12] for name in names]
                assert "its file was changed" in said[0]
                assert "is missing" in said[-1]
                assert page.js("return window.pwned") is None
                assert any("which colour?" in text for text in page.texts(".message.user .content"))
            page.driver.get_log("browser")  # the refused requests for images
