"""`mup`: the factors of table 3 by path, and the factors in an optimizer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def shapes(width, head=4, layers=2, vocab=10):
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    return {
        "embed": f(vocab, width),
        "hidden": {"kernel": f(width, width), "bias": f(width)},
        "up": f(width, 4 * width),
        "head": f(width, head),
        "head_bias": f(head),
        "gain": f(),
        "ids": jax.ShapeDtypeStruct((width,), jnp.int32),
        "none": None,
        "hidden2": f(3, 3),
    }


INPUT, HIDDEN, OUTPUT, NONE = (
    ("embed", "hidden/bias"),
    ("hidden/kernel", "up"),
    ("head",),
    ("head_bias", "gain", "hidden2"),
)
R = 4.0
RATES = {
    "adam": (1.0, 1 / R, 1 / R),
    "sgd": (R, 1.0, 1 / R),
    "muon": (1.0, 1 / math.sqrt(R), 1 / R),
    "muon_original": (1.0, 1.0, 1 / R),
    "hyperball": (1.0, 1.0, 1.0),
}
INITIALS = {"fan_in": (1.0, 1.0, R**-0.5), "constant": (1.0, R**-0.5, 1 / R)}


@pytest.mark.parametrize("init", INITIALS)
@pytest.mark.parametrize("optimizer", RATES)
def test_table_3(optimizer, init):
    factors = jstep.mup(shapes(8), shapes(32), optimizer=optimizer, init=init)
    for kind, paths, rate, initial in zip(
        ("input", "hidden", "output", "none"),
        (INPUT, HIDDEN, OUTPUT, NONE),
        (*RATES[optimizer], 1.0),
        (*INITIALS[init], 1.0),
        strict=True,
    ):
        for path in paths:
            assert factors.widths[path].kind == kind
            assert factors.rates[path] == rate
            assert factors.decays[path] == 1 / rate
            assert factors.initials[path] == initial
    assert set(factors.rates) == set(factors.decays) == {*INPUT, *HIDDEN, *OUTPUT, *NONE}


@pytest.mark.parametrize("init", INITIALS)
@pytest.mark.parametrize("optimizer", RATES)
def test_equal_trees_change_nothing(optimizer, init):
    for delta in (None, shapes(16), shapes(8)):
        factors = jstep.mup(shapes(8), shapes(8), delta=delta, optimizer=optimizer, init=init)
        found = {*factors.rates.values(), *factors.decays.values(), *factors.initials.values()}
        assert found == {1.0}
        params = {"a": jnp.arange(3.0)}
        unchanged = jstep.mup(params, params).initial(params)
        assert jstep.fingerprint(unchanged).tolist() == jstep.fingerprint(params).tolist()


def test_axes():
    small = {
        "conv": jnp.zeros((8, 4, 3, 3)),
        "out": jnp.zeros((2, 4, 8)),
        "stack": jnp.zeros((3, 8)),
        "b": jnp.zeros((2, 4)),
    }
    wide = {
        "conv": jnp.zeros((16, 8, 3, 3)),
        "out": jnp.zeros((4, 4, 16)),
        "stack": jnp.zeros((3, 16)),
        "b": jnp.zeros((4, 4)),
    }
    given = {"conv": (1, 0), "out": ((0, 1), -1), "stack": (None, -1), "b": (None, (0, 1))}
    factors = jstep.mup(small, wide, axes=lambda path, leaf: given[path])
    assert {path: one.kind for path, one in factors.widths.items()} == {
        "b": "input", "conv": "hidden", "out": "hidden", "stack": "input"
    }  # fmt: skip
    assert factors.widths["out"].r_in == 2
    assert dict(factors.rates) == {"b": 1, "conv": 0.5, "out": 0.5, "stack": 1}
    with pytest.raises(ValueError, match=r"axes: axis 0 of the leaf at 'out' grows from 2 to 4"):
        jstep.mup({"out": small["out"]}, {"out": wide["out"]})
    by_row = jstep.mup(
        {"w": jnp.zeros((4, 2))}, {"w": jnp.zeros((8, 2))}, axes=lambda path, leaf: (0, None)
    )
    assert by_row.widths["w"].kind == "output"


def test_delta_determines_which_axes_are_widths():
    """Sizes in base and target may be equal by coincidence; delta shows which axes are widths."""
    f = lambda *shape: {"w": jnp.zeros(shape)}  # noqa: E731
    assert jstep.mup(f(8, 8), f(8, 32), delta=f(8, 16)).widths["w"].kind == "input"
    factors = jstep.mup(f(8, 8), f(16, 32), delta=f(12, 16))
    assert (factors.widths["w"].r_in, factors.widths["w"].r_out) == (2, 4)
    with pytest.raises(
        ValueError,
        match=r"delta: axis 0 of the leaf at 'w' is 8 in base and delta",
    ):
        jstep.mup(f(8, 8), f(16, 32), delta=f(8, 16))
    with pytest.raises(
        ValueError,
        match=r"delta: must have the leaves of target, but lacks \['w'\] and has \['v'\]",
    ):
        jstep.mup(f(8, 8), f(16, 32), delta={"v": jnp.zeros((8, 16))})
    with pytest.raises(ValueError, match=r"delta: the leaf at 'w' has shape \(8,\), in target"):
        jstep.mup(f(8, 8), f(16, 32), delta=f(8))


def test_initial_values():
    small, wide = (
        {"w": jnp.zeros((4, 2)), "n": jnp.int32(1), "none": None},
        {"w": jnp.ones((16, 2)), "n": jnp.int32(5), "none": None},
    )
    factors = jstep.mup(small, wide)
    for initial in (factors.initial, jax.jit(factors.initial)):
        found = initial(wide)
        np.testing.assert_array_equal(found["w"], np.full((16, 2), 0.5))
        assert found["n"] == 5
        assert found["none"] is None
    low = factors.initial({**wide, "w": wide["w"].astype(jnp.bfloat16)})
    assert low["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"params: 'w' has shape \(4, 2\), in target \(16, 2\)"):
        factors.initial(small)
    with pytest.raises(ValueError, match="'v', 'w'"):
        factors.initial({"v": wide["w"]})
    with pytest.raises(ValueError, match="'ww'"):
        factors.initial({**wide, "ww": jnp.zeros(3)})


def step_with(optimizer, params):
    state = jstep.TrainState.create(params, optimizer)
    return jstep.apply_gradients(state, jax.tree.map(jnp.ones_like, params), optimizer).params


def test_rates_and_decays_in_a_chain():
    """lr·wd is that of the base while the rate is scaled; paths share prefixes or contain glob
    characters."""
    names = ["w", "ww", "w*", "w[x]"]
    small = {name: jnp.ones((2 + i, 2)) for i, name in enumerate(names)}
    wide = {name: jnp.ones(((2 + i) * (i + 2), 2)) for i, name in enumerate(names)}
    factors = jstep.mup(small, wide)
    optimizer = jstep.chain(
        jstep.add_weight_decay(0.1, factors.decays),
        jstep.scale_by_learning_rate(0.01),
        jstep.scale_updates(factors.rates),
    )
    found = step_with(optimizer, wide)
    for i, name in enumerate(names):
        np.testing.assert_allclose(
            found[name], 1 - 0.01 / (i + 2) - 0.01 * 0.1, rtol=1e-6, err_msg=name
        )


def test_factors_inside_a_partition():
    factors = jstep.mup(
        {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))},
        {"a": jnp.ones((4, 2)), "b": jnp.ones((8, 2))},
    )
    scaled = jstep.chain(jstep.gradient_descent(1.0), jstep.scale_updates(factors.rates))
    optimizer = jstep.partition({"a": scaled, "b": scaled}, lambda path, leaf: path)
    found = step_with(optimizer, {"a": jnp.ones((4, 2)), "b": jnp.ones((8, 2))})
    np.testing.assert_allclose([found["a"][0, 0], found["b"][0, 0]], [0.5, 0.75])


# `coord_check` on a model with known results; the one of docs/how/width-transfer.md is a real one.


def known_model(width):
    """Return a model whose parameter w grows by 0.5·width at each step."""
    optimizer = jstep.gradient_descent(0.5 * width)
    step = jstep.minimize(lambda params, x: -params["w"] * jnp.mean(x), optimizer)
    return step, jstep.TrainState.create({"w": 2.0}, optimizer), jnp.ones(3)


def test_sizes_changes_and_growth():
    def activations(params, x):
        return {
            "linear": params["w"] * x,
            "same": x,
            "root": jnp.sqrt(jnp.abs(params["w"] - 2.0)) * x[None],
        }

    check = jstep.coord_check(known_model, (4, 8, 16), activations, steps=2)
    assert check.sizes["linear"] == {4: 2.0, 8: 2.0, 16: 2.0}
    assert check.changes["linear"] == {4: 4.0, 8: 8.0, 16: 16.0}
    assert check.growth["linear"] == pytest.approx(1.0)
    assert check.growth["root"] == pytest.approx(0.5)
    assert np.isnan(check.growth["same"])
    lines = str(check).splitlines()
    assert lines[0] == "mean |x| over widths, and its change after 2 steps"
    assert lines[2].split() == ["activation", "4", "8", "16", "growth"]
    assert any(line.split() == ["linear", "size", "2", "2", "2"] for line in lines)
    assert any(line.split() == ["change", "4", "8", "16", "1.00"] for line in lines)
    # `coord_check` takes five steps.
    assert jstep.coord_check(known_model, iter([4, 8]), activations).changes["linear"][8] == 20.0


def test_params_returned_as_activations_survive_donation():
    """The step donates the state, and the value before training is still needed."""
    check = jstep.coord_check(known_model, (4, 8), lambda params, x: {"w": params["w"]}, steps=1)
    assert check.changes["w"] == {4: 2.0, 8: 4.0}
