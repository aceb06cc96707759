"""The page in a real browser: it shows events, and executes none of the text that it shows."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, free_port, mlp, until, write_script

from tests.models.sequences import CELL, Cell, seeded
from tests.models.sequences import WIDTH as CELL_WIDTH

pytest.importorskip("httptools", reason="make installs it")

WIDTH = 1024  # width of the models: 36 MiB each, so two do not fit in the arena
EVIL = "<img src=x onerror=window.hacked=1>"
SCRIPT = f"""
    import torch
    from pipeswitch import job

    print({EVIL!r}, flush=True)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in job.steps(range(10**9), model=model, optimizer=optimizer):
        loss = model(torch.ones(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(**{{"loss": loss, {EVIL!r}: 1}})
"""
INK = """
    const canvas = document.getElementById(arguments[0]);
    const probe = document.createElement("span");
    probe.style.color = `var(--${arguments[1]})`;
    document.body.append(probe);
    const wanted = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
    probe.remove();
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let at = 0; at < data.length; at += 4)
      if (wanted.every((value, index) => Math.abs(data[at + index] - value) < 3)) count++;
    return count;
"""

FIND = """
    const [find, sort] = ["find", "sort"].map((id) => document.getElementById(id));
    [find.value, sort.value] = arguments;
    find.dispatchEvent(new Event("input"));
"""
LOOK_BACK = r"""
    const done = arguments[0], asked = [];  // a request of an hour ago, then nothing; 1,000 steps
    const spans =
      [["scheduler", "switch old", 0], ["copy", "old", 1], ["worker 0", "infer old", 2]];
    const trace = (isThere) => ({ now_ms: 3.5e6, traceEvents: !isThere ? [] : spans.flatMap(
      ([track, name, tid]) => [{ ph: "M", name: "thread_name", tid, args: { name: track } },
        { ph: "X", tid, name, ts: 1e3, dur: 2e3, args: {} }, { cat: "switch", id: 7 }]) });
    import("/ui/model.js").then(async ({ Model }) => {
      const get = async (path) => {
        asked.push(Number(path.split("=")[1]));
        return trace(asked.length === 3);
      };
      const rows = [...Array(1000).keys()].map((step) => JSON.stringify({ step, loss: 1 / step }));
      const cut = `9, "loss": 1}\n${rows.join("\n")}\n{"step": 10`;
      const fetch = async () => ({ text: async () => cut });
      const model = new Model({ get, fetch }, () => {});
      for (let look = 0; look < 3; look++) await model.readTrace();
      const names = (rows) => rows.map((one) => one.model);
      await model.readHistory("j");
      const { timeline } = model, curve = model.losses.get("j");
      done([asked.slice(0, 3), names(timeline.answered()), names([timeline.lastSwitch()]),
        curve.length > 100 && curve.length <= 240 && curve[0].step < 9,
        curve[curve.length - 1].step]);
    });
"""


def program(*names: str) -> str:
    """Return the path of the first of these programs that is installed.
    If none is, skip the test, or fail it if TESTS_NEED_BROWSER is set."""
    for name in names:
        path_of_tool = shutil.which(name)
        if path_of_tool:
            return path_of_tool
    without(f"no {names[0]} here: apt-get install chromium chromium-driver")


def without(why: str) -> Any:
    if os.environ.get("TESTS_NEED_BROWSER"):
        pytest.fail(f"the page test must run here, and there is {why}")
    pytest.skip(why)


class Tab:
    """A browser tab with the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def text(self, selector: str) -> str:
        value: str = self.driver.execute_script(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )
        return value

    def texts(self, selector: str) -> list[str]:
        values: list[str] = self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)",
            selector,
        )
        return values

    def shows(self, selector: str, words: str) -> None:
        until(lambda: words in self.text(selector), f"{selector} shows {words!r}")

    def click(self, label: str) -> None:
        """Click the button with this label once the page has it: a row may come a poll later."""
        selector = f'[aria-label="{label}"]'
        until(lambda: self.driver.find_elements("css selector", selector), f"{label!r} is there")
        self.driver.find_element("css selector", selector).click()

    def press(self, key: str) -> None:
        self.driver.find_element("css selector", "#lanes").send_keys(key)

    def ink(self, canvas: str, colour: str) -> int:
        """Return how many pixels of a canvas have one of the page's named colours."""
        return int(self.driver.execute_script(INK, canvas, colour))

    @property
    def state(self) -> str:
        return str(self.driver.execute_script("return document.body.dataset.state"))

    def complaints(self) -> list[str]:
        """Return the messages in the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def folded(driver: Any) -> set[str]:
    """Return the ids of the panels that are folded to their headings."""
    elements = driver.find_elements("css selector", ".folded h2")
    return {one.get_attribute("id") for one in elements}


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if importlib.util.find_spec("selenium") is None:
        without("no selenium here: make installs it")
    browser, chromedriver = program("chromium", "google-chrome"), program("chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield chrome
    chrome.quit()


@contextlib.contextmanager
def serving(state: Path, port: int, devices: tuple[str, ...] = ("cpu",)) -> Iterator[Checked]:
    """Run a server; another call with the same ``state`` and ``port`` restarts it."""
    args = ("--http", f"127.0.0.1:{port}", "--grpc", "off")
    with checked_server(
        http=True, devices=devices, args=args, arena="64MiB", state_dir=state, settles=False
    ) as checked:
        yield checked


def test_the_page_shows_a_switch_and_a_preemption_and_outlives_the_server(
    driver: Any, tmp_path: Path
) -> None:
    state, port, tab = tmp_path / "state", free_port(), Tab(driver)
    x = np.zeros((1, WIDTH), np.float32)
    with serving(state, port) as checked:
        for number, name in enumerate(("left", "right")):
            net = mlp(WIDTH, 9, seed=number)
            checked.client.register(name, net, example_inputs=(torch.zeros(1, WIDTH),))
        page = f"http://127.0.0.1:{port}/ui"

        driver.get(page)  # without a token
        until(lambda: tab.state == "login", "the server has refused it")
        tab.shows("#login", "pipeswitch ui")
        assert not driver.find_element("css selector", "#live").is_displayed()
        driver.find_element("css selector", "#token").send_keys("a-token-of-nobody\n")
        tab.shows("#wrong", "without a known token")
        driver.get("about:blank")  # so that none of its requests is refused later
        refused = tab.complaints()
        assert refused
        assert all("401" in line or "403" in line for line in refused)

        token = (state / "owner.token").read_text().strip()
        driver.get(f"{page}#token={token}")
        tab.shows("#status", "live")
        until(lambda: {"jobs-title", "request-title"} <= folded(driver), "empty panels fold")
        tab.shows("#request-line", "No request yet")
        assert driver.current_url == page  # so the token is not in the history
        assert driver.get_cookies() == []

        script = write_script(tmp_path, "evil.py", SCRIPT)
        checked.client.train(script, name="digits", activation_memory="1MiB")
        tab.shows("#headline", "Training digits")
        until(lambda: tab.ink("lanes", "train") > 500, "training moves on its lane")
        until(lambda: checked.client.job("digits", "show")["job"]["step"] > 5, "it trains")

        for name in ("left", "right"):
            checked.client.infer(name, x)
        until(lambda: "cold, preempts" in tab.texts("#timings .tags"), "both in the timings")
        tab.shows("#request-title", "Last switch")
        tab.shows("#request-line", "layer groups streamed in")
        tab.shows("#headline", "suspended")
        for colour in ("switch", "infer"):
            until(lambda colour=colour: tab.ink("waterfall", colour) > 100, f"{colour} is drawn")
        tab.shows("#events", "switch.evicted")
        tab.shows("#owners", "right")
        tab.shows("#jobs", "loss")
        tab.shows("#jobs", "KiB activations")

        tab.click("Infer left with a random input")
        tab.shows("#toasts", "left: ")
        tab.press("2")
        tab.shows("#toasts", "right: ")
        tab.click("Pin left on the device")
        tab.shows("#models li", "pinned")
        tab.click("Unpin left")
        until(lambda: "pinned" not in tab.text("#models li"), "it is not pinned")
        tab.click("Pause digits")
        tab.shows("#jobs", "paused")
        tab.click("Resume digits")
        tab.shows("#jobs", "running")

        assert not folded(driver)
        tab.click("Details of digits")
        tab.shows("#log-text", EVIL)
        tab.shows("#commits-line", "on disk")
        tab.shows("#loss-title", "loss ")
        tab.shows("#loss-from", "step ")
        driver.find_element("css selector", "#log button").click()
        tab.click("Details of left")
        tab.shows("#model-facts", "ready")
        tab.shows("#model-request-line", "layer groups streamed in")
        until(lambda: tab.ink("model-waterfall", "switch") > 100, "its last switch is drawn")
        assert len(driver.find_elements("css selector", "#plan i")) > 1
        driver.find_element("css selector", "#model button").click()
        for words, names in (("RIGH", ["right"]), (EVIL, []), ("", ["left", "right"])):
            driver.execute_script(FIND, words, "name")
            until(lambda names=names: tab.texts("#models .name") == names, f"found: {names}")
        assert driver.execute_async_script(LOOK_BACK) == [
            [30, 300, 3600],
            ["old"],
            ["old"],
            True,
            999,
        ]
        assert "holds" not in tab.text("#device")
        quiet = write_script(tmp_path, "quiet.py", "import pipeswitch\n")
        checked.client.train(quiet, name="quiet").wait()
        tab.click("Details of quiet")  # must not fail, although the job has logged no loss
        tab.shows("#loss-title", "none logged")
        driver.find_element("css selector", "#log button").click()
        cell = tuple(torch.zeros(1, width) for width in (8, CELL_WIDTH, CELL_WIDTH))
        checked.client.register("cell", seeded(Cell), example_inputs=cell, state=CELL)
        with checked.client.sequence("cell") as one:
            one.infer(torch.zeros(1, 8))
            tab.shows("#sequences-text", "1 sequence holds")
            until(lambda: tab.ink("lanes", "quiet") > 500, "its state is drawn")
        tab.shows("#sequences-text", "0 sequences hold 0 KiB")

        driver.find_element("css selector", "#all-events").click()
        tab.shows("#events", EVIL)
        assert driver.execute_script("return window.hacked") is None
        assert driver.execute_script("return document.querySelectorAll('img').length") == 1  # logo
        tab.press("d")
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"

        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )
        width = "return document.documentElement.scrollWidth"
        until(lambda: driver.execute_script(width) == 380, "nothing is wider than a narrow screen")
        assert tab.complaints() == []

    until(lambda: tab.state == "away", "it says that the server is gone")
    with serving(state, port, ("cpu:0", "cpu:1")) as checked:
        until(lambda: tab.state == "live", "it is back by itself")
        tab.shows("#jobs", "digits")
        checked.client.infer("left", x)
        tab.shows("#timings", "left")
        tab.shows("#events", "switch.started")
        tab.shows("#owners", "on cpu:")
        until(lambda: len(driver.find_elements("css selector", ".arena")) == 2, "two arenas")
        lanes = "return document.querySelector('#lanes').style.getPropertyValue('--devices')"
        until(lambda: driver.execute_script(lanes) == "2", "the lanes of both")
        checked.client.task("digits").cancel()
        tab.shows("#jobs", "cancelled")
        missed = [line for line in tab.complaints() if "Failed to load resource" not in line]
        assert missed == []  # reports that the stopped server does not answer are no fault
