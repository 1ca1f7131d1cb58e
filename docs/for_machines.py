"""The site for programs that read: a hook of MkDocs.

It writes `llms.txt`, and each page as Markdown beside its HTML. `llms.txt` has the form of
https://llmstxt.org: the name, a summary, and by section each page with a line about it. The page
`tutorial/loop/` is `tutorial/loop.md` as Markdown, where the links between the sources lead on;
entries of the reference are their signatures and docstrings.
"""

import functools
import html
import os
import pathlib
import posixpath
import re
import textwrap
from typing import Any
from urllib.parse import quote

import griffe
import names

_ROOT = pathlib.Path(__file__).parents[1]
_ENTRY = re.compile(r"^::: (jstep\.[\w.]+)$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n.*?^---\n+", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Writes the page as Markdown, and links to it in its head."""
    target = pathlib.Path(config["site_dir"], page.file.src_uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(as_markdown(_source(page)), encoding="utf-8")
    here = posixpath.relpath(page.file.src_uri, posixpath.dirname(page.file.dest_uri) or ".")
    link = f'<link rel="alternate" type="text/markdown" href="{html.escape(quote(here))}">'
    return output.replace("</head>", f"{link}</head>", 1)


def on_env(env: Any, config: Any, files: Any) -> None:
    """Keeps the navigation for `on_post_build`, which is not given it."""
    pages = [page for page in files.documentation_pages() if page.page]
    config["extra"]["llms_txt"] = llms_txt(config, pages)


def on_post_build(config: Any) -> None:
    """Writes `llms.txt`."""
    target = pathlib.Path(config["site_dir"], "llms.txt")
    target.write_text(config["extra"].pop("llms_txt"), encoding="utf-8")


def llms_txt(config: Any, files: Any) -> str:
    """The content of `llms.txt`, in the order of the navigation in `mkdocs.yml`."""
    pages = {file.src_uri: file.page for file in files}
    summary = f"{config['site_description']}."
    more = _first_paragraph(_source(pages["index.md"])).removeprefix(summary).strip()
    lines = [f"# {config['site_name']}", "", f"> {summary}", "", more]
    for title, entries in _sections(config["nav"]):
        lines += ["", f"## {title}", ""]
        for name, uri in entries:
            address = posixpath.join(config["site_url"] or "", quote(uri))
            lines.append(f"- [{name or _title(pages[uri])}]({address}): {_about(pages[uri])}")
    return "\n".join(lines) + "\n"


def _sections(nav: Any) -> list[tuple[str, list[tuple[str | None, str]]]]:
    """The sections of the navigation with their pages.

    Pages that are in none come first, as the section Pages.
    """
    alone: list[tuple[str | None, str]] = []
    found: list[tuple[str, list[tuple[str | None, str]]]] = [("Pages", alone)]
    for entry in nav:
        for title, inner in entry.items() if isinstance(entry, dict) else [(None, entry)]:
            if isinstance(inner, str):
                alone.append((title, inner))
            else:
                found.append((title, list(_leaves(inner))))
    return [section for section in found if section[1]]


def _leaves(nav: Any) -> Any:
    for entry in nav:
        for title, inner in entry.items() if isinstance(entry, dict) else [(None, entry)]:
            if isinstance(inner, str):
                yield title, inner
            else:
                yield from _leaves(inner)


def _source(page: Any) -> str:
    """The source of a page without its front matter, which is for MkDocs."""
    return _FRONT_MATTER.sub("", names.source(pathlib.Path(page.file.abs_src_path)))


def _title(page: Any) -> str:
    match = re.search(r"^# (.+)$", _source(page), re.MULTILINE)
    return match[1] if match else pathlib.PurePosixPath(page.file.src_uri).stem


def _about(page: Any) -> str:
    return about(_source(page))


def about(source: str) -> str:
    """A line about a page: the beginning of its prose without links, its entries, or its links.

    The beginning is one sentence, or two if the first says little. A line that is not a list of
    entries is not longer than 300 characters.
    """
    if words := _first_paragraph(source):
        first, *rest = re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"])", words)
        two = " ".join([first, *rest[:1]])
        line = two if len(first) < 40 and len(two) <= 300 else first
        return textwrap.shorten(line.rstrip(":"), 300, placeholder=" …")
    names = [name.partition(".")[2] for name in _ENTRY.findall(source)]
    links = re.findall(r"(?<!!)\[([^\]]+)\]\([^):]*\)", _without_code(source))
    return ", ".join(names) or textwrap.shorten(", ".join(links), 300, placeholder=" …")


def _first_paragraph(source: str) -> str:
    """The first paragraph of prose of a page, as plain text in one line; empty if there is none."""
    paragraphs = re.split(r"\n\s*\n", _without_code(source))
    found = (one for one in paragraphs if re.match(r"\*\*|[\w`\[(\"]", one))
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", next(found, "")).replace("**", "")
    return " ".join(plain.split())


def _without_code(source: str) -> str:
    text = _COMMENT.sub("", source)
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


def as_markdown(source: str) -> str:
    """The source of a page with the entries of the reference written out, and without comments."""
    return _ENTRY.sub(lambda match: _entry(match[1]), _COMMENT.sub("", source))


def _entry(name: str) -> str:
    found = _package()[name.removeprefix("jstep.")]
    while found.is_alias or (found.is_module and found.name in found.members):
        found = found.final_target if found.is_alias else found.members[found.name]
    text = f"\n\n{found.docstring.value}" if found.docstring else ""
    inner = [
        f"\n\n#### {member.name}{_signature(member)}\n\n{member.docstring.value}"
        for member in (found.members.values() if found.is_class else ())
        if not member.is_alias
        and member.is_function
        and not member.name.startswith("_")
        and member.docstring
    ]
    return f"### {name}{_signature(found)}{text}{''.join(inner)}\n"


def _signature(found: Any) -> str:
    """The arguments of a function or a class with their defaults, as the site shows them."""
    if not (found.is_function or found.is_class) or not (parameters := list(found.parameters)):
        return "()" if found.is_function else ""
    words, star = [], False
    for one in parameters:
        kind = str(getattr(one.kind, "value", one.kind))
        if one.name in ("self", "cls"):
            continue
        if kind == "keyword-only" and not star:
            words.append("*")
            star = True
        star |= kind == "variadic positional"
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        default = "" if stars or one.default is None else f"={one.default}"
        words.append(f"{stars}{one.name}{default}")
    return f"({', '.join(words)})"


@functools.cache
def _package() -> Any:
    """The package, read and not imported."""
    return griffe.load("jstep", search_paths=[os.fspath(_ROOT)], resolve_aliases=True)
