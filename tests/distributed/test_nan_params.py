"""NaN detection in parameters that are sharded over processes while each loss is finite."""

import pytest
from processes import run

import jstep

NAN_GRADIENT = """
def finite_loss(params, x):
    root = jnp.sqrt(jnp.sum(params["w"] ** 2) * x[0, 0] ** 2)  # its gradient at x = 0 is NaN
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2) + root

zeroed = lambda n: batches[n] * (n != 9)
optimizer = jstep.adam(0.02)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P("data"))
step = jstep.minimize(finite_loss, optimizer, metrics=["grad_norm"])
try:
    jstep.train(
        step, state, zeroed, 30, hooks=[jstep.NanLossHook(every_n_steps=7)], checkpoint_dir=directory,
        save_checkpoint_steps=5, save_checkpoint_secs=None, batch_sharding=rows, progress=False,
    )
except jstep.NanLossDuringTrainingError as error:
    print("raised", error.step, "after step 10, though each loss is finite: params/" in str(error), flush=True)
"""


@pytest.mark.thorough
def test_sharded_params_are_checked_before_a_checkpoint(tmp_path):
    for lines in run(NAN_GRADIENT, 2, tmp_path):
        assert "raised 10 True" in lines
    assert jstep.Saver(tmp_path).all_steps() == [5]
