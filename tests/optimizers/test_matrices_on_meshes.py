"""How matrices of one shape are batched, or distributed over the devices of a mesh: the layouts of the stack."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jstep.optimizers.muon import MatrixLayout, distribute_matrices, layout_of_matrix

CUBE = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
AXES = (0, 1), (2,)
MERGED = (8, 2, 4)


def test_layouts_of_matrices() -> None:
    def of(spec: P, shape: Any = MERGED, axes: Any = AXES, devices: int = 8) -> Any:
        mesh = jax.make_mesh((devices // 2 or 1, 2 if devices > 1 else 1), ("x", "y"), devices=jax.devices()[:devices])
        found = layout_of_matrix(NamedSharding(mesh, spec), shape, axes)
        return None if found is None else (found.mesh is mesh, *found[1:])

    assert layout_of_matrix(None, MERGED, AXES) is None
    assert of(P("x"), devices=1) is None
    assert of(P("y"), devices=2) == (True, (), ("y",), ())
    assert of(P()) == (True, (), (), ())
    assert of(P(("x", "y"))) == (True, (), ("x", "y"), ())
    assert of(P("x", None, "y")) == (True, (), ("x",), ("y",))
    assert of(P(None, "x")) is None  # the second of two axes that are merged
    assert of(P("x", "y")) is None
    assert of(P("x", "y"), (8, 4), ((0,), (1,))) == (True, (), ("x",), ("y",))
    assert of(P("x", "y", None), (8, 4), ((0,), (1,))) is None
    assert of(P("x", None, "y"), axes=((1,), (2,))) == (True, ("x",), (), ("y",))


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize(
    ("layout", "shapes", "hops"),
    [
        ("/a/b", [()], [" a b", "b a ", "ba  "]),
        ("/a/b", [(2, 3), ()], [" a b", "c a b", "cb a ", "cba  "]),
        ("c/a/b", [(2,), (4,)], ["c a b", "cb a ", "cba  "]),
        ("/ab/", [(4,)], [" ab ", "b a ", "ba  "]),
        ("//", [(8,)], ["  ", "abc  "]),
        ("//", [(3,)], ["  ", "ab  "]),
        ("//", [()], ["  "]),
    ],
)
def test_a_stack_is_resharded_one_axis_at_a_time(
    layout: str, shapes: list[tuple[int, ...]], hops: list[str], is_set: bool
) -> None:
    """There and back, to one matrix on each device or a few; the values are those of each matrix."""
    numbers = np.random.default_rng(0)
    members = [jnp.asarray(numbers.normal(size=(*shape, 4, 2)), jnp.float32) for shape in shapes]
    names = [tuple(part) for part in layout.split("/")]

    def compute(stack: Any) -> Any:
        return stack + jnp.sum(jnp.abs(stack), (1, 2), keepdims=True)

    def run(members: Any) -> Any:
        return distribute_matrices(members, MatrixLayout(CUBE, *names), compute)

    with jax.set_mesh(CUBE) if is_set else contextlib.nullcontext():
        program = jax.make_jaxpr(run)(members)
    specs = [eqn.params["sharding"].spec for eqn in program.eqns if eqn.primitive.name == "sharding_constraint"]
    found = [" ".join("".join(axis if isinstance(axis, tuple) else (axis or "",)) for axis in spec) for spec in specs]
    assert found == [*hops, *hops[::-1]]
    for one, member in zip(jax.jit(run)(members) if is_set else (), members, strict=is_set):
        np.testing.assert_allclose(one, member + np.sum(np.abs(member), (-2, -1), keepdims=True), rtol=1e-6)
