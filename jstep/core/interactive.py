"""A session in which one types, Python's prompt or a notebook, and what it keeps of a run that was interrupted."""

import sys
from typing import Any

_kept: list[Any] = []
"""The last complete state of the last run that an exception ended, if there is one; no copy is made."""


def is_interactive() -> bool:
    """Whether this process is a session in which one types: Python's prompt, IPython, a notebook."""
    return hasattr(sys, "ps1") or _shell() is not None


def is_notebook() -> bool:
    """Whether it is a notebook: IPython with a kernel, which shows HTML, and not in a terminal."""
    return getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:
    """IPython's shell, or None; IPython is not imported for that."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


def kept() -> Any:
    """Return the state that is kept; None if there is none, or it was donated since."""
    from jstep.core import trees  # which needs JAX

    return next((state for state in _kept if not trees.is_donated(state)), None)


def keep(state: Any) -> bool:
    """Keep the state of a run that an exception ends; return False where nobody types."""
    if not is_interactive():
        return False
    _kept[:] = [state]
    return True


def forget() -> None:
    """Drop what is kept: a run ended well, or took its first step."""
    _kept.clear()
