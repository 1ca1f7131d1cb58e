"""The page of `report` in headless Chromium: legible at three widths, in both themes, without errors or requests.

The screenshots are saved in the directory JSTEP_SCREENSHOTS, by default in a temporary one.
"""

import base64
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest

import jstep

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER),
    reason="chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs, one of which was started again from an earlier step; a metric over many decades."""
    above = tmp_path_factory.mktemp("runs")
    optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 10, 0.9))
    train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    for name, last_step in (("a-run-with-a-long-name-of-a-sweep", 60), ("a-run-with-a-long-name-of-a-sweep-2", 60)):
        evaluation = jstep.EvaluationHook(
            lambda state: {"loss": float(state.params["w"])}, every_n_steps=5, prefix="validation",
            callbacks=[jstep.KeepBest(above / name / "best", "loss")],
        )  # fmt: skip
        state = jstep.TrainState.create({"w": 0.0}, optimizer)
        jstep.train(
            train_step, state, lambda step: jnp.float32(1e3), last_step, checkpoint_dir=above / name,
            logdir=above / name, save_summaries_steps=1, save_checkpoint_steps=20, log_steps=None, hooks=[evaluation],
        )  # fmt: skip
    file = above / "page.html"
    jstep.report(above, file)
    return file


TEXTS = """
return [...document.querySelectorAll("figure")].map(figure => [...figure.querySelectorAll("text, figcaption")]
  .map(text => [text.textContent, text.getBoundingClientRect(), parseFloat(getComputedStyle(text).fontSize)])
  .map(([words, box, size]) => [words, box.left, box.top, box.right, box.bottom, size]))
"""
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
"""


def overlap(a, b):
    return a[1] < b[3] - 1 and b[1] < a[3] - 1 and a[2] < b[4] - 1 and b[2] < a[4] - 1


@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_is_legible(width, theme, browser, page, tmp_path):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    folder = pathlib.Path(os.environ.get("JSTEP_SCREENSHOTS", tmp_path))
    (folder / f"report-{width}-{theme}.png").write_bytes(base64.b64decode(picture["data"]))
    assert browser.get_log("browser") == [], "no message in the console"
    requests = [
        one["message"] for one in browser.get_log("performance") if 'Network.requestWillBeSent"' in one["message"]
    ]
    assert len(requests) == 1, "that of the page"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "nothing is cut off"
    for texts in browser.execute_script(TEXTS):
        assert all(size >= 11 for *_, size in texts)
        assert all(one[1] >= 0 and one[3] <= width for one in texts)
        assert not [(a[0], b[0]) for i, a in enumerate(texts) for b in texts[:i] if overlap(a, b)]
    words, lines = browser.execute_script(CONTRAST)
    assert words >= 4.5
    assert lines >= 3.0


def test_the_pointer_shows_values_and_names_switch_curves_off(browser, page):
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.common.by import By

    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(page.as_uri())
    figure = browser.find_element(By.CSS_SELECTOR, "figure")
    plot = figure.find_element(By.CSS_SELECTOR, "svg[data-x]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    ActionChains(browser).move_to_element(plot).perform()
    output = figure.find_element(By.CSS_SELECTOR, "output")
    values, step = output.text.split(" at step ")
    assert abs(int(step) - 30) <= 2
    assert len(values.split(", ")) == 4
    assert 1 < float(values.split(", ")[0]) < 1e6
    key = figure.find_element(By.CSS_SELECTOR, ".key[data-i]")
    curve = figure.find_element(By.CSS_SELECTOR, f'path.line[data-i="{key.get_attribute("data-i")}"]')
    key.click()
    assert (curve.value_of_css_property("display"), key.get_attribute("aria-pressed")) == ("none", "false")
    key.send_keys(Keys.ENTER)
    assert (curve.value_of_css_property("display"), key.get_attribute("aria-pressed")) == ("inline", "true")
