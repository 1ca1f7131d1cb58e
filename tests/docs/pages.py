"""Run the code blocks of documentation pages."""

import importlib.util
import os
import pathlib
import re
import sys
import warnings
from typing import NamedTuple
from unittest import mock

import jax

DOCS = pathlib.Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->")
# On the line above a block: only this block is skipped if a package is missing; the rest of the page still runs.
BLOCK_NEEDS = re.compile(r"<!-- block needs: ([\w, ]+) -->\s*\Z")


class Block(NamedTuple):
    """A Python code block of a page, without the indentation of tabs and lists."""

    line: int
    code: str
    needs: tuple[str, ...]


def section_of(text, heading):
    """Return where the section with a heading begins and ends: before the next heading of its level or above."""
    # Comments of programs begin with # as well.
    without_code = FENCE.sub(lambda match: " " * len(match.group()), text)
    (begin,) = re.finditer(rf"^(#+) {re.escape(heading)}$", without_code, re.MULTILINE)
    end = re.compile(rf"^#{{1,{len(begin.group(1))}}} ", re.MULTILINE).search(without_code, begin.end())
    return begin.start(), end.start() if end else len(text)


def blocks_of(page, section=None):
    text = page.read_text(encoding="utf-8")
    begin, end = section_of(text, section) if section else (0, len(text))
    found = []
    for match in BLOCK.finditer(text, begin, end):
        indent = len(match.group(1))
        code = "".join(line[indent:] for line in match.group(2).splitlines(keepends=True))
        before = text[: match.start()]
        mark = BLOCK_NEEDS.search(before)
        needs = tuple(name.strip() for name in mark.group(1).split(",")) if mark else ()
        found.append(Block(before.count("\n") + 1, code, needs))
    return found


def run_page(page, change=str, section=None, more=""):
    """Run the code blocks of a page in order, after applying `change` to each, and more code; return the names."""
    names = {"__name__": "__main__"}
    # Pages run with JAX's default settings, not those of the tests; changes to the environment are undone.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.legacy_prng_key("allow"),
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "path", [os.fspath(EXAMPLES), *sys.path]),  # pages on reinforcement learning import ppo
        warnings.catch_warnings(),
    ):
        # Keras 3.15 uses NumPy functions that are now deprecated.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"keras\.")
        for line, code, needs in blocks_of(page, section):
            if all(importlib.util.find_spec(module) for module in needs):
                exec(compile("\n" * line + change(code), str(page), "exec"), names)
        exec(more, names)
    return names
