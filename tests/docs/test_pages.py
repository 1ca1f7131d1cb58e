"""What the pages show, runs; what they link to, is there; what they picture, a script makes."""

import contextlib
import os
import pathlib
import re

import pytest
from pages import DOCS, NEEDS, PAGES, blocks_of, run_page

import jstep

ROOT = pathlib.Path(__file__).parents[2]


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_the_code_of_a_page_runs_in_order(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for needed in NEEDS.findall(page.read_text(encoding="utf-8")):
        for module in needed.split(","):
            pytest.importorskip(module.strip())
    with contextlib.chdir(tmp_path):
        run_page(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_listings_are_not_silenced(page: pathlib.Path) -> None:
    """A reader who copies `progress=False` sees neither a restored checkpoint nor why no step was run."""
    assert not re.search(r'progress["=: ]+False', page.read_text(encoding="utf-8"))


def test_every_picture_is_made_by_the_script() -> None:
    script = (DOCS / "pictures.py").read_text(encoding="utf-8")
    for picture in (DOCS / "pictures").iterdir():
        assert f'"{picture.name}"' in script, f"docs/pictures/{picture.name} is made by nothing in docs/pictures.py"


def test_every_picture_is_on_a_page() -> None:
    shown = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [picture.name for picture in (DOCS / "pictures").iterdir()]
    assert len(pictures) >= 10
    assert [name for name in pictures if f"pictures/{name})" not in shown] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_inside_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))
    listed = re.findall(r"^::: (jstep\.[\w.]+)$", pages, re.MULTILINE)
    wanted = [f"jstep.{name}" for name in jstep.__all__ if name not in ("distributed", "metrics", "summary")]
    wanted += [f"jstep.summary.{name}" for name in jstep.summary.__all__]
    wanted += [f"jstep.metrics.{name}" for name in jstep.metrics.__all__]
    wanted += [f"jstep.distributed.{name}" for name in jstep.distributed.__all__]
    assert sorted(listed) == sorted(wanted)
    contents = re.findall(r"`([\w.]+)`", (DOCS / "reference" / "index.md").read_text(encoding="utf-8"))
    assert set(wanted) <= {f"jstep.{name}" for name in contents}, "docs/reference/index.md names every one, too"


def test_the_site_is_complete() -> None:
    """The pages of the navigation are the pages there are: a page that nobody can reach is no page."""
    navigation = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert navigation == {os.fspath(name_of(page)) for page in PAGES}
