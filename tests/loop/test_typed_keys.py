"""States that hold typed PRNG keys: they are saved, restored, staged and compiled ahead like any other array."""

import json
import os
import pathlib
import signal

import jax
import numpy as np
import pytest
from children import IMPORTS, start
from problems import ROWS as X
from problems import loss_with_keys, state_with_keys

import jstep


def make_step(rate=0.1):
    return jstep.minimize(loss_with_keys, jstep.adam(rate), has_model_state=True)


def make_state(mesh=None):
    return state_with_keys(jstep.adam(0.1), mesh)


def numbers(state):
    def plain(leaf):
        return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(lambda leaf: np.asarray(plain(leaf)), state)


def run(last_step, directory, mesh, steps_per_call, stages, kill_at=None):
    axes = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    mesh = mesh and jax.make_mesh((2,), ("data",), axis_types=(axes[mesh],))

    def kill(step, state, metrics):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    steps = {0: make_step(), 4: make_step(0.05)} if stages else make_step()
    fingerprints = jstep.FingerprintHook(f"{directory}.jsonl", every_n_steps=2)
    return jstep.train(
        steps,
        make_state(mesh),
        lambda n: X * n,
        last_step,
        hooks=[jstep.NanLossHook(), fingerprints, jstep.every(1, kill)],
        checkpoint_dir=directory,
        save_checkpoint_steps=3,
        steps_per_call=steps_per_call,
        progress=False,
    )


@pytest.mark.parametrize("mesh", [None, "auto", "explicit"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.thorough(except_for=["False-1-None"])
def test_a_run_resumes_bitwise(tmp_path, mesh, steps_per_call, stages):
    case = (mesh, steps_per_call, stages)
    whole = run(7, tmp_path / "whole", *case)
    run(3, tmp_path / "parts", *case)
    resumed = run(7, tmp_path / "parts", *case)
    jax.tree.map(np.testing.assert_array_equal, numbers(resumed), numbers(whole))
    events = [json.loads(line) for line in (tmp_path / "parts" / "timeline.jsonl").read_text().splitlines()]
    assert sum("card" in json.dumps(event) for event in events) >= 1


@pytest.mark.parametrize("case", [(None, 1, False), ("auto", 3, True), ("explicit", 1, True), (None, 3, True)], ids=str)
@pytest.mark.thorough
def test_a_killed_run_resumes_bitwise(tmp_path, case):
    script = f"""
import sys
sys.path[:0] = {[*map(str, pathlib.Path(__file__).parents[:2])]!r}
jax.config.update("jax_num_cpu_devices", 8)
from test_typed_keys import run
run(7, directory + "/parts", *{case!r}, kill_at=5)
"""
    program = start(script, tmp_path, prelude=IMPORTS)
    program.communicate(timeout=150)
    assert program.returncode == -signal.SIGKILL
    resumed, whole = run(7, tmp_path / "parts", *case), run(7, tmp_path / "whole", *case)
    jax.tree.map(np.testing.assert_array_equal, numbers(resumed), numbers(whole))
