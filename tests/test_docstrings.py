"""Every example in the docstring of a public name runs and prints what it says.

pytest's own collector passes them over: what `jstep` exports says `jstep` as its module, not that of its file.
"""

import doctest
import inspect

import pytest

import jstep

NAMES = [name for name in jstep.__all__ if not inspect.ismodule(getattr(jstep, name))]


def examples_of(name: str) -> list[doctest.DocTest]:
    value = getattr(jstep, name)
    found = doctest.DocTestFinder(exclude_empty=True).find(value, name, module=False, globs={})
    return [one for one in found if one.examples]


@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name)])
def test_examples_run(name: str) -> None:
    for one in examples_of(name):
        told: list[str] = []
        doctest.DocTestRunner(verbose=False).run(one, out=told.append)
        assert not told, "".join(told)
