"""The notebook outputs shown on the pages are up to date."""

import re
from pathlib import Path

import pytest
from source_files import import_file

DOCS = Path(__file__).parents[2] / "docs"
notebook = import_file(DOCS / "notebook.py")


def text_of(html):
    return " ".join(re.sub(r"<[^>]*>|&[#\w]+;", " ", html).split())


@pytest.fixture(scope="module")
def outputs():
    pytest.importorskip("matplotlib")
    return notebook.outputs()


@pytest.mark.thorough
def test_the_stored_output_is_up_to_date(outputs):
    assert text_of((DOCS / "notebook" / "state.html").read_text(encoding="utf-8")) == text_of(
        outputs["state"]
    )


@pytest.mark.thorough
# Their numbers depend on the machine and on versions.
@pytest.mark.parametrize("name", ["plan", "cost", "goodput"])
def test_a_computed_output_has_the_current_rows(outputs, name):
    stored = (DOCS / "notebook" / f"{name}.html").read_text(encoding="utf-8")
    titles = [
        set(re.findall(r"<t[dh][^>]*left[^>]*>([^<]*)<", html)) for html in (stored, outputs[name])
    ]
    assert titles[0]
    assert titles[0] & titles[1]
    assert text_of(stored).split()[0] == text_of(outputs[name]).split()[0]


@pytest.mark.thorough
def test_outputs_and_placeholders_match(outputs):
    placeholders = [
        name
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"<!-- notebook: (\w+) -->", page.read_text("utf-8"))
    ]
    assert (
        sorted(placeholders)
        == sorted(outputs)
        == sorted(path.stem for path in (DOCS / "notebook").glob("*.html"))
    )


def test_an_output_is_embedded_as_one_block():
    page = notebook.on_page_markdown(
        "before\n\n<!-- notebook: state -->\n\n`<!-- notebook: nope -->`\n"
    )
    lines = page.splitlines()
    assert lines[2].startswith('<div class="notebook-output"><div')
    assert lines[2].endswith("</div>")
    assert lines[4] == "`<!-- notebook: nope -->`"
    with pytest.raises(FileNotFoundError):
        notebook.on_page_markdown("<!-- notebook: nope -->\n")
