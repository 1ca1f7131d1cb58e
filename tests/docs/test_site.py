"""The built site: nothing is loaded from other hosts, equations are typeset, Markdown and llms.txt
are generated."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_files import import_file

import jstep

# The extra `docs`.
NEEDED = ("mkdocs", "material", "mkdocstrings", "griffe", "latex2mathml", "ruff")
pytestmark = pytest.mark.skipif(
    None in map(importlib.util.find_spec, NEEDED), reason="needs the extra `docs`"
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    # Not `--quiet`, with which `--strict` counts no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme
    done = subprocess.run(
        command, cwd=ROOT, env=quiet, timeout=600, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, [line for line in lines if not line.startswith("INFO")]
    assert not [line for line in lines if not line.startswith("INFO")], (
        "no warnings, and no advertisements"
    )
    return directory


@pytest.fixture(scope="module")
def docs():
    """A function that imports the hooks of docs/ as modules."""
    sys.path.insert(0, str(ROOT / "docs"))  # they import each other
    yield lambda name: import_file(ROOT / "docs" / f"{name}.py")
    sys.path.remove(str(ROOT / "docs"))


@pytest.mark.thorough
def test_nothing_is_loaded_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for tag in re.findall(
            r"<(?:script|link|img|iframe|source|video|object)\b[^>]*>", page.read_text("utf-8")
        ):
            assert not re.search(r"""(?:src|href|data|srcset)=["']?(?:https?:)?//""", tag), (
                f"{page}: {tag}"
            )
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", sheet.read_text("utf-8")
        ), sheet


@pytest.mark.thorough
def test_equations_are_typeset(site, docs):
    clock = (site / "how" / "one-clock" / "index.html").read_text("utf-8")
    assert "<mfrac>" in clock
    for page in site.rglob("*.html"):
        assert "arithmatex" not in page.read_text("utf-8"), f"{page} has TeX that was not typeset"
    formulas = docs("formulas")
    reference = "".join(page.read_text("utf-8") for page in (site / "reference").rglob("*.html"))
    assert reference.count('<div class="equation">') >= sum(map(len, formulas.FORMULAS.values()))
    entry = reference[reference.index('id="jstep.adam"') :]
    assert 0 < entry.index("<math") < entry.index("Kingma")


@pytest.mark.thorough
def test_only_pages_are_published(site):
    assert not [*site.rglob("*.py"), *site.rglob("*.toml")]


def test_equations_belong_to_public_names(docs):
    formulas = docs("formulas")
    assert set(formulas.FORMULAS) <= set(jstep.__all__)
    assert set(formulas.WHERE) <= set(formulas.FORMULAS)


@pytest.mark.thorough
def test_every_page_is_also_served_as_markdown(site):
    for source in (ROOT / "docs").rglob("*.md"):
        name = source.relative_to(ROOT / "docs")
        text = (site / name).read_text("utf-8")
        assert ":::" not in text
        assert not text.startswith("---"), "front matter is for MkDocs"
        assert "<!--" not in text
        page = site / (
            name.with_suffix("") / "index.html"
            if name.name != "index.md"
            else name.with_suffix(".html")
        )
        (to,) = re.findall(
            r'<link rel="alternate" type="text/markdown" href="([^"]*)">', page.read_text("utf-8")
        )
        assert (page.parent / to).resolve() == (site / name).resolve()
        for target in re.findall(r"\]\(([^)#\s:]+\.md)(?:#[\w.-]+)?\)", text):
            assert (site / name).parent.joinpath(target).exists(), f"{name} links to {target}"
    reference = (site / "reference" / "optimizers.md").read_text("utf-8")
    assert (
        "### jstep.adam(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08)"
        in reference.replace("1e-8", "1e-08")
    )
    assert "Kingma and Ba" in reference


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.stem
)
def test_the_reference_names_the_members_of_each_class_that_it_shows(page):
    """What users call is chosen; methods that only jstep calls are not shown because they happen to
    be public."""
    for name, options in re.findall(
        r"^::: jstep\.(\S+)\n((?:    .*\n)*)", page.read_text(), re.MULTILINE
    ):
        shown = functools.reduce(getattr, name.split("."), jstep)
        if isinstance(shown, type):
            members = re.search(r"\bmembers: \[(.*)\]", options)
            assert members, f"{name}: list its members"
            assert all(hasattr(shown, member) for member in re.findall(r"\w+", members[1])), name
