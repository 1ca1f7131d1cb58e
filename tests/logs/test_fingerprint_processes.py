"""`FingerprintHook` on several processes: fingerprints do not depend on their number, and all stop
together."""

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
many = jax.device_put([np.full((4, n % 2 + 1), n, np.float32) for n in range(400)], rows)
for _ in range(3):  # more programs with a collective than CPUs can have in flight
    leaves = jstep.fingerprint(many)
print("many", np.asarray(leaves.addressable_data(0)))
print("done", flush=True)
"""


@pytest.mark.thorough
def test_processes_agree_and_raise_together(tmp_path):
    for where in ("one", "two"):
        (tmp_path / where).mkdir()
    (alone,) = run(SCRIPT, 1, tmp_path, "1", tmp_path / "one")
    both = run(SCRIPT, 2, tmp_path, "12", tmp_path / "two")  # the second time with other batches
    for name in ("initial", "many"):
        found = {line for ended in (alone, *both) for line in ended if line.startswith(name)}
        assert len(found) == 1  # 1 process with 4 devices, 2 with 2 each
    lines = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:3]] == [3, 6, 9]
    assert set(lines[0]["leaves"]) >= {"params/w", "params/b", "global_step"}
    diverged = [[line for line in ended if line.startswith("diverged")] for ended in both]
    assert diverged[0] == diverged[1]
    assert len(diverged[0]) == 1
    assert diverged[0][0].startswith("diverged 3 params/")
