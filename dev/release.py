"""List what is left to do before a release: `python dev/release.py`, the first point of the list in
dev/README.md.

The exit code is 1 if something is left.
"""

import pathlib
import re
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACEHOLDER = "jstep.invalid"
"""The host of URLs that are not known yet; no domain can end in `.invalid` (RFC 2606)."""
PRIVATE = "Private :: Do Not Upload"
"""An index refuses a package with this classifier."""
URLS = ("Homepage", "Documentation", "Source", "Issues", "Changelog")
WITH_URLS = (
    "pyproject.toml",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "mkdocs.yml",
)


def problems(root: pathlib.Path = ROOT) -> list[str]:
    """Return what is left to do before a release of this checkout."""
    texts = {
        name: (root / name).read_text(encoding="utf-8") for name in (*WITH_URLS, "CHANGELOG.md")
    }
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    version = project["version"]
    found = [
        f"{name}, line {number}: a placeholder for a URL"
        for name in WITH_URLS
        for number, line in enumerate(texts[name].splitlines(), 1)
        if PLACEHOLDER in line
    ]
    found += [
        f"pyproject.toml: no URL {name!r}" for name in URLS if name not in project.get("urls", {})
    ]
    if PRIVATE in project["classifiers"]:
        found.append(f"pyproject.toml: the classifier {PRIVATE!r}")
    found += [
        f"mkdocs.yml: no {key}"
        for key in ("site_url", "repo_url")
        if f"\n{key}:" not in texts["mkdocs.yml"]
    ]
    dated = re.search(
        rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", texts["CHANGELOG.md"], re.MULTILINE
    )
    if dated is None:
        found.append(f"CHANGELOG.md: no section '## [{version}] - DATE'")
    elif f"date-released: {dated[1]}" not in texts["CITATION.cff"]:
        found.append(f"CITATION.cff: date-released is not {dated[1]}, as in CHANGELOG.md")
    if texts["CHANGELOG.md"].partition("## [Unreleased]")[2].partition("\n## [")[0].strip():
        found.append(
            "CHANGELOG.md: entries under [Unreleased]; move them to a section of the new version"
        )
    return found


TABLE = ".nightly/table"
"""The table of the nightly run, whose first line is the hash of the tree that it has run on."""


def table_problems(root: pathlib.Path) -> list[str]:
    """Return what is wrong with the table of the nightly run: it is missing, is another tree's, or
    not all passed."""
    path = root / TABLE
    if not path.is_file():
        return [f"{TABLE}: there is none; run dev/nightly.sh on the commit to be released"]
    first, *rows = path.read_text(encoding="utf-8").splitlines()
    tree = _git(root, "rev-parse", "HEAD^{tree}")
    if first != f"tree {tree}":
        return [
            f"{TABLE}: it is of {first!r}, and the tree of this commit is {tree!r}; "
            "run dev/nightly.sh again"
        ]
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        return [f"{TABLE}: the checkout has changes that are not committed"]
    return [
        f"{TABLE}: {row}"
        for row in rows
        if " passed " not in f"{row} " and "not installed" not in row
    ]


def by_a_person(root: pathlib.Path, version: str) -> list[str]:
    """Return what nobody but a person can do, or decide."""
    found = []
    if ".dev" in version:
        found.append(f"pyproject.toml: the version is {version}, of no release")
    if not (root / "THIRD_PARTY_NOTICES.md").is_file():
        found.append(
            "THIRD_PARTY_NOTICES.md: there is none, and the package includes files of others"
        )
    if not (root / "tests" / "golden" / version).is_dir():
        found.append(
            f"tests/golden/{version}: there is none; "
            "write it once with dev/golden.py if a format has changed"
        )
    if f"v{version}" not in _git(root, "tag", "--points-at", "HEAD").split():
        found.append(f"git: no tag v{version} at this commit")
    return found


def _git(root: pathlib.Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    left = [*problems(), *table_problems(ROOT), *by_a_person(ROOT, version)]
    print("\n".join(left) or "nothing is left to do")
    raise SystemExit(bool(left))
