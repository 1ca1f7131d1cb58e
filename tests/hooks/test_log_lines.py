"""Log lines and the progress bar share a terminal."""

import logging
import re

import jax.numpy as jnp
import pytest

import jstep
from jstep.core.logs import log_to_stderr


def run(hooks, progress):
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    jstep.train(train_step, state, lambda n: jnp.ones(()), last_step=4, hooks=hooks, progress=progress)


def test_a_log_line_does_not_overlap_the_progress_bar(capsys):
    pytest.importorskip("tqdm")
    run([jstep.EvaluationHook(lambda state: {"one": 1.0}, every_n_steps=2)], progress=True)
    stderr = capsys.readouterr().err
    lines = re.findall(r"[^\r\n]*step \d  eval/one[^\n]*\n", stderr)
    assert lines == ["step 2  eval/one 1\n", "step 4  eval/one 1\n"]
    assert "4/4" in stderr


@pytest.mark.thorough
def test_other_handlers_of_the_root_logger_receive_what_its_level_allows(capsys):
    """A file that the root logger writes has the warnings of a run, whose lines are shown on standard error."""
    seen = []

    class Collects(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    root, handler, above = logging.getLogger(), Collects(), Collects(logging.ERROR)
    assert root.level == logging.WARNING
    for one in (handler, above):
        root.addHandler(one)
    try:
        with log_to_stderr():
            for level in (logging.INFO, logging.WARNING):
                logging.getLogger("jstep").log(level, "of level %d", level)
    finally:
        for one in (handler, above):
            root.removeHandler(one)
    assert seen == ["of level 30"]
    assert capsys.readouterr().err == "of level 20\nof level 30\n"
