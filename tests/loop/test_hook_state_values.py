"""States of hooks: what they may hold, when they are read, and to which hook they belong."""

import threading

import numpy as np
import pytest
from loop_runs import Calls, train

import jstep


class Keeps(jstep.Hook):
    """A hook whose state is a value, and which counts how often it is read."""

    def __init__(self, value=None, key=None):
        self.value, self.key, self.reads = value, key, 0

    def get_state(self):
        self.reads += 1
        return self.value

    def set_state(self, value):
        self.value = value


class KeepsCallback(Keeps):
    def __call__(self, step, state, results):
        return None


def evaluation(callback, **kwargs):
    return jstep.EvaluationHook(
        lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[callback], **kwargs
    )


def hooks_of(kept, where):
    return [kept] if where == "hook" else [evaluation(kept)]


VALUES = {
    "arrays": {
        "best": np.arange(6.0, dtype=np.float32).reshape(2, 3),
        "flags": np.array([True, False]),
    },
    "number": np.float32(1.5),
    "looks like a tag": {"$array": [1], "n": {"$tuple": 2}},
    "plain": {"best": 0.1, "bad": 3, "names": ["a", None, True]},
}


@pytest.mark.thorough(except_for=["looks like a tag-hook"])
@pytest.mark.parametrize("where", ["hook", "callback"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_state_is_the_same_after_a_restart(value, where, tmp_path):
    kind = KeepsCallback if where == "callback" else Keeps
    train(3, hooks=hooks_of(kind(value), where), checkpoint_dir=tmp_path)
    found = kind()
    train(5, hooks=hooks_of(found, where), checkpoint_dir=tmp_path)
    assert repr(found.value) == repr(value)


@pytest.mark.thorough(except_for=["lock-callback"])
@pytest.mark.parametrize("where", ["hook", "callback"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"a": [0, threading.Lock()]},
            r"get_state\(\)\['a'\]\[1\] is a value of type _thread.lock",
        ),
        (np.array([None]), r"get_state\(\) is a NumPy array of dtype object"),
    ],
    ids=["lock", "objects"],
)
def test_a_state_that_cannot_be_kept_is_an_error_before_the_first_step(
    value, words, where, tmp_path
):
    calls = Calls()
    kept = KeepsCallback(value)
    with pytest.raises(TypeError, match=rf"the state of KeepsCallback cannot be kept .*: {words}"):
        train(3000, hooks=[*hooks_of(kept, where), calls], checkpoint_dir=tmp_path)
    assert calls.steps() == []
    assert kept.reads == 1
    assert jstep.latest_checkpoint(tmp_path) is None
    # Nothing is kept without checkpoints.
    assert jstep.global_step(train(4, hooks=hooks_of(kept, where))) == 4


def test_the_state_is_read_once_and_after_begin(tmp_path):
    class Opens(Keeps):
        def begin(self, state):
            self.value = {"rows": np.zeros(3)}

        def get_state(self):
            super().get_state()
            return {"rows": self.value["rows"].copy()}

        def before_step(self, step, state):
            assert self.reads >= 1
            self.value["rows"][step] += self.reads == 1

    hook = Opens()
    train(3, hooks=[hook], checkpoint_dir=tmp_path)
    assert hook.value["rows"].tolist() == [1, 1, 1]
