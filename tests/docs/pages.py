"""Run the code blocks of documentation pages, and compare what they print with what the pages
show."""

import builtins
import contextlib
import importlib.util
import io
import logging
import os
import pathlib
import re
import shlex
import sys
import warnings
from typing import NamedTuple
from unittest import mock

import jax

DOCS = pathlib.Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"^( *)```(?:python\n(?P<code>.*?)|text\n(?P<command> *\$ jstep .*?\n)(?P<result>.*?))^\1```"
    r"(?:\n\n\1```text\n(?! *\$ )(?P<shown>.*?)^\1```)?",
    re.DOTALL | re.MULTILINE,
)
"""A program, or a command of jstep, and what it prints."""
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->")
# On the line above a block: only this block is skipped if a package is missing; the rest of the
# page still runs.
BLOCK_NEEDS = re.compile(r"<!-- block needs: ([\w, ]+) -->\s*\Z")


LEFT_OUT: list[str] = []
"""The packages for want of which blocks were left out, since `conftest.py` has reported them."""


class Block(NamedTuple):
    """A Python code block of a page, without the indentation of tabs and lists.

    Attributes:
        shown: The block of output that follows it, or "".
    """

    line: int
    code: str
    needs: tuple[str, ...]
    shown: str


def section_of(text, heading):
    """Return where the section with a heading begins and ends: before the next heading of its level
    or above."""
    # Comments of programs begin with # as well.
    without_code = FENCE.sub(lambda match: " " * len(match.group()), text)
    (begin,) = re.finditer(rf"^(#+) {re.escape(heading)}$", without_code, re.MULTILINE)
    end = re.compile(rf"^#{{1,{len(begin.group(1))}}} ", re.MULTILINE).search(
        without_code, begin.end()
    )
    return begin.start(), end.start() if end else len(text)


def blocks_of(page, section=None):
    text = page.read_text(encoding="utf-8")
    begin, end = section_of(text, section) if section else (0, len(text))
    found = []
    for match in BLOCK.finditer(text, begin, end):
        before, indent = text[: match.start()], len(match.group(1))
        code, command, result, shown = (_dedented(part, indent) for part in match.group(*_PARTS))
        if command:
            arguments = shlex.split(command.removeprefix("$ jstep"))
            code, shown = f"__import__('jstep.look.cli').look.cli.main({arguments})\n", result
        mark = BLOCK_NEEDS.search(before)
        needs = tuple(name.strip() for name in mark.group(1).split(",")) if mark else ()
        found.append(Block(before.count("\n") + 1, code, needs, shown))
    return found


_PARTS = "code", "command", "result", "shown"


def _dedented(part, indent):
    return "".join(line[indent:] for line in (part or "").splitlines(keepends=True))


def run_page(page, change=str, section=None, more="", wrong=None):
    """Run the code blocks of a page in order, after applying `change` to each, and more code;
    return the names.

    To the list `wrong`, if it is given, the outputs are added that the page shows, but its code
    does not print.
    """
    names = {"__name__": "__main__"}
    printed = Printed(str(page))
    if wrong is not None:
        names["print"] = printed.print
    # Pages run with JAX's default settings, not those of the tests; changes to the environment are
    # undone.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.legacy_prng_key("allow"),
        mock.patch.dict(os.environ),
        # Pages on reinforcement learning import ppo.
        mock.patch.object(sys, "path", [os.fspath(EXAMPLES), *sys.path]),
        warnings.catch_warnings(),
        printed.logging() if wrong is not None else contextlib.nullcontext(),
    ):
        # Keras 3.15 uses NumPy functions that are now deprecated.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"keras\.")
        for block in blocks_of(page, section):
            missing = [name for name in block.needs if importlib.util.find_spec(name) is None]
            LEFT_OUT.extend(missing)
            if not missing:
                program = compile("\n" * block.line + change(block.code), str(page), "exec")
                if wrong is None:
                    exec(program, names)
                    continue
                with printed.recording():
                    exec(program, names)
                wrong += printed.differences(block)
        exec(more, names)
    return names


