"""Parameters that the label None of `partition` freezes: not differentiated, and in no norm, guard
or noise scale."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

KEY = jax.random.key(5)
PARAMS = {
    "head": jnp.arange(1.0, 9.0).reshape(8, 1) / 8,
    "head2": jnp.full((8, 8), 0.25),
    "n": jnp.int32(3),
}
X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
EMA = jstep.ExponentialMovingAverage(0.5)

Wrap = Callable[[jstep.Optimizer], jstep.Optimizer]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Its gradient with respect to `head2` is large, and so would be every norm that includes
    it."""
    error = jnp.tanh(1e3 * (x @ params["head2"])) @ params["head"] - 1.0
    return jnp.mean(error**2) + 1e3 * jnp.sum(params["head2"] ** 2)


def head_alone(path: str, leaf: Any) -> str | None:
    return "head" if path == "head" else None  # "head" is also a prefix of "head2"


def only_head(optimizer: jstep.Optimizer) -> jstep.Optimizer:
    return jstep.partition({"head": optimizer}, head_alone)


def clipped(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.clip(p, -0.9, 0.9) if p.dtype == jnp.float32 else p, params)


WRAPPERS: dict[str, Wrap] = {
    "clip_by_global_norm": lambda one: jstep.chain(jstep.clip_gradients(by_global_norm=0.5), one),
    "adam": lambda one: jstep.chain(jstep.scope(jstep.scale_by_adam(), "outer"), one),
    "adam_of_masters": lambda one: jstep.master_weights(
        jstep.chain(
            jstep.chain(jstep.scope(jstep.scale_by_adam(), "outer"), jstep.add_weight_decay(0.1)),
            one,
        )
    ),
    "normalize": lambda one: jstep.chain(jstep.normalize_gradients(), one),
    "decay_after": lambda one: jstep.chain(one, jstep.decay_weights(0.1)),
    "add_noise": lambda one: jstep.chain(jstep.add_noise(0.01, 0.5, KEY), one),
    "scope": lambda one: jstep.scope(
        jstep.chain(jstep.clip_gradients(by_global_norm=0.5), one), "head2"
    ),
    "skip_nonfinite": jstep.skip_nonfinite,
    "dynamic_loss_scale": lambda one: jstep.dynamic_loss_scale(
        jstep.chain(jstep.normalize_gradients(), one)
    ),
    "master_weights": lambda one: jstep.master_weights(
        jstep.chain(jstep.normalize_gradients(), one)
    ),
    "lookahead": lambda one: jstep.lookahead(
        jstep.chain(jstep.normalize_gradients(), one), sync_period=2
    ),
    "average": lambda one: jstep.with_moving_average(
        jstep.chain(jstep.normalize_gradients(), one), EMA
    ),
    "cautious": lambda one: jstep.cautious(jstep.chain(jstep.normalize_gradients(), one)),
    "projection": lambda one: jstep.with_projection(
        jstep.chain(jstep.normalize_gradients(), one), clipped
    ),
    "accumulating": lambda one: jstep.update_every(
        jstep.chain(jstep.normalize_gradients(), one), 2, accumulate=True
    ),
    "label": lambda one: jstep.partition(
        {"a": jstep.chain(jstep.normalize_gradients(), one), "a/b": jstep.sgd(1.0)},
        lambda path, leaf: "a/b" if path == "n" else "a",
    ),
    "jit": lambda one: one._replace(init=jax.jit(one.init)),
}


def train(
    optimizer: jstep.Optimizer, steps: int = 3, **options: Any
) -> tuple[jstep.TrainState, dict[str, Any]]:
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm"), **options)
    state = jstep.TrainState.create(PARAMS, optimizer)
    for _ in range(steps):
        state, metrics = step(state, X)
    return state, {name: float(metrics[name]) for name in ("loss", "grad_norm", "update_norm")}


def assert_same_run(wrap: Wrap, inner: jstep.Optimizer, **options: Any) -> None:
    """A partition that freezes the rest trains as `var_list` does."""
    state, metrics = train(wrap(only_head(inner)), **options)
    expected, of_var_list = train(wrap(inner), var_list="head", **options)
    np.testing.assert_array_equal(state.params["head"], expected.params["head"])
    np.testing.assert_array_equal(state.params["head2"], PARAMS["head2"])
    assert not [
        name
        for name, slot in state.slots.items()
        if isinstance(slot, dict) and slot["head2"] is not None
    ]
    assert metrics == of_var_list
    assert np.any(state.params["head"] != PARAMS["head"])


