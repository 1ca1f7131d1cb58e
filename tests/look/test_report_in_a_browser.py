"""The page of 1, 5, 40 and 300 runs in headless Chromium: widths, overlaps, contrasts, and what the
scripts do."""

import pytest
from chromium import CONTRAST, NEEDED, TEXTS, look, overlap
from written_sweep import write_sweep

import jstep

pytestmark = NEEDED
FIRST_CURVE = (
    "return document.querySelector('.pictures figure').getBoundingClientRect().top + scrollY"
)
WIDE = """
return [...document.querySelectorAll("body *")].filter(one => !one.closest(".wide, title"))
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))
"""  # noqa: E501
WORDS = """
const kinds = "h1, h2, p:not(#legend), li, .key, input, button, select, output, summary, figure text, figcaption, " +
  ".wide";
return [...document.querySelectorAll(kinds)]
  .filter(one => !one.closest("table, .odd, details:not([open])") && one.getBoundingClientRect().width)
  .map(one => [one, one.getBoundingClientRect()])
  .filter(([one]) => !["LABEL"].includes(one.tagName) && !one.querySelector(kinds))
  .map(([one, box]) => [(one.value ?? one.textContent).slice(0, 30), box.left, box.top, box.right, box.bottom])
"""  # noqa: E501
CELLS = """
return [...document.querySelectorAll("#runs tr")].slice(0, 30).map(row => [...row.cells].map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const box = range.getBoundingClientRect(), own = cell.getBoundingClientRect();
  return [cell.textContent, box.left, box.right, own.left, own.right];
}))
"""  # noqa: E501


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A function that returns the page of so many runs."""
    made = {}

    def page(count):
        if count not in made:
            folder = tmp_path_factory.mktemp(f"runs{count}")
            write_sweep(folder / "runs", count)
            made[count] = folder / f"report-{count}.html"
            jstep.report(folder / "runs", made[count])
        return made[count]

    return page


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 5, 40, 300])
@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_is_legible(count, width, theme, browser, pages):
    look(browser, pages(count), width, theme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(WIDE) == []
    for texts in browser.execute_script(TEXTS):
        assert all(size >= 11 for *_, size in texts)
    words = browser.execute_script(WORDS)
    assert not [(a[0], b[0]) for i, a in enumerate(words) for b in words[:i] if overlap(a, b)]
    for row in browser.execute_script(CELLS):
        assert all(
            cell[1] >= cell[3] - 1 and cell[2] <= cell[4] + 1 for cell in row if cell[0].strip()
        )
    words, lines = browser.execute_script(CONTRAST)
    assert words >= 4.5
    assert lines >= 3.0
    assert (count, width) != (40, 1600) or browser.execute_script(FIRST_CURVE) <= 1600


@pytest.fixture
def opened(browser, pages):
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(pages(40).as_uri())
    return browser


def find(browser, selector):
    from selenium.webdriver.common.by import By

    return browser.find_elements(By.CSS_SELECTOR, selector)


def names(browser):
    """The names of the rows that are shown, in their order."""
    return browser.execute_script(
        "return [...document.querySelectorAll('#runs tbody tr')].filter(row => !row.hidden)"
        ".map(row => row.cells[0].textContent.trim())"
    )


def cells(browser, head):
    return browser.execute_script(
        "const at = [...document.querySelectorAll('#runs th')].findIndex(one "
        "=> one.textContent == arguments[0]);"
        "const rows = [...document.querySelectorAll('#runs tbody tr')];"
        "return rows.map(row => row.cells[at].textContent.trim())",
        head,
    )


@pytest.mark.thorough
def test_a_click_on_a_head_sorts(opened):
    first = names(opened)
    heads = {head.text: head for head in find(opened, "#runs th")}
    head = heads["best validation/loss"]
    unsorted = cells(opened, "best validation/loss")
    assert len(unsorted) > 20
    head.click()
    now = [float(value) for value in cells(opened, "best validation/loss") if value]
    assert now == sorted(now) == sorted(float(value) for value in unsorted if value)
    assert cells(opened, "best validation/loss")[-1] == "", "what has none is last"
    assert head.get_attribute("aria-sort") == "ascending"
    head.click()
    now = [float(value) for value in cells(opened, "best validation/loss") if value]
    assert now == sorted(now, reverse=True)
    head.click()
    assert (names(opened), head.get_attribute("aria-sort")) == (first, None)


@pytest.mark.thorough
def test_the_filter_hides_rows(opened):
    (box,) = find(opened, "#controls input")
    box.send_keys("FAILED")
    assert 0 < len(names(opened)) < 10
    assert set(names(opened)) >= {"run-011", "run-023", "run-035"}
    box.clear()
    box.send_keys("run-012")
    assert "run-012" in names(opened)
    assert len(names(opened)) <= 2


@pytest.mark.thorough
def test_a_tick_hides_a_run_in_all_pictures(opened):
    run = find(opened, "#legend .key")[0].get_attribute("data-i")
    (tick,) = find(opened, f'#runs tr[data-r="{run}"] input')
    shown = (
        "return [...document.querySelectorAll(`figure [data-i='${arguments[0]}']`)]"
        ".map(one => one.style.display)"
    )
    assert len(opened.execute_script(shown, run)) == 5
    count = len(names(opened))
    opened.execute_script("arguments[0].click()", tick)
    assert set(opened.execute_script(shown, run)) == {"none"}
    assert len(names(opened)) == count, "it keeps its row"
    find(opened, "#legend .key")[0].click()
    assert set(opened.execute_script(shown, run)) == {""}
    assert tick.is_selected()


FRAME = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"


@pytest.mark.thorough
def test_smoothing(opened):
    lines = ".pictures figure:last-child path.line"
    drawn = f"return [...document.querySelectorAll('{lines}')].map(one => one.getAttribute('d'))"
    before = opened.execute_script(drawn)
    set_to = (
        "const one = document.querySelector('#drawing input'); one.value = arguments[0];"
        "one.dispatchEvent(new Event('input'))"
    )
    opened.execute_script(set_to, 0.9)
    opened.execute_async_script(FRAME)
    smooth = opened.execute_script(drawn)
    assert all(one != other for one, other in zip(before, smooth, strict=True))
    opened.execute_script(set_to, 0)
    opened.execute_async_script(FRAME)
    assert opened.execute_script(drawn) == before


@pytest.mark.thorough
def test_the_pointer_names_the_nearest_run(opened):
    from selenium.webdriver import ActionChains

    (plot, *_) = find(opened, ".pictures svg[data-x]")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(opened).move_to_element(plot).perform()
    (output, *_) = find(opened, ".pictures output")
    assert output.text.startswith("run-")
    assert " at step " in output.text


@pytest.mark.thorough
def test_the_page_of_one_run_has_values_and_keys(browser, pages):
    from selenium.webdriver import ActionChains, Keys

    browser.get(pages(1).as_uri())
    (plot, *_) = find(browser, ".pictures svg[data-x]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element(plot).perform()
    (output, *_) = find(browser, ".pictures output")
    assert len(output.text.split(" at step ")[0].split(", ")) == 2
    (key, *_) = find(browser, ".pictures .key[data-i]")
    (curve, *_) = find(browser, f'.pictures path.line[data-i="{key.get_attribute("data-i")}"]')
    key.click()
    assert (curve.value_of_css_property("display"), key.get_attribute("aria-pressed")) == (
        "none",
        "false",
    )
    key.send_keys(Keys.ENTER)
    assert (curve.value_of_css_property("display"), key.get_attribute("aria-pressed")) == (
        "inline",
        "true",
    )


@pytest.mark.thorough
def test_without_scripts_everything_is_there(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(pages(40).as_uri())
        assert len(find(browser, "#runs tbody tr[data-r]")) == 40
        assert len(find(browser, ".pictures figure")) >= 4
        assert find(browser, "input, button, select") == [], "nothing that does nothing"
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
