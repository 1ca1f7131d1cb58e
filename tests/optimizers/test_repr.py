"""The `repr` of an optimizer is what one would type."""

import copy
import pickle
import re

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_table import TABLE

import jstep

NAMES = {name: getattr(jstep, name) for name in jstep.__all__}


def a_loss_of(path: str, leaf: object) -> str:
    return "a"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: jstep.chain(
                jstep.clip_gradients(by_global_norm=1.0),
                jstep.adamw(jstep.warmup_cosine_decay(1e-3, 10, 100)),
            ),
            "chain(clip_gradients(by_global_norm=1.0), "
            "adamw(learning_rate=warmup_cosine_decay(peak=0.001, "
            "warmup_steps=10, decay_steps=100)))",
        ),
        (lambda: jstep.adam(beta1=0.8, learning_rate=0.1), "adam(beta1=0.8, learning_rate=0.1)"),
        (
            lambda: jstep.scope(jstep.adam(jstep.held("lr", 0.1)), "x"),
            "scope(adam(learning_rate=held('lr', 0.1)), 'x')",
        ),
        (
            lambda: jstep.partition({"a": jstep.adam(1e-3), "b": jstep.sgd(0.1)}, a_loss_of),
            "partition({'a': adam(learning_rate=0.001), 'b': sgd(learning_rate=0.1)}, a_loss_of)",
        ),
        (
            lambda: jstep.update_every(
                jstep.skip_nonfinite(jstep.adam(np.float32(0.1))), 2, accumulate=True
            ),
            f"update_every(skip_nonfinite(adam(learning_rate={np.float32(0.1)!r})), "
            "2, accumulate=True)",
        ),
        (
            lambda: jstep.with_moving_average(
                jstep.adam(), jstep.ExponentialMovingAverage(0.99), ["w*"]
            ),
            "with_moving_average(adam(), ExponentialMovingAverage(decay=0.99, ",
        ),
        (lambda: jstep.adam(jnp.float32(0.1)), "adam(learning_rate=float32[])"),
        (
            lambda: jstep.from_optax(optax.adam(1e-3), {"learning_rate": 1e-3}),
            "from_optax(GradientTransformation",
        ),
        (lambda: jstep.adam(optax.cosine_decay_schedule(1.0, 9)), "adam(learning_rate=schedule)"),
        (
            lambda: jstep.add_noise(0.1, 0.5, jax.random.key(0)),
            "add_noise(eta=0.1, gamma=0.5, key=key<fry>[])",
        ),
    ],
)
def test_reprs(make, text: str) -> None:
    assert repr(make()).startswith(text)


def test_every_function_that_makes_an_optimizer_or_a_schedule_is_remembered() -> None:
    makers = [name for name, fn in NAMES.items() if _returns(fn) in ("Optimizer", "Schedule")]
    assert {"adam", "chain", "from_optax", "leafwise", "cosine_decay", "times"} <= set(makers)
    assert not [name for name in makers if not hasattr(NAMES[name], "__wrapped__")]


def test_every_optimizer_has_an_entry() -> None:
    """Tests of their own have functions that wrap others or need a rule, and `rprop`, whose rate is
    a constant."""
    makers = {name for name, fn in NAMES.items() if _returns(fn) == "Optimizer"}
    used = {
        word for entry in TABLE.values() for word in re.findall(r"\w+", repr(entry.make(0.125)))
    }
    others = {"compact", "from_direction", "leafwise", "rprop", "scale_by_trust_ratio"}
    assert makers - used == others, "add one line for each to tests/optimizer_entries/modern.py"


def _returns(function: object) -> str:
    found = getattr(function, "__annotations__", {}).get("return", "")
    return found if isinstance(found, str) else getattr(found, "__name__", "")


