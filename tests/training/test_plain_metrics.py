"""Results of a step that are no dict, and constant metrics by their bits."""

import numpy as np

from jstep.training.metrics import Constants


def test_constants_are_equal_by_their_bits() -> None:
    """They are static metadata of a program: a NaN equals itself, and a guard's metric counts."""
    nan = np.float32(np.nan)
    one, same = (Constants({"a": nan, "b": np.float32(0)}, "skipped") for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    others = [Constants({"a": nan, "b": np.float32(-0.0)}, "skipped"), Constants({"a": nan, "b": np.float32(0)})]
    others += [Constants({"a": nan, "b": np.float64(0)}, "skipped"), Constants({"a": nan}, "skipped")]
    assert [one == other for other in [*others, "skipped"]] == [False] * 5
    repeated = one.repeated(3)
    assert {name: value.tolist() for name, value in repeated.values.items() if name == "b"} == {"b": [0.0] * 3}
    assert repeated.values["a"].shape == (3,)
    assert repeated.skipped == "skipped"
