"""`AuditHook` on several processes: all detect the same mismatch and raise together."""

import pytest
from processes import run

SCRIPT = """
step = jstep.minimize(loss_fn, optimizer)
calls = []

def faulty(state, x):
    new, metrics = step(state, x)
    calls.append(None)
    if len(calls) == 4 and process == 1:  # the second execution of step 2, on one device of process 1
        old = new.params["w"]
        shards = [shard.data for shard in old.addressable_shards]
        shards[1] = shards[1].at[0, 0].add(1.0)
        w = jax.make_array_from_single_device_arrays(old.shape, old.sharding, shards)
        new = new.replace(params={**new.params, "w": w})
    return new, metrics

def state():
    return jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())

hooks = [jstep.AuditHook(every_n_steps=1)]
end = jstep.train(step, state(), batches, 6, hooks=hooks, batch_sharding=rows, progress=False)
print("clean", jstep.global_step(end))
hooks = [jstep.AuditHook(every_n_steps=2)]
try:
    jstep.train(faulty, state(), batches, 6, hooks=hooks, batch_sharding=rows, progress=False)
except jstep.AuditError as error:
    alone = str(mesh.devices.flat[3]) in str(error) and "alone" in str(error)
    print("found", error.step, error.leaves, alone)
print("done", flush=True)
"""


@pytest.mark.thorough
def test_processes_raise_together(tmp_path):
    both = run(SCRIPT, 2, tmp_path)
    lines = [[line for line in ended if line.startswith(("clean", "found"))] for ended in both]
    assert lines[0] == lines[1] == ["clean 6", "found 3 ('params/w',) True"]