@pytest.mark.thorough(except_for=["adam_of_masters"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_frozen_parameters_count_in_no_wrapper_and_have_no_slots(name: str) -> None:
    assert_same_run(WRAPPERS[name], jstep.adam(0.1))


def moments(params: Any, step: Any = 0) -> dict[str, Any]:
    return {"moments": jax.tree.map(jnp.zeros_like, {**params, "n": None})}


@pytest.mark.parametrize("mesh", [False, True])
def test_slots_of_frozen_parameters_that_a_custom_optimizer_keeps_are_one_line(
    caplog: pytest.LogCaptureFixture, mesh: bool
) -> None:
    custom = jstep.Optimizer(
        moments, lambda grads, slots, params, step: (grads, slots), lambda step: {}
    )
    inside = jstep.partition({"head": jstep.chain(custom, jstep.sgd(0.1))}, head_alone)
    for optimizer in (
        jstep.chain(jstep.scope(custom, "x"), jstep.scale_by_adam(), only_head(jstep.sgd(0.1))),
        inside,
    ):
        where = {"mesh": jax.make_mesh((8,), ("data",))} if mesh else {}
        state = jstep.TrainState.create(PARAMS, optimizer, **where)
        jstep.minimize(loss_fn, optimizer)(state, X)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("optimizers[0]: its slots of frozen parameters (of no label) take 256 B")


@pytest.mark.thorough(except_for=["microbatches"])
@pytest.mark.parametrize(
    "options",
    [
        {"sharpness": 0.5},
        {"num_microbatches": 4},
        {"lanes": 4},
        {"jit": False},
    ],
    ids=["sharpness", "microbatches", "lanes", "no_jit"],
)
def test_frozen_parameters_are_as_those_that_var_list_leaves_out(options: dict[str, Any]) -> None:
    assert_same_run(WRAPPERS["clip_by_global_norm"], jstep.adam(0.1), **options)


@pytest.mark.thorough
def test_the_noise_scale_is_that_of_what_is_trained() -> None:
    found = []
    for optimizer, var_list in ((only_head(jstep.sgd(0.1)), None), (jstep.sgd(0.1), "head")):
        noisy = jstep.with_noise_scale(optimizer)
        step = jstep.minimize(
            loss_fn, noisy, var_list=var_list, num_microbatches=4, metrics=("noise_scale",)
        )
        _, metrics = step(jstep.TrainState.create(PARAMS, noisy), X)
        found.append((float(metrics["gradient_square"]), float(metrics["gradient_noise"])))
    assert found[0] == found[1]


def test_a_frozen_parameter_is_not_differentiated() -> None:
    traced = []

    @jax.custom_vjp
    def watched(leaf: jax.Array) -> jax.Array:
        return leaf

    watched.defvjp(lambda leaf: (leaf, None), lambda _, gradient: traced.append(1) or (gradient,))
    optimizer = jstep.skip_nonfinite(only_head(jstep.sgd(0.1)))
    step = jstep.minimize(lambda p, x: loss_fn({**p, "head2": watched(p["head2"])}, x), optimizer)
    step(jstep.TrainState.create(PARAMS, optimizer), X)
    assert not traced


@pytest.mark.thorough(except_for=["chain"])
@pytest.mark.parametrize("guard", [jstep.skip_nonfinite, jstep.chain])
def test_apply_gradients_ignores_gradients_of_frozen_parameters(guard: Wrap) -> None:
    optimizer = guard(
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), only_head(jstep.sgd(1.0)))
    )
    state = jstep.TrainState.create(PARAMS, optimizer)
    grads = {"head": jnp.ones((8, 1)), "head2": jnp.full((8, 8), np.nan), "n": None}
    after = jstep.apply_gradients(state, grads, optimizer, scaled=True)
    expected = jstep.apply_gradients(state, {**grads, "head2": None}, optimizer, scaled=True)
    assert np.any(after.params["head"] != PARAMS["head"])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(after), jax.tree.leaves(expected))


def test_a_context_has_no_gradients_of_frozen_parameters() -> None:
    seen = []

    def update(grads: Any, slots: Any, params: Any, step: Any, context: jstep.Context) -> Any:
        seen.append(context.value_and_grad(params)[1])
        return grads, slots

    look = jstep.Optimizer(lambda params, step=0: {}, update, lambda step: {}, takes_context=True)
    optimizer = jstep.chain(look, only_head(jstep.sgd(0.1)))
    state = jstep.TrainState.create(PARAMS, optimizer)
    jstep.minimize(loss_fn, optimizer)(state, X)
    grads = {"head": jnp.ones((8, 1)), "head2": jnp.ones((8, 8)), "n": None}
    context = jstep.Context(value_and_grad=lambda params: (0.0, grads))
    state = jstep.TrainState.create(PARAMS, optimizer)
    jstep.apply_gradients(state, grads, optimizer, context=context, scaled=True)
    assert [one["head2"] for one in seen] == [None, None]
    assert all(one["head"] is not None for one in seen)
