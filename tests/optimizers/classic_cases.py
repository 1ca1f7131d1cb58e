"""The classic optimizers, with every hyperparameter as a number and as a schedule, and the equations they follow."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reference

import jstep

EXACT = {"rtol": 1e-11, "atol": 1e-13}
# Schedules are tables, so that both sides read the same numbers.
FALLING = np.linspace(0.3, 0.05, 64)
RISING = np.linspace(0.5, 0.95, 64)


class Case(NamedTuple):
    make: Callable[..., jstep.Optimizer]
    rule: reference.Rule
    slots: dict[str, float]
    hyper: dict[str, Any]
    """All hyperparameters by name; arrays are schedules. Those not in `defaults` are passed by keyword."""
    static: Mapping[str, Any] = MappingProxyType({})
    defaults: tuple[str, ...] = ()


OF_FTRL = {
    "learning_rate": 0.3,
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
}
OF_ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
OF_RMSPROP = {"learning_rate": 0.1, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10}
OTHERS = {"learning_rate": 0.05, "decay": 0.7, "momentum": 0.6, "epsilon": 0.01}
SCHEDULED = {"learning_rate": FALLING, "decay": RISING, "momentum": RISING, "epsilon": FALLING}
RMS = {"rms": 1.0, "momentum": 0.0}


DESCENT = partial(Case, jstep.gradient_descent, reference.gradient_descent, {})
MOMENTUM = partial(Case, jstep.momentum, reference.momentum, {"momentum": 0.0})
NESTEROV = partial(Case, jstep.momentum, reference.nesterov, {"momentum": 0.0}, static={"use_nesterov": True})
ADAGRAD = partial(Case, jstep.adagrad, reference.adagrad)
ADAM = partial(Case, jstep.adam, reference.adam, {"m": 0.0, "v": 0.0})
RMSPROP = partial(Case, jstep.rmsprop, reference.rmsprop, RMS)
CENTERED = partial(Case, jstep.rmsprop, reference.rmsprop_centered, RMS | {"mg": 0.0}, static={"centered": True})


def ftrl_case(accum: float = 0.1, **changes: Any) -> Case:
    slots = {"accum": accum, "linear": 0.0}
    return Case(jstep.ftrl, reference.ftrl, slots, OF_FTRL | changes, {"initial_accumulator_value": accum})


CASES = {
    "gradient_descent-scheduled": DESCENT({"learning_rate": FALLING}),
    "momentum-scheduled": MOMENTUM({"learning_rate": FALLING, "momentum": RISING}),
    "nesterov-scheduled": NESTEROV({"learning_rate": FALLING, "momentum": RISING}),
    "adagrad-defaults": ADAGRAD({"accumulator": 0.1}, {"learning_rate": 0.2}),
    "adagrad": ADAGRAD({"accumulator": 0.7}, {"learning_rate": FALLING}, {"initial_accumulator_value": 0.7}),
    "adam-defaults": ADAM(OF_ADAM, defaults=tuple(OF_ADAM)),
    "adam": ADAM({"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.1}),
    "adam-no-averaging": ADAM(OF_ADAM | {"beta1": 0.0, "beta2": 0.0}),
    "adam-rate-scheduled": ADAM(OF_ADAM | {"learning_rate": FALLING}),
    "adam-all-scheduled": ADAM({"learning_rate": FALLING, "beta1": RISING, "beta2": RISING, "epsilon": FALLING}),
    "rmsprop-defaults": RMSPROP(OF_RMSPROP, defaults=("decay", "momentum", "epsilon")),
    "rmsprop": RMSPROP(OTHERS),
    "rmsprop-scheduled": RMSPROP(SCHEDULED),
    "rmsprop-centered": CENTERED(OTHERS),
    "rmsprop-centered-scheduled": CENTERED(SCHEDULED),
    "ftrl-defaults": Case(
        jstep.ftrl, reference.ftrl, {"accum": 0.1, "linear": 0.0}, OF_FTRL, defaults=tuple(OF_FTRL)[1:]
    ),
    "ftrl-power": ftrl_case(learning_rate_power=-0.8),
    "ftrl-fixed-rate": ftrl_case(learning_rate_power=0.0),
    "ftrl-accum-zero": ftrl_case(accum=0.0),
    "ftrl-l1": ftrl_case(l1_regularization_strength=0.9),
    "ftrl-everything": ftrl_case(
        accum=0.3,
        learning_rate=FALLING,
        learning_rate_power=-0.6,
        l1_regularization_strength=0.3,
        l2_regularization_strength=0.2,
        l2_shrinkage_regularization_strength=0.1,
        beta=0.5,
    ),
    "ftrl-everything-scheduled": ftrl_case(
        learning_rate=FALLING,
        learning_rate_power=-RISING,
        l1_regularization_strength=FALLING,
        l2_regularization_strength=RISING,
        l2_shrinkage_regularization_strength=FALLING,
        beta=RISING,
    ),
}


def table_schedule(table: np.ndarray) -> Callable[[Any], jax.Array]:
    return lambda step: jnp.asarray(table)[step]


def build(case: Case) -> jstep.Optimizer:
    given = {name: value for name, value in case.hyper.items() if name not in case.defaults}
    return case.make(
        **{name: table_schedule(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}, **case.static
    )
