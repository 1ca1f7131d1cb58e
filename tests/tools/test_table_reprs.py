"""The `repr` of what looks at a run is its table, as at a prompt."""

import jax.numpy as jnp

import jstep


def test_the_repr_of_plan_cost_and_goodput_is_their_table() -> None:
    optimizer = jstep.adam(jstep.cosine_decay(0.1, 10))
    step = jstep.minimize(lambda params, x: (params["w"] * x).sum(), optimizer)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    plan = jstep.plan(optimizer, 10)
    assert "learning_rate" in repr(plan)
    tables = [plan, jstep.cost(step, state, jnp.ones(3)), jstep.Goodput(productive=3.0, starting=1.0, steps=5)]
    for table in tables:
        assert repr(table) == str(table)
        assert "\n" in repr(table)
        assert type(table).__name__ not in repr(table)
