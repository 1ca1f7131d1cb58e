"""Integers of aux, summed over microbatches and lanes, saturate at the bounds of their dtype, and do not wrap."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.differentiate.integer_sums import sum_integers


def clipped(numbers: Any, dtype: Any) -> int:
    info = np.iinfo(dtype)
    return min(max(sum(int(x) for x in numbers), int(info.min)), int(info.max))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_sums_are_exact_or_at_a_bound(dtype: Any) -> None:
    info, random = np.iinfo(dtype), np.random.default_rng(0)
    special = np.array([info.min, info.max, 0, 1, info.max // 2, info.min // 2], dtype)
    for _ in range(50):
        size = int(random.integers(1, 9))
        numbers = (
            random.choice(special, (size, 3))
            if random.random() < 0.5
            else random.integers(info.min, info.max, (size, 3), dtype, endpoint=True)
        )
        found = sum_integers(jnp.asarray(numbers))
        assert found.dtype == dtype
        assert found.tolist() == [clipped(column, dtype) for column in numbers.T]


@pytest.mark.thorough
def test_sums_of_wide_integers(x64: None) -> None:
    numbers = np.array([[2**62, -(2**62)], [2**62, -(2**62)], [2**62, -(2**62)], [5, 7]], np.int64)
    assert sum_integers(jnp.asarray(numbers)).tolist() == [2**63 - 1, -(2**63)]
    assert sum_integers(jnp.asarray(numbers[[0, 3]])).tolist() == [2**62 + 5, -(2**62) + 7]


OPTIMIZER = jstep.sgd(0.1)


def step_of(value: Any, dtype: Any = jnp.int32, **options: Any) -> Any:
    """A step whose aux has an integer for each part of a batch."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        zero = jnp.zeros((), dtype) * x.sum().astype(dtype)
        return jnp.mean(params["w"] * x), {"count": jnp.asarray(value, dtype) + zero, "seen": x.sum() > -1}

    return jstep.minimize(loss_fn, OPTIMIZER, has_aux=True, **options)


def make() -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"lanes": 4}, {"lanes": 2, "num_microbatches": 2}])
@pytest.mark.parametrize(
    ("value", "dtype"), [(2_000_000_000, jnp.int32), (-2_000_000_000, jnp.int32), (2**31, jnp.uint32)]
)
def test_a_count_that_does_not_fit_is_at_the_bound(options: Any, value: int, dtype: Any) -> None:
    metrics = step_of(value, dtype, **options)(make(), jnp.ones(8))[1]
    assert metrics["count"].dtype == dtype
    assert int(metrics["count"]) == clipped([value] * 4, dtype)
    assert int(metrics["seen"]) == 4
    assert int(step_of(1000, dtype, **options)(make(), jnp.ones(8))[1]["count"]) == 4000


def test_lanes_on_several_devices_saturate_alike() -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    state = jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER, mesh=mesh)
    step = step_of(2_000_000_000, lanes=4)
    assert int(step(state, jstep.shard_batch(np.ones(8, np.float32), mesh))[1]["count"]) == 2**31 - 1
