"""TensorBoard's pages in headless Chromium: the content of each tab, and a screenshot of it.

The screenshots are saved in the directory JSTEP_SCREENSHOTS, by default in a temporary one.
"""

import os
import shutil
import time
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (CHROMIUM and CHROMEDRIVER),
        reason="chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)",
    ),
]

# The elements of TensorBoard's page are in nested shadow roots; this script searches all of them.
ALL = """
const found = [];
const walk = root => {
  for (const element of root.querySelectorAll('*')) {
    if (element.matches(arguments[0])) found.push(element);
    if (element.shadowRoot) walk(element.shadowRoot);
  }
};
walk(document);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1400,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def open_tab(browser, tensorboard_url, tmp_path):
    """A function that opens a tab, waits for elements that match a CSS selector, and saves a screenshot."""

    def open_tab(name, selector, script="return found.length", *, at_least=1):
        if browser.current_url.startswith(tensorboard_url):
            browser.execute_script("location.hash = arguments[0]", f"#{name}")
        else:
            browser.get(f"{tensorboard_url}/#{name}")
        return wait_for(name, selector, script, at_least=at_least)

    def wait_for(name, selector, script="return found.length", *, at_least=1):
        deadline = time.monotonic() + 60
        found = None
        while time.monotonic() < deadline:
            found = browser.execute_script(ALL + script, selector)
            if found and (not isinstance(found, int) or found >= at_least):
                break
            time.sleep(0.25)
        folder = Path(os.environ.get("JSTEP_SCREENSHOTS", tmp_path))
        folder.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(folder / f"{name}.png"))
        assert found, f"nothing matches {selector!r} in the tab {name!r}; see {folder / name}.png"
        return found

    open_tab.wait_for = wait_for
    return open_tab


def test_scalars_are_drawn(open_tab):
    # The curve of 1/step decreases monotonically.
    lines = open_tab(
        "scalars",
        "path.line",
        "return found.map(p => p.getAttribute('d')).filter(d => d && d.length > 100)",
    )
    ys = [float(point.split(",")[1]) for point in lines[0].lstrip("M").split("L")]
    assert len(ys) >= 10
    assert ys == sorted(ys)  # y increases downwards on the screen


def test_images_are_drawn(open_tab):
    colors = open_tab(
        "images",
        "img",
        """
        const image = found.find(i => i.complete && i.naturalWidth === 8);
        if (!image) return null;
        const canvas = document.createElement('canvas');
        [canvas.width, canvas.height] = [8, 8];
        const context = canvas.getContext('2d');
        context.drawImage(image, 0, 0);
        return [0, 7].map(y => Array.from(context.getImageData(4, y, 1, 1).data));
        """,
    )
    assert colors == [[200, 0, 0, 255], [0, 0, 100, 255]]


def test_histograms_are_drawn(open_tab):
    paths = open_tab(
        "histograms",
        "path.outline",
        "return found.map(p => p.getAttribute('d')).filter(d => d && d.length > 100)",
    )
    assert len(paths) >= 4  # one per step


def test_the_graph_is_drawn_and_its_scopes_expand(browser, open_tab):
    names = open_tab("graphs", "g.node[data-name]", "return found.map(n => n.getAttribute('data-name'))")
    assert {"state", "batch", "dense", "rnn", "gradients", "result"} <= set(names)
    for scope, inside in (("rnn", "rnn/scan"), ("rnn/scan", "rnn/scan/tanh"), ("state", "state/params")):
        browser.execute_script(
            ALL + "found[0].dispatchEvent(new MouseEvent('dblclick', {bubbles: true, composed: true}))",
            f"g.node[data-name='{scope}'] > g.nodeshape > *",
        )
        open_tab.wait_for("graph-opened", f"g.node[data-name='{inside}']")
