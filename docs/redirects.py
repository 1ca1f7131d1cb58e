"""Pages that were joined to others: a page at each old address leads on. A hook of MkDocs."""

import html
import pathlib
import posixpath
import re
from typing import Any
from urllib.parse import quote

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{to}">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={to}">
</head>
<body><a href="{to}">This page has moved.</a></body>
</html>
"""


def on_post_build(config: Any) -> None:
    """Writes the pages that `extra.redirects` of `mkdocs.yml` lists."""
    site = pathlib.Path(config["site_dir"])
    for old, new in config["extra"]["redirects"].items():
        page, _, section = new.partition("#")
        target = site / _address(page) / "index.html"
        if not target.exists() or not re.search(rf'\bid="{re.escape(section)}"', target.read_text(encoding="utf-8")):
            raise ValueError(f"mkdocs.yml: extra.redirects: {old}: there is no {new}")
        written = site / _address(old) / "index.html"
        written.parent.mkdir(parents=True)
        to = html.escape(f"{quote(posixpath.relpath(_address(page), _address(old)))}/#{section}")
        written.write_text(_PAGE.format(to=to), encoding="utf-8")


def _address(page: str) -> str:
    return page.removesuffix(".md")
