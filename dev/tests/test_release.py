"""What a release needs is there or found, and nothing says that jstep is on an index before it
is."""

import re
import shutil
import subprocess
import sys

import pytest
from source_files import MODULES, ROOT, text_of

sys.path.insert(0, str(ROOT / "dev"))

from release import PLACEHOLDER, PRIVATE, URLS, by_a_person, problems, table_problems

FILES = (
    "pyproject.toml", "CITATION.cff", "CONTRIBUTING.md", "README.md", "SECURITY.md", "mkdocs.yml",
    "CHANGELOG.md",
)  # fmt: skip


@pytest.fixture
def ready(tmp_path):
    """A checkout that may be released."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)

    def change(name: str, *changes: tuple[str, str]) -> None:
        text = (tmp_path / name).read_text()
        for old, new in changes:
            text = re.sub(old, new, text, flags=re.DOTALL)
        (tmp_path / name).write_text(text)

    change("pyproject.toml", (PLACEHOLDER, "example.com"), (f' *"{PRIVATE}",\n', ""))
    for name in ("CITATION.cff", "SECURITY.md"):
        change(name, (PLACEHOLDER, "example.com"))
    change(
        "mkdocs.yml",
        ("^site_name", "site_url: https://example.com\nrepo_url: https://example.com\nsite_name"),
    )
    change("mkdocs.yml", ("^site_url", "\nsite_url"))
    change("pyproject.toml", (r'(?m)^version = "[^"]*"', 'version = "0.4.0"'))
    change("CHANGELOG.md", (r"## \[Unreleased\].*?\n## \[", "## [Unreleased]\n\n## ["))
    return change, tmp_path


def test_a_checkout_that_is_ready_has_no_problems(ready) -> None:
    assert problems(ready[1]) == []


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "pyproject.toml",
            ("https://example.com/docs", f"https://{PLACEHOLDER}/docs"),
            "pyproject.toml, line .*URL",
        ),
        ("CITATION.cff", ("example.com/source", PLACEHOLDER), "CITATION.cff, line .*URL"),
        ("SECURITY.md", ("example.com/source", PLACEHOLDER), "SECURITY.md, line .*URL"),
        ("pyproject.toml", ("Issues = [^\n]*", ""), "no URL 'Issues'"),
        ("pyproject.toml", ("classifiers = \\[", f'classifiers = ["{PRIVATE}",'), "Do Not Upload"),
        ("mkdocs.yml", ("\nsite_url[^\n]*", ""), "no site_url"),
        ("CHANGELOG.md", (r"\[Unreleased\]", "[Unreleased]\n\n- A change."), "entries under"),
        ("CITATION.cff", ("date-released: 2", "date-released: 1"), "date-released is not"),
        ("pyproject.toml", ('\nversion = "', '\nversion = "9'), "no section"),
    ],
)
def test_what_is_left_to_do_is_found(ready, name, change, text) -> None:
    ready[0](name, change)
    (found,) = problems(ready[1])
    assert re.search(text, found)


def test_the_placeholders_of_this_checkout_are_found() -> None:
    """Delete this test with the first release."""
    found = problems()
    assert sum("placeholder" in one for one in found) >= len(URLS)
    assert any(PRIVATE in one for one in found)


def test_nothing_says_that_jstep_is_on_an_index() -> None:
    """With an extra, as in `pip install 'jstep[plot]'`, pip installs what the package that is there
    lacks."""
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
        *MODULES.values(),
    ]
    claim = re.compile(
        r"pip install (?:-\S+ )*['\"]?jstep(?!\[)|pypi\.org/project/jstep|conda install \S*jstep"
    )
    if any(PRIVATE in one for one in problems()):
        claims = {
            str(page): claim.findall(text_of(page))
            for page in pages
            if page.name != "CONTRIBUTING.md"
        }
        assert not {page: found for page, found in claims.items() if found}


def git(root, *words):
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, timeout=60)


def test_the_table_of_the_nightly_run_must_be_of_this_tree_and_have_passed(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    assert "there is none; run dev/nightly.sh" in table_problems(tmp_path)[0]
    tree = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD^{tree}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    table = tmp_path / ".nightly" / "table"
    table.parent.mkdir()
    table.write_text("tree 123\nsoak         passed      3 s\n")
    assert "it is of 'tree 123'" in table_problems(tmp_path)[0]
    table.write_text(
        f"tree {tree}\nsoak         passed      3 s\nslurm        not run, SLURM is not installed\n"
    )
    assert table_problems(tmp_path) == []
    table.write_text(f"tree {tree}\nsoak         FAILED      3 s\ntypes        not run\n")
    assert len(table_problems(tmp_path)) == 2
    (tmp_path / "a").write_text("2")
    assert "not committed" in table_problems(tmp_path)[0]


def test_what_a_person_has_to_do_is_found(tmp_path):
    git(tmp_path, "init", "-q")
    found = by_a_person(tmp_path, "1.0.0.dev0")
    for words in (
        "of no release",
        "THIRD_PARTY_NOTICES.md",
        "tests/golden/1.0.0.dev0",
        "no tag v1.0.0.dev0",
    ):
        assert any(words in one for one in found)
