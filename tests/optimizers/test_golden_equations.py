"""Trajectories of the modern optimizers and of chains, compared with their equations in float64
(equations.py)."""

import functools
import types

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import (
    DECAY,
    DECAYED,
    RATE,
    RISING,
    assert_close,
    gradients,
    initial_params,
    run_equation,
    run_jstep,
    table_schedule,
)

import jstep

MASK = list(DECAYED)
MOVING = {"beta1": RISING, "beta2": RISING, "epsilon": 1e-3}
FREE = {"beta1": 0.9, "weight_lr_power": 2.0, "r": 0.0}

CASES = {
    # name: constructor of jstep, equation, hyperparameters of both (arrays are schedules),
    # arguments of jstep only
    "adamw-scheduled": (jstep.adamw, equations.adamw, MOVING, {}),
    "lion-scheduled": (jstep.lion, equations.lion, {"beta1": RISING, "beta2": RISING}, {}),
    "lamb-scheduled": (jstep.lamb, equations.lamb, MOVING, {}),
    "lars-nesterov": (
        jstep.lars,
        functools.partial(equations.lars, nesterov=True),
        {"momentum": RISING, "trust_coefficient": RISING, "epsilon": 0.01},
        {"trust_ratio_mask": MASK, "use_nesterov": True},
    ),
    "ademamix-scheduled": (
        jstep.ademamix,
        equations.ademamix,
        MOVING | {"beta3": RISING, "alpha": RISING},
        {},
    ),
    "schedule_free_adamw-weights": (
        jstep.schedule_free_adamw,
        equations.schedule_free,
        {"beta1": 0.8, "weight_lr_power": 1.5, "r": 0.5, "beta2": RISING, "epsilon": 0.1},
        {},
    ),
    "schedule_free_sgd": (
        jstep.schedule_free_sgd,
        functools.partial(equations.schedule_free, adam=False),
        FREE,
        {},
    ),
}


def adafactor_like(static):
    """Return the equation with the settings that jstep gets by keywords."""
    settings = {
        "factor": 3,
        "relative": "relative_step" in static,
        "scales": "scale_parameter" not in static,
    }
    return lambda g, p, s, h: equations.adafactor(
        g, p, s, types.SimpleNamespace(**vars(h), **settings)
    )


FACTORS = {
    "decay_rate": 0.8,
    "epsilon": 1e-30,
    "epsilon_scale": 1e-3,
    "clip_threshold": 1.0,
    "momentum": None,
}
for _name, _hyper, _static in (
    ("adafactor", FACTORS, {}),
    ("adafactor-momentum", FACTORS | {"momentum": RISING, "clip_threshold": 0.3}, {}),
    ("adafactor-plain", FACTORS | {"decay_rate": 0.5}, {"scale_parameter": False}),
    ("adafactor-relative", FACTORS, {"relative_step": True}),
):
    CASES[_name] = (
        jstep.adafactor,
        adafactor_like(_static),
        _hyper,
        _static | {"min_dim_size_to_factor": 3},
    )


def scheduled(values):
    """Return hyperparameters of jstep: arrays become schedules."""
    return {
        key: table_schedule(value) if isinstance(value, np.ndarray) else value
        for key, value in values.items()
    }


def with_decay_and_mask(name):
    """Return optimizer, equation and its hyperparameters: rate and weight decay are schedules; `c`
    does not decay."""
    make, rule, hyper, static = CASES[name]
    decay = scheduled({"weight_decay": DECAY}) | {"weight_decay_mask": MASK}
    return (
        make(table_schedule(RATE), **decay, **scheduled(hyper), **static),
        rule,
        {"lr": RATE, "wd": DECAY, **hyper},
    )


MORE_CASES = {
    "adadelta-scheduled": (
        jstep.adadelta,
        equations.adadelta,
        {"rho": RISING, "epsilon": 1e-3},
        "lr",
    ),
    "signum": (jstep.signum, equations.signum, {"beta": RISING}, "lr"),
    "madgrad-scheduled": (
        jstep.madgrad,
        equations.madgrad,
        {"momentum": RISING, "epsilon": 1e-3, "weight_decay": DECAY},
        "lr",
    ),
    "madgrad-plain": (
        jstep.madgrad,
        equations.madgrad,
        {"momentum": 0.0, "epsilon": 1e-6, "weight_decay": 0.0},
        "",
    ),
    "adan-scheduled": (jstep.adan, equations.adan, MOVING | {"beta3": RISING}, "lr wd"),
}


