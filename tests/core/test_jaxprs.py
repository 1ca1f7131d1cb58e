"""What jstep reads of JAX's programs beyond their documentation: each thing by its name, in one
file."""

import ast
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from source_files import MODULES, nodes_of, text_of

from jstep.core import jaxprs
from jstep.differentiate import merging, microbatches, reproducible

X, KERNEL = jnp.ones((4, 4)), jnp.ones((1, 1, 3, 3))


def kernel(x, out):
    out[...] = x[...] * 2


@jax.custom_vjp
def with_rule(x):
    return jnp.sin(x)


with_rule.defvjp(lambda x: (with_rule(x), x), lambda x, ct: (ct * jnp.cos(x),))


@functools.cache
def mesh(kind=AxisType.Auto):
    return jax.make_mesh((1,), ("data",), axis_types=(kind,))


def on_shards(x):
    gathered = jax.lax.all_gather(x, "data", tiled=True)
    return jax.lax.psum(gathered, "data")


def resharded(x):
    return jax.sharding.reshard(x, NamedSharding(mesh(AxisType.Explicit), PartitionSpec("data")))


EXAMPLES = [
    lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x),
    lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x),
    lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    lambda x: jax.shard_map(
        on_shards, mesh=mesh(), in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )(x),
    lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), PartitionSpec("data"))),
    jax.jit(jnp.sin),
    lambda x: jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum())(x),
    lambda x: (jax.nn.relu(x), with_rule(x)),
    lambda x: jax.lax.ragged_dot(x, x[None], jnp.array([4])),
    lambda x: jax.lax.conv(x[None, None], KERNEL, (1, 1), "SAME"),
    lambda x: x.reshape(2, 8) @ x.reshape(8, 2),
    lambda x: jnp.broadcast_to(x, (2, 4, 4)),
    lambda x: pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x),
    lambda x: (jax.lax.optimization_barrier(x), jnp.split(x, 2), jnp.copy(x)),
    lambda x: jax.lax.rng_uniform(0.0, 1.0, (2,)),
    resharded,
    lambda x: jax.pure_callback(lambda x: x, x, x),
    lambda x: jax.experimental.io_callback(lambda x: None, None, x),
    lambda x: (jax.debug.callback(print, x), jax.debug.print("{}", x)),
    lambda x: jax.ffi.ffi_call("none", x)(x),
    lambda x: (jax.lax.linalg.qr(x), jnp.linalg.svd(x)),
]
"""Functions whose programs have the operations of which jstep reads parameters, or names that are
public nowhere."""

PARAMETERS = {
    "scan": "jaxpr length reverse unroll",
    "while": "cond_jaxpr body_jaxpr cond_nconsts body_nconsts",
    "cond": "branches branches_platforms",
    "platform_index": "platforms",
    "shard_map": "jaxpr mesh in_specs out_specs check_vma",
    "jit": "jaxpr name",
    "remat2": "jaxpr differentiated",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "dot_general": "dimension_numbers precision",
    "ragged_dot_general": "ragged_dot_dimension_numbers precision",
    "conv_general_dilated": "dimension_numbers precision",
    "broadcast_in_dim": "shape",
    "pallas_call": "cost_estimate",
    "svd": "compute_uv",
    "all_gather": "axis_name",
    "psum": "axes",
    "sharding_constraint": "sharding",
}
"""Operation → the parameters that jstep reads of it."""
EITHER = {
    "scan": [{"num_consts", "num_carry"}, {"ft_in"}],
    "shard_map": [{"newly_manual_axes"}, {"manual_axes"}],
}
"""Operation → parameters with different names in the supported versions of JAX."""
ALIASES = [
    {"jit", "pjit"},
    {"remat", "remat2", "checkpoint"},
    {"psum", "psum_invariant"},
    {"all_gather", "all_gather_invariant"},
]
"""Names of one operation in the supported versions of JAX, or inside and outside of a shard_map."""
OF_OTHER_VERSIONS = {"copy_p", "expand_dims", "pvary", "mesh_cast", "closed_call"}
"""Names that need not be there: an operation of such a name is read like its neighbours in the same
set."""


@functools.cache
def known():
    """Name of an operation → the parameters that it has in the installed JAX."""
    found = {}
    for example in EXAMPLES:
        for *_, eqn in jaxprs.all_equations(jax.make_jaxpr(example)(X)):
            found.setdefault(eqn.primitive.name, set()).update(eqn.params)
    return found


def lacks(what):
    return f"JAX {jax.__version__} lacks {what}, which jstep/core/jaxprs.py reads"


def names_of(operation):
    return next((names for names in ALIASES if operation in names), {operation})


