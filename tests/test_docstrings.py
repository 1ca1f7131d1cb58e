"""The examples in the docstrings of public names run and print the documented output.

pytest's doctest collection skips them, because the `__module__` of exported names is `jstep`, not that of their file.
`jstep/__init__.py` is not collected: it would have the names that were used before, once more.
"""

import doctest
import inspect

import pytest

import jstep

NAMES = [name for name in jstep.__all__ if not inspect.ismodule(getattr(jstep, name))]
EXPENSIVE = "add_noise coord_check evaluator mup on_hyperball stochastic_rounding".split()  # noqa: SIM905
"""Names whose examples are thorough: they compile several programs, as quick tests of the same names do."""


def examples_of(name: str) -> list[doctest.DocTest]:
    value = getattr(jstep, name)
    found = doctest.DocTestFinder(exclude_empty=True).find(value, name, module=False, globs={})
    return [one for one in found if one.examples]


@pytest.mark.thorough(except_for=[name for name in NAMES if name not in EXPENSIVE])
@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name)])
def test_examples_run(name: str) -> None:
    for one in examples_of(name):
        failures: list[str] = []
        doctest.DocTestRunner(verbose=False).run(one, out=failures.append)
        assert not failures, "".join(failures)
