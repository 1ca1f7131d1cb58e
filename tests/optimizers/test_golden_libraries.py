"""Trajectories compared with those of Optax, and in `dev/peers.sh` of torch and its libraries.

No figures are stored: a reviewer can check an equation (test_golden_equations.py) or the call of a
library, but not a table of numbers that one of them once gave.
"""

import functools

import jax
import jax.numpy as jnp
import library_references as references
import optax
import pytest
from against_optax import run_optax
from golden import (
    DECAY,
    DECAYED,
    RATE,
    STEPS,
    assert_close,
    gradients,
    initial_params,
    run_jstep,
    table_schedule,
)
from optax import contrib

import jstep

LR, WD, MASK = table_schedule(RATE), table_schedule(DECAY), list(DECAYED)
ADAM = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6}
OPTAX_ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-6}
DECAYING = {"weight_decay": WD, "weight_decay_mask": MASK}

# Those that equations.py does not have.
BY_OPTAX = {
    "radam": (lambda: jstep.radam(LR, **ADAM), lambda: optax.radam(LR, **OPTAX_ADAM)),
    "radam-early": (
        lambda: jstep.radam(LR, beta2=0.9, threshold=4.2),
        lambda: optax.radam(LR, b2=0.9, threshold=4.2),
    ),
    "prodigy-safeguard": (
        lambda: jstep.prodigy(LR, d0=1e-2, bias_correction=True, safeguard_warmup=True, beta3=0.9),
        lambda: contrib.prodigy(
            LR, estim_lr0=1e-2, safeguard_warmup=True, betas=(0.9, 0.999), beta3=0.9
        ),
    ),
    "adabelief": (
        lambda: jstep.adabelief(LR, 0.9, 0.99, 1e-6, 1e-8),
        lambda: optax.adabelief(LR, 0.9, 0.99, 1e-6, 1e-8),
    ),
    "yogi": (lambda: jstep.yogi(LR, 0.9, 0.99), lambda: optax.yogi(LR, 0.9, 0.99)),
    "novograd": (
        lambda: jstep.novograd(LR, weight_decay=0.1),
        lambda: optax.novograd(LR, weight_decay=0.1),
    ),
    "adopt": (lambda: jstep.adopt(LR, 0.9, 0.99), lambda: contrib.adopt(LR, 0.9, 0.99)),
}


@pytest.mark.thorough(except_for=["radam-early", "adopt", "prodigy-safeguard"])
@pytest.mark.parametrize("name", BY_OPTAX)
def test_matches_optax(name):
    optimizer, reference = BY_OPTAX[name]
    params, *grads = jax.tree.map(jnp.float32, [initial_params(), *map(gradients, range(STEPS))])
    assert_close(
        run_jstep(optimizer())[0], run_optax(reference(), grads, params), rtol=1e-4, atol=1e-5
    )


FREE = {"weight_lr_power": 2.0, "r": 0.5, "weight_decay": 0.1, "weight_decay_mask": MASK}
BY_LIBRARY = {
    # name in library_references.py: optimizer, tolerances besides those below
    "sgd": (lambda: jstep.sgd(LR, **DECAYING), {}),
    "sgd-momentum": (lambda: jstep.sgd(LR, 0.9, 0.3, **DECAYING), {}),
    "sgd-nesterov": (lambda: jstep.sgd(LR, 0.9, use_nesterov=True, **DECAYING), {}),
    "adamw": (lambda: jstep.adamw(LR, **ADAM, **DECAYING), {}),
    "amsgrad": (lambda: jstep.adamw(LR, **ADAM, **DECAYING, amsgrad=True), {}),
    "nadam": (lambda: jstep.nadam(LR, **ADAM, momentum_decay=0.004, **DECAYING), {}),
    "adamax": (lambda: jstep.adamax(LR, **ADAM), {}),
    "rprop": (lambda: jstep.rprop(0.05), {}),
    # torch multiplies in bfloat16, so that each step is off by one or two percent.
    "muon": (lambda: jstep.muon(LR, **DECAYING), {"rtol": 0.0, "atol": 3e-2 * float(RATE.sum())}),
    "prodigy": (lambda: jstep.prodigy(0.7, d0=1e-2, growth_rate=1.5, weight_decay=0.1), {}),
    "prodigy-guard": (
        lambda: jstep.prodigy(
            0.7, d0=1e-2, growth_rate=1.5, safeguard_warmup=True, weight_decay=0.1
        ),
        {},
    ),
    "soap": (
        lambda: jstep.soap(
            LR, weight_decay=0.1, precondition_frequency=3, max_precondition_dim=10000
        ),
        {"rtol": 1e-3, "atol": 1e-4},
    ),
    "soap-wide": (
        lambda: jstep.soap(LR, weight_decay=0.1, precondition_frequency=3, max_precondition_dim=4),
        {"rtol": 1e-3, "atol": 1e-4},
    ),
    "adan": (lambda: jstep.adan(LR, weight_decay=0.1), {"rtol": 1e-3, "atol": 1e-4}),
}
for _warmup, _power in ((0, 2.0), (0, 1.0), (4, 2.0), (4, 1.0)):
    _rate, _free = jstep.linear_warmup(0.1, _warmup), FREE | {"weight_lr_power": _power}
    BY_LIBRARY |= {
        f"free-adamw-{_warmup}-{_power}": (
            functools.partial(jstep.schedule_free_adamw, _rate, 0.9, 0.99, **_free),
            {},
        ),
        f"free-sgd-{_warmup}-{_power}": (
            functools.partial(jstep.schedule_free_sgd, _rate, 0.9, **_free),
            {},
        ),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", BY_LIBRARY)
def test_matches_the_library(name):
    for library in ("torch", "schedulefree", "pytorch_optimizer"):
        pytest.importorskip(library)
    make, tolerances = BY_LIBRARY[name]
    want = references.computed(name)
    shapes = {leaf: values.shape for leaf, values in want[0].items()}
    trajectory, state = run_jstep(make(), shapes)
    found = [trajectory[n] for n in references.COMPARED]
    if name.startswith("free-"):
        found.append(jstep.schedule_free_params(state))
    assert_close(found, want, **{"rtol": 1e-4, "atol": 1e-5, **tolerances})


def test_each_reference_is_compared():
    assert BY_LIBRARY.keys() == references.REFERENCES.keys()
