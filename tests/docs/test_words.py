"""Names and terms that a reader would stumble over: signatures name types, and errors say what must be.

Prose is for people to judge; CONTRIBUTING.md has the rules of style.
"""

import inspect
import pathlib
import re

from source_files import MODULES, text_of

import jstep


def test_signatures_of_optimizers_and_schedules_name_their_types() -> None:
    """The files begin with `from __future__ import annotations`, so that `help()` does not expand the type aliases."""
    functions = [getattr(jstep, name) for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]
    files = {function: inspect.getsourcefile(inspect.unwrap(function)) or "" for function in functions}
    taken = [one for one, file in files.items() if {"optimizers", "schedules"} & set(pathlib.Path(file).parts)]
    assert jstep.adamw in taken
    assert not [one.__name__ for one in taken if "numpy.number" in str(inspect.signature(one))]


def test_errors_say_what_a_value_must_be() -> None:
    """One word for it, not `expected`."""
    wrong = re.compile(r""": expected [a-z\['{0-9]""")
    assert not [f"{path.name}: {found.group()}" for path in MODULES.values() for found in wrong.finditer(text_of(path))]
