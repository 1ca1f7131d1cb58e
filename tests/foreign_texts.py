"""Names of somebody else, and what is printed of them."""

import re
import traceback

CONTROL = "\x1b[31m\nforged\x9b"
"""It colors a terminal, and begins a line that looks like one of jstep."""


def printed(error):
    """Return what Python prints of an error, with its notes and causes."""
    return "".join(traceback.format_exception(error))


def assert_printable(text):
    """Check that a text has `CONTROL`, escaped, and no control characters but line breaks of
    ours."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\nforged", text), repr(text)
    assert "\\x1b[31m\\nforged\\x9b" in text
