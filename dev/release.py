"""List what is left to do before a release: `python dev/release.py`, the first point of the list in dev/README.md.

The exit code is 1 if something is left.
"""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACEHOLDER = "jstep.invalid"
"""The host of URLs that are not known yet; no domain can end in `.invalid` (RFC 2606)."""
PRIVATE = "Private :: Do Not Upload"
"""An index refuses a package with this classifier."""
URLS = ("Homepage", "Documentation", "Source", "Issues", "Changelog")
WITH_URLS = ("pyproject.toml", "CITATION.cff", "CONTRIBUTING.md", "README.md", "SECURITY.md", "mkdocs.yml")


def problems(root: pathlib.Path = ROOT) -> list[str]:
    """Return what is left to do before a release of this checkout."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in (*WITH_URLS, "CHANGELOG.md")}
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    version = project["version"]
    found = [
        f"{name}, line {number}: a placeholder for a URL"
        for name in WITH_URLS
        for number, line in enumerate(texts[name].splitlines(), 1)
        if PLACEHOLDER in line
    ]
    found += [f"pyproject.toml: no URL {name!r}" for name in URLS if name not in project.get("urls", {})]
    if PRIVATE in project["classifiers"]:
        found.append(f"pyproject.toml: the classifier {PRIVATE!r}")
    found += [f"mkdocs.yml: no {key}" for key in ("site_url", "repo_url") if f"\n{key}:" not in texts["mkdocs.yml"]]
    dated = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", texts["CHANGELOG.md"], re.MULTILINE)
    if dated is None:
        found.append(f"CHANGELOG.md: no section '## [{version}] - DATE'")
    elif f"date-released: {dated[1]}" not in texts["CITATION.cff"]:
        found.append(f"CITATION.cff: date-released is not {dated[1]}, as in CHANGELOG.md")
    if texts["CHANGELOG.md"].partition("## [Unreleased]")[2].partition("\n## [")[0].strip():
        found.append("CHANGELOG.md: entries under [Unreleased]; move them to a section of the new version")
    return found


if __name__ == "__main__":
    left = problems()
    print("\n".join(left) or "nothing is left to do")
    raise SystemExit(bool(left))
