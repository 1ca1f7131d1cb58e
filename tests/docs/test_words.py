"""Names and terms that a reader would stumble over: they are defined where they first occur, and signatures name types.

Prose is for people to judge; CONTRIBUTING.md has the rules of style.
"""

import inspect
import pathlib
import re

from source_files import MODULES, ROOT, text_of

import jstep


def test_slots_are_defined_where_they_first_appear() -> None:
    for page in ("README.md", "docs/index.md", "docs/tutorial/state-and-step.md"):
        text = re.sub(r"```.*?```", "", text_of(ROOT / page), flags=re.DOTALL)
        sentences = re.split(r"(?<=[.:])\s", text)
        first = next(one for one in sentences if "slots" in re.sub(r"`[^`\n]*slots[^`\n]*`", "", one))
        assert "optimizer state" in " ".join(first.split()), page


def test_train_state_defines_slots() -> None:
    first = inspect.getdoc(jstep.TrainState).split("\n\n")[:2]
    assert "optimizer state" in " ".join(first)
    assert "slots" in " ".join(first)


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
