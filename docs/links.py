"""Links every public name that a page mentions to its entry in the reference: a hook of MkDocs."""

import posixpath
import re
from typing import Any

import names

ENTRIES = {
    name: f"reference/{page.name}#jstep.{name}"
    for page in sorted(names.REFERENCE.glob("*.md"))
    for name in names.ENTRY.findall(names.source(page))
    if name != "global_step"  # on a page it is the field of the state, seldom the function
}
# Names of jstep.summary are written without it where no other word could be meant.
ENTRIES |= {
    name.split(".")[1]: entry
    for name, entry in ENTRIES.items()
    if re.match(r"summary\.(\w+_|[A-Z])", name)
}

# What is linked already stays as it is; inline code is a name, or a call of it.
PIECE = re.compile(r"\[[^\]]*\]\([^)]*\)|`(?:jstep\.)?([\w.]+)(?:\([^`]*\))?`")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """The page with links: each name in a table, in prose the first of a page."""
    here = page.file.src_uri
    if here.startswith("reference/") and here != "reference/index.md":
        return markdown  # mkdocstrings links these
    seen: set[str] = set()
    lines, fenced = [], False
    for line in markdown.splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        lines.append(line if fence or fenced or line.startswith("#") else _linked(line, here, seen))
    return "\n".join(lines)


def _linked(line: str, here: str, seen: set[str]) -> str:
    table = line.startswith("|")
    # The first column of a page "From …" holds the names of others.
    others = line.index("|", 1) if table and here.startswith("from/") else 0

    def link(match: re.Match[str]) -> str:
        name = match[1] or ""
        if name[:1].isupper() and name not in ENTRIES:
            name = name.split(".")[0]  # a class, of `TrainState.create`
        if name not in ENTRIES or match.start() < others or (name in seen and not table):
            return match[0]
        seen.add(name)
        return f"[{match[0]}]({posixpath.relpath(ENTRIES[name], posixpath.dirname(here))})"

    return PIECE.sub(link, line)
