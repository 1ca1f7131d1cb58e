"""Which object gets which state of a checkpoint, and what is said of those that get none."""

import collections
import logging
from typing import Any

import pytest

import jstep
from jstep.hooks.states import get_states, set_states


class Kept(jstep.Hook):
    """A hook whose state is its name."""

    def __init__(self, name: str, *, ends: bool = False, key: Any = None) -> None:
        self.name, self.ends, self.got, self.key = name, ends, None, key

    def get_state(self) -> Any:
        return (self.name,)

    def set_state(self, value: Any) -> bool:
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
            ["hooks: the checkpoint has 1 state(s) of Other, and the run has 0 of them: they start fresh"],
        ),
        ([Other("a", key="mine"), Kept("b")], [Kept("1"), Kept("2", key="mine")], ["b", "a"], []),
    ],
)
def test_who_gets_which_state(saved: Any, here: Any, got: Any, said: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jstep")
    assert set_states(here, get_states(saved)) is False
    assert [one.got and one.got[0] for one in here] == got
    assert caplog.messages == said


def test_one_of_several_ends_the_run() -> None:
    saved = get_states([Kept("a", key="1"), Kept("b", key="2")])
    for ends in ((False, True), (True, False)):
        here = [Kept("", key=str(i + 1), ends=one) for i, one in enumerate(ends)]
        assert set_states(here, saved) is True
        assert [one.got for one in here] == [("a",), ("b",)]


@pytest.mark.parametrize(
    "saved",
    [
        {"Kept": [1]},
        [{"key": "Kept", "class": "Kept", "is_given": False}],
        [{"key": "Kept", "class": 3, "is_given": False, "state": 1}],
        [None],
    ],
)
def test_what_is_no_list_of_states(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    hook = Kept("1", ends=True)
    assert set_states([hook], saved, "callbacks") is False
    assert hook.got is None
    assert caplog.messages == ["callbacks: their states in the checkpoint cannot be read: all start fresh"]


def test_states_that_are_plain_or_cannot_be_decoded_or_kept() -> None:
    hook = Kept("1")
    record = {"key": "Kept", "class": f"{__name__}.Kept", "is_given": False, "state": {"t": 1}}
    set_states([hook], [record])
    assert hook.got == {"t": 1}
    (tagged,) = get_states([hook])
    with pytest.raises(ValueError) as caught:
        set_states([hook], [{**tagged, "state": {"$tuple": 3}}], "callbacks")
    text = str(caught.value)
    assert text.startswith("callbacks: the checkpoint's state of Kept cannot be decoded (")
    assert text.endswith("); it was not saved by jstep, or was changed")
    hook.get_state = lambda: [collections.deque()]  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"hooks: the state of Kept cannot be kept .*: get_state\(\)\[0\] is a value"):
        get_states([hook])
    hook.get_state = lambda: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError) as failed:
        get_states([hook], "callbacks")
    note = "jstep: callbacks: in Kept.get_state(), whose result is kept with each checkpoint"
    assert failed.value.__notes__ == [note]