# What a page prints, beside what it shows.


class Printed:
    """What the code of a page prints and logs: all of a block, and by line."""

    def __init__(self, page):
        self._page = page
        self._lines = {}
        self._text = io.StringIO()

    def print(self, *values, **options):
        builtins.print(*values, **options)
        caller = sys._getframe(1)
        if caller.f_code.co_filename == self._page and not options:
            self._lines[caller.f_lineno] = " ".join(map(str, values))

    @contextlib.contextmanager
    def logging(self):
        """Record the log lines of a page. A run in a thread may end in another block than it began
        in."""
        logger, handler = logging.getLogger("jstep"), logging.StreamHandler(self._text)
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    @contextlib.contextmanager
    def recording(self):
        """Record the output of a block."""
        self._text.seek(0)
        self._text.truncate()
        self._lines.clear()
        try:
            with contextlib.redirect_stdout(self._text):
                yield
        finally:
            sys.stdout.write(self._text.getvalue())

    def differences(self, block):
        """Return what a block shows, in a listing or in comments, and does not print."""
        text = self._text.getvalue()
        found = (
            []
            if shows(block.shown, text)
            else [f"line {block.line}: shown:\n{block.shown}printed:\n{text}"]
        )
        call = 0
        for number, code in enumerate(block.code.splitlines(), block.line + 1):
            call = number if number in self._lines else call
            comment = COMMENT.search(code)
            is_beside = call == number or (
                call and (call == number - 1 or code.lstrip().startswith(")"))
            )
            if comment and is_beside and not shows(comment[1], self._lines[call], whole=True):
                found.append(f"line {number}: shown: {comment[1]}; printed: {self._lines[call]}")
        return found


COMMENT = re.compile(r"(?:\)  |^ *)# (?=[\d'\[({…-]|True|False|nan)(.*?)(?:[,:;] [a-z].*)?$")
"""A value that a line of code prints, on its last line or below it, perhaps with words after it."""
TOKEN = re.compile(
    r"(?P<any>…)"
    r"|(?P<date>\d{4}-\d\d-\d\d(?: \d\d:\d\d(?::\d\d)?)?)"
    r"|(?P<place>[\w.-]+\.py:\d+)"
    r"|(?P<time>\d[\d.]*(?= (?:ms|s|min|h)\b))"
    r"|(?P<number>-?\d+\.\d+(?:e[+-]?\d+)?)"
    r"|(?P<space>\s+)"
)
PATTERNS = {
    "any": ".*?",
    "date": r"\d{4}-\d\d-\d\d(?: \d\d:\d\d(?::\d\d)?)?",
    "place": r"\S+:\d+",
    "time": r"\d[\d.]*",
    "number": r"(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf)",
    "space": r"\s+",
}


def shows(shown, printed, whole=False):
    """Whether a text is part of what was printed: numbers have the digits shown, times, dates and
    places any value."""
    pattern, numbers, end = "", [], 0
    for token in TOKEN.finditer(shown.strip()):
        pattern += re.escape(shown.strip()[end : token.start()]) + PATTERNS[token.lastgroup]
        numbers += [token.group()] if token.lastgroup == "number" else []
        end = token.end()
    pattern += re.escape(shown.strip()[end:])
    found = (
        [re.fullmatch(pattern, printed.strip(), re.DOTALL)]
        if whole
        else re.finditer(pattern, printed, re.DOTALL)
    )
    return any(match and all(map(has_digits, numbers, match.groups())) for match in found)


def has_digits(shown, printed):
    digits = len(shown.partition(".")[2].partition("e")[0])
    exponent = int(shown.partition("e")[2] or 0)
    return abs(float(printed) - float(shown)) <= 0.5001 * 10.0 ** (exponent - digits)
