"""Meshes and the other contexts of JAX: which one applies, and code that must not depend on the user's.

The mesh and its axis types belong to the user: arrays that the user sees are never converted. A user's function is
traced on the given axis types; jstep's own computations run with Auto axes, and their results are sharded like their
arguments.
"""

import contextlib
import functools
import inspect
import logging
import math
import operator
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jstep.core.annotations import Tree
from jstep.core.exceptions import explain_jax, scoped
from jstep.core.trees import arrays_of, is_traced

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOT_CARRIED = {"thread_guard", "transfer_guard"}
"""The first belongs to one thread; the second is an alias of three settings, which are propagated."""

SETTINGS = tuple(
    name
    for name in (entry.removeprefix("jax_") for entry in jax.config.values if entry.startswith("jax_"))
    if name not in _NOT_CARRIED and callable(getattr(jax, name, None))
)
"""Settings: `jax.config.jax_<name>` is the value in this thread, `jax.<name>(value)` is its context manager."""

_GUARDS = tuple(name for name in SETTINGS if name.startswith("transfer_guard_"))
_guard_values = operator.attrgetter(*[f"jax_{name}" for name in _GUARDS])

NO_GUARD: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
"""What `internal_transfers` returns if the caller has set no guard."""


def internal_transfers() -> contextlib.AbstractContextManager[object]:
    """Context manager that exempts internal transfers (host, devices) from the caller's transfer guards.

    Use it only around transfers: a user's function called inside would not see its guard. It costs almost nothing when
    no guard is set.

    Example:
        >>> import jax, numpy as np
        >>> from jstep.core.meshes import internal_transfers
        >>> with jax.transfer_guard("disallow"):
        ...     with internal_transfers():
        ...         x = jax.numpy.add(np.float32(1), np.float32(2))
        >>> float(x)
        3.0
    """
    if not any(_guard_values(jax.config)):  # quick: it is asked at each step, and for every logged scalar
        return NO_GUARD
    return _allowed([name for name in _GUARDS if str(read_setting(name)).startswith("disallow")])


