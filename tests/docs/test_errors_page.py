"""The page of common errors: each program on it raises or logs the message below it."""

import contextlib
import logging
import pathlib
import re
import traceback
from typing import NamedTuple

import jax
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "help" / "errors.md"
TEXT = PAGE.read_text(encoding="utf-8")
PRELUDE = re.search(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE).group(1)
NEEDS = re.compile(r"<!-- needs: (\w+) -->")
ENTRY = re.compile(
    r"```py\n(?P<code>.*?)```\n\n```text\n(?P<message>.*?)\n```\n\n(?P<advice>.+)", re.DOTALL
)


class Section(NamedTuple):
    title: str
    body: str


SECTIONS = [
    Section(*part.split("\n", 1)) for part in re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
]
# Test IDs are ASCII: the first words of a title.
IDS = ["-".join(re.findall(r"[A-Za-z0-9]+", section.title)[:8]) for section in SECTIONS]
EXPENSIVE = (
    *("Array-has-been-deleted", "A-generator-has", "The-parameters-are-not"),
    *(
        "The-checkpoint-was",
        "The-configuration-changed",
        "Slots-that",
        "A-checkpoint-is-corrupted",
        "A-directory-is",
    ),
    "RESOURCE-EXHAUSTED",
)
"""The beginnings of ids of programs that train or save, as quick tests of the same messages do."""


def as_pattern(quoted):
    """Return a regular expression for a quoted message, in which "…" stands for omitted text."""
    return r".*?".join(re.escape(part) for part in quoted.split("…"))


def matches(quoted, actual):
    return re.fullmatch(as_pattern(quoted), actual.rstrip("\n"), re.DOTALL) is not None


def message_of(code, caplog):
    """Run a program and return the end of its traceback, or its jstep log lines if it does not
    raise."""
    names = {"__name__": "__main__"}
    caplog.clear()
    try:
        exec(compile(PRELUDE + code, str(PAGE), "exec"), names)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        # JAX 0.10.0 and 0.10.1 add this to errors of asynchronous operations.
        return "".join(traceback.format_exception_only(error)).replace(
            "Buffer Definition Event: ", ""
        )
    finally:
        for value in names.values():
            if hasattr(value, "close"):
                value.close()
    return "\n".join(
        f"{line.levelname}: {line.getMessage()}" for line in caplog.records if "jstep" in line.name
    )


@pytest.mark.thorough(except_for=[name for name in IDS if not name.startswith(EXPENSIVE)])
@pytest.mark.parametrize("section", SECTIONS, ids=IDS)
def test_the_program_produces_the_quoted_message(section, tmp_path, caplog):
    entry = ENTRY.search(section.body)
    assert entry, f"{section.title}: a program in ```py, its message in ```text, and what to do"
    for module in NEEDS.findall(section.body):
        pytest.importorskip(module)
    # Pages run with JAX's default settings, not those of the tests.
    caplog.set_level(logging.INFO, logger="jstep")
    with (
        contextlib.chdir(tmp_path),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        actual = message_of(entry["code"], caplog)
    quoted = entry["message"]
    if quoted.startswith(("INFO: ", "WARNING: ")):
        level, _, rest = quoted.partition(": ")
        quoted = f"…{level}: {rest}…"
    assert matches(quoted, actual), f"quoted: {entry['message']}\n\nactual: {actual}"


def test_the_page_has_thirty_entries_with_unique_titles():
    titles = [section.title for section in SECTIONS]
    assert len(titles) >= 30
    assert len(set(titles)) == len(titles)
