"""Headless Chromium for tests of pages: a browser, a look at a page, and what is measured there.

Screenshots are saved in the directory JSTEP_SCREENSHOTS, if it is set.
"""

import base64
import os
import pathlib
import shutil

import pytest

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER),
    reason="chromium and chromedriver are not installed (Debian: "
    "apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.get("about:blank")  # the page of a new tab loads scripts for a while
    try:
        yield driver
    finally:
        driver.quit()


def look(browser, page, width, theme, height=900):
    """Open a page at a width in a theme; it may write no message and send no request."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    if folder := os.environ.get("JSTEP_SCREENSHOTS"):
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        pathlib.Path(folder, f"{page.stem}-{width}-{theme}.png").write_bytes(
            base64.b64decode(picture["data"])
        )
    assert browser.get_log("browser") == [], "no message in the console"
    requests = [
        one["message"]
        for one in browser.get_log("performance")
        if 'Network.requestWillBeSent"' in one["message"]
    ]
    assert len(requests) == 1, "that of the page"


TEXTS = """
return [...document.querySelectorAll("figure")].map(figure => [...figure.querySelectorAll("text, figcaption")]
  .map(text => [text.textContent, text.getBoundingClientRect(), parseFloat(getComputedStyle(text).fontSize)])
  .map(([words, box, size]) => [words, box.left, box.top, box.right, box.bottom, size]))
"""  # noqa: E501
CONTRAST = """
const light = rgb => rgb.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const ground = light(getComputedStyle(document.body).backgroundColor);
const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
const against = color => ratio(light(color), ground);
const kinds = "h1, h2, p, td, th, summary, dt, dd, li, figcaption, span, text";
const all = [...document.querySelectorAll(kinds)];
const words = all.map(one => against(getComputedStyle(one)[one.tagName === "text" ? "fill" : "color"]));
const lines = [...document.querySelectorAll("path.line:not(.pale)")].map(one => against(getComputedStyle(one).stroke));
return [Math.min(...words), Math.min(...lines)]
"""  # noqa: E501


def overlap(a, b):
    return a[1] < b[3] - 1 and b[1] < a[3] - 1 and a[2] < b[4] - 1 and b[2] < a[4] - 1
