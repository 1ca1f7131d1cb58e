"""`minimize(metrics=…)` with functions of gradients, updates and parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
PARAMS = {"a": {"w": jnp.full((4, 8), 0.5), "b": jnp.ones(8)}, "still": jnp.ones(3), "n": jnp.array(2)}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["a"]["w"] + params["a"]["b"][None]) ** 2)


def norms(gradients: Any, updates: Any, params: Any) -> dict[str, jax.Array]:
    assert gradients["still"] is None
    assert gradients["n"] is None
    assert updates["still"] is None
    trees = {"grad": gradients, "update": updates, "new": {"a": params["a"]}}
    return {f"{what}/{k}": v for what, tree in trees.items() for k, v in jstep.layer_norms(tree).items()}


def product(gradients: Any, updates: Any, params: Any) -> dict[str, jax.Array]:
    """It combines trees that may be sharded in different ways."""
    return {"product": jnp.sum(gradients["a"]["w"] * updates["a"]["w"] * params["a"]["w"])}


def run(optimizer: Any, steps: int = 2, state: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    state = jstep.TrainState.create(PARAMS, optimizer) if state is None else state
    step = jstep.minimize(loss_fn, optimizer, **kwargs)
    for _ in range(steps):
        state, metrics = step(state, X)
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    return state, metrics


OPTIMIZERS: dict[str, Any] = {
    "clipped": lambda: jstep.chain(jstep.clip_gradients(by_global_norm=0.01), jstep.adam(0.1)),
    "scaled": lambda: jstep.dynamic_loss_scale(jstep.adam(0.1), initial=8.0),
    "guarded": lambda: jstep.skip_nonfinite(jstep.momentum(0.1, 0.9)),
    "accumulated": lambda: jstep.update_every(2, jstep.adam(0.1), accumulate=True),
    "projected": lambda: jstep.with_projection(jstep.adam(0.1), lambda p: jax.tree.map(lambda x: x * 1, p)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_functions_see_raw_gradients_updates_and_new_params(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    state, metrics = run(optimizer, metrics=["grad_norm", "update_norm", norms, product])
    assert state == run(optimizer)[0]
    np.testing.assert_allclose(metrics["grad/a"], metrics["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(metrics["update/a"], metrics["update_norm"], rtol=1e-6)
    np.testing.assert_allclose(metrics["new/a"], jstep.global_norm(state.params["a"]), rtol=1e-6)
    before, _ = run(optimizer, 1)
    np.testing.assert_allclose(
        metrics["grad/a"], jstep.global_norm(jax.grad(loss_fn, allow_int=True)(before.params, X)["a"]), rtol=1e-5
    )
    assert {metrics[key].shape for key in ("grad/a", "update/a", "new/a", "product")} == {()}


FORMS: dict[str, dict[str, Any]] = {
    "microbatches": {"num_microbatches": 4},
    "lanes": {"lanes": 4},
    "uncompiled": {"jit": False},
}


@pytest.mark.thorough(except_for=["microbatches"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_step(form: str) -> None:
    optimizer = jstep.adam(0.1)
    _, want = run(optimizer, metrics=[norms, product])
    step = jstep.minimize(loss_fn, optimizer, metrics=[norms, product], **FORMS[form])
    state = jstep.TrainState.create(PARAMS, optimizer)
    for _ in range(2):
        state, metrics = step(state, X)
    for key in ("grad/a", "update/a", "new/a", "product"):
        np.testing.assert_allclose(metrics[key], want[key], rtol=1e-4)


def test_a_skipped_update_is_zero_and_a_frozen_leaf_is_none() -> None:
    guarded = jstep.skip_nonfinite(jstep.gradient_descent(0.5))
    optimizer = jstep.partition({"a": guarded}, lambda path, leaf: "a" if path == "a" else None)
    found: list[Any] = []

    def look(gradients: Any, updates: Any, params: Any) -> dict[str, Any]:
        found.append((gradients["b"], updates["b"]))
        return {"u": updates["a"], "p": params["a"], "g": gradients["a"]}

    step = jstep.minimize(lambda p: jnp.log(p["a"]) + p["b"], optimizer, metrics={look})
    _, metrics = step(jstep.TrainState.create({"a": 0.0, "b": 1.0}, optimizer))
    assert found == [(None, None)]
    assert (float(metrics["u"]), float(metrics["p"]), float(metrics["g"])) == (0.0, 0.0, float("inf"))
    assert float(metrics["a/skipped"]) == 1.0


class Refusal(Exception):  # noqa: N818
    pass


def test_errors_of_a_function_stay_and_name_it() -> None:
    def refuse(gradients: Any, updates: Any, params: Any) -> Any:
        raise Refusal("no")

    def look(gradients: Any, updates: Any, params: Any) -> Any:
        return {"big": 1.0 if jstep.global_norm(updates) > 1 else 0.0}

    for fn, kind in ((refuse, Refusal), (look, jax.errors.TracerBoolConversionError)):
        with pytest.raises(kind) as caught:
            run(jstep.gradient_descent(0.5), metrics=["grad_norm", fn])
        assert sum(f"metrics[1]={fn.__name__}" in line for line in caught.value.__notes__) == 1
