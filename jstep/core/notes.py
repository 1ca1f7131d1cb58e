"""Notes on the user's exceptions."""

import contextlib


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, if its class allows it."""
    with contextlib.suppress(Exception):
        error.add_note(text)