@pytest.mark.parametrize("operation", PARAMETERS)
def test_parameters_are_there(operation):
    found = [known()[name] for name in names_of(operation) if name in known()]
    assert found, lacks(f"the operation {operation}")
    for parameter in PARAMETERS[operation].split():
        assert all(parameter in params for params in found), lacks(f"{parameter} of {operation}")
    for either in EITHER.get(operation, [set()]):
        if any(either <= params for params in found):
            break
    else:
        pytest.fail(lacks(f"{EITHER[operation]} of {operation}"))


NAMES = {
    jaxprs: "MOVES COPYING HARMLESS ELEMENTWISE SLOW_IN_LOOPS _OPAQUE _REMAT _PLACING _PRODUCTS "
    "UNCOUNTED FACTORIZATIONS",
    merging: "INLINED NEVER_MERGED",
    reproducible: "SHARDED",
    microbatches: "_SAME_ELEMENTS",
}
"""Module → its sets of names of operations."""


@pytest.mark.parametrize(
    ("module", "names"), [(one, name) for one, names in NAMES.items() for name in names.split()]
)
def test_names_are_there(module, names):
    public = {
        getattr(primitive, "name", None) for primitive in vars(primitives).values()
    } | known().keys()
    for name in getattr(module, names) - OF_OTHER_VERSIONS:
        assert not names_of(name).isdisjoint(public), lacks(f"the operation {name}")


def test_equations_are_as_they_are_read():
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x).sum()))(X)
    *_, eqn = traced.jaxpr.eqns
    assert any("jvp" in jaxprs.name_stack(one) for one in traced.jaxpr.eqns), lacks(
        "source_info.name_stack"
    )
    frame = jaxprs.source_frames(eqn)[0]
    for name in ("file_name", "line_num", "function_name"):
        assert hasattr(frame, name), lacks(f"{name} of a frame of source_info.traceback")
    alone = jaxprs.subprogram(traced.jaxpr, [], [], [])
    assert [*alone.invars, *alone.outvars, *alone.eqns] == [], lacks("Jaxpr.replace")
    assert hash(eqn.ctx) == hash(eqn.replace(invars=eqn.invars).ctx), lacks("ctx of an equation")
    both = jax.make_jaxpr(lambda x: (x + 1, jnp.sin(x)))(X)
    (one,) = jaxprs.part_for(both, [False, True])[0].jaxpr.eqns
    assert one.primitive.name == "sin", lacks("dce_jaxpr_consts")


def test_loops_and_shard_maps_are_read():
    def first(example):
        return jaxprs.body_of(jax.make_jaxpr(example)(X)).operations[-1]

    scan = first(lambda x: jax.lax.scan(lambda c, y: (c + y + x.sum(), c), x[0], x))
    assert scan.counts == (1, 1)
    assert scan.options == {"length": 4, "reverse": False, "unroll": 1}
    loop = first(
        lambda x: (lambda y: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + x + y, x))(
            jnp.sin(x)
        )
    )
    assert loop.counts == (0, 2)
    assert loop.options == {}
    assert jaxprs.shard_counts(first(EXAMPLES[4])) == {"data": 1}
    assert jaxprs.named_axes(jax.make_jaxpr(EXAMPLES[4])(X)) == {"data"}
    assert first(EXAMPLES[3]).is_of_platforms
    assert not first(EXAMPLES[2]).is_of_platforms
    assert first(jax.jit(jnp.sin)).called == "sin"


def read_in(module):
    """Iterate over the names of undocumented attributes and parameters that a module reads."""
    if not re.search(r"eqns|eqn\.|source_info|debug_info|dce_jaxpr", text_of(MODULES[module])):
        return  # need not be parsed
    for node in nodes_of(MODULES[module]):
        if isinstance(node, ast.Attribute):
            of_equation = isinstance(node.value, ast.Name | ast.Attribute) and ast.unparse(
                node.value
            ).endswith("eqn")
            if node.attr in ("eqns", "source_info", "debug_info") or (
                of_equation and node.attr in ("primitive", "params")
            ):
                yield node.attr
        if isinstance(node, ast.Name | ast.alias) and re.match(
            "dce_jaxpr", getattr(node, "id", "") or getattr(node, "name", "")
        ):
            yield "dce_jaxpr"


def test_three_files_read_programs():
    """`core.jaxprs`, the graph of a program, and the merging of equal equations."""
    expected = {"core.jaxprs", "differentiate.merging", "summary.graph"}
    assert {module for module in MODULES if any(read_in(module))} == expected


def test_each_parameter_that_is_read_is_named_here():
    text = MODULES["core.jaxprs"].read_text()
    read = set(re.findall(r'params(?:\.get\(|\[)"(\w+)"', text)) | set(
        sum(jaxprs._OPTIONS.values(), ())
    )
    assert "length" in read
    assert "cond_nconsts" in read
    named = set(" ".join(PARAMETERS.values()).split()).union(
        *(names for some in EITHER.values() for names in some)
    )
    assert read <= named
