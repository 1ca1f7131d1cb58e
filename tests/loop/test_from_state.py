"""Batches that are made with the state (`from_state`), and those that a restart reads again
(`replayed`)."""

import copy
import functools
import itertools
import logging
import re
import threading

import numpy as np
import pytest
from points import STEP, make_state

import jstep


class Environment:
    """An environment on the host: a random walk towards the parameters, with a generator of its
    own."""

    def __init__(self):
        self.rng, self.at = np.random.default_rng(3), np.zeros(2)
        self.seen = []

    def __call__(self, step, state):
        self.seen.append((step, jstep.global_step(state), threading.current_thread().name))
        self.at = (
            self.at + 0.1 * (np.asarray(state.params["w"]) - self.at) + self.rng.normal(size=2)
        )
        return self.at.astype(np.float32)

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "at": self.at.tolist()}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.at = np.array(state["at"])


def by_hand(steps):
    state, environment = make_state(), Environment()
    for step in range(steps):
        state, _ = STEP(state, environment(step, state))
    return state


def trained(last, batches, **kwargs):
    return jstep.train(STEP, make_state(), batches, last, progress=False, log_steps=None, **kwargs)


def test_a_batch_is_made_with_the_state_of_its_step_and_never_ahead():
    environment = Environment()
    assert trained(40, jstep.from_state(environment)) == by_hand(40)
    assert environment.seen == [(n, n, "MainThread") for n in range(40)]


def test_a_position_that_cannot_be_saved_is_left_out_by_a_lambda(tmp_path):
    environment = Environment()
    environment.state_dict = lambda: {"simulator": object()}
    with pytest.raises(
        TypeError,
        match=r"state\['simulator'\].*; convert it, see docs: help/errors#positions",
    ):
        trained(3, jstep.from_state(environment), checkpoint_dir=tmp_path)
    trained(
        3, jstep.from_state(lambda step, state: environment(step, state)), checkpoint_dir=tmp_path
    )


def test_calls_of_several_steps_are_refused():
    with pytest.raises(
        ValueError,
        match=r"steps_per_call=4, batches=<jstep.from_state\(.*Environment.*\)>: .*=1",
    ):
        trained(9, jstep.from_state(Environment()), steps_per_call=4)
    assert trained(9, jstep.from_state(Environment()), steps_per_call="auto") == by_hand(9)


# Batches that a restart reads again.


def stream():
    rng = np.random.default_rng(0)
    for _ in range(30):
        yield rng.normal(size=2).astype(np.float32)


def test_a_restart_drops_the_batches_that_were_used(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    whole = trained(20, jstep.replayed(stream))
    for last, used in ((8, 0), (13, 8), (20, 13)):
        caplog.clear()
        state = trained(last, jstep.replayed(stream), checkpoint_dir=tmp_path)
        lines = [m for m in caplog.messages if m.startswith("replayed: ")]
        assert [line.split(" in ")[0] for line in lines] == [
            f"replayed: {used} batches were read again"
        ][: used > 0]
    assert state == whole


def test_too_few_batches_after_a_restart_and_wrong_values(tmp_path):
    trained(8, jstep.replayed(stream), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="returned 5 batches, and the run has used 8"):
        trained(20, jstep.replayed(lambda: itertools.islice(stream(), 5)), checkpoint_dir=tmp_path)
    with pytest.raises(TypeError, match="must return an iterable of batches"):
        trained(3, jstep.replayed(lambda: 3))


def test_each_run_reads_them_from_the_beginning(tmp_path):
    batches = jstep.replayed(stream)
    whole = trained(9, batches)
    assert trained(9, batches) == whole
    for last in (4, 9):
        assert trained(last, batches, checkpoint_dir=tmp_path) == trained(last, batches)
    for step in (6, 2):  # 2 lies before the first checkpoint
        assert jstep.replay(STEP, make_state(), batches, tmp_path, step).state == trained(
            step, batches
        )
    assert jstep.verify_resume(make_state, STEP, batches, at=3, steps=6)
    assert repr(batches) == "<jstep.replayed(stream)>"


class Walk:
    """An environment that keeps something and has no position."""

    at = 0.0

    def __call__(self, step, state):
        self.at += 1.0
        return np.full(2, self.at, np.float32)


def nothing(step, state):
    return np.zeros(2, np.float32)


def test_what_may_keep_something_without_a_position_is_named(tmp_path, caplog):
    """It costs a run its data: a line says so at its start, and when it resumes."""
    for make, is_named in ((Walk(), True), (nothing, False), (functools.partial(nothing), False)):
        for last, words in (
            (2, "a restart of this run would continue from where"),
            (4, "resumes at step 2.*set_state"),
        ):
            caplog.clear()
            trained(last, jstep.from_state(make), checkpoint_dir=tmp_path / str(id(make)))
            lines = [line for line in caplog.messages if "no position" in line]
            assert len(lines) == is_named
            assert all(
                re.search("Walk has no position|for the .*Walk", line) and re.search(words, line)
                for line in lines
            )
    caplog.clear()
    trained(2, jstep.from_state(Walk()))  # nothing is kept without checkpoints
    assert not caplog.messages


def test_batches_that_could_not_be_made_are_made_again():
    calls = iter([OSError("not yet"), None])

    def make():
        if (error := next(calls)) is not None:
            raise error
        return [1, 2]

    items = iter(jstep.replayed(make))
    with pytest.raises(OSError, match="not yet"):
        next(items)
    assert list(items) == [1, 2]
    assert list(copy.deepcopy(iter(jstep.replayed(lambda: [3])))) == [3]
