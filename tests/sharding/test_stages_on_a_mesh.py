"""Stages and changing batch sizes on a mesh are compiled ahead, once, for the shardings in use."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep


@pytest.mark.thorough(except_for=["4-AxisType.Explicit-True"])
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_stage_changes_do_not_compile_in_the_main_thread(kind, steps_per_call, fsdp):
    compiled, marks = [], []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(threading.current_thread().name)

    optimizer = jstep.adam(0.1)

    def make_step(scale, microbatches):
        loss = lambda params, x: scale * jnp.mean((x @ params["w"]) ** 2)  # noqa: E731
        return jstep.minimize(loss, optimizer, num_microbatches=microbatches)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    params = {"w": jnp.ones((16, 4))}
    specs = jstep.fsdp_specs(params, mesh, min_size=1) if fsdp else None
    state = jstep.shard_state(jstep.TrainState.create(params, optimizer), mesh, specs)
    rows = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    data = jstep.batches(rows, {0: 16, 10: 32})
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        state = jstep.train(
            {0: make_step(1.0, 1), 20: make_step(2.0, 2)},
            state,
            data,
            30,
            hooks=[jstep.every(10, lambda step, *_: marks.append(len(compiled)))],
            batch_sharding=NamedSharding(mesh, PartitionSpec("data")),
            steps_per_call=steps_per_call,
            progress=False,
            log_steps=None,
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert jstep.global_step(state) == 30
    assert compiled.count("jstep-compile") == 3  # the first program, too
    assert "MainThread" not in compiled[marks[0] :]
