"""The programs of clipping: what is compiled for each leaf, what moves between devices, and the bits they compute."""

import json
import re

import golden_clips
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep

OPTIMIZER = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(0.1))


def update(state, grads):
    return jstep.apply_gradients(state, grads, OPTIMIZER)


@pytest.mark.parametrize(
    ("names", "exponents"),
    [(["global 1"], [-60, 50]), pytest.param(None, golden_clips.EXPONENTS, marks=pytest.mark.thorough)],
    ids=["few", "all"],
)
def test_values_and_norms_have_the_recorded_bits(names, exponents):
    known = json.loads(golden_clips.PATH.read_text())
    found = golden_clips.recorded(names, exponents)
    # Recorded with XLA's default flags; with those of the tests complex numbers near 1e-36 round differently.
    found = {case: bits for case, bits in found.items() if not case.endswith(" mixed global 1e-36")}
    assert len(found) > 12
    assert found == {case: known[case] for case in found}


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(64, 64), (4096,), (512, 300)])
def test_norms_of_bfloat16_have_the_bits_of_the_plain_sum(shape):
    """XLA adds converted numbers in another order behind a product."""
    for seed in range(3):
        x = (1e3 * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)
        plain = jax.jit(lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)))))(x)
        assert jax.jit(lambda x: jstep.clip_by_global_norm({"x": x}, 1.0)[1])(x) == plain


def test_each_leaf_is_squared_and_summed_once():
    params = {f"{name}{i}": jnp.ones(shape) for name, shape in (("w", (8, 8)), ("b", (8,))) for i in range(10)}
    state = jstep.TrainState.create(params, OPTIMIZER)
    assert jax.jit(update).lower(state, params).as_text().count("stablehlo.reduce(") <= len(params) + 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_leaves_are_not_gathered_and_their_sums_are_added_together(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))

    def moved(count):
        specs = {"w": PartitionSpec("data", "model"), "v": PartitionSpec("model"), "r": PartitionSpec()}
        params = {
            f"{name}{i}": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, spec))
            for name, spec in specs.items()
            for i in range(count)
        }
        state = jstep.TrainState.create(params, OPTIMIZER)
        program = jax.jit(update).lower(state, params).compile().as_text()
        return sorted(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program))

    assert moved(1) == moved(3)
    assert set(moved(3)) == {"all-reduce"}
