"""Integers that 32 bits cannot hold, while 64-bit types are off: errors in all places where they
reach a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.sgd(0.1)
WIDE = np.array([[3, -7], [2**33 + 5, -(2**40)]])


def loss(params, batch):
    return jnp.sum(params["a"]), {"ids": batch["ids"]}


STEP = jstep.minimize(loss, OPTIMIZER, has_aux=True)


def state(params=None, **options):
    return jstep.TrainState.create(
        {"a": jnp.ones(2)} if params is None else params, OPTIMIZER, **options
    )


def trained(batches, **options):
    return jstep.train(STEP, state(), batches, 4, progress=False, log_steps=None, **options)


def refused(value=2**33 + 5, path="the leaf at 'ids'", dtype="int32"):
    return pytest.raises(
        OverflowError, match=f"{path} must hold integers that fit {dtype} while .*, got {value};"
    )


@pytest.mark.parametrize(
    "train",
    [
        lambda of: trained(
            jstep.batches({"ids": np.concatenate([batch["ids"] for batch in of])}, 2, shuffle=False)
        ),
        lambda of: trained(of.__getitem__),
        lambda of: trained(of.__getitem__, steps_per_call=2),
        lambda of: trained(jstep.from_state(lambda step, state: of[step])),
        lambda of: trained(iter(of)),
    ],
    ids=["batches", "function", "calls of two steps", "from_state", "loader"],
)
def test_batches_of_a_run(train):
    with refused():
        train([{"ids": ids} for ids in (WIDE[:1].repeat(2, 0), WIDE[:1].repeat(2, 0), WIDE, WIDE)])


def test_batches_moved_by_hand():
    mesh = jax.make_mesh((1,), ("data",))
    with refused():
        next(jstep.prefetch_to_device([{"ids": WIDE}]))
    with refused():
        jstep.shard_batch({"ids": WIDE}, mesh)


def test_evaluators():
    evaluate = jstep.evaluator(
        lambda params, batch: {"id": jnp.max(batch["ids"]).astype(jnp.float32)},
        [{"ids": WIDE[:1]}, {"ids": WIDE}],
    )
    with refused():
        evaluate(state())


@pytest.mark.parametrize("step", [STEP, jstep.minimize(loss, OPTIMIZER, has_aux=True, jit=False)])
def test_calls_of_a_step(step):
    for batch in (
        {"ids": WIDE},
        {"other": np.ones(2), "ids": WIDE.astype(">i8")},
        {"ids": 2**33 + 5},
    ):
        with refused():
            step(state(), batch)
    with refused(dtype="uint32"):
        step(state(), {"ids": np.uint64(2**33 + 5)})
    with refused():
        jstep.scan_steps(step)(state(), {"ids": WIDE})


def test_state_made_by_hand():
    with refused(path="state: the leaf at 'slots/model_state/ids'"):
        STEP(state().replace(model_state={"ids": WIDE}), {"ids": WIDE[:1]})


@pytest.mark.parametrize("mesh", [None, "Auto", "Explicit"])
def test_create(mesh):
    mesh = mesh and jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType[mesh],))
    params = {"a": np.ones(2), "ids": WIDE}
    for given in (params, lambda: params):
        with refused(path="params: the leaf at 'ids'"):
            state(given, mesh=mesh)
    with refused(path="model_state: the leaf at 'table/ids'"):
        state(model_state={"table": {"ids": WIDE}}, mesh=mesh)
    with refused(path="model_state: the leaf at 'seen'"):
        state(model_state={"seen": 2**33 + 5}, mesh=mesh)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([2**31 - 1, -(2**31)]),
        np.array([2**32 - 1], np.uint64),
        np.zeros((0, 2), np.int64),
        np.int64(7),
        True,
    ],
)
def test_integers_that_fit(ids):
    _, metrics = STEP(state(), {"ids": ids})
    assert np.array_equal(metrics["ids"], ids)
    jstep.train(STEP, state(), lambda step: {"ids": ids}, 2, progress=False)


@pytest.mark.thorough
def test_64_bit_types():
    with jax.enable_x64(True):
        _, metrics = STEP(state(), {"ids": WIDE})
        assert np.array_equal(metrics["ids"], WIDE)
        trained(lambda step: {"ids": WIDE})  # a thread may read ahead
        assert state(model_state=WIDE).model_state.dtype == np.int64
