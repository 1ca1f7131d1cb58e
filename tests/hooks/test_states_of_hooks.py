"""Which object gets which state of a checkpoint, and what is said of those that get none."""

import collections
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hook_fakes import state_at

import jstep
from jstep.hooks.hook import StopWith, as_hook_result, as_returned_state
from jstep.hooks.hook_states import get_states, set_states
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


def as_saved(*records):
    return {"format": 1, "jstep": "1.2.3", "states": list(records)}


@pytest.mark.parametrize(
    ("saved", "here", "got", "said"),
    [
        ([Kept("a"), Kept("b")], [Kept("1"), Kept("2")], ["a", "b"], []),
        (
            [Kept("a"), Kept("b")],
            [Kept("1")],
            [None],
            [
                "hooks: the checkpoint has 2 state(s) of Kept, and the run has 1 of them: "
                "they start fresh"
            ],
        ),
        (
            [Other("a"), Kept("b")],
            [Kept("1")],
            ["b"],
            [
                "hooks: the checkpoint has 1 state(s) of Other, and the run has 0 of them: "
                "their state is dropped"
            ],
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
        as_saved({"key": "Kept", "class": "Kept"}),
        as_saved({"key": "Kept", "class": 3, "state": 1}),
        as_saved(None),
        {**as_saved(), "format": "2"},
        {**as_saved(), "jstep": 3},
    ],
)
def test_what_is_no_record_of_states(saved, caplog):
    hook = Kept("1", ends=True)
    assert set_states([hook], saved, "callbacks") is False
    assert hook.got is None
    assert caplog.messages == [
        "callbacks: their states in the checkpoint cannot be read: all start fresh"
    ]


def test_states_that_are_plain_or_cannot_be_decoded_or_kept():
    hook = Kept("1")
    record = {"key": "Kept", "class": f"{__name__}.Kept", "state": {"t": 1}}
    set_states([hook], as_saved(record))
    assert hook.got == {"t": 1}
    (tagged,) = get_states([hook])["states"]
    with pytest.raises(ValueError) as caught:
        set_states([hook], as_saved({**tagged, "state": {"$tuple": 3}}), "callbacks")
    text = str(caught.value)
    assert text.startswith("callbacks: the checkpoint's state of Kept cannot be decoded (")
    assert text.endswith("); it was not saved by jstep, or was changed")
    hook.get_state = lambda: [collections.deque()]
    with pytest.raises(
        TypeError,
        match=r"hooks: the state of Kept cannot be kept .*: get_state\(\)\[0\] is a value",
    ):
        get_states([hook])
    hook.get_state = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError) as failed:
        get_states([hook], "callbacks")
    note = "jstep: callbacks: in Kept.get_state(), whose result is kept with each checkpoint"
    assert failed.value.__notes__ == [note]


Early = jstep.EarlyStopping
OF_HISTORY = {"key": "History", "class": "jstep.History", "state": {}, "format": 1}


def later(record, **changes):
    return {**as_saved({**record, **changes}), "jstep": "7.8.9"}


def of(hook):
    return get_states([hook])["states"][0]


NEWER = {
    "a record": {**later(OF_HISTORY), "format": 2},
    "a record of another form": {"format": 2, "jstep": "7.8.9", "states": {"x": 1}},
    "a key of the record": {**later(OF_HISTORY), "order": [0]},
    "a key of a state": later(OF_HISTORY, is_given=True),
    "a state of History": later(OF_HISTORY, format=2),
    "a field of History": later(OF_HISTORY, state={"was_first": 3}),
    "a field with a key": later(of(Early("loss", key="mine")), state={"was_bad": 3}),
    "a tag": later(OF_HISTORY, state={"sums": {"$table": []}}),
    "a part of an array": later(
        OF_HISTORY,
        state={
            "sums": {
                "$array": {
                    "dtype": "<i8",
                    "shape": [1],
                    "data": {"$bytes": "AQAAAAAAAAA="},
                    "order": 1,
                }
            }
        },
    ),
}
NAMED = {
    "a key of a state": "History",
    "a state of History": "History",
    "a field of History": "History",
    "a field with a key": "mine",
    "a tag": "History has the tag '$table'",
    "a part of an array": "History has the part 'order'",
}


