"""Programs that are killed and started again say what has changed, on one process or two, and nothing else."""

import signal

import forked
import pytest
from processes import start as start_processes
from processes import wait_for

PROGRAM = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np
import jstep

directory, K, kill, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
parts = {"w": jstep.adam(jstep.held("rate", 0.1)), "b": jstep.momentum(rate, 0.9)}
optimizer = jstep.partition(parts, lambda path, leaf: path)

def loss(params, x):
    return jnp.mean((x @ params["w"] - params["b"]) ** 2)

def doubled(params, x):
    return 2 * loss(params, x)

class Hook(jstep.Hook):
    def after_step(self, step, state, metrics):
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return jstep.set_hyperparameter(state, "w/rate", 0.1 / (1 + step)) if step % 2 else None

steps = {0: jstep.minimize(loss, optimizer), 3: jstep.minimize(doubled, optimizer), 7: jstep.minimize(loss, optimizer)}
data = jstep.batches(np.ones((64, 4), np.float32), {0: 8, 4: 16}, seed=0)
state = jstep.TrainState.create({"w": jnp.ones((4, 2)), "b": jnp.zeros((1, 2))}, optimizer)
jstep.train(steps, state, data, 10, checkpoint_dir=directory, save_checkpoint_steps=1, progress=False,
            steps_per_call=K if K == "auto" else int(K), hooks=[Hook()])
"""


def run(directory, steps_per_call, kill, rate=0.1):
    """Run the program, which may be killed after a step, and return what it wrote to stderr."""
    program = forked.start(PROGRAM, directory, steps_per_call, kill, rate)
    _, errors = program.communicate(300)
    assert program.returncode == (-signal.SIGKILL if kill else 0), errors
    return errors


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [1, 10, "auto"])
def test_a_run_that_is_killed_at_every_step_has_not_changed(steps_per_call, tmp_path):
    """With stages, a held rate, and batch sizes that change; without progress, only warnings are written."""
    for kill in (*range(1, 11), 0):
        assert run(tmp_path, steps_per_call, kill) == ""


def test_a_warning_is_written_without_progress(tmp_path):
    assert run(tmp_path, 1, 3) == ""
    errors = run(tmp_path, 10, 0, 0.2)
    assert errors.splitlines()[1:] == ["  b/learning_rate: 0.1 before, 0.2 now"]


TWO = """
optimizer = jstep.adam(float(sys.argv[5]))
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
step = jstep.minimize(loss_fn, optimizer, lanes=4)
jstep.train(step, state, batches, int(sys.argv[6]), checkpoint_dir=directory, batch_sharding=rows, progress=False)
"""


@pytest.mark.thorough
def test_one_of_two_processes_says_it(tmp_path):
    """Also after a run on another number of devices, under lanes."""
    for count, devices, rate, last_step in ((2, 4, 0.1, 4), (2, 4, 0.2, 6), (1, 4, 0.2, 8), (1, 4, 0.3, 10)):
        done = wait_for(start_processes(TWO, count, tmp_path, rate, last_step, devices=devices))
        lines = [
            line for one in done for line in one.err.splitlines() if "learning_rate" in line or "has changed" in line
        ]
        assert [one.code for one in done] == [0] * count, done
        changed = {6: "  learning_rate: 0.1 before, 0.2 now", 10: "  learning_rate: 0.2 before, 0.3 now"}.get(last_step)
        assert lines[1:] == ([] if changed is None else [changed]), lines
        assert len(lines) == (0 if changed is None else 2)
