"""Training steps that these tests compile, and checks of the compiled programs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jstep

LAYOUTS = ("replicated", "zero1", "fsdp")


def params():
    return {
        "a": jnp.zeros((512, 256)),
        "b": jnp.zeros(256),
        "x": jnp.zeros((256, 1024)),
        "f": jnp.zeros(1024),
    }


def loss(p, x, y):
    hidden = jax.nn.relu(x @ p["a"] + p["b"][None])
    return jnp.mean((hidden @ p["x"] + p["f"][None] - y) ** 2)


def batch(mesh, *lead, rows=64):
    """Return a batch with `rows` rows on each device; `lead` are the leading axes for
    `scan_steps`."""
    sharding = jax.NamedSharding(mesh, jax.P(*[None] * len(lead), mesh.axis_names[0]))
    return [
        jax.ShapeDtypeStruct((*lead, rows * mesh.size, width), jnp.float32, sharding=sharding)
        for width in (512, 1024)
    ]


def state(optimizer, mesh, layout, params=params, **kwargs):
    axis = mesh.axis_names[0]
    if layout == "fsdp":
        kwargs["param_specs"] = jstep.fsdp_specs(jax.eval_shape(params), mesh, axis, min_size=1024)
    if layout == "zero1":
        kwargs["slot_axis"] = axis
    return jstep.TrainState.create(params, optimizer, mesh=mesh, **kwargs)


def compiled(step, state, *batch):
    """Compile a step; warnings, such as the one about a buffer that is not donated, are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return step.lower(state, *batch).compile()


def check(program, state):
    """Check that the program donates the complete state and keeps the sharding of each leaf."""
    expected = sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(state))
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes + analysis.host_alias_size_in_bytes >= expected, (
        "a leaf is not donated"
    )
    shardings = program.output_shardings[0]
    for path, leaf in jax.tree.leaves_with_path(state):
        sharding = shardings
        for key in path:
            sharding = getattr(sharding, key.name) if hasattr(key, "name") else sharding[key.key]
        assert sharding.is_equivalent_to(leaf.sharding, leaf.ndim), (
            f"{jax.tree_util.keystr(path)} moves to {sharding}"
        )


def total_bytes(tree):
    """Return the bytes of all leaves of a tree, unsharded."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(leaf):
    """Return the bytes of a leaf on each device."""
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
