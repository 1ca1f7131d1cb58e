"""The `repr` of what looks at a run is its table, as at a prompt."""

import jax.numpy as jnp

import jstep
from jstep.tools.cli import as_strict_json
from jstep.tools.collectives import Collective


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


def test_the_text_of_a_cost_is_aligned_and_its_warnings_are_wrapped() -> None:
    moved = {"all-reduce": Collective(number=2, bytes=4096)}
    cost = jstep.Cost(2e9, None, 4, 8, 12, 12, 8, 0, 16, moved, 1.25, warnings=("one-word " * 12,))
    assert str(cost).splitlines() == [
        "a step on one device",
        "  operations      2 GFLOP",
        "  memory traffic  not known",
        "  parameters      4 B",
        "  slots           8 B",
        "  arguments       12 B",
        "  results         12 B, 8 B of it aliased to arguments",
        "  temporaries     0 B",
        "  at its peak     16 B",
        "  all-reduce      2 × per step, 4 KiB in all",
        "  compiled in     1.2 s",
        "  warning: one-word one-word one-word one-word one-word one-word one-word one-word one-word one-word",
        "    one-word one-word",
    ]
    assert as_strict_json({"collectives": moved}) == '{"collectives": {"all-reduce": {"number": 2, "bytes": 4096}}}'
