"""One matcher of paths, for checkpoints, weights and slots."""

from jstep.core.path_matching import match_paths


def test_what_is_found_missing_and_unused():
    sources = {"a/w": 1, "a": 2, "b": None, "a/w/v": 4}
    matched = match_paths(["a", "a/w/x", None, "b"], sources)
    assert matched.found == [2, None, None, None]
    # A source that is None is one; a leaf without a name wants none.
    assert matched.missing == ["a/w/x"]
    assert matched.unused == ["a/w", "a/w/v"]


def test_nothing_and_repeated_names():
    assert match_paths([], {"a": 1}) == ([], [], ["a"])
    assert match_paths(["a", "a"], {"a": 1}) == ([1, 1], [], [])
    assert match_paths(["a", "a"], {}) == ([None, None], ["a", "a"], [])
