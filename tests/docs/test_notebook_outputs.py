"""What the pages show of notebooks is what a notebook shows."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("docs_notebook", DOCS / "notebook.py")
notebook = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebook)


def text_of(html):
    return " ".join(re.sub(r"<[^>]*>|&[#\w]+;", " ", html).split())


@pytest.fixture(scope="module")
def made():
    pytest.importorskip("matplotlib")
    return notebook.outputs()


def test_an_output_is_what_the_object_shows_today(made):
    assert text_of((DOCS / "notebook" / "state.html").read_text(encoding="utf-8")) == text_of(made["state"])


@pytest.mark.parametrize("name", ["plan", "cost", "goodput"])  # with numbers of this machine and these versions
def test_an_output_that_is_computed_has_the_rows_of_today(made, name):
    kept = (DOCS / "notebook" / f"{name}.html").read_text(encoding="utf-8")
    titles = [set(re.findall(r"<t[dh][^>]*left[^>]*>([^<]*)<", html)) for html in (kept, made[name])]
    assert titles[0]
    assert titles[0] & titles[1]
    assert text_of(kept).split()[0] == text_of(made[name]).split()[0]


def test_every_output_is_on_a_page_and_every_place_has_one(made):
    places = [
        name for page in DOCS.rglob("*.md") for name in re.findall(r"<!-- notebook: (\w+) -->", page.read_text("utf-8"))
    ]
    assert sorted(places) == sorted(made) == sorted(path.stem for path in (DOCS / "notebook").glob("*.html"))


def test_it_is_embedded_as_one_block():
    page = notebook.on_page_markdown("before\n\n<!-- notebook: state -->\n\n`<!-- notebook: nope -->`\n")
    lines = page.splitlines()
    assert lines[2].startswith('<div class="notebook-output"><div')
    assert lines[2].endswith("</div>")
    assert lines[4] == "`<!-- notebook: nope -->`"
    with pytest.raises(FileNotFoundError):
        notebook.on_page_markdown("<!-- notebook: nope -->\n")
