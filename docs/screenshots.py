"""Write ``docs/images/page-*.png``: the page of a real server, light, dark and narrow.

    python docs/screenshots.py        (needs chromium, chromedriver and selenium)

The link is modelled at 0.8 GB/s, so that a copy is wide enough to be seen on a picture.
"""

from __future__ import annotations

import io
import itertools
import random
import shutil
import threading
from pathlib import Path
from typing import Any

from PIL import Image

import pipeswitch.testing

IMAGES = Path(__file__).with_name("images")
MODELS = ("resnet50", "resnet34", "mobilenet_v2")
VIEWS = {
    "light": (1280, 1180, "light"),
    "dark": (1280, 1180, "dark"),
    "narrow": (380, 1500, "light"),
}
LOOK_S = 25.0  # until the lanes and the loss have something to show
PER_S = 1.0  # requests
CHOOSE = """
    [...document.querySelectorAll("#timings button")]
        .find((row) => row.textContent.includes("resnet50") && row.textContent.includes("cold"))
        ?.click();
"""


def tab(width: int, height: int, theme: str) -> Any:
    from selenium import webdriver
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
            picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            picture.quantize(128).save(IMAGES / f"page-{view}.png", optimize=True)
            driver.quit()
        done.set()
        asking.join()
        client.close()


if __name__ == "__main__":
    main()
