"""A viewer that serves runs, and a real Chromium, without a window, that looks at it."""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = (1280, 860), (390, 844)
DEADLINE_S = 30.0


@contextmanager
def served(*runs: Path) -> Iterator[str]:
    """Yield the address, with its token, of a viewer of these runs."""
    command = [sys.executable, "-m", "skyrl_train.view", *map(str, runs), "--no-browser"]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert viewer.stdout is not None
        readable, _, _ = select.select([viewer.stdout], [], [], DEADLINE_S)
        address = viewer.stdout.readline().strip() if readable else ""
        assert address.startswith("http://127.0.0.1:"), f"the viewer printed {address!r} within {DEADLINE_S} s"
        yield address
    finally:
        viewer.terminate()
        try:
            viewer.wait(10)
        except subprocess.TimeoutExpired:
            viewer.kill()


def start_chromium(profile: Path) -> Any:
    """Return a driver of a Chromium with a fresh profile; the test that asks is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(DEADLINE_S)
    driver.set_script_timeout(DEADLINE_S)
    return driver


class Page:
    """The page in the browser. Everything that waits does so until `DEADLINE_S`."""

    def __init__(self, driver: Any, address: str) -> None:
        """`address` with the token, or that of a file."""
        self.driver = driver
        self._base = address.partition("?")[0]
        self.size(DESKTOP)
        self.dark(False)
        driver.get(address)
        self.opened_in_ms: dict[str, float] = self.settled().js(
            "return Object.fromEntries([...performance.getEntriesByType('paint'), "
            "...performance.getEntriesByType('mark')].map((entry) => [entry.name, entry.startTime]))"
        )
        """Since the request: `first-contentful-paint`, and `shown`, with its data drawn."""
        self.js("localStorage.clear(); document.documentElement.dataset.theme = ''")
        driver.get_log("browser")

    def size(self, size: tuple[int, int]) -> None:
        """Let the window be as large as a desktop's or a phone's."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, is_dark: bool) -> None:
        """Let the system prefer dark or light."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, view: str, **state: object) -> Page:
        """Go to a view by its link, and wait until it is there."""
        self.driver.get(f"{self._base}#/{view}?{urlencode(state)}")
        return self.settled()

    def settled(self) -> Page:
        """Wait until the view of the address is there."""
        self.until(
            "const main = document.getElementById('main'); return main && main.dataset.ready === (location.hash || '#')"
        )
        return self

    def js(self, script: str, *arguments: object) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(script, *arguments)

    def seconds_to(self, link: str) -> float:
        """Go to another view by its link; the seconds until it is drawn with its data."""
        script = """
            const done = arguments[1], began = performance.now();
            const look = () => document.getElementById('main').dataset.ready === arguments[0]
                ? done((performance.now() - began) / 1000) : requestAnimationFrame(look);
            location.hash = arguments[0];
            look();
        """
        found: float = self.driver.execute_async_script(script, link)
        return found

    def until(self, script: str) -> Any:
        """Return what a script returns as soon as that is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, DEADLINE_S, poll_frequency=0.05).until(
            lambda driver: driver.execute_script(script), f"never came true: {script}"
        )

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that the selector names."""
        return self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())", selector)

    def click(self, selector: str) -> Page:
        """Click on the first element of the selector once it is there, as a person does: it must be in sight."""
        self.until(f"return document.querySelector({selector!r})")
        self.driver.find_element("css selector", selector).click()
        return self

    def follow(self, selector: str) -> Page:
        """Click on a link to another view, and wait for that."""
        before = self.js("return location.hash")
        self.click(selector)
        self.until(f"return location.hash !== {before!r}")
        return self.settled()

    def press(self, *keys: str) -> Page:
        """Press keys, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()
        return self

    def errors(self) -> list[str]:
        """Return what the browser complained of since the last call: errors of scripts, refused loads."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]

    def save(self, picture: Path) -> None:
        """Write what is in the window as a PNG."""
        assert self.driver.save_screenshot(str(picture))


def export(report: Path, runs: Sequence[Path], limit: int = 100) -> None:
    """Write the report of these runs, as `skyrl-view --export` does."""
    command = [
        sys.executable,
        "-m",
        "skyrl_train.view",
        *map(str, runs),
        "--export",
        str(report),
        "--limit",
        str(limit),
    ]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