def more(name):
    """Return optimizer, equation and its hyperparameters."""
    make, rule, hyper, changing = MORE_CASES[name]
    given, values = scheduled(hyper), hyper | {"lr": RATE if "lr" in changing else 0.05}
    if "wd" in changing:
        given |= {"weight_decay": table_schedule(DECAY), "weight_decay_mask": MASK}
        values |= {"wd": DECAY}
    return make(table_schedule(RATE) if "lr" in changing else 0.05, **given), rule, values


STEPS, PARTS = 6, 3
"""Steps, and the programs into which the optimizers are divided."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_few_steps_of_each_in_one_program(part):
    known = {name: with_decay_and_mask(name) for name in CASES} | {
        name: more(name) for name in MORE_CASES
    }
    some = {name: known[name] for name in sorted(known)[part::PARTS]}
    params = jax.tree.map(jnp.float32, initial_params())
    states = {
        name: jstep.TrainState.create(params, optimizer) for name, (optimizer, _, _) in some.items()
    }

    @jax.jit
    def step(states, grads):
        return {
            name: jstep.apply_gradients(state, grads, some[name][0])
            for name, state in states.items()
        }

    found = []
    for n in range(STEPS):
        states = step(states, jax.tree.map(jnp.float32, gradients(n)))
        found.append({name: state.params for name, state in states.items()})
    for name, (_, rule, values) in some.items():
        assert_close([one[name] for one in found], run_equation(rule, values, steps=STEPS))


MATRICES = {"a": (3, 4), "b": (4, 3), "c": (4, 4)}


@pytest.mark.thorough(except_for=["None-True"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["rms", "original", None])
def test_muon(nesterov, scale):
    factors = {
        "rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
        "original": lambda rows, columns: max(1, columns / rows) ** 0.5,
        None: lambda rows, columns: 1.0,
    }
    shared = {
        "nesterov": nesterov,
        "coefficients": (3.4445, -4.775, 2.0315),
        "steps": 5,
        "epsilon": 1e-7,
    }
    optimizer = jstep.muon(
        table_schedule(RATE),
        table_schedule(RISING),
        use_nesterov=nesterov,
        scale=scale,
        weight_decay=table_schedule(DECAY),
        weight_decay_mask=MASK,
    )
    values = shared | {"lr": RATE, "wd": DECAY, "momentum": RISING, "scale": factors[scale]}
    # The iteration is not a contraction and amplifies rounding errors.
    assert_close(
        run_jstep(optimizer, MATRICES)[0],
        run_equation(equations.muon, values, MATRICES),
        rtol=1e-3,
        atol=1e-4,
    )


# Hyperball and NorMuon recipes as chains.

BALL_STEPS = 30
BALL_MATRICES = {"a": (3, 4), "b": (6, 4), "c": (4, 4)}
BALL_RATE = np.linspace(0.05, 0.005, BALL_STEPS)
BALL_VALUES = {
    "lr": BALL_RATE,
    "momentum": 0.95,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "over": "short",
}
BALLS = {
    "AdamH": (equations.adamh, lambda: (jstep.scale_by_adam(0.9, 0.95),)),
    "NorMuonH-short": (
        equations.normuonh,
        lambda: (
            jstep.trace(0.95, use_nesterov=True),
            jstep.orthogonalize(scale=None),
            jstep.normalize_neurons(over="short"),
        ),
    ),
}


@pytest.mark.thorough(except_for=["AdamH"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", BALLS)
def test_chains_match_their_equations(name):
    """In float64, where the rounding errors that the iteration amplifies do not matter."""
    rule, elements = BALLS[name]
    optimizer = jstep.chain(
        *elements(), jstep.on_hyperball(lambda step: jnp.asarray(BALL_RATE)[step])
    )
    found, _ = run_jstep(optimizer, BALL_MATRICES, BALL_STEPS, dtype=jnp.float64)
    assert_close(
        found, run_equation(rule, BALL_VALUES, BALL_MATRICES, BALL_STEPS), rtol=1e-6, atol=1e-9
    )


# A chain of blocks equals the optimizer: the same updates, slots and hyperparameters.

LR, WD, MU = table_schedule(RATE), table_schedule(DECAY), table_schedule(RISING)
CHAINS = {
    "adamw": (
        lambda: jstep.adamw(LR, MU, 0.99, 1e-6, WD, MASK),
        lambda: (jstep.scale_by_adam(MU, 0.99, 1e-6), jstep.add_weight_decay(WD, MASK)),
    ),
    "lion": (
        lambda: jstep.lion(LR, MU, 0.9, WD, MASK),
        lambda: (jstep.scale_by_lion(MU, 0.9), jstep.add_weight_decay(WD, MASK)),
    ),
    "lamb": (
        lambda: jstep.lamb(LR, 0.9, 0.99, 1e-6, WD, MASK),
        lambda: (
            jstep.scale_by_adam(0.9, 0.99, 1e-6),
            jstep.add_weight_decay(WD, MASK),
            jstep.scale_by_trust_ratio(),
        ),
    ),
    "sgd-nesterov": (
        lambda: jstep.sgd(LR, MU, use_nesterov=True, weight_decay=WD, weight_decay_mask=MASK),
        lambda: (jstep.add_weight_decay(WD, MASK), jstep.trace(MU, use_nesterov=True)),
    ),
}


@pytest.mark.thorough(except_for=["lion"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_blocks_equals_the_optimizer(name):
    make, blocks = CHAINS[name]
    named, chain = make(), jstep.chain(*blocks(), jstep.scale_by_learning_rate(LR))
    (found, state), (other, chain_state) = run_jstep(named), run_jstep(chain)
    assert_close(found, other, rtol=1e-6, atol=1e-6)
    assert state.slots.keys() == chain_state.slots.keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.slots,
        chain_state.slots,
    )
    have, want = chain.hyperparameters(3), named.hyperparameters(3)
    assert have.keys() == want.keys() - {"dampening"}
    for key, value in have.items():
        np.testing.assert_allclose(value, want[key], rtol=1e-6)


def test_scale_by_rms_and_orthogonalize():
    params = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    grads = {"w": jnp.array([[3.0, -1.0], [2.0, 2.0]])}
    by_rms = jstep.chain(jstep.scale_by_rms(0.75, 0.0), jstep.scale(-0.5))
    state = jstep.apply_gradients(jstep.TrainState.create(params, by_rms), grads, by_rms)
    np.testing.assert_allclose(state.params["w"], params["w"] - jnp.sign(grads["w"]), rtol=1e-6)
    assert by_rms.hyperparameters(0).keys() == {"decay", "epsilon", "factor"}
    orthogonal = jstep.chain(
        jstep.orthogonalize(scale=None, ns_steps=30, ns_coefficients=(1.5, -0.5, 0.0)),
        jstep.scale(-1.0),
    )
    state = jstep.apply_gradients(jstep.TrainState.create(params, orthogonal), grads, orthogonal)
    u, _, vt = np.linalg.svd(grads["w"])
    np.testing.assert_allclose(params["w"] - state.params["w"], u @ vt, rtol=1e-4, atol=1e-5)


# MADGRAD: its initial parameters, low precision and missing gradients.

HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "epsilon": 1e-6}


@pytest.mark.parametrize("copy", [True, False])
def test_initial_params_survive_donation(copy):
    optimizer = jstep.madgrad(0.05)
    params = jax.tree.map(jnp.float32, initial_params())
    state = jstep.TrainState.create(params, optimizer, copy=copy)
    step = jax.jit(
        lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0
    )
    for n in range(3):
        state = step(state, jax.tree.map(jnp.float32, gradients(n)))
    jax.tree.map(
        np.testing.assert_array_equal,
        state.slots["initial"],
        jax.tree.map(np.float32, initial_params()),
    )
    assert_close([state.params], run_equation(equations.madgrad, HYPER)[2:3])
