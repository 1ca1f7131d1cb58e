"""Argument checks: each error names the argument, its value, what it must be and what it is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.core import checks
from jstep.core.device_values import as_scalar
from jstep.slots.matching import describe_difference


def test_a_failing_repr_is_tolerated() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(TypeError, match="flag=<Broken>"):
        checks.as_bool(Broken(), "flag")
    assert len(checks.format_value("x" * 1000)) == 100


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array(2), np.uint8(2)])
def test_scalars_of_the_host_become_python_numbers(value: object) -> None:
    assert type(as_scalar(value, "x")) is float
    assert as_scalar(value, "x", low=0, high=2) == 2.0


def test_scalars_that_are_arrays_stay_arrays() -> None:
    array = jnp.float32(2)
    assert as_scalar(array, "x", low=0) is array
    assert as_scalar(jnp.int32(2), "x", integer=True).dtype == jnp.int32
    assert type(as_scalar(np.int32(2), "x", integer=True)) is int
    # A traced value has no range.
    assert jax.jit(lambda x: as_scalar(x, "x", low=0))(-1.0) == -1.0


def test_scalars_on_a_mesh_become_python_numbers() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    on_mesh = jax.device_put(
        jnp.float32(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    assert type(as_scalar(on_mesh, "x")) is float


def test_numbers_as_text() -> None:
    assert [checks.format_count(n) for n in (0, 999, 1000, 1234567)] == [
        "0",
        "999",
        "1 000",
        "1 234 567",
    ]


@pytest.mark.parametrize("make", [float, np.float32, np.array, jnp.float32])
def test_scalars_are_in_their_range(make: Callable[[float], object]) -> None:
    with pytest.raises(ValueError, match=r"^x=-1(\.0)?: must be > 0 and finite; why$"):
        as_scalar(make(-1.0), "x", low=0, above=True, meaning="why")
    with pytest.raises(ValueError, match=r"^x=inf: must be ≥ 0 and finite$"):
        as_scalar(make(np.inf), "x", low=0)
    with pytest.raises(ValueError, match=r"^x=nan: must be ≥ 0 and < 1$"):
        as_scalar(make(np.nan), "x", low=0, high=1, below=True)
    with pytest.raises(ValueError, match=r"^x: must be a scalar, got shape \(2,\)"):
        as_scalar(jnp.ones(2), "x")
    assert as_scalar(make(np.inf), "x", low=0, finite=False) == np.inf
    with pytest.raises(ValueError, match="must be a number that fits in a float"):
        as_scalar(10**400, "x")


def test_the_difference_of_two_trees_has_one_text() -> None:
    old = {"w": np.ones((2, 3), np.float32), "wide": {"w": np.ones(2, np.int32)}, "b": 1.0}
    assert (
        describe_difference({**old, "b": 2.0}, old)
        == describe_difference(dict(reversed(old.items())), old)
        == ""
    )
    new = {"w": old["w"], "wide": {"v": 1, "u": 2}, "b": 1.0}
    assert describe_difference(new, old) == "without 'wide/w'; with 'wide/u', 'wide/v'"
    assert (
        describe_difference({**old, "w": np.ones((3, 2), np.int8)}, old)
        == "whose 'w' is int8[3,2] instead of float32[2,3]"
    )
    assert describe_difference({**old, "b": np.float32(1)}, old) == (
        "whose 'b' is float32[] instead of float[]"
    )


def test_a_list_in_a_message_has_twenty_entries_at_most() -> None:
    names = [f"w{i}" for i in range(21)]
    assert checks.format_items("missing", []) == ""
    assert checks.format_items("missing", names[:20]) == f"; missing (20): {', '.join(names[:20])}"
    assert checks.format_items("missing", names) == (
        f"; missing (21): {', '.join(names[:20])} and 1 more"
    )
