"""`batch_sharding` as the name of a mesh axis, or a tuple of names: in `train`, `evaluator` and `replay`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

OPTIMIZER = jstep.adam(0.1)
X = np.arange(64, dtype=np.float32).reshape(32, 2) / 64
SEEN: list[Any] = []


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2)


STEP = jstep.minimize(loss_fn, OPTIMIZER)
DATA = jstep.batches({"x": X}, 8, seed=0)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "data2"), axis_types=(kind, kind), devices=jax.devices()[:4])


def make_state(mesh):
    return jstep.shard_state(jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER), mesh)


def watched(step):
    """A step that records how its batch is sharded."""

    def run(state, batch):
        SEEN.append(jax.tree.map(lambda leaf: leaf.sharding, batch))
        return step(state, batch)

    return run


NAMES = {
    "one name": ("data", P("data")),
    "several names": (("data", "data2"), P(("data", "data2"))),
    "one in a tuple": (("data2",), P("data2")),
    "in a tree": ({"x": "data"}, P("data")),
}


@pytest.mark.thorough(except_for=["in a tree-AxisType.Auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("names", NAMES)
def test_names_are_the_sharding_over_the_mesh_of_the_state(names, kind):
    names, spec = NAMES[names]
    mesh = mesh_of(kind)
    SEEN.clear()
    state = jstep.train(watched(STEP), make_state(mesh), DATA, 3, batch_sharding=names, progress=False)
    assert [one["x"] for one in SEEN] == [NamedSharding(mesh, spec)] * 3
    expected = jstep.train(
        STEP, make_state(mesh), DATA, 3, batch_sharding=NamedSharding(mesh, spec), progress=False, steps_per_call=2
    )
    again = jstep.train(STEP, make_state(mesh), DATA, 3, batch_sharding=names, progress=False, steps_per_call=2)
    bits = [jstep.fingerprint(one).tolist() for one in (state, again, expected)]
    assert bits[0] == bits[1] == bits[2]


def test_the_mesh_of_the_state_counts_and_not_the_one_that_is_set():
    mesh = mesh_of()
    other = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    SEEN.clear()
    with jax.set_mesh(other):
        jstep.train(watched(STEP), make_state(mesh), DATA, 1, batch_sharding="data", progress=False)
    assert SEEN[0]["x"] == NamedSharding(mesh, P("data"))


def test_an_evaluator_takes_the_mesh_of_each_state():
    batches = [{"x": X}, {"x": X[:5]}]
    evaluate = jstep.evaluator(lambda params, batch: {"x": batch["x"][:, 0]}, batches, batch_sharding="data")
    whole = float(np.concatenate([X, X[:5]])[:, 0].mean())
    assert evaluate(make_state(mesh_of()))["x"] == pytest.approx(whole)
    other = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    assert evaluate(make_state(other))["x"] == pytest.approx(whole)
    hook = jstep.EvaluationHook(evaluate, every_n_steps=2)
    jstep.train(STEP, make_state(mesh_of()), DATA, 2, batch_sharding="data", hooks=[hook], progress=False)
    assert hook.results[2]["x"] == pytest.approx(whole)


USES = {
    "train": lambda state, names: jstep.train(STEP, state, DATA, 2, batch_sharding=names, progress=False),
    "evaluator": lambda state, names: jstep.evaluator(lambda params, x: {"x": x["x"][:, 0]}, [{"x": X}],
                                                      batch_sharding=names)(state),
    "replay": lambda state, names: jstep.replay(STEP, state, DATA, None, 1, batch_sharding=names),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_state_on_no_mesh_and_an_axis_that_is_missing(use):
    with pytest.raises(ValueError, match="which is on no mesh; put it on one") as error:
        USES[use](jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER), ("a", "b"))
    assert "put it on one by jstep.shard_state(state, mesh)" in str(error.value)
    with pytest.raises(ValueError, match=r"batch_sharding='dat': the mesh has no axis 'dat'.*'data'"):
        USES[use](make_state(mesh_of()), "dat")
    with pytest.raises(TypeError, match="batch_sharding: 3 at"):
        USES[use](make_state(mesh_of()), {"x": 3})
