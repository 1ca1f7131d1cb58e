"""Notes on exceptions of the user's."""

import contextlib


def note(error: BaseException, text: str) -> None:
    """Adds a note; an exception whose class does not let it stays as it is."""
    with contextlib.suppress(Exception):
        error.add_note(text)
