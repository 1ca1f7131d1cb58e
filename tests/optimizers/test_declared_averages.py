"""What counts as an average: the slots that an optimizer declares, in every function that uses
averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

TARGET = jstep.ExponentialMovingAverage(0.5, name="target")
PARAMS = {"w": jnp.arange(3.0), "b": jnp.float32(1)}


def trained(optimizer, params=PARAMS, steps=3):
    state = jstep.TrainState.create(params, optimizer)
    for _ in range(steps):
        state = jstep.apply_gradients(state, jax.tree.map(jnp.ones_like, params), optimizer)
    return state


def uses_of(state, optimizer, tmp_path):
    """Return the functions that use averages, each of an argument `use_averages`, on a trained
    state."""

    def evaluated(params, x):
        return {"w": (params["w"][1].astype(jnp.float32), 1)}

    def in_loss(params, averages):
        unused = params["w"].sum() + params["b"]
        return (0 * unused + averages["w"][1]).astype(jnp.float32)

    saver = jstep.Saver(tmp_path, async_save=False)
    saver.save(state)
    by_name = lambda name: () if name is True else (name,)  # noqa: E731
    return {
        "averaged_params": lambda name: jstep.averaged_params(state, *by_name(name))["w"][1],
        "minimize": lambda name: jstep.minimize(in_loss, optimizer, use_averages=name, jit=False)(
            state
        )[1]["loss"],
        "evaluator": lambda name: jstep.evaluator(evaluated, [jnp.ones(1)], use_averages=name)(
            state
        )["w"],
        "restore": lambda name: saver.restore(state, use_averages=name).params["w"][1],
        "restore without a target": lambda name: saver.restore(use_averages=name)["params"]["w"][1],
        "restore_params": lambda name: saver.restore_params(state.params, use_averages=name)["w"][
            1
        ],
    }


NO_AVERAGES = {
    "adam": (lambda: jstep.adam(0.1), ["v", "m"]),
    "prodigy": (lambda: jstep.prodigy(1.0), ["p0"]),
    "madgrad": (lambda: jstep.madgrad(0.1), ["initial"]),
    "lookahead": (lambda: jstep.lookahead(jstep.momentum(0.1, 0.9)), ["slow"]),
    "schedule-free": (lambda: jstep.schedule_free_adamw(0.1), ["z"]),
    "masters": (lambda: jstep.master_weights(jstep.adam(0.1)), ["master"]),
    "scope": (lambda: jstep.scope(jstep.prodigy(1.0), "x"), ["p0", "x/p0"]),
}


@pytest.mark.parametrize("name", NO_AVERAGES)
def test_what_is_not_declared_is_refused_and_not_advised(name, tmp_path):
    """Slots that begin as copies of the parameters are initial, slow or unaveraged parameters, and
    no averages."""
    make, slots = NO_AVERAGES[name]
    optimizer = make()
    state = trained(optimizer)
    for use, call in uses_of(state, optimizer, tmp_path).items():
        for slot in (True, *slots):
            if slot is True and (name, use) == ("schedule-free", "evaluator"):
                continue  # it evaluates `schedule_free_params`
            with pytest.raises(ValueError, match="has no averages of the parameters") as caught:
                call(slot)
            text = str(caught.value)
            assert "jstep.with_moving_average(optimizer, ema)" in text
            assert "jstep.schedule_free_params(state)" in text
            assert "jstep.slow_params(state)" in text
            assert not any(f"give {other!r}" in text for other in state.slots)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: inner,
        jstep.master_weights,
        lambda inner: jstep.lookahead(jstep.scope(inner, "a")),
    ],
)
def test_the_only_average_is_found_by_its_name_and_without_one(wrap, tmp_path):
    optimizer = wrap(jstep.with_moving_average(jstep.adam(0.1), TARGET))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    state = trained(optimizer, params)
    (slot,) = [name for name in state.slots if name.endswith("target")]
    expected = float(state.slots[slot]["w"][1].astype(jnp.bfloat16))
    assert expected != float(state.params["w"][1])
    for call in uses_of(state, optimizer, tmp_path).values():
        for name in (True, "target", slot):
            assert float(call(name)) == expected
        for name in ("v", "master", "slow", "targets"):
            with pytest.raises(
                ValueError,
                match=rf"must be the name of an average; .* has \['{slot}'\]\. ",
            ):
                call(name)


def test_an_average_beside_schedule_free_parameters_is_named():
    """Without a name, an evaluation could mean either."""
    optimizer = jstep.with_moving_average(jstep.schedule_free_sgd(0.1), TARGET)
    state = trained(optimizer)
    evaluate = jstep.evaluator(
        lambda params, x: {"w": params["w"][1]}, [jnp.ones(1)], use_averages=True
    )
    with pytest.raises(
        ValueError,
        match=r"must name one of \['target'\], as the state also has schedule-free",
    ):
        evaluate(state)


@pytest.mark.parametrize(
    ("params_of", "optimizer", "slots"),
    [
        (jstep.slow_params, jstep.lookahead(jstep.momentum(0.1, 0.9)), ["slow"]),
        (jstep.slow_params, jstep.scope(jstep.lookahead(jstep.adam(0.1)), "x"), ["x/slow"]),
        (jstep.slow_params, jstep.prodigy(1.0), []),
        (jstep.schedule_free_params, jstep.schedule_free_adamw(0.1), ["z"]),
    ],
    ids=["lookahead", "scope", "prodigy", "schedule-free"],
)
def test_no_slot_of_another_kind_is_slow_or_schedule_free(params_of, optimizer, slots):
    """Second moments, for example, have the shapes of the parameters, too."""
    state = trained(optimizer)
    shaped = [name for name, slot in state.slots.items() if isinstance(slot, dict)]
    assert set(shaped) > set(slots)
    for slot in shaped:
        for name in (slot, slot.rpartition("/")[2]):
            if slot in slots:
                params_of(state, name)
                continue
            with pytest.raises(ValueError, match="no such slot") as caught:
                params_of(state, name)
            listed = f"; it has {slots}. S" if slots else "no such slot. S"
            assert listed in str(caught.value)


# Averages that a custom optimizer declares.


def averaging(declares=True, traceable=True, copies=True):
    """Gradient descent that keeps an average itself, in the slot `mine`."""

    def init(params, global_step=0):
        if not traceable:
            assert not isinstance(params["b"], jax.core.Tracer), "it needs values"
            float(params["b"])
        first = jnp.copy if copies else jnp.zeros_like
        return {"mine": jax.tree.map(first, params), "other": jax.tree.map(jnp.copy, params)}

    if declares:
        init.averages = ("mine",)

    def update(updates, slots, params, step):
        moves = jax.tree.map(lambda g: -0.1 * g, updates)
        moved = jax.tree.map(lambda a, p, u: 0.5 * a + 0.5 * (p + u), slots["mine"], params, moves)
        return moves, {"mine": moved, "other": slots["other"]}

    return jstep.Optimizer(init, update, lambda step: {"learning_rate": 0.1})


def renamed():
    """A custom optimizer that gives the slots of an inner one other names."""
    inner = jstep.with_moving_average(jstep.momentum(0.1, 0.9), TARGET)

    def init(params, global_step=0):
        slots = inner.init(params, global_step)
        return {"mine": slots["target"], "other": slots["momentum"]}

    def update(updates, slots, params, step):
        updates, new = inner.update(
            updates, {"target": slots["mine"], "momentum": slots["other"]}, params, step
        )
        return updates, {"mine": new["target"], "other": new["momentum"]}

    return jstep.Optimizer(init, update, inner.hyperparameters)


def by_rule():
    def rule(g, p, s, h):
        u = -h.learning_rate * g
        return u, {"mine": 0.5 * s.mine + 0.5 * (p + u)}

    slots = {"mine": jstep.Slot("copy", averages_params=True), "other": jstep.Slot("copy")}
    return jstep.leafwise(rule, hyper={"learning_rate": 0.1}, slots=slots)


CUSTOM = {
    "a copy": averaging,
    "zeros": lambda: averaging(copies=False),
    "in an init that needs values": lambda: averaging(traceable=False),
    "of an inner optimizer": renamed,
    "of a rule": by_rule,
}


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_optimizers_declare_averages(name, tmp_path):
    optimizer = CUSTOM[name]()
    state = trained(optimizer)
    for call in uses_of(state, optimizer, tmp_path).values():
        for given in (True, "mine"):
            np.testing.assert_array_equal(call(given), state.slots["mine"]["w"][1])
        with pytest.raises(ValueError, match="must be the name of an average"):
            call("other")
    with_scope = trained(jstep.scope(jstep.skip_nonfinite(CUSTOM[name]()), "x"))
    np.testing.assert_array_equal(jstep.averaged_params(with_scope)["w"], state.slots["mine"]["w"])


def test_an_average_that_is_not_declared_says_how_to_declare_it(tmp_path):
    optimizer = averaging(declares=False)
    state = trained(optimizer)
    for call in uses_of(state, optimizer, tmp_path).values():
        with pytest.raises(
            ValueError,
            match=r"a custom optimizer declares its own by init\.averages",
        ):
            call("mine")


@pytest.mark.parametrize("copies", [True, False])
def test_replaced_parameters_replace_a_declared_average(copies):
    state = trained(averaging(copies=copies))
    new = {"w": jnp.full(3, 7.0), "b": jnp.float32(8)}
    np.testing.assert_array_equal(jstep.averaged_params(state.with_params(new))["w"], new["w"])


def test_slots_of_a_state_made_by_hand_are_taken_by_name(tmp_path):
    """Nobody has declared what they are."""
    made = jstep.TrainState(PARAMS, {"mine": jax.tree.map(jnp.zeros_like, PARAMS)}, jnp.int32(0))
    assert jstep.averaged_params(made, "mine")["w"].tolist() == [0, 0, 0]
    with pytest.raises(
        ValueError, match="name='ExponentialMovingAverage': the state has no averages"
    ):
        jstep.averaged_params(made)
    with jstep.Saver(tmp_path) as saver:
        saver.save(made)
        assert saver.restore_params(PARAMS, use_averages="mine")["w"].tolist() == [0, 0, 0]
