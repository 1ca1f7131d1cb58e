"""Which object gets which state of a checkpoint, and what is said of those that get none."""

import collections
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hook_fakes import state_at

import jstep
from jstep.checkpoint.hook_states import get_states, set_states
from jstep.hooks.hook import StopWith, check_hook_result, check_returned_state
from jstep.state.train_state import TrainState


class Kept(jstep.Hook):
    def __init__(self, name, *, ends=False, key=None):
        self.name, self.ends, self.got, self.key = name, ends, None, key

    def get_state(self):
        return (self.name,)

    def set_state(self, value):
        self.got = value
        return self.ends


class Other(Kept):
    pass


@pytest.mark.parametrize(
    ("saved", "here", "got", "said"),
    [
        ([Kept("a"), Kept("b")], [Kept("1"), Kept("2")], ["a", "b"], []),
        (
            [Kept("a"), Kept("b")],
            [Kept("1")],
            [None],
            ["hooks: the checkpoint has 2 state(s) of Kept, and the run has 1 of them: they start fresh"],
        ),
        (
            [Other("a"), Kept("b")],
            [Kept("1")],
            ["b"],
            ["hooks: the checkpoint has 1 state(s) of Other, and the run has 0 of them: their state is dropped"],
        ),
        ([Other("a", key="mine"), Kept("b")], [Kept("1"), Kept("2", key="mine")], ["b", "a"], []),
    ],
)
def test_who_gets_which_state(saved, here, got, said, caplog):
    caplog.set_level(logging.INFO, "jstep")
    assert set_states(here, get_states(saved)) is False
    assert [one.got and one.got[0] for one in here] == got
    assert caplog.messages == said


def test_one_of_several_ends_the_run():
    saved = get_states([Kept("a", key="1"), Kept("b", key="2")])
    for ends in ((False, True), (True, False)):
        here = [Kept("", key=str(i + 1), ends=one) for i, one in enumerate(ends)]
        assert set_states(here, saved) is True
        assert [one.got for one in here] == [("a",), ("b",)]


@pytest.mark.parametrize(
    "saved",
    [
        {"Kept": [1]},
        [{"key": "Kept", "class": "Kept"}],
        [{"key": "Kept", "class": 3, "state": 1}],
        [None],
    ],
)
def test_what_is_no_list_of_states(saved, caplog):
    hook = Kept("1", ends=True)
    assert set_states([hook], saved, "callbacks") is False
    assert hook.got is None
    assert caplog.messages == ["callbacks: their states in the checkpoint cannot be read: all start fresh"]


def test_states_that_are_plain_or_cannot_be_decoded_or_kept():
    hook = Kept("1")
    record = {"key": "Kept", "class": f"{__name__}.Kept", "state": {"t": 1}}
    set_states([hook], [record])
    assert hook.got == {"t": 1}
    (tagged,) = get_states([hook])
    with pytest.raises(ValueError) as caught:
        set_states([hook], [{**tagged, "state": {"$tuple": 3}}], "callbacks")
    text = str(caught.value)
    assert text.startswith("callbacks: the checkpoint's state of Kept cannot be decoded (")
    assert text.endswith("); it was not saved by jstep, or was changed")
    hook.get_state = lambda: [collections.deque()]
    with pytest.raises(TypeError, match=r"hooks: the state of Kept cannot be kept .*: get_state\(\)\[0\] is a value"):
        get_states([hook])
    hook.get_state = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError) as failed:
        get_states([hook], "callbacks")
    note = "jstep: callbacks: in Kept.get_state(), whose result is kept with each checkpoint"
    assert failed.value.__notes__ == [note]


# Which states a step and a hook may return, and what the errors advise.


def test_a_hook_may_return_its_state_or_another_of_the_same_step():
    state = state_at(5)
    assert check_returned_state(state, state, 5, "hook returned") is state
    assert check_hook_result(None, state, 5, "hook") == (False, state)
    assert check_hook_result(np.True_, state, 5, "hook") == (True, state)
    for step in (state.global_step, jnp.copy(state.global_step)):
        stop, other = check_hook_result(TrainState({"w": jnp.full(3, 7.0)}, state.slots, step), state, 5, "hook")
        assert not stop
        assert int(other.global_step) == 5
        np.testing.assert_array_equal(other.params["w"], np.full(3, 7.0))


def test_callbacks_may_stop_and_replace_the_state_at_once():
    state = state_at(5)
    stop, found = check_hook_result(StopWith(state_at(5, 7.0)), state, 5, "hook")
    assert stop
    assert found.params["w"].tolist() == [7.0] * 3
    with pytest.raises(ValueError, match="hook returned a state at step 6: must be at step 5"):
        check_hook_result(StopWith(state_at(6)), state, 5, "hook")


def test_a_returned_state_has_no_weak_types():
    """The step would be compiled again for that of a Python number."""
    state = state_at(5)
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3,))
    assert weak.weak_type
    found = check_returned_state(state.replace(params={"w": weak}), state, 5, "hook returned")
    assert (found.params["w"].weak_type, found.params["w"].tolist()) == (False, [2.0] * 3)
    keyed = state.replace(model_state=jax.random.key(0))  # keys have no weak type
    assert check_returned_state(keyed.replace(model_state=jax.random.key(1)), keyed, 5, "hook returned") != keyed
