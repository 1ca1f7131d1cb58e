"""What a compiled function of states returns does not depend on the states that it met before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.arange(64.0) / 64, "b": jnp.ones(2)}
ADAM = jstep.adam(jstep.held("rate", 0.1))
EMA = jstep.ExponentialMovingAverage(0.9, model_state=True)
BASES = {
    "adam": ADAM,
    "averages": jstep.with_moving_average(ADAM, EMA),
    "sgd": jstep.gradient_descent(0.1),
    "compact": jstep.compact(ADAM, min_size=0),
    "masters": jstep.master_weights(ADAM),
    "lookahead": jstep.lookahead(ADAM),
    "schedule_free": jstep.schedule_free_adamw(),
    "ftrl": jstep.ftrl(0.1),
    "loss scale": jstep.dynamic_loss_scale(ADAM),
    "skip_nonfinite": jstep.skip_nonfinite(jstep.with_noise_scale(ADAM)),
    "parts": jstep.partition(
        {"w": ADAM, "b": jstep.update_every(ADAM, 2)}, lambda path, leaf: path
    ),
    "soap": jstep.soap(max_precondition_dim=4),
}


def functions_of(optimizer):
    """The public functions of a state, and steps."""
    step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2) + jnp.sum(p["b"]), optimizer, jit=False)
    mesh = jax.make_mesh((1,), ("data",))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    return {
        "itself": lambda state: state,
        "increment_global_step": jstep.increment_global_step,
        "get_or_create_global_step": jstep.get_or_create_global_step,
        "replace": lambda state: state.replace(
            params=state.params, global_step=3, model_state={"n": 1.0}
        ),
        "with_params": lambda state: state.with_params(
            jax.tree.map(lambda leaf: 2 * leaf, state.params)
        ),
        "get_slot": lambda state: {name: jstep.get_slot(state, name) for name in state.slots},
        "get_slot_names": lambda state: dict.fromkeys(jstep.get_slot_names(state), 0.0),
        "averaged_params": jstep.averaged_params,
        "averaged_model_state": jstep.averaged_model_state,
        "slow_params": jstep.slow_params,
        "schedule_free_params": jstep.schedule_free_params,
        "set_hyperparameter": lambda state: jstep.set_hyperparameter(state, "rate", 0.5),
        "fingerprint": lambda state: jstep.fingerprint(state, per_leaf=True),
        "shard_state": lambda state: jstep.shard_state(state, mesh),
        "repack": lambda state: jstep.repack(
            state, optimizer, jstep.compact(optimizer, min_size=0)
        ),
        "apply_gradients": lambda state: jstep.apply_gradients(
            state, grads, optimizer, increment_global_step=False, scaled=True
        ),
        "step": step,
        "scan_steps": jstep.scan_steps(step, 2),
    }


def states_of(optimizer, directory):
    """States with the leaves of a created one, whose roles are known, unknown, inferred or declared
    otherwise."""
    created = jstep.TrainState.create(PARAMS, optimizer, model_state={"n": jnp.zeros(2)})
    slots = {name: tree for name, tree in created.slots.items() if name != "model_state"}

    def declared(**attributes):
        def init(params, step=0):
            return jax.tree.map(jnp.copy, slots)

        vars(init).update(attributes)
        custom = jstep.Optimizer(
            init, lambda updates, slots, params, step: (updates, slots), lambda step: {}
        )
        return jstep.TrainState.create(PARAMS, custom).replace(model_state=created.model_state)

    with jstep.Saver(directory) as saver:
        saver.save(created)
    donated = jax.tree.map(jnp.copy, created)
    jax.jit(lambda state: state, donate_argnums=0)(donated)
    by_hand = jstep.TrainState(created.params, created.slots, created.global_step)
    return {
        "by hand": by_hand,
        "created": created,
        "restored": jstep.Saver(directory).restore(created),
        "restored by hand": jstep.Saver(directory).restore(by_hand),
        "shapes": jax.eval_shape(lambda: created),
        "donated": donated,
        "custom": declared(),
        "custom with ages": declared(
            ages=[name for name, slot in slots.items() if np.shape(slot) == ()]
        ),
        "custom with copies": declared(copies=list(slots)),
    }


def outcome(function, state):
    """Return what a compiled function computes and returns, or why it cannot."""
    try:
        traced = function.trace(state)
    except Exception as error:
        return type(error), str(error)
    roles = [
        vars(node.roles)
        for node in jax.tree.leaves(traced.out_info, is_leaf=_is_state)
        if _is_state(node)
    ]
    return str(traced.jaxpr), str(jax.tree.structure(traced.out_info)), roles


def _is_state(node):
    return isinstance(node, jstep.TrainState)


SAME = {
    "restored": "created",
    "shapes": "created",
    "donated": "created",
    "restored by hand": "by hand",
}
"""States for which a function computes and returns what it does for others."""


@pytest.mark.thorough(except_for=["averages"])
@pytest.mark.parametrize("name", BASES)
def test_the_order_of_calls_does_not_matter(name, tmp_path):
    optimizer = BASES[name]
    states = states_of(optimizer, tmp_path)
    for what, function in functions_of(optimizer).items():
        others = {kind: state for kind, state in states.items() if kind not in SAME}
        alone = {
            kind: outcome(jax.jit(lambda state, f=function: f(state)), state)
            for kind, state in others.items()
        }
        shared = jax.jit(function)
        assert all(
            outcome(shared, state) == alone[SAME.get(kind, kind)] for kind, state in states.items()
        ), what
        if what in ("itself", "increment_global_step") and name != "sgd":
            assert alone["by hand"] != alone["created"] != alone["custom"]


def test_equal_values_of_other_types_are_other_values_to_a_rule():
    """Leaves of one shape share the trace of a rule."""

    def rule(g, p, slots, h):
        return jnp.full_like(g, 1.0 if h.flag is True else 2.0 if str(h.flag) == "1" else 3.0), {}

    for values in ([1, True, 1.0], [True, 1.0, 1], [1.0, 1, True]):
        flags = {"flag": lambda params: values}  # noqa: B023
        optimizer = jstep.leafwise(rule, hyper={}, slots={}, flags=flags, finished=True)
        params = [jnp.zeros(2)] * 3
        updates, _ = optimizer.update([jnp.ones(2)] * 3, {}, params, 0)
        assert [float(update[0]) for update in updates] == [
            {bool: 1.0, int: 2.0, float: 3.0}[type(v)] for v in values
        ]
