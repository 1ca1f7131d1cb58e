"""Meshes with Explicit axes, which jstep takes with Auto ones: of the arguments, of arrays, of the caller's context."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from jstep.core.contexts import own_transfers

_P = ParamSpec("_P")
_R = TypeVar("_R")


def auto_mesh(mesh: Any) -> Mesh:
    """The mesh with Auto axes: under Explicit ones a model would need annotations of its own.

    Raises:
        TypeError: It is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',))")
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def in_explicit_mesh() -> bool:
    """Whether the caller has set a mesh with Explicit axes, as `jax.set_mesh(jax.make_mesh(...))` does."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """The mesh that the caller has set, with Auto axes while this lasts.

    Arrays of one mesh with Explicit and with Auto axes do not mix, so whatever computes with a state that lies on a
    mesh does it in here. Under a trace there is nothing to be changed any more.
    """
    if not in_explicit_mesh():
        yield
        return
    try:
        mesh = auto_mesh(jax.sharding.get_mesh())
    except ValueError:  # traced
        yield
        return
    with jax.set_mesh(mesh):
        yield


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """The context for work of jstep's own on the arrays it was given: `auto_axes`, and no transfer guard stops it.

    A user's function that is called inside would not see its guard.
    """
    with auto_axes(), own_transfers():
        yield


@contextlib.contextmanager
def alike(tree: Any, *, always: bool = False) -> Iterator[Any]:
    """The arrays of a tree, fit to be computed with together, and the caller's mesh with them.

    Where some of them lie on Auto axes, or always, all are taken as on Auto ones, as a compiled step takes them; arrays
    that all lie on Explicit axes are the caller's own, and stay as they are.
    """
    if always or any(map(_lies_on_auto_axes, jax.tree.leaves(tree))):
        with auto_axes():
            yield on_auto_axes(tree)
    else:
        yield tree


def as_own_work(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, whose work on the arrays it is given no transfer guard stops, wherever they lie: see `alike`."""

    @functools.wraps(fn)
    def work(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with alike((args, kwargs)) as given, own_transfers():
            return fn(*given[0], **given[1])

    return work


def _lies_on_auto_axes(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or isinstance(leaf, jax.core.Tracer):
        return False
    sharding = leaf.sharding
    return isinstance(sharding, NamedSharding) and AxisType.Auto in sharding.mesh.axis_types


def lies_explicitly(leaf: Any) -> bool:
    """Whether an array lies on a mesh with Explicit axes."""
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def on_auto_axes(tree: Any) -> Any:
    """The same arrays in the same memory, those on Explicit axes taken as lying on Auto ones; and shapes of arrays."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or isinstance(x, jax.core.Tracer):
            return x
        if not lies_explicitly(x):
            return x
        sharding: Any = x.sharding
        if isinstance(x, jax.ShapeDtypeStruct):
            # Shapes that were traced under a mesh know no devices.
            known = isinstance(sharding.mesh, Mesh)
            placed = NamedSharding(auto_mesh(sharding.mesh), sharding.spec) if known else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.weak_type)
        return jax.device_put(x, NamedSharding(auto_mesh(sharding.mesh), sharding.spec))

    return jax.tree.map(leaf, tree) if any(map(lies_explicitly, jax.tree.leaves(tree))) else tree
