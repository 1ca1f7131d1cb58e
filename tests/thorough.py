"""The marker `thorough`: tests that the default run leaves out, as dev/README.md explains.

    @pytest.mark.thorough                                    the whole test
    @pytest.mark.thorough(except_for=["adam", "muon-fsdp"])  all cases but these ids
    @pytest.mark.thorough(except_for={"name": ["adam"]})     all but those with these values
    @pytest.mark.thorough(except_for="each value once")      all but some in which each value occurs

`@examples(60)` of a property runs 60 examples in thorough runs and fewer in the default one. A test
that is named on the command line (`pytest tests/test_a.py::test_b`) runs, thorough or not.
"""

import collections
from collections.abc import Mapping

import hypothesis
import pytest

EACH_VALUE = "each value once"
QUICK_EXAMPLES = 5
_is_default_run = False


def configure(config):
    """Note whether this is the default run; if tests are named on the command line, run them
    all."""
    global _is_default_run
    _is_default_run = config.option.markexpr == "not thorough"
    if _is_default_run and any("::" in argument for argument in config.args):
        config.option.markexpr, _is_default_run = "", False


def examples(count):
    """Return the settings of a property with this number of examples in thorough runs."""
    return hypothesis.settings(
        max_examples=min(count, QUICK_EXAMPLES) if _is_default_run else count
    )


def mark_cases(items):
    """Remove the marker from the cases that it excepts, and mark the other cases of these tests as
    repetitions.

    A repetition has a quick case of the same test beside it. `dev/nightly.sh` runs repetitions with
    the newest versions and not with the lowest ones.

    Raises:
        ValueError: In the default run, an exception matches no case: a test, an id or a value was
            renamed.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if any(mark.name == "thorough" and mark.kwargs for mark in item.own_markers):
            cases[item.nodeid.split("[")[0]].append(item)
    for test, group in cases.items():
        (mark,) = (mark for mark in group[0].own_markers if mark.name == "thorough")
        chosen = _chosen(group, **mark.kwargs)
        if _is_default_run and (not chosen or chosen == group):
            # Not a UsageError, whose text a worker of xdist would not show.
            raise ValueError(
                f"{test}: {mark.kwargs} excepts {'all' if chosen else 'none'} of its cases"
            )
        for item in group:
            if item in chosen:
                item.own_markers = [mark for mark in item.own_markers if mark.name != "thorough"]
            elif chosen:
                item.own_markers.append(pytest.mark.repetition.mark)


def _chosen(items, except_for):
    if except_for == EACH_VALUE:
        return _each_value_once(items)
    if isinstance(except_for, Mapping):
        known = {name: list(values) for name, values in except_for.items()}
        return [
            item
            for item in items
            if all(item.callspec.params[name] in values for name, values in known.items())
        ]
    return [item for item in items if item.callspec.id in except_for]


def _each_value_once(items):
    """Return a few of the cases in which each value of each parameter occurs, in their order."""
    values = {
        item.nodeid: {(name, id(value)) for name, value in item.callspec.params.items()}
        for item in items
    }
    missing, chosen = set().union(*values.values()), []
    while missing:
        # Of those with as many, this is the first.
        best = max(items, key=lambda item: len(missing & values[item.nodeid]))
        chosen.append(best)
        missing -= values[best.nodeid]
    return [item for item in items if item in chosen]
