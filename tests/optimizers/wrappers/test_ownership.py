"""A slot belongs to the optimizer that created it, whatever its name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"decoder": {"attn": jnp.ones(2), "mlp": jnp.ones(2)}, "head": jnp.ones(2)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def update(state: Any, optimizer: Any, grads: Any = GRADS) -> Any:
    return jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(state, grads)


def test_custom_optimizers_may_return_the_slots_they_got() -> None:
    """A custom optimizer gets only its own slots, so that it cannot overwrite others."""
    seen = []

    def custom_update(updates: Any, slots: Any, params: Any, step: Any) -> Any:
        seen.append(sorted(slots))
        return updates, {**slots, "calls": slots["calls"] + 1}

    custom = jstep.Optimizer(
        lambda params, global_step=0: {"calls": jnp.zeros((), jnp.int32)}, custom_update, lambda step: {}
    )
    optimizer = jstep.chain(jstep.adam(0.1), jstep.scope("mine", custom), custom)
    state = update(jstep.TrainState.create(PARAMS, optimizer), optimizer)
    assert seen == [["calls"], ["calls"]]
    assert int(state.slots["calls"]) == int(state.slots["mine/calls"]) == 1
    assert float(state.slots["m"]["head"][0]) > 0


def test_two_finished_updates_in_a_chain_warn() -> None:
    first, second = jstep.scope("a", jstep.adam(1.0)), jstep.gradient_descent(0.1)
    with pytest.warns(UserWarning, match=r"optimizers\[0\] makes finished updates.*climb.*scale_by_adam.*partition"):
        optimizer = jstep.chain(first, second)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer)
    np.testing.assert_allclose(state.params["w"], 0.1, rtol=1e-6)  # gradient ascent
    with pytest.raises(ValueError, match="'learning_rate'") as caught:
        jstep.chain(jstep.adam(1.0), second)
    assert "climb" in str(caught.value.__notes__)
    held = jstep.scope("b", jstep.gradient_descent(jstep.held("rate", 0.1)))
    with pytest.warns(UserWarning, match="climb"):
        jstep.chain(jstep.skip_nonfinite(first), held)
    custom = jstep.Optimizer(lambda p, global_step=0: {}, lambda u, s, p, n: (u, s), lambda n: {"x/learning_rate": 0.1})
    with pytest.warns(UserWarning, match="climb"):
        jstep.chain(first, custom)
    jstep.chain(first, jstep.clip_gradients(by_norm=1.0), jstep.decay_weights(0.1), jstep.scale_updates({"*": 0.5}))


def test_masks_inside_partition_match_against_all_params() -> None:
    mask, bools = ["decoder/*", "head"], {"decoder": True, "head": False}
    optimizer = jstep.partition(
        {
            "decoder": jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(0.5, mask)),
            "head": jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(0.5, bools)),
        },
        lambda path, leaf: path.split("/")[0],
    )
    new = update(jstep.TrainState.create(PARAMS, optimizer), optimizer).params
    np.testing.assert_allclose(new["decoder"]["attn"], 0.5)
    np.testing.assert_allclose(new["head"], 1.0)
    wrong = jstep.partition({"all": jstep.decay_weights(0.5, ["decoder/atn"])}, lambda path, leaf: "all")
    with pytest.raises(ValueError, match=r"mask: 'decoder/atn' matches no parameter; nearest: 'decoder/attn'"):
        update(jstep.TrainState.create(PARAMS, wrong), wrong)
