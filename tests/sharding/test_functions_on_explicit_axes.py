"""Functions of trees on Explicit axes: what they return is sharded like what they were given."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

SPECS = {"a": P("data", None), "b": P(None, "data"), "c": P(None, None)}
EMA = jstep.ExponentialMovingAverage(0.5, num_updates=True)
DEBIASED = jstep.ExponentialMovingAverage(0.5, zero_debias=True)


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((4,), ("data",))  # Explicit axes


@pytest.fixture
def params(mesh: Any) -> Any:
    def placed(spec: P) -> jax.Array:
        return jax.device_put(jnp.full((8, 8), 2.0, jnp.float32), NamedSharding(mesh, spec))

    return {name: placed(spec) for name, spec in SPECS.items()}


def specs(tree: Any) -> Any:
    """Return the specs with one entry for each dimension, as JAX writes those of a program."""
    return jax.tree.map(lambda leaf: P(*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))), tree)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "clip_by_value": lambda tree: jstep.clip_by_value(tree, -1, 1),
    "clip_by_norm": lambda tree: jstep.clip_by_norm(clip_norm=1.0, t=tree),
    "clip_by_average_norm": lambda tree: jstep.clip_by_average_norm(clip_norm=0.1, t=tree),
    "clip_by_global_norm": lambda tree: jstep.clip_by_global_norm(clip_norm=1.0, tree=tree)[0],
    "apply_updates": lambda tree: jstep.apply_updates(updates=tree, params=tree),
    "init": lambda tree: EMA.init(tree),
    "init_from_zeros": lambda tree: DEBIASED.init(params=tree),
    "apply": lambda tree: EMA.apply(tree, tree, 3),
    "apply_to_averages_of_the_host": lambda tree: EMA.apply(jax.device_get(tree), tree, 3),
    "apply_to_averages_elsewhere": lambda tree: EMA.apply(jax.tree.map(jnp.asarray, jax.device_get(tree)), tree, 3),
    "apply_by_names": lambda tree: DEBIASED.apply(num_updates=3, params=tree, averages=tree),
    "apply_updates_of_the_host": lambda tree: jstep.apply_updates(tree, jax.device_get(tree)),
}


@pytest.mark.thorough(except_for=["clip_by_global_norm", "apply_by_names"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_sharded_like_the_tree(name: str, params: Any) -> None:
    assert specs(FUNCTIONS[name](params)) == SPECS


def test_a_path_of_a_tree_is_not_one_of_its_result(params: Any) -> None:
    """The clipped tree is the first of two results, whose paths are those of other leaves of this tree."""
    tree = ((params["a"], params["b"]), params["c"])
    assert specs(jstep.clip_by_global_norm(tree, 1.0)[0]) == ((SPECS["a"], SPECS["b"]), SPECS["c"])
    assert specs(jstep.clip_by_value(tree, -1, 1)) == ((SPECS["a"], SPECS["b"]), SPECS["c"])


def test_averages_keep_their_own_sharding(params: Any) -> None:
    moved = {"a": params["b"], "b": params["a"], "c": params["c"]}
    assert specs(EMA.apply(moved, params, 3)) == specs(moved)
