"""Write ``docs/images/page-*.png``: the page of a real server, light, dark and narrow.

    python docs/screenshots.py        (needs chromium, chromedriver and selenium)
    python docs/screenshots.py top    writes top.svg: what ``pipeswitch top`` prints during the demo

The page's link is modelled at 0.8 GB/s, so that a copy is wide enough to be seen on a picture.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich import _export_format
from rich.console import Console
from rich.text import Text

import pipeswitch.testing

IMAGES = Path(__file__).with_name("images")
MODELS = ("resnet50", "resnet34", "mobilenet_v2")
VIEWS = {
    "light": (1280, 1180, "light"),
    "dark": (1280, 1180, "dark"),
    "narrow": (380, 1500, "light"),
}
LOOK_S = 25.0  # until the lanes and the loss have something to show
TOP_COLUMNS = 100
PER_S = 1.0  # requests
CHOOSE = """
    [...document.querySelectorAll("#timings button")]
        .find((row) => row.textContent.includes("resnet50") && row.textContent.includes("cold"))
        ?.click();
"""


def tab(width: int, height: int, theme: str) -> Any:
    from selenium import webdriver  # like PIL, not needed by ``top``
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    return driver


def top() -> None:
    """Start the demo with its page, and draw what ``top`` prints while requests come."""
    with tempfile.TemporaryDirectory(prefix="psw-") as folder:
        environment = {**os.environ, "TMPDIR": folder, "BROWSER": "true", "FORCE_COLOR": "1"}
        environment["COLUMNS"] = str(TOP_COLUMNS)
        command = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]
        with subprocess.Popen(
            [*command, "demo", "--ui"], env=environment, stdout=subprocess.PIPE, text=True
        ) as demo:
            assert demo.stdout is not None
            next(line for line in demo.stdout if "Ctrl-C ends it" in line)
            time.sleep(LOOK_S)
            (socket,) = Path(folder).glob("pipeswitch-*/pipeswitch/*.sock")
            environment["PIPESWITCH_HOST"] = f"ipc://{socket}"
            printed = subprocess.run(
                [*command, "top"], env=environment, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            demo.send_signal(signal.SIGINT)
    screen = Console(record=True, width=TOP_COLUMNS, file=io.StringIO())
    screen.print(Text.from_ansi(printed.rstrip()))
    before, _, rest = _export_format.CONSOLE_SVG_FORMAT.partition("@font-face")
    own_fonts = before + rest[rest.index(".{unique_id}-matrix") :]  # none from the network
    svg = screen.export_svg(title="pipeswitch top", code_format=own_fonts, unique_id="top")
    (IMAGES / "top.svg").write_text(svg, "utf-8")


def main() -> None:
    args = ("--grpc", "off", "--link-gbps", "0.8")
    with pipeswitch.testing.server(arena="200MiB", http=True, args=args) as running:
        client, done = running.client(), threading.Event()
        for name in MODELS:
            inputs = {"x": ((1, 3, 160, 160), "float32")}
            client.register(name, f"torchvision:{name}", weights="random:0", inputs=inputs)
        client.train(
            "pipeswitch.extras.demo.digits:main", name="digits", args=["--epochs", "100000"]
        )
        token = (running.state_dir / "owner.token").read_text().strip()

        def ask() -> None:
            chance = random.Random(0)
            for name in itertools.cycle(MODELS):
                if done.wait(chance.expovariate(PER_S)):
                    return
                client.infer(name, client.signature(name).random())

        asking = threading.Thread(target=ask)
        asking.start()
        for view, shape in VIEWS.items():
            driver = tab(*shape)
            driver.get(f"http://{running.http_address}/ui#token={token}")
            done.wait(LOOK_S)
            driver.execute_script(CHOOSE)
            done.wait(1.0)
            from PIL import Image

            picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            picture.quantize(128).save(IMAGES / f"page-{view}.png", optimize=True)
            driver.quit()
        done.set()
        asking.join()
        client.close()


if __name__ == "__main__":
    top() if sys.argv[1:] == ["top"] else main()
