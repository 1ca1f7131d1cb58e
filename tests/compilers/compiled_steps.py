"""Steps that the tests here compile, and what is asked of the compiled programs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jstep
from jstep.tools.collectives import collectives_of

LAYOUTS = ("replicated", "zero1", "fsdp")


def params():
    return {"a": jnp.zeros((512, 256)), "b": jnp.zeros(256), "x": jnp.zeros((256, 1024)), "f": jnp.zeros(1024)}


def loss(p, x, y):
    hidden = jax.nn.relu(x @ p["a"] + p["b"][None])
    return jnp.mean((hidden @ p["x"] + p["f"][None] - y) ** 2)


def batch(mesh, *lead, rows=64):
    """Rows for each device, behind the axes of `scan_steps`."""
    sharding = jax.NamedSharding(mesh, jax.P(*[None] * len(lead), mesh.axis_names[0]))
    return [
        jax.ShapeDtypeStruct((*lead, rows * mesh.size, width), jnp.float32, sharding=sharding) for width in (512, 1024)
    ]


def state(optimizer, mesh, layout, params=params, **kwargs):
    axis = mesh.axis_names[0]
    if layout == "fsdp":
        kwargs["param_specs"] = jstep.fsdp_specs(jax.eval_shape(params), mesh, axis, min_size=1024)
    if layout == "zero1":
        kwargs["slot_axis"] = axis
    return jstep.TrainState.create(params, optimizer, mesh=mesh, **kwargs)


def compiled(step, state, *batch):
    """The compiled program; a warning, such as that of a buffer which is not donated, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return step.lower(state, *batch).compile()


def check(program, state):
    """The program donates the whole state, and each leaf stays where it is."""
    held = sum(bytes_of(leaf) for leaf in jax.tree.leaves(state))
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes + analysis.host_alias_size_in_bytes >= held, "a leaf is not donated"
    shardings = program.output_shardings[0]
    for path, leaf in jax.tree.leaves_with_path(state):
        where = shardings
        for key in path:
            where = getattr(where, key.name) if hasattr(key, "name") else where[key.key]
        assert where.is_equivalent_to(leaf.sharding, leaf.ndim), f"{jax.tree_util.keystr(path)} moves to {where}"


def moved(program):
    return collectives_of(program.as_text())


def size_of(tree):
    """The bytes of a tree, whole."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_of(leaf):
    """The bytes of a leaf on each device."""
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
