"""The examples in the docstrings of public names run and print the documented output.

pytest's doctest collection skips them, because the `__module__` of exported names is `jstep`, not that of their file.
`jstep/__init__.py` is not collected: it would have the names that were used before, once more.
"""

import doctest
import inspect
import operator

import pytest

import jstep

METRICS = ["metrics.accuracy", "metrics.auc", "metrics.confusion_matrix", "metrics.f1", "metrics.perplexity"]
NAMES = [name for name in jstep.__all__ if not inspect.ismodule(getattr(jstep, name))] + METRICS
EXPENSIVE = [*"add_noise coord_check evaluator mup on_hyperball stochastic_rounding".split(), *METRICS]  # noqa: SIM905
"""Names whose examples are thorough: they compile several programs, as quick tests of the same names do."""


def examples_of(name: str) -> list[doctest.DocTest]:
    value = operator.attrgetter(name)(jstep)
    found = doctest.DocTestFinder(exclude_empty=True).find(value, name, module=False, globs={})
    return [one for one in found if one.examples]


@pytest.mark.thorough(except_for=[name for name in NAMES if name not in EXPENSIVE])
@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name) or name in METRICS])
def test_examples_run(name: str) -> None:
    assert examples_of(name)
    for one in examples_of(name):
        failures: list[str] = []
        doctest.DocTestRunner(verbose=False).run(one, out=failures.append)
        assert not failures, "".join(failures)
