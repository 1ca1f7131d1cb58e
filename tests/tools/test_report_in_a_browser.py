"""The page of `report` in headless Chromium: legible at three widths, in both themes, without errors or requests."""

import jax.numpy as jnp
import pytest
from chromium import CONTRAST, NEEDED, TEXTS, look, overlap

import jstep

pytestmark = NEEDED


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


@pytest.mark.thorough(except_for=["light-360"])
@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_is_legible(width, theme, browser, page):
    look(browser, page, width, theme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "nothing is cut off"
    for texts in browser.execute_script(TEXTS):
        assert all(size >= 11 for *_, size in texts)
        assert all(one[1] >= 0 and one[3] <= width for one in texts)
        assert not [(a[0], b[0]) for i, a in enumerate(texts) for b in texts[:i] if overlap(a, b)]
    words, lines = browser.execute_script(CONTRAST)
    assert words >= 4.5
    assert lines >= 3.0


@pytest.mark.thorough
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
