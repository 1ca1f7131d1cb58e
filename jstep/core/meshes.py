"""Computing on the user's mesh, whatever the types of its axes.

A mesh and its axis types are the user's: nothing here converts an array that the user sees. A user's function is traced
on the types it is given; what jstep computes itself runs with Auto axes inside, and its results are sharded as the
arrays it was given.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jstep.core.contexts import internal_transfers
from jstep.core.layouts import mesh_axes_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_logger = logging.getLogger("jstep")

_WAYS_OUT = (
    "The state is on Explicit axes (the default of jax.make_mesh), and JAX refuses this function on Explicit"
    " and on Auto axes. Annotate what JAX names (out_sharding=, jax.sharding.reshard); or make the mesh with "
    "axis_types=(jax.sharding.AxisType.Auto, ...); or pass jax.sharding.auto_axes(fn, out_sharding=jax.P()). Sharded "
    "arrays that the function closes over are better passed as arguments."
)


def require_mesh(mesh: Any) -> Mesh:
    """The mesh.

    Raises:
        TypeError: It is not a `jax.sharding.Mesh`.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',))")
    return mesh


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays (or shapes with shardings) are on; None on a single device, and of traced arrays."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not is_traced(leaf):
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                return sharding.mesh
    return None


def on_host(value: Any) -> np.ndarray[Any, Any] | None:
    """The values of an array that is on a mesh, where this process has them; None for any other."""
    if not isinstance(value, jax.Array) or is_traced(value):
        return None
    if not isinstance(value.sharding, NamedSharding) or not (value.is_fully_replicated or value.is_fully_addressable):
        return None
    with internal_transfers():
        return np.asarray(value)


def using_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which `mesh` is the one that is set; nothing changes if it already is, or is None."""
    if mesh is None:
        return contextlib.nullcontext()
    try:
        return contextlib.nullcontext() if jax.sharding.get_mesh() == mesh else jax.set_mesh(mesh)
    except ValueError:  # inside a function that JAX is tracing
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def overriding_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which `mesh` is set if another one was; where none is set, none is."""
    try:
        return contextlib.nullcontext() if jax.sharding.get_mesh().empty else using_mesh(mesh)
    except ValueError:  # inside a function that JAX is tracing
        return using_mesh(mesh)


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes in the types of some arrays, traced or not; None for any other mesh, or none.

    Within `jax.shard_map`, whose axes are Manual, there is none either.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            mesh = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                return None if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types else mesh.abstract_mesh
    return None


def spec_of(leaf: Any) -> PartitionSpec:
    """How the type of an array says that it is sharded."""
    return jax.typeof(leaf).sharding.spec


def reduced(total: Any) -> Any:
    """An array that is not `unreduced` over any axis: the sum over all devices of what each has."""
    mesh = explicit_mesh(total)
    if mesh is None or not spec_of(total).unreduced:
        return total
    return jax.sharding.reshard(total, NamedSharding(mesh, PartitionSpec(*spec_of(total).partitions)))


def sharded_like(*trees: Any) -> Callable[[Any], Any]:
    """From a result to its specs: those of the leaves of equal path and shape in `trees`, else replicated."""

    def specs(result: Any) -> Any:
        known = {}
        for tree in trees:
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                if isinstance(leaf, jax.Array):
                    sharding = None if is_traced(leaf) else leaf.sharding
                    as_written = sharding.spec if isinstance(sharding, NamedSharding) else None
                    known[path, leaf.shape] = spec_of(leaf) if as_written is None else as_written
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: known.get((path, getattr(leaf, "shape", ())), PartitionSpec()), result
        )

    return specs


def without_explicit_axes(
    fn: Callable[..., _R], *args: Any, place: Callable[[Any], Any] | None = None, mesh: AbstractMesh | None = None
) -> _R:
    """`fn(*args)`, with Auto axes inside: for what jstep computes itself.

    Like `jax.sharding.auto_axes`, but the specs of the result may follow from the result.

    Args:
        fn: A function of arrays. It must not close over arrays that are on the mesh.
        *args: Trees of arrays.
        place: From the result to the specs of its leaves; replicated by default.
        mesh: The mesh with Explicit axes; that of the arguments by default.
    """
    mesh = mesh or explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    with using_mesh(mesh_of(args)):
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))):
            result = fn(*jax.tree.map(_entered, args))
        specs = (place or sharded_like())(result)
        return jax.tree.map(functools.partial(_left, mesh), result, specs)


def leaving_auto_axes(fn: Callable[[Any], _R], params: Any) -> Callable[[Any], _R]:
    """A function of parameters that works on the axis types of its mesh, to be called within `without_explicit_axes`.

    Args:
        fn: The function.
        params: Trees like the arguments that it will be called with, sharded as `fn` is to see them.
    """
    mesh = explicit_mesh(params)
    if mesh is None:
        return fn
    place = sharded_like(params)

    def outside(params: Any) -> _R:
        with jax.sharding.use_abstract_mesh(mesh):
            result = fn(jax.tree.map(functools.partial(_left, mesh), params, place(params)))
        return jax.tree.map(_entered, result)

    return outside