@pytest.mark.parametrize("case", NEWER)
def test_what_a_later_version_saved_is_refused(case):
    hooks = [jstep.History(), Early("loss", key="mine")]
    with pytest.raises(jstep.UnsupportedFormatError) as caught:
        set_states(hooks, NEWER[case])
    text = str(caught.value)
    assert (
        "The checkpoint is intact, and was written by jstep 7.8.9: install that or a later one"
    ) in text
    assert NAMED.get(case, "hooks: their record in the checkpoint has") in text


def test_notes_are_ignored_and_a_missing_field_has_its_default():
    hook = Early("loss")
    # A state without `bad`.
    state = {"metric": "loss", "mode": "min", "best": 0.5, "stopped_at": None, "cooling": 0}
    saved = {**as_saved({**of(hook), "state": state, "notes": [1]}), "notes": {"a": 1}}
    set_states([hook], saved)
    assert (hook.best, hook.wait) == (0.5, 0)


def test_states_before_the_first_release_are_refused_as_what_they_are():
    with pytest.raises(
        jstep.UnsupportedFormatError,
        match=r"before the first release.*The checkpoint is intact",
    ):
        set_states([Kept("1")], [{"key": "Kept", "class": f"{__name__}.Kept", "state": 1}])


def test_a_hook_that_has_a_key_now_finds_its_state():
    hook = Kept("", key="Kept")
    set_states([hook], get_states([Kept("a")]))
    assert hook.got == ("a",)
    other = Counting("loss", key="Kept")
    other.mine = 0
    set_states([other], get_states([Kept("a")]))
    assert other.mine == 0


class Counting(Early):
    """A user's callback, whose state has a field more."""

    def get_state(self):
        return {**super().get_state(), "mine": 3}

    def set_state(self, value):
        self.mine = value["mine"]
        return super().set_state(value)


def test_a_users_subclass_has_a_state_of_its_own():
    hook = Counting("loss")
    set_states([hook], get_states([Counting("loss")]))
    assert hook.mine == 3


def test_what_set_state_raises_names_the_hook():
    hook = Counting("loss")
    with pytest.raises(KeyError) as caught:
        set_states([hook], as_saved({**of(hook), "state": {}}))
    assert caught.value.__notes__ == [
        "jstep: hooks: in Counting(loss).set_state(), with its state in the checkpoint"
    ]


# Which states a step and a hook may return, and what the errors advise.


def test_a_hook_may_return_its_state_or_another_of_the_same_step():
    state = state_at(5)
    assert as_returned_state(state, state, 5, "hook returned") is state
    assert as_hook_result(None, state, 5, "hook") == (False, state)
    assert as_hook_result(np.True_, state, 5, "hook") == (True, state)
    for step in (state.global_step, jnp.copy(state.global_step)):
        stop, other = as_hook_result(
            TrainState({"w": jnp.full(3, 7.0)}, state.slots, step), state, 5, "hook"
        )
        assert not stop
        assert int(other.global_step) == 5
        np.testing.assert_array_equal(other.params["w"], np.full(3, 7.0))


def test_callbacks_may_stop_and_replace_the_state_at_once():
    state = state_at(5)
    stop, found = as_hook_result(StopWith(state_at(5, 7.0)), state, 5, "hook")
    assert stop
    assert found.params["w"].tolist() == [7.0] * 3
    with pytest.raises(ValueError, match="hook returned a state at step 6: must be at step 5"):
        as_hook_result(StopWith(state_at(6)), state, 5, "hook")


def test_a_returned_state_has_no_weak_types():
    """The step would be compiled again for that of a Python number."""
    state = state_at(5)
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3,))
    assert weak.weak_type
    found = as_returned_state(state.replace(params={"w": weak}), state, 5, "hook returned")
    assert (found.params["w"].weak_type, found.params["w"].tolist()) == (False, [2.0] * 3)
    keyed = state.replace(model_state=jax.random.key(0))  # keys have no weak type
    assert (
        as_returned_state(keyed.replace(model_state=jax.random.key(1)), keyed, 5, "hook returned")
        != keyed
    )
