"""Draws lists of public names on pages, from the list in `jstep/__init__.py`: a hook of MkDocs.

`<!-- questions: all -->` becomes a table of the questions of `questions.toml` and the pages that
answer them, `<!-- entries: Optimizers -->` becomes the entries of the topics that begin so,
`<!-- table: Optimizers -->` a table with a row for each of them, and `<!-- pages: reference -->`
a table of the pages of the reference with their names.
"""

import pathlib
import re
import tomllib
from collections.abc import Iterable
from typing import Any

import jstep

REFERENCE = pathlib.Path(__file__).parent / "reference"
ENTRY = re.compile(r"^::: jstep\.([\w.]+)$", re.MULTILINE)
_PLACE = re.compile(r"^<!-- (entries|table|pages|questions): (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """The page with its lists."""
    return _PLACE.sub(lambda place: _DRAWN[place[1]](place[2]), markdown)


def source(page: pathlib.Path) -> str:
    """The Markdown of a page with its lists."""
    return on_page_markdown(page.read_text(encoding="utf-8"))


def topics(beginning: str) -> dict[str, list[str]]:
    """Topic, without this beginning → its names."""
    found: dict[str, list[str]] = {}
    for line in jstep._NAMES.strip().splitlines():
        if line.startswith(" "):
            found[next(reversed(found))] += line.partition(": ")[2].split()
        else:
            found[line] = []
    chosen = {topic: names for topic, names in found.items() if topic.startswith(beginning)}
    return {topic.removeprefix(beginning).lstrip(", "): names for topic, names in chosen.items()}


def _entries(beginning: str) -> str:
    return "\n\n".join(
        f"::: jstep.{name}" for names in topics(beginning).values() for name in names
    )


def _table(beginning: str) -> str:
    return _rows((topic, names) for topic, names in topics(beginning).items())


def _pages(folder: str) -> str:
    found = sorted((REFERENCE.parent / folder).glob("*.md"))
    pages = {page.name: source(page) for page in found if page.name not in ("index.md", "cli.md")}
    titles = {name: text.splitlines()[0].removeprefix("# ") for name, text in pages.items()}
    return _rows((f"[{titles[name]}]({name})", ENTRY.findall(text)) for name, text in pages.items())


def _questions(_: str) -> str:
    text = (REFERENCE.parent / "questions.toml").read_text(encoding="utf-8")
    lines = ["| question | page |", "|---|---|"]
    for question in tomllib.loads(text)["question"]:
        page = question["page"]
        title = (REFERENCE.parent / page).read_text(encoding="utf-8")
        heading = re.search(r"^# (.+)$", title, re.MULTILINE)
        assert heading is not None, page
        lines.append(f"| {question['asked']} | [{heading[1]}](../{page}) |")
    return "\n".join(lines)


def _rows(rows: Iterable[tuple[str, list[str]]]) -> str:
    lines = [f"| {first} | {' · '.join(f'`{name}`' for name in names)} |" for first, names in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


_DRAWN = {"entries": _entries, "table": _table, "pages": _pages, "questions": _questions}