def _entered(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or jax.typeof(leaf).sharding.mesh.empty:
        return leaf
    return jax.sharding.reshard(leaf, PartitionSpec(*[None] * leaf.ndim))


def _left(mesh: AbstractMesh, leaf: Any, spec: PartitionSpec) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, _of_types(mesh, spec)))
    # JAX writes a spec in full; as written by the user it is the one that compiled programs know.
    return leaf if is_traced(leaf) else jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, spec))


def _of_types(mesh: AbstractMesh, spec: PartitionSpec) -> PartitionSpec:
    """What a spec says of the Explicit axes of a mesh, which alone are in the types of arrays."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(types.values()) == {AxisType.Explicit}:
        return spec

    def part(axis: Any) -> Any:
        return tuple(name for name in mesh_axes_of(axis) if types.get(name) == AxisType.Explicit) or None

    return PartitionSpec(*map(part, spec.partitions))


def is_traced(leaf: Any) -> bool:
    """Whether JAX traces it, which then has no values, and on Auto axes no sharding."""
    return isinstance(leaf, jax.core.Tracer)


def on_any_mesh(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of jstep's that works for arrays on any mesh, and that no transfer guard stops.

    What it returns is sharded as its first argument where the two are alike, in whole or in the first of several
    results, and replicated otherwise.
    """

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with internal_transfers():
            if explicit_mesh((args, kwargs)) is None:
                return fn(*args, **kwargs)
            first = args[0] if args else next(iter(kwargs.values()))
            place = sharded_like(first, (first,))
            return without_explicit_axes(lambda args, kwargs: fn(*args, **kwargs), args, kwargs, place=place)

    return run


class Attempts:
    """A user's function on the axis types it is given, or on Auto axes if JAX refuses those.

    JAX refuses a model without annotations on Explicit axes as soon as an operation has more than one sensible result.
    Then the function is traced once more with Auto axes, and one line of the log says so.

    Args:
        name: What the log calls the function.
    """

    def __init__(self, name: str) -> None:
        self._name, self._is_logged = name, False

    def __call__(self, fn: Callable[..., _R], *args: Any, place: Callable[[Any], Any] | None = None) -> _R:
        """`fn(*args)`; `place` is that of `without_explicit_axes`.

        Raises:
            Exception: Both were refused: what was said of the types given, with a note on what to do.
        """
        mesh = explicit_mesh(args)
        if mesh is None:
            return fn(*args)
        with contextlib.ExitStack() as stack:
            stack.enter_context(using_mesh(mesh_of(args)))
            if jax.sharding.get_abstract_mesh() != mesh:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            try:
                return atomic(fn, *args)
            except Exception as error:
                refusal = error
            try:
                result = without_explicit_axes(fn, *args, place=place)
            except Exception as error:
                if _signature(error) != _signature(refusal):
                    refusal.add_note(_WAYS_OUT)
                raise refusal from refusal.__cause__
            finally:
                reason = f"{type(refusal).__name__}: {refusal}".splitlines()[0]
                del refusal  # its traceback holds tracers
        if not self._is_logged and jax.process_index() == 0:
            self._is_logged = True
            _logger.info(
                "%s is computed on Auto axes: JAX refuses it on the Explicit axes of its mesh (%s)", self._name, reason
            )
        return result


def _signature(error: Exception) -> tuple[type, str]:
    """What tells an error from others: its type and its first line, whatever that says of shardings.

    A bug of the function's own is the same on all types of axes; the lines that follow say where it was traced.
    """
    first = (str(error).splitlines() or [""])[0]
    return type(error), re.sub(r"@\([^()]*\)|@\w+", "", first)


def atomic(fn: Callable[..., _R], *args: Any) -> _R:
    """`fn(*args)`, of which nothing is left if tracing it raises: no operation in the caller's program, none that ran.

    Args:
        fn: A function that JAX can trace.
        *args: Trees; what is not an array reaches `fn` as it is.
    """
    leaves: list[Any]
    treedef: Any
    leaves, treedef = jax.tree.flatten(args)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def whole(arrays: list[Any]) -> Any:
        filled = list(leaves)
        for i, array in zip(indices, arrays, strict=True):
            filled[i] = array
        return fn(*treedef.unflatten(filled))

    arrays = [leaves[i] for i in indices]
    if any(map(is_traced, arrays)):
        result: _R = jax.jit(whole)(arrays)
        return result
    jax.eval_shape(whole, arrays)
    return fn(*args)