def test_the_repr_of_every_optimizer_can_be_typed() -> None:
    for entry in TABLE.values():
        optimizer = entry.make(0.125)
        text = repr(optimizer)
        assert "0.125" in text
        assert " at 0x" not in text
        assert repr(copy.deepcopy(optimizer)) == text
        if not {"<", "…"} & set(text) and _names_in(text) <= NAMES.keys():
            assert repr(eval(text, dict(NAMES))) == text


def _names_in(text: str) -> set[str]:
    return set(compile(text, "repr", "eval").co_names)


def test_optimizers_compare_and_copy_as_before() -> None:
    optimizer, other = jstep.adam(0.1), jstep.adam(0.1)
    assert optimizer == copy.deepcopy(optimizer)
    assert hash(optimizer) == hash(copy.deepcopy(optimizer))
    assert optimizer != other  # functions of their own
    assert (
        repr(cloudpickle.loads(cloudpickle.dumps(jstep.chain(optimizer))))
        == "chain(adam(learning_rate=0.1))"
    )


WITH_LAMBDAS = {"from_optax", "average_of_some", "frozen", "stateless"}
"""Entries whose arguments only cloudpickle can pickle."""


def test_optimizers_are_pickled_as_the_calls_that_made_them() -> None:
    for name, entry in TABLE.items():
        optimizer = entry.make(0.1)
        module = cloudpickle if name in WITH_LAMBDAS else pickle
        copied = pickle.loads(module.dumps(optimizer))
        assert repr(copied) == repr(optimizer)
        assert copied != optimizer
    optimizer = jstep.partition(
        {"a": jstep.adam(jstep.linear_warmup(0.1, 3))}, {"w": "a", "b": None}
    )
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    states = []
    for made in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        step = jstep.minimize(loss_of_w, made, rng=jax.random.key(0))
        for one in (
            step,
            pickle.loads(pickle.dumps(step)),
            pickle.loads(pickle.dumps(jstep.scan_steps(step))),
        ):
            states.append(
                one(
                    jstep.TrainState.create(params, made),
                    *[np.ones(1)] * (one.__name__ == "train_steps"),
                )[0]
            )
        pure = pickle.loads(pickle.dumps(step.__wrapped__))
        assert (repr(pure), repr(one.donate)) == (repr(step.__wrapped__), "True")
    assert all(state == states[0] for state in states)
    with pytest.raises(
        TypeError,
        match=r"adam\(learning_rate=0.1\): cannot be pickled, as its functions were replaced",
    ):
        pickle.dumps(jstep.adam(0.1)._replace(update=loss_of_w))
    custom = jstep.Optimizer(a_loss_of, loss_of_w, a_loss_of)
    assert pickle.loads(pickle.dumps(custom)) == custom


def loss_of_w(params, x=1.0, rng=None):
    return jnp.sum(params["w"] ** 2) * x


def test_schedules_are_pickled_as_the_calls_that_made_them() -> None:
    schedules = [0.1, jstep.exponential_decay(0.1, 2, 0.5)]
    joined = jstep.join(schedules, [3])
    schedules.append(1.0)  # the call has what was passed
    for schedule in (joined, jstep.times(2.0, jstep.constant(jnp.float32(0.5)))):
        copied = pickle.loads(pickle.dumps(schedule))
        assert [float(copied(n)) for n in range(6)] == [float(schedule(n)) for n in range(6)]
        assert repr(copied) == repr(schedule)


@pytest.mark.thorough
def test_a_schedule_stays_a_function() -> None:
    schedule = jstep.cosine_decay(1.0, 10)
    assert jax.jit(schedule)(5) == schedule(5) == jax.vmap(schedule)(jnp.arange(6))[5]
    assert {schedule: 1}[schedule] == 1
    assert cloudpickle.loads(cloudpickle.dumps(schedule))(5) == schedule(5)


def test_a_repr_reads_no_array_of_a_device() -> None:
    optimizer = jstep.adam(jnp.float32(0.1))
    with jax.transfer_guard("disallow"):
        assert repr(optimizer) == "adam(learning_rate=float32[])"
