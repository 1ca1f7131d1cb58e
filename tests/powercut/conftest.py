"""Recordings that the tests of power cuts share."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import file_calls
import pytest
from disk_states import complete

Record = Callable[[str], list[file_calls.Call]]


@pytest.fixture(scope="session")
def recorder():
    """Skip a test where file calls cannot be recorded."""
    reason = file_calls.library()[1]
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def record(recorder, tmp_path_factory):
    """A function that records a program of `cut_runs.RUNS`, and checks that nothing was missed."""

    @functools.cache
    def recorded(name):
        above = Path(os.path.realpath(tmp_path_factory.mktemp("recorded")))
        (above / "disk").mkdir()
        file_calls.python(
            "import sys, cut_runs; cut_runs.main(*sys.argv[1:])",
            name,
            above / "disk",
            above / "log",
        )
        return complete(above / "log", above / "disk")

    return recorded