@scoped
def _allowed(guards: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in guards:
            stack.enter_context(getattr(jax, name)("allow"))
        yield


def read_setting(name: str) -> Any:
    """Return the value of one of `SETTINGS` in this thread."""
    return getattr(jax.config, f"jax_{name}")


_logger = logging.getLogger("jstep")

_WAYS_OUT = (
    "The state is on Explicit axes (the default of jax.make_mesh), and JAX refuses this function on Explicit"
    " and on Auto axes. Annotate what JAX names (out_sharding=, jax.sharding.reshard); or make the mesh with "
    "axis_types=(jax.sharding.AxisType.Auto, ...); or pass jax.sharding.auto_axes(fn, out_sharding=jax.P()). Pass "
    "sharded arrays as arguments instead of closing over them."
)


def require_mesh(mesh: object) -> Mesh:
    """Return the value, which must be a mesh.

    Raises:
        TypeError: It is not a `jax.sharding.Mesh`.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',))")
    return mesh


def mesh_of(tree: Tree) -> Mesh | None:
    """Return the mesh of arrays (or shapes with shardings); None on a single device, and for traced arrays."""
    for leaf in jax.tree.leaves(tree):
        sharding = None if is_traced(leaf) else sharding_on_mesh(leaf)
        if sharding is not None and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def sharding_on_mesh(leaf: object) -> NamedSharding | None:
    """Return the sharding of an array, a shape, or a tracer with Explicit axes; None if unknown or not on a mesh."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = jax.typeof(leaf).sharding if is_traced(leaf) else leaf.sharding
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def on_host(value: object) -> np.ndarray[Any, Any] | None:
    """Return the values of an array on a mesh, if this process has all of them; None for any other array."""
    if not isinstance(value, jax.Array) or is_traced(value):
        return None
    if not isinstance(value.sharding, NamedSharding) or not (value.is_fully_replicated or value.is_fully_addressable):
        return None
    with internal_transfers():
        return np.asarray(value)


def current_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh`, which may be empty; None inside a function that JAX is tracing."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return None


def using_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Context manager that sets `mesh`; a no-op if it is already set, or is None."""
    if mesh is None:
        return contextlib.nullcontext()
    current = current_mesh()
    if current is None:
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return contextlib.nullcontext() if current == mesh else jax.set_mesh(mesh)


def overriding_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Context manager that sets `mesh` only if some mesh is already set."""
    current = current_mesh()
    return using_mesh(mesh) if current is None or not current.empty else contextlib.nullcontext()


def explicit_mesh(tree: Tree) -> AbstractMesh | None:
    """Return the mesh with Explicit axes in the types of some arrays, traced or not; None if there is no such mesh.

    Also None within `jax.shard_map`, whose axes are Manual.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            mesh = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                return None if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types else mesh.abstract_mesh
    return None


def dims_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the mesh axes of each dimension of a spec.

    JAX 0.10.0 has no `PartitionSpec.partitions`; later versions refuse to iterate over a spec with unreduced axes.
    """
    return tuple(spec.partitions) if hasattr(spec, "partitions") else tuple(spec)


def mesh_text(mesh: Any) -> str:
    """Format the axes of a mesh with their sizes and types: `data: 4 Explicit, model: 2 Auto`."""
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return ", ".join(f"{name}: {mesh.shape[name]} {kind.name}" for name, kind in named)


def sharding_text(sharding: Any) -> str:
    """Format a sharding without its devices: the spec, the axes of the mesh, and the memory kind."""
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} over ({mesh_text(sharding.mesh)}){memory}"
    return f"{type(sharding).__name__}{memory}"


def parts_along(mesh: Mesh | AbstractMesh, axis: object) -> int:
    """Return the number of parts into which the mesh axes of one dimension of a spec split it."""
    return math.prod(mesh.shape[name] for name in mesh_axes_of(axis))


def mesh_axes_of(axis: object) -> tuple[str, ...]:
    """Return the mesh axes of one dimension of a spec."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def spec_of(leaf: object) -> PartitionSpec:
    """Return the spec in the type of an array."""
    return jax.typeof(leaf).sharding.spec


def reduced(total: object) -> Any:
    """Sum an `unreduced` array over its devices, and forget that one is `reduced`; any other array is unchanged."""
    mesh = explicit_mesh(total)
    if mesh is None or not (spec_of(total).unreduced or spec_of(total).reduced):
        return total
    return jax.sharding.reshard(total, NamedSharding(mesh, PartitionSpec(*dims_of(spec_of(total)))))


def sharded_like(*trees: Any) -> Callable[[Any], Any]:
    """Return a function from a result to its specs: those of leaves of equal path and shape in `trees`, else P().

    Of several trees the last one decides that has the leaf on a mesh. Shapes may have shardings, too.
    """

    def specs(result: object) -> Any:
        known = {}
        for tree in trees:
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                if (sharding := sharding_on_mesh(leaf)) is not None:
                    known[path, leaf.shape] = sharding.spec
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: known.get((path, getattr(leaf, "shape", ())), PartitionSpec()), result
        )

    return specs


def without_explicit_axes(
    fn: Callable[..., _R], *args: Any, place: Callable[[Any], Any] | None = None, mesh: AbstractMesh | None = None
) -> _R:
    """Call `fn(*args)` with Auto axes, for jstep's own computations.

    Like `jax.sharding.auto_axes`, but the specs of the result may depend on the result.

    Args:
        fn: A function of arrays. It must not close over arrays on the mesh.
        *args: Trees of arrays.
        place: Maps the result to the specs of its leaves; replicated by default.
        mesh: The mesh with Explicit axes; defaults to the mesh of the arguments.
    """
    mesh = mesh or explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    with using_mesh(mesh_of(args)):
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))):
            result = fn(*jax.tree.map(_entered, args))
        specs = (place or sharded_like())(result)
        return jax.tree.map(functools.partial(_left, mesh), result, specs)


def leaving_auto_axes(fn: Callable[[Any], _R], params: Tree) -> Callable[[Any], _R]:
    """Wrap a function of parameters to run on its own axis types when called within `without_explicit_axes`.

    Args:
        fn: The function.
        params: Trees like the later arguments, with the shardings that `fn` expects.
    """
    mesh = explicit_mesh(params)
    if mesh is None:
        return fn
    place = sharded_like(params)

    def outside(params: Tree) -> _R:
        with jax.sharding.use_abstract_mesh(mesh):
            result = fn(jax.tree.map(functools.partial(_left, mesh), params, place(params)))
        return jax.tree.map(_entered, result)

    return outside


def _entered(leaf: object) -> Any:
    if not isinstance(leaf, jax.Array) or jax.typeof(leaf).sharding.mesh.empty:
        return leaf
    return jax.sharding.reshard(leaf, PartitionSpec(*[None] * leaf.ndim))


def _left(mesh: AbstractMesh, leaf: Any, spec: PartitionSpec) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, _of_types(mesh, spec)))
    # JAX normalizes specs; compiled programs were compiled for the user's form.
    return leaf if is_traced(leaf) else jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, spec))


def _of_types(mesh: AbstractMesh, spec: PartitionSpec) -> PartitionSpec:
    """Restrict a spec to the Explicit axes of a mesh, the only ones in the types of arrays."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(types.values()) == {AxisType.Explicit}:
        return spec

    def part(axis: object) -> Any:
        return tuple(name for name in mesh_axes_of(axis) if types.get(name) == AxisType.Explicit) or None

    return PartitionSpec(*map(part, dims_of(spec)))


def on_any_mesh(*like: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator of jstep functions: supports arrays on any mesh, and exempts internal transfers from transfer guards.

    Args:
        *like: The arguments that the result is like, or attributes of arguments, such as `"state.params"`. A leaf of
            the result is sharded like the leaf of the same path and shape in the first of them that has one on a mesh;
            all others are replicated.
    """

    def decorated(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with internal_transfers():
                if explicit_mesh((args, kwargs)) is None:
                    return fn(*args, **kwargs)
                given = types.SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
                place = sharded_like(*(_found(given, name) for name in reversed(like)))
                return without_explicit_axes(lambda args, kwargs: fn(*args, **kwargs), args, kwargs, place=place)

        return run

    return decorated


def _found(given: object, name: str) -> Any:
    """Return an argument or its attribute; None if it has none, as the function itself will say."""
    return functools.reduce(lambda value, part: getattr(value, part, None), name.split("."), given)


class Attempts:
    """Calls of a user's function on the given axis types, or on Auto axes if JAX rejects the given ones.

    With Explicit axes JAX rejects a model without annotations if an operation has an ambiguous output sharding. The
    function is then traced again with Auto axes, and this is logged once.

    Args:
        name: The name of the function in the log.
    """

    def __init__(self, name: str) -> None:
        self._name, self._is_logged = name, False

    def __call__(self, fn: Callable[..., _R], *args: Any, place: Callable[[Any], Any] | None = None) -> _R:
        """Call `fn(*args)`; see `without_explicit_axes` for `place`.

        Raises:
            Exception: Both attempts failed: the error for the given axis types, with a note on what to do.
        """
        try:
            mesh = explicit_mesh(args)
            if mesh is None:
                return fn(*args)
            with using_mesh(mesh_of(args)), jax.sharding.use_abstract_mesh(mesh):
                try:
                    return atomic(fn, *args)
                except Exception as error:
                    refusal = error
                try:
                    result = without_explicit_axes(fn, *args, place=place)
                except Exception as error:
                    if _signature(error) != _signature(refusal):
                        refusal.add_note(f"On Auto axes: {type(error).__name__}: {error}".splitlines()[0])
                        refusal.add_note(_WAYS_OUT)
                    raise refusal from refusal.__cause__
                finally:
                    reason = f"{type(refusal).__name__}: {refusal}".splitlines()[0]
                    del refusal  # its traceback holds tracers
        except (NameError, TypeError) as error:
            explain_jax(error)
            raise
        if not self._is_logged and jax.process_index() == 0:
            self._is_logged = True
            text = "%s is computed on Auto axes: JAX refuses it on the Explicit axes of its mesh (%s)"
            _logger.info(text, self._name, reason)
        return result


def _signature(error: Exception) -> tuple[type, str]:
    """Return the type of an error and the first line of its message without shardings, for comparison.

    A bug in the user's function gives the same error on all axis types; later lines depend on the trace.
    """
    first = (str(error).splitlines() or [""])[0]
    return type(error), re.sub(r"@\([^()]*\)|@\w+", "", first)


def atomic(fn: Callable[..., _R], *args: Any) -> _R:
    """Call `fn(*args)` without side effects if tracing raises: no operation is run, or added to the caller's program.

    Args:
        fn: A function that JAX can trace.
        *args: Trees; leaves that are not arrays are passed to `fn` unchanged.
    """
    arrays, filled = arrays_of(args)

    def whole(arrays: list[Any]) -> Any:
        return fn(*filled(arrays))

    if any(map(is_traced, arrays)):
        result: _R = jax.jit(whole)(arrays)
        return result
    jax.eval_shape(whole, arrays)
    return fn(*args)


def on_every_device(fn: Callable[..., _R], *args: Any) -> _R:
    """Compute `fn(*args)` redundantly on every device of the current mesh, if its axes are Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return fn(*args)
    spec = PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*args)
