"""What gradients must be for their parameters, and what is said of those that are not, whole."""

from typing import Any

import jax.numpy as jnp
import pytest

import jstep
from jstep.slots.matching import NoGradientsError, explain_missing_gradients, match_gradients, require_slots

PARAMS = {"n": jnp.int32(3), "w": jnp.ones((2, 3), jnp.bfloat16)}
SLICES = jstep.IndexedSlices(jnp.ones((1, 3)), jnp.array([1]), (2, 3))


def of(n: Any, w: Any) -> dict[str, Any]:
    return {"n": n, "w": w}


def test_gradients_of_parameters() -> None:
    numbers = {"x": jnp.ones((), jnp.bfloat16)}
    (made,) = match_gradients({"x": 2.0}, numbers)
    assert (made.dtype, made.shape, float(made)) == (jnp.bfloat16, (), 2.0)
    array = jnp.ones((2, 3))
    assert match_gradients(of(None, array), PARAMS) == [None, array]
    assert match_gradients(of(None, SLICES), PARAMS) == [None, SLICES]


@pytest.mark.parametrize(
    ("grads", "kind", "message"),
    [
        (of(1.0, None), TypeError, "gradients: got a gradient for 'n', whose dtype int32 cannot be trained; pass None "
         "instead"),
        (of(None, "x"), TypeError, "gradients: the gradient at 'w' must be an array, got str"),
        (of(None, 1), ValueError, "gradients: the gradient at 'w' has shape (), its parameter has shape (2, 3)"),
        (of(None, jnp.ones((4, 2, 3))), ValueError, "gradients: the gradient at 'w' has shape (4, 2, 3), its parameter "
         "has shape (2, 3); take the mean of gradients per example over axis 0"),
        (of(None, jnp.ones((2, 3), int)), TypeError, "gradients: the gradient at 'w' has dtype int32; it must be "
         "floating point"),
        (of(None, jstep.IndexedSlices(jnp.ones((1, 3), int), jnp.array([1]), (2, 3))), TypeError,
         "gradients: the gradient at 'w' has dtype int32; it must be floating point"),
        (of(None, jstep.IndexedSlices(jnp.ones((1, 3)), jnp.array([1]), (4, 3))), ValueError,
         "IndexedSlices at 'w': dense_shape=(4, 3), but the parameter has shape (2, 3)"),
        (of(None, None), NoGradientsError, "No gradients provided for any variable: ['n', 'w']. All gradients are "
         "None; does the loss depend on params, and does var_list leave any?"),
        ({"n": None, "v": 1.0}, ValueError, "gradients does not have the structure of params; missing: 'w'; extra: "
         "'v'. Give gradients the structure of params, with None for a leaf to leave out."),
        ([None, 1.0], ValueError, "gradients does not have the structure of params; missing: 'n', 'w'; extra: '0', "
         "'1'. Give gradients the structure of params, with None for a leaf to leave out."),
        ((1.0, of(None, None)), ValueError, "gradients does not have the structure of params; missing: 'n', 'w'; "
         "extra: '0', '1/n', '1/w'; element 1 of this tuple has it: unpack the tuple. Give gradients the structure of "
         "params, with None for a leaf to leave out."),
        (of(None, [1.0, 2.0]), ValueError, "gradients: at 'w': must be an array, as in params, got a list with 2 "
         "leaves. Give gradients the structure of params, with None for a leaf to leave out."),
    ],
)  # fmt: skip
def test_what_is_said_of_other_gradients(grads: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        match_gradients(grads, PARAMS)
    assert str(caught.value) == message


def test_gradients_of_the_same_paths_in_other_containers() -> None:
    with pytest.raises(ValueError, match="same paths, other containers: tuple and list, or ") as caught:
        match_gradients([1.0], (jnp.ones(()),))
    assert str(caught.value) == (
        "gradients does not have the structure of params; same paths, other containers: tuple and list, or "
        "PyTreeDef([*]) instead of PyTreeDef((*,)). Give gradients the structure of params, with None for a leaf to "
        "leave out."
    )


def test_a_note_explains_errors_about_none_alone() -> None:
    """Only where a trainable leaf has no gradient, and not for the error that says so itself."""
    missing, complete = of(None, None), of(None, jnp.ones((2, 3)))
    about_none = "unsupported operand type(s) for *: 'NoneType' and 'float'"
    for error, grads, notes in (
        (TypeError(about_none), missing, 1),
        (TypeError(about_none), complete, 0),
        (TypeError("another"), missing, 0),
        (NoGradientsError(PARAMS, "All are None."), missing, 0),
    ):
        explain_missing_gradients(error, PARAMS, grads)
        found = getattr(error, "__notes__", [])
        assert [text[:30] for text in found] == ["The gradients of ['w'] are Non"] * notes


def test_slots_that_a_state_lacks() -> None:
    assert require_slots(["a"], {"a": 1, "b": 2}) == {"a": 1}
    for held, has in (({"b": 2, "a": 1}, "it has ['a', 'b']"), ({}, "nor any other of this optimizer")):
        with pytest.raises(ValueError, match="no slot 'c'") as caught:
            require_slots(["c"], held)
        assert str(caught.value) == (
            f"the state has no slot 'c', {has}. It was created with another optimizer: use that one, or create new "
            "slots with TrainState.create(params, optimizer, global_step=state.global_step)."
        )
