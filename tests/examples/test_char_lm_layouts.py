"""Collectives of examples/char_lm.py with FSDP: weights are exchanged, activations never."""

import functools
import runpy

import jax
import jax.numpy as jnp
import pytest
from compiled_text import collectives
from jax.sharding import AxisType
from programs import ROOT

import jstep


def program_of(module, loss_fn, mesh):
    optimizer = jstep.adam(1e-3)
    make_params = functools.partial(module["init_params"], jax.random.key(0))
    specs = module["param_specs"](mesh, fsdp=True)
    state = jstep.TrainState.create(make_params, optimizer, mesh=mesh, param_specs=specs)
    windows = jstep.shard_batch(jnp.zeros((32, 65), jnp.uint8), mesh)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jstep.minimize(loss_fn, optimizer).lower(state, windows).compile()


@pytest.mark.thorough
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_fsdp_does_not_reshard_activations(axes, axis_type):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))
    module = runpy.run_path(str(ROOT / "examples" / "char_lm.py"))
    program = program_of(module, module["loss_fn"], mesh)
    module["predict"].__globals__["split_by_rows"] = lambda x: x
    without = program_of(module, lambda params, windows: module["loss_fn"](params, windows), mesh)

    moved, moved_without = (collectives(one.as_text()) for one in (program, without))
    assert "all-to-all" in moved_without, "the problem that split_by_rows avoids"
    assert "all-to-all" not in moved
    assert (
        program.memory_analysis().temp_size_in_bytes < without.memory_analysis().temp_size_in_bytes
    )
    assert (
        sum(one.bytes for one in moved.values())
        < sum(one.bytes for one in moved_without.values()) / 2
    )
