"""Which states a step and a hook may return, and what the errors advise."""

import jax.numpy as jnp
import numpy as np
import pytest
from hook_fakes import state_at

from jstep.hooks.hook import StopWith, check_hook_result, check_returned_state, check_step
from jstep.state.train_state import TrainState


@pytest.mark.parametrize(
    ("found", "first", "advice"),
    [
        (3, 3, r"by one, and changed it from 3 to 3 in 2 step\(s\); pass increment_global_step=False to all updates"),
        (8, 3, r"by one, and changed it from 3 to 8 in 2 step\(s\)"),
        (7, None, "by one; pass increment_global_step=False"),
    ],
)
def test_advice_for_a_step_that_does_not_count_once(found, first, advice):
    with pytest.raises(ValueError, match=f"global_step is {found} after the update that makes step 5: .*{advice}"):
        check_step(5, state_at(found), first)


def test_a_hook_may_return_its_state_or_another_of_the_same_step():
    state = state_at(5)
    assert check_returned_state(state, state, 5, "hook") is state
    assert check_hook_result(None, state, 5, "hook") == (False, state)
    assert check_hook_result(np.True_, state, 5, "hook") == (True, state)
    for step in (state.global_step, jnp.copy(state.global_step)):
        stop, other = check_hook_result(TrainState({"w": jnp.full(3, 7.0)}, state.slots, step), state, 5, "hook")
        assert not stop
        assert int(other.global_step) == 5
        np.testing.assert_array_equal(other.params["w"], np.full(3, 7.0))
    with pytest.raises(ValueError, match="hook returned a state at step 6: must be at step 5"):
        check_returned_state(state_at(6), state, 5, "hook")


def test_callbacks_may_stop_and_replace_the_state_at_once():
    state = state_at(5)
    stop, found = check_hook_result(StopWith(state_at(5, 7.0)), state, 5, "hook")
    assert stop
    assert found.params["w"].tolist() == [7.0] * 3
    with pytest.raises(ValueError, match="hook returned a state at step 6: must be at step 5"):
        check_hook_result(StopWith(state_at(6)), state, 5, "hook")


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jnp.ones(4), "float32 of shape (4,)"),
        (jnp.ones(3, jnp.int32), "int32 of shape (3,)"),
        (np.ones(3), "float64 of shape (3,)"),
        (3.0, "a float"),
    ],
)
def test_a_leaf_of_another_shape_or_dtype_is_named(leaf, got):
    state = state_at(5)
    with pytest.raises(ValueError) as caught:
        check_returned_state(state.replace(params={"w": leaf}), state, 5, "hook")
    want = f"hook returned a state whose 'params/w' is {got}: must be float32 of shape (3,), as before"
    assert str(caught.value) == want


def test_a_returned_state_has_no_weak_types():
    """The step would be compiled again for that of a Python number."""
    state = state_at(5)
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3,))
    assert weak.weak_type
    found = check_returned_state(state.replace(params={"w": weak}), state, 5, "hook")
    assert (found.params["w"].weak_type, found.params["w"].tolist()) == (False, [2.0] * 3)
