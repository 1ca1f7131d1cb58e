"""The warnings of a run that are logged once."""

import contextvars

WARNED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("jstep_warned", default=None)
"""The texts of these warnings so far; None outside of a run, where each is logged again."""


def is_first(text: str) -> bool:
    """Return whether a warning is the first of its text in this run."""
    warned = WARNED.get()
    if warned is None:
        return True
    is_new = text not in warned
    warned.add(text)
    return is_new
