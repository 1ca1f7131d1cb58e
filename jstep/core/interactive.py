"""Interactive sessions, which keep the state of an interrupted run."""

import sys
from typing import Any

_kept: list[Any] = []
"""The last complete state of the latest run that ended with an exception; not a copy."""


def is_interactive() -> bool:
    return hasattr(sys, "ps1") or _shell() is not None


def is_notebook() -> bool:
    return getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:
    # IPython is not imported for this: a program that runs in it has imported it.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()


def kept_state() -> Any:
    from jstep.core import trees  # which needs JAX

    return next((state for state in _kept if not trees.is_donated(state)), None)


def keep(state: Any) -> bool:
    if not is_interactive():
        return False
    _kept[:] = [state]
    return True


def forget() -> None:
    _kept.clear()
