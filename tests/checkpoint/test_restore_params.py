"""`Saver.restore_params`: only the parameters, from a checkpoint of any optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import assert_same

import jstep
from jstep.checkpoint.saver import Saver

EMA = jstep.ExponentialMovingAverage(0.5)


def params_of(value):
    return {
        "layers": [{"w": jnp.full((8, 2), float(value))}, (jnp.full(3, value + 1.0), None)],
        "n": jnp.int32(value),
    }


OPTIMIZERS = {
    "none": jstep.gradient_descent(0.1),
    "adam": jstep.adam(),
    "averaged": jstep.with_moving_average(jstep.adamw(1e-3), EMA),
    "guarded": jstep.dynamic_loss_scale(jstep.skip_nonfinite(jstep.momentum(0.1, 0.9))),
    "label": jstep.partition(
        {"params": jstep.adam()}, lambda path, leaf: "params" if path.startswith("la") else None
    ),
}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def saver(request, tmp_path):
    with Saver(tmp_path) as saver:
        for step in (3, 12):
            saver.save(jstep.TrainState.create(params_of(step), request.param, global_step=step))
        yield saver


@pytest.mark.thorough(except_for=["averaged", "label"])
def test_containers_and_array_types_are_those_of_the_target(saver, caplog):
    target = params_of(0)
    for given in (target, jax.eval_shape(lambda: target)):
        for step, value in ((None, 12), (3, 3)):
            restored = saver.restore_params(given, step=step)
            assert_same(restored, params_of(value))
            assert isinstance(restored["layers"], list)
            assert isinstance(restored["layers"][1], tuple)
    as_numpy = saver.restore_params(jax.tree.map(np.asarray, target))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(as_numpy))
    assert not caplog.records


@pytest.mark.thorough(except_for=["averaged", "label"])
def test_names(saver):
    target = params_of(0)
    target["layers"][0]["kernel"] = target["layers"][0].pop("w")
    names = {"params/layers/0/kernel": "params/layers/0/w"}
    for given in (names, lambda path: names.get(path, path)):
        assert saver.restore_params(target, names=given)["layers"][0]["kernel"][0, 0] == 12
    with pytest.raises(ValueError, match="nearest: 'params/layers/0/kernel'"):
        saver.restore_params(target, names={"layers/0/kernel": "params/layers/0/w"})
    for given in (lambda path: path, {}.get):
        with pytest.raises(
            ValueError,
            match=r"missing in the checkpoint \(1\): 'params/layers/0/kernel'",
        ):
            saver.restore_params(target, names=given)
