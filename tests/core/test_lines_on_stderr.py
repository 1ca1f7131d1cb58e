"""Log lines of runs on standard error: of several runs at once, in each order, and beside users'
own handlers."""

import contextlib
import itertools
import logging

import pytest

from jstep.core.logs import log_to_stderr, logger
from jstep.watching.notebook import ShownLines


@pytest.mark.parametrize("ending", list(itertools.permutations(range(3))))
def test_each_run_shows_its_lines_until_its_end(ending, capsys):
    """Runs in threads end in any order. Each line is shown once, by one handler for all."""
    runs = [contextlib.ExitStack() for _ in range(3)]
    for run in runs:
        run.enter_context(log_to_stderr())
    for number in ending:
        logger.info("before run %d ends", number)
        runs[number].close()
    logger.info("after all runs")
    assert capsys.readouterr().err.splitlines() == [
        f"before run {number} ends" for number in ending
    ]
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


def test_a_run_that_begins_beside_one_that_ends_shows_its_lines(capsys):
    first, second, third = (contextlib.ExitStack() for _ in range(3))
    first.enter_context(log_to_stderr())
    second.enter_context(log_to_stderr())
    first.close()
    third.enter_context(log_to_stderr())
    second.close()
    logger.info("of the third run")
    third.close()
    logger.info("after all runs")
    assert capsys.readouterr().err == "of the third run\n"


def test_the_lowest_level_of_the_open_runs_is_shown(capsys):
    warnings, everything = contextlib.ExitStack(), contextlib.ExitStack()
    warnings.enter_context(log_to_stderr(logging.WARNING))
    logger.info("hidden at first")
    everything.enter_context(log_to_stderr())
    logger.info("shown")
    everything.close()
    logger.info("hidden again")
    logger.warning("a warning")
    warnings.close()
    assert capsys.readouterr().err == "shown\na warning\n"


def test_a_handler_of_the_user_is_the_only_one(capsys, monkeypatch):
    users = logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [users])
    with log_to_stderr(), log_to_stderr():
        assert logger.handlers == [users]
        logger.warning("a warning")
    assert capsys.readouterr().err == "a warning\n"


def test_a_handler_that_the_user_adds_during_a_run_stays(monkeypatch):
    monkeypatch.setattr(logger, "handlers", [])
    users = logging.StreamHandler()
    with log_to_stderr():
        logger.addHandler(users)
        with log_to_stderr():
            assert len(logger.handlers) == 2
    assert logger.handlers == [users]


def test_a_run_beside_one_in_a_notebook_shows_its_lines(monkeypatch, capsys):
    """In a notebook, a run adds a second handler, for the lines below its bar."""
    monkeypatch.setattr(logger, "handlers", [])
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(log_to_stderr())
    below_bar = ShownLines()
    logger.addHandler(below_bar)
    second.enter_context(log_to_stderr())
    logger.removeHandler(below_bar)
    first.close()
    logger.info("of the second run")
    second.close()
    logger.info("after both runs")
    assert capsys.readouterr().err == "of the second run\n"
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
