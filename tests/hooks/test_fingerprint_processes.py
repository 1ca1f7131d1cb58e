"""`FingerprintHook` on several processes: fingerprints do not depend on their number, and all stop together."""

import json

import pytest
from processes import run

SCRIPT = """
seeds, directory = sys.argv[5], sys.argv[6]
path = os.path.join(directory, "log.jsonl")
step = jstep.minimize(loss_fn, optimizer)
for seed in map(int, seeds):
    state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P("data"))
    initial = jstep.fingerprint(state)
    print("initial", *(f"{int(x):08x}" for x in np.asarray(initial.addressable_data(0))))
    hook = jstep.FingerprintHook(every_n_steps=3, path=path, on_divergence="raise")
    batches = jstep.batches(data, 16, seed=seed)
    try:
        jstep.train(step, state, batches, 9, hooks=[hook], batch_sharding=rows, progress=False)
    except jstep.DivergenceError as error:
        print("diverged", error.step, sorted(error.leaves)[0])
print("done", flush=True)
"""


@pytest.mark.thorough
def test_processes_agree_and_raise_together(tmp_path):
    for where in ("one", "two"):
        (tmp_path / where).mkdir()
    (alone,) = run(SCRIPT, 1, tmp_path, "1", tmp_path / "one")
    both = run(SCRIPT, 2, tmp_path, "12", tmp_path / "two")  # the second time with other batches
    initial = {line for ended in (alone, *both) for line in ended if line.startswith("initial")}
    assert len(initial) == 1  # 1 process with 4 devices, 2 with 2 each
    lines = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:3]] == [3, 6, 9]
    assert set(lines[0]["leaves"]) >= {"params/w", "params/b", "global_step"}
    diverged = [[line for line in ended if line.startswith("diverged")] for ended in both]
    assert diverged[0] == diverged[1]
    assert len(diverged[0]) == 1
    assert diverged[0][0].startswith("diverged 3 params/")


# `AuditHook` on several processes: all detect the same mismatch and raise together.

SCRIPT_OF_AUDITS = """
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
    both = run(SCRIPT_OF_AUDITS, 2, tmp_path)
    lines = [[line for line in ended if line.startswith(("clean", "found"))] for ended in both]
    assert lines[0] == lines[1] == ["clean 6", "found 3 ('params/w',) True"]
