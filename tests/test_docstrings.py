"""The examples in the docstrings of public names run and print the documented output.

pytest's doctest collection skips them: the `__module__` of functions is `jstep`, and `conftest.py`
leaves out classes. `jstep/__init__.py` is not collected: it would have the names that were used
before, once more.
"""

import doctest
import importlib
import inspect
import operator
import re
import types

import pytest
from source_files import MODULES, PACKAGE, text_of

import jstep

METRICS = [
    "metrics.accuracy",
    "metrics.auc",
    "metrics.confusion_matrix",
    "metrics.f1",
    "metrics.perplexity",
]
NAMES = [name for name in jstep.__all__ if not inspect.ismodule(getattr(jstep, name))] + METRICS
QUICK = """
adam Batches chain Context CancelledError every get_slot global_step Goodput join linear partition
polynomial_decay ReportingHook sgd shard_batch Slot train TrainState
""".split()  # noqa: SIM905
"""Names whose examples quick tests run; the others compile more, as quick tests of the same names
do."""


def examples_of(name: str) -> list[doctest.DocTest]:
    value = operator.attrgetter(name)(jstep)
    found = doctest.DocTestFinder(exclude_empty=True).find(value, name, module=False, globs={})
    return [one for one in found if one.examples]


@pytest.mark.thorough(except_for=QUICK)
@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name) or name in METRICS])
def test_examples_run(name: str) -> None:
    assert examples_of(name)
    for one in examples_of(name):
        failures: list[str] = []
        doctest.DocTestRunner(verbose=False).run(one, out=failures.append)
        assert not failures, "".join(failures)


def owners(module: types.ModuleType) -> list[object]:
    """A module, and its classes: an instance may have the module's name, as in `saver.extra()`."""
    return [module, *(one for _, one in inspect.getmembers(module, inspect.isclass))]


def unresolved(text: str) -> list[str]:
    """Names `module.name` of the package, in the backquotes of docstrings and comments, that do not
    exist."""
    modules: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            modules.setdefault(path.stem, []).append(f"jstep.{name}")
    found = {match for match in re.findall(r"`(\w+)\.(\w+)(?=[`(.])", text) if match[0] in modules}
    return sorted(
        f"{module}.{name}"
        for module, name in found
        if name not in ("py", "jsonl", "css")  # a file
        and not any(
            hasattr(owner, name)
            for one in modules[module]
            for owner in owners(importlib.import_module(one))
        )
    )


def test_names_of_other_modules_exist() -> None:
    found = {module: unresolved(text_of(MODULES[module])) for module in MODULES}
    assert {module: names for module, names in found.items() if names} == {}
    assert unresolved("`selection.names_of`, `trees.ids(x)`, `state.params`, `start.py`") == [
        "selection.names_of"
    ]


def test_files_that_the_package_names_exist() -> None:
    named = {
        name for path in MODULES.values() for name in re.findall(r"`([\w/]+\.pyi?)`", text_of(path))
    }
    there = [
        str(path)
        for folder in (PACKAGE, PACKAGE.parent / "tests")
        for path in folder.rglob("*.py*")
    ]
    assert "tests/core/test_jaxprs.py" in named
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
