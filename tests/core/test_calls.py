"""Optimizers and schedules show the call that made them, as one would type it."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.core.recorded_calls import (
    RecordedCall,
    RememberedFunction,
    as_typed,
    makes_optimizer,
)


def function(a: int, b: int = 2, *rest: int, c: int = 3, **more: int) -> None:
    """A function of every kind of parameter."""


@pytest.mark.parametrize(
    ("positional", "args", "kwargs", "expected"),
    [
        (0, (1,), {}, "function(a=1)"),
        (1, (1,), {"b": 5}, "function(1, b=5)"),
        (2, (1, 5, 6, 7), {}, "function(1, 5, 6, 7)"),
        (2, (1,), {"c": 4, "d": 8}, "function(1, c=4, d=8)"),
    ],
)
def test_calls(
    positional: int, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    assert repr(RecordedCall(function, positional, args, kwargs)) == expected


@dataclasses.dataclass
class Plain:
    a: int = 1
    b: float = 2.0
    hidden: int = dataclasses.field(default=0, repr=False)


class Other: ...


def a_loss(x: Any) -> Any: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, "1.5"),
        (np.float32(0.5), repr(np.float32(0.5))),
        ("x", "'x'"),
        (jnp.ones((2, 3)), "float32[2,3]"),
        (np.ones(2, np.int8), "int8[2]"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype("int8"), "dtype('int8')"),
        ([1, 2], "[1, 2]"),
        ((1,), "(1,)"),
        ((1, 2), "(1, 2)"),
        ({"a": 1, 2: "b"}, "{'a': 1, 2: 'b'}"),
        (functools.partial(a_loss, 1), "partial(…)"),
        (Plain(1, 3.0), "Plain(a=1, b=3.0)"),
        (a_loss, "a_loss"),
        (Other(), "Other(…)"),
        (range(3), "range(0, 3)"),
    ],
)
def test_arguments(value: Any, expected: str) -> None:
    assert as_typed(value) == expected


def test_calls_are_shown_in_full_and_of_long_arguments_the_first_items() -> None:
    assert len(as_typed("x" * 1000)) == 200
    long = [*range(1000)]
    for value in (long, tuple(long), dict.fromkeys(long)):
        assert "49" in as_typed(value)
        assert " and 950 more" in as_typed(value)
    optimizers = [jstep.adam(0.1 + i) for i in range(40)]
    for value in (optimizers, tuple(optimizers), dict(enumerate(optimizers))):
        assert as_typed(value).count("adam(learning_rate=") == 40


def test_an_optimizer_of_ones_own_is_no_call_of_jstep() -> None:
    own = jstep.Optimizer(lambda params, step=0: {}, lambda *args: args[:2], lambda step: {})

    @makes_optimizer()
    def mine(rate: float) -> jstep.Optimizer:
        return own

    assert mine(0.1) is own
    assert repr(own) == "Optimizer(<lambda>, <lambda>, <lambda>, False)"


def test_functions_that_remember_their_call_are_copied_as_functions() -> None:
    made: Callable[..., Any] = RememberedFunction(
        lambda x, y=0: x - y, RecordedCall(function, 0, (1,), {})
    )
    assert repr(copy.deepcopy(made)) == repr(made)
    assert (made(3, y=1), repr(made), as_typed(made)) == (2, "function(a=1)", "function(a=1)")
