"""The states that a disk may hold: for small records, exactly those that each model allows."""

import pytest
from disk_states import (
    ORDERED,
    POSIX,
    PREFIX,
    History,
    by_content,
    distinct,
    more_than,
    sampled,
)
from file_calls import Call, Kind

ROOT = [Call(Kind.MKDIR, "/r", inode=1), Call(Kind.SYNC, "/r", inode=1), Call(Kind.MARK, "start")]


def create(name, inode, data=b""):
    made = [Call(Kind.CREATE, f"/r/{name}", inode=inode)]
    return [*made, Call(Kind.WRITE, f"/r/{name}", inode=inode, data=data)] if data else made


def flush(inode):
    return Call(Kind.SYNC, "", inode=inode)


def at_the_end(model, *calls):
    """Return the set of what the disk may hold after a last mark, each as a tuple of names with bytes."""
    history = History([*ROOT, *calls, Call(Kind.MARK, "end")])
    return {tuple(sorted(state.tree.items())) for state in history.states(model) if "end" in state.marks}


def test_after_sigkill_every_call_took_effect():
    assert at_the_end(PREFIX, *create("a", 2, b"xyzw")) == {(("a", b"xyzw"),)}
    history = History([*ROOT, *create("a", 2, b"xyzw")])
    assert [state.tree for state in history.states(PREFIX)] == [{}, {"a": b""}, {"a": b"xyzw"}]


ANY_BYTES = {(("a", b""),), (("a", b"\0\0\0\0"),), (("a", b"xy"),), (("a", b"xyzw"),)}


@pytest.mark.parametrize("model", [ORDERED, POSIX])
def test_bytes_without_a_flush(model):
    assert at_the_end(model, *create("a", 2, b"xyzw")) == {(), *ANY_BYTES}
    # The flush of its folder makes the name durable, that of the file its bytes.
    assert at_the_end(model, *create("a", 2, b"xyzw"), flush(1)) == ANY_BYTES
    assert at_the_end(model, *create("a", 2, b"xyzw"), flush(1), flush(2)) == {(("a", b"xyzw"),)}


def test_a_flush_of_a_file_makes_its_name_durable_only_where_names_are_ordered():
    assert at_the_end(ORDERED, *create("a", 2, b"x"), flush(2)) == {(("a", b"x"),)}
    assert at_the_end(POSIX, *create("a", 2, b"x"), flush(2)) == {(), (("a", b"x"),)}


def test_names_in_order_and_out_of_order():
    calls = [*create("a", 2), *create("b", 3), *create("c", 4)]
    names = [tuple(name for name, _ in found) for found in at_the_end(ORDERED, *calls)]
    assert sorted(names) == [(), ("a",), ("a", "b"), ("a", "b", "c")]
    names = [tuple(name for name, _ in found) for found in at_the_end(POSIX, *calls)]
    assert {("b",), ("c",), ("a", "c"), ("b", "c")} <= set(names)
    # A flush concerns what was before it.
    assert at_the_end(POSIX, *create("a", 2), flush(1), *create("b", 3)) == {
        (("a", b""),),
        (("a", b""), ("b", b"")),
    }


@pytest.mark.parametrize("model", [ORDERED, POSIX])
def test_a_rename_is_done_or_not(model):
    calls = [*create("a", 2, b"old"), flush(2), *create("b", 3, b"new"), flush(3), flush(1)]
    renamed = [*calls, Call(Kind.RENAME, "/r/b", "/r/a")]
    assert at_the_end(model, *renamed) == {(("a", b"new"),), (("a", b"old"), ("b", b"new"))}
    assert at_the_end(model, *renamed, flush(1)) == {(("a", b"new"),)}


def test_a_file_that_is_made_empty():
    calls = [*create("a", 2, b"old"), flush(2), flush(1), Call(Kind.TRUNCATE, "", inode=2)]
    assert at_the_end(ORDERED, *calls) == {(("a", b""),), (("a", b"old"),)}
    replaced = [*calls, Call(Kind.WRITE, "", inode=2, data=b"new!")]
    assert {dict(found)["a"] for found in at_the_end(ORDERED, *replaced)} == {b"", b"old", b"ne", bytes(4), b"new!"}
    assert at_the_end(ORDERED, *replaced, flush(2)) == {(("a", b"new!"),)}


def test_what_is_in_a_folder_that_is_lost_is_lost():
    calls = [Call(Kind.MKDIR, "/r/d", inode=2), *create("d/a", 3, b"x"), flush(3), flush(2)]
    assert at_the_end(POSIX, *calls) == {(), (("d", None), ("d/a", b"x"))}
    assert at_the_end(POSIX, *calls, flush(1)) == {(("d", None), ("d/a", b"x"))}


def test_equal_states_count_once_with_all_marks():
    calls = [*ROOT, *create("a", 2, b"x"), flush(2), flush(1), Call(Kind.MARK, "acknowledged 0")]
    history = History(calls)
    states = distinct(history.states(ORDERED))
    (whole,) = [state for state in states if state.tree == {"a": b"x"}]
    assert whole.marks == ("start", "acknowledged 0")
    assert sampled(states, 2, seed=1) == sampled(states, 2, seed=1)
    without = [call for i, call in enumerate(calls) if i != len(calls) - 3]  # the flush of the file
    added = more_than(History(without).states(ORDERED), by_content(history.states(ORDERED)))
    assert {state.tree["a"] for state in added} == {b"", b"\0"}
