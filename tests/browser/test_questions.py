"""Ten questions of a researcher: each is answered from the page as it opens, in at most four actions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")

from tests.support.browser_pages import Page, served
from tests.support.view_runs import write_run

pytestmark = pytest.mark.browser

MOST_ACTIONS = 4


class Asked:
    """A page on which actions are counted."""

    def __init__(self, page: Page) -> None:
        self.page, self.actions = page, 0

    def follow(self, selector: str) -> Asked:
        self.actions += 1
        self.page.follow(selector)
        return self

    def choose(self, label: str, value: str) -> Asked:
        """Choose from the field whose label has this text."""
        self.actions += 1
        found = self.page.js(
            """const fields = [...document.querySelectorAll('label, .field')];
            const field = fields.find((each) => each.innerText.startsWith(arguments[0]));
            const select = field && field.querySelector('select');
            if (!select) return false;
            select.value = arguments[1];
            select.dispatchEvent(new Event('change', {bubbles: true}));
            return select.value === arguments[1]""",
            label,
            value,
        )
        assert found, f"there is no choice {label!r} with {value!r}"
        return self

    def texts(self, selector: str) -> list[str]:
        return self.page.texts(selector)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A sweep of two runs, of which the first stopped before its end, with what evaluations and staleness left."""
    root = tmp_path_factory.mktemp("sweep")
    runs = [write_run(root / str(seed), steps=6, prompts=6, samples=6, turns=3, seed=seed) for seed in (0, 1)]
    for folder in runs:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line |= {"off_policy/age/mean": 0.4, "off_policy/age/max": 1.0}
            if "eval/accuracy" in line:
                line |= {"eval/data_source=sums/accuracy": 0.1 * line["step"], "eval/data_source=shop/accuracy": 0.3}
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plan = json.loads((runs[0] / "plan.json").read_text())
    (runs[0] / "plan.json").write_text(json.dumps({**plan, "total_steps": 20}))
    (runs[0] / "complete.json").unlink(missing_ok=True)
    (root / "multirun.yaml").write_text("hydra: {}\n")
    return [*root.iterdir()]


@pytest.fixture(scope="module")
def address(folders: list[Path]) -> Iterator[str]:
    with served(*sorted(folders)) as found:
        yield found


@pytest.fixture
def asked(chromium: Any, address: str) -> Iterator[Asked]:
    page = Page(chromium, address)
    found = Asked(page)
    yield found
    assert page.errors() == []
    assert found.actions <= MOST_ACTIONS


def facts(asked: Asked) -> dict[str, str]:
    return dict(zip(asked.texts(".facts dt"), asked.texts(".facts dd")))


def test_did_it_learn_and_on_which_kind_of_row(asked: Asked) -> None:
    assert "→" in facts(asked)["reward"]
    titles = asked.texts("figure .title")
    assert "eval/data_source=sums/accuracy" in titles
    assert "eval/data_source=shop/accuracy" in titles


def test_why_is_this_advantage_0(asked: Asked) -> None:
    asked.follow("#nav a:nth-of-type(2)")
    asked.page.until("return document.querySelector('a.group')")
    # Sorted by their spread what has none stands last; by their mean, those of which nothing was solved stand first.
    asked.choose("purpose", "train").choose("sorted by", "mean asc")
    asked.page.until("return document.querySelector('a.group .mean')?.innerText.startsWith('0 ')")
    asked.follow("a.group")
    why = asked.texts("p.why")[0]
    assert why.startswith("No spread in this group: ")
    assert "An advantage that compares them is 0" in why


def test_which_tokens_moved(asked: Asked) -> None:
    asked.follow("#nav a:nth-of-type(3)")
    asked.page.until("return document.querySelector('a.trajectory .outcome.done')")
    asked.follow("a.trajectory:has(.outcome.done)")
    asked.choose("colour by", "difference")
    shades = asked.page.js(
        "return [...document.querySelectorAll('.tokens span[data-n]')].map((e) => e.style.background)"
    )
    assert len({*shades}) > 2


def test_what_did_the_reward_see(asked: Asked) -> None:
    asked.follow("#nav a:nth-of-type(3)")
    asked.page.until("return document.querySelector('a.trajectory .outcome.done')")
    asked.follow("a.trajectory:has(.outcome.done)")
    assert {"Reward components", "Metrics", "Extras"} <= {*asked.texts("aside summary")}
    assert {"environment", "format", "solved"} <= {*asked.texts("aside dt")}


def test_what_changed_between_two_runs(asked: Asked) -> None:
    asked.page.until("return document.querySelector('details.section td')")
    section = " ".join(asked.texts("details.section"))
    assert "Configuration: what differs" in section
    assert "differs first at step " in section
    assert [text for text in asked.texts(".chips a") if "seed=" in text], "runs of a sweep are named by what differs"
    assert asked.page.js("return document.querySelectorAll('.chips a.on').length") == 1, "both are drawn"


def test_is_it_off_policy_and_how_old(asked: Asked) -> None:
    names = " ".join(asked.texts("section td"))
    assert "off_policy/age/mean" in names
    assert "training steps between the weights that sampled a token and those that train on it" in names
    assert "off_policy/age/mean" in asked.texts("figure .title")


def test_where_does_time_go_and_who_waits(asked: Asked) -> None:
    assert {"phases", "waits for environments, added up over trajectories"} <= {*asked.texts("figure .title")}
    assert asked.page.js("return document.querySelectorAll('.gantt rect').length") > 10


def test_what_does_it_cost_to_go_on(asked: Asked) -> None:
    told = facts(asked)["to the end"]
    assert told.startswith("14 steps, ")
    assert told.endswith(" tokens")


def test_which_rows_to_show_in_a_paper(asked: Asked) -> None:
    asked.follow("#nav a:nth-of-type(3)")
    asked.page.until("return document.querySelector('a.trajectory')")
    asked.choose("sorted by", "reward desc")
    asked.page.until("return document.querySelector('a.trajectory .reward')?.innerText === '1'")
    assert "export these" in asked.texts(".found a")


def test_what_does_the_doctor_say(asked: Asked) -> None:
    asked.follow("#nav a:nth-of-type(5)")
    assert asked.texts(".finding h2")[0].startswith("problem: Numbers are not finite")
    assert "the loss is nan" in asked.texts(".finding")[0]
    assert "Do: " in asked.texts(".finding p")[-1]
    asked.follow(".finding a.jump")
    assert "reward" in asked.texts("aside dt"), "its evidence opens the row that shows it"
