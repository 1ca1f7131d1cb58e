"""Meshes and other JAX contexts: which one applies, and code independent of the user's contexts.

A user's function is traced on the axis types of the user's mesh; jstep's own computations run with
Auto axes, and their results are sharded like their arguments.
"""

import contextlib
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jstep.core.logs import logger
from jstep.core.trees import Tree, is_traced, partition_arrays, suggest_names

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOT_CARRIED = {"thread_guard", "transfer_guard"}
"""`thread_guard` belongs to one thread; `transfer_guard` is an alias of three settings."""


def _carried_settings() -> tuple[str, ...]:
    names = [entry.removeprefix("jax_") for entry in jax.config.values if entry.startswith("jax_")]
    return tuple(
        name for name in names if name not in _NOT_CARRIED and callable(getattr(jax, name, None))
    )


SETTINGS = _carried_settings()
"""Settings with a thread-local value and a context manager, `jax.<name>(value)`."""

_GUARDS = tuple(name for name in SETTINGS if name.startswith("transfer_guard_"))
_guard_values = operator.attrgetter(*[f"jax_{name}" for name in _GUARDS])
special_settings = operator.attrgetter(
    *[f"jax_{name}" for name in (*_GUARDS, "debug_nans", "debug_infs")]
)
"""The settings of `jax.config` that change how a step is called."""

NO_GUARD: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def internal_transfers() -> contextlib.AbstractContextManager[object]:
    """Exempt jstep's transfers from the caller's transfer guards; not for users' functions."""
    # A fast path, as this is called at each step, and for every logged scalar.
    if not any(_guard_values(jax.config)):
        return NO_GUARD
    return jax.transfer_guard("allow")


def exempts_transfers(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: exempt the transfers of a function from the user's transfer guards."""

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with internal_transfers():
            return fn(*args, **kwargs)

    return call


_setting_values = operator.attrgetter(*[f"jax_{name}" for name in SETTINGS])


def read_settings() -> dict[str, Any]:
    return dict(zip(SETTINGS, _setting_values(jax.config), strict=True))


_WAYS_OUT = (
    "JAX refuses this function on the Explicit axes of the mesh (the default of jax.make_mesh) and "
    "on Auto axes: annotate what JAX names (out_sharding=, jax.sharding.reshard), or pass it "
    "arrays in place of closing over them."
)


def as_mesh(mesh: object) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={mesh!r}: must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',))"
        )
    return mesh


def mesh_of(tree: Tree) -> Mesh | None:
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf.sharding, NamedSharding):
            continue
        mesh = leaf.sharding.mesh
        if isinstance(mesh, Mesh) and not mesh.empty:
            return mesh
    return None


def sharding_on_mesh(leaf: object) -> NamedSharding | None:
    """The sharding of an array, shape, or tracer with Explicit axes; None if not on a mesh."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = jax.typeof(leaf).sharding if is_traced(leaf) else leaf.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding


def copy_to_host(value: object) -> np.ndarray[Any, Any] | None:
    """Return the value of an array on a mesh, if this process has all of it; else None."""
    if not isinstance(value, jax.Array) or is_traced(value):
        return None
    if not isinstance(value.sharding, NamedSharding):
        return None
    if not (value.is_fully_replicated or value.is_fully_addressable):
        return None
    with internal_transfers():
        return np.asarray(value)


def current_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh`, which may be empty; None during tracing."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return None


def using_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    if mesh is None:
        return contextlib.nullcontext()
    current = current_mesh()
    if current is None:
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    if current == mesh:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def overriding_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Set a mesh only if some mesh is already set."""
    current = current_mesh()
    if current is not None and current.empty:
        return contextlib.nullcontext()
    return using_mesh(mesh)


def explicit_mesh(tree: Tree) -> AbstractMesh | None:
    """Return the mesh with Explicit axes of arrays' types; None also within `jax.shard_map`."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            mesh = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                is_in_shard_map = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
                return None if is_in_shard_map else mesh.abstract_mesh
    return None


def dims_of(spec: PartitionSpec) -> tuple[Any, ...]:
    # JAX 0.10.0 has no `partitions`; later versions do not iterate over a spec with unreduced axes.
    return tuple(spec.partitions) if hasattr(spec, "partitions") else tuple(spec)


def mesh_text(mesh: Any) -> str:
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return ", ".join(f"{name}: {mesh.shape[name]} {kind.name}" for name, kind in named)


def sharding_text(sharding: Any) -> str:
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} over ({mesh_text(sharding.mesh)}){memory}"
    return f"{type(sharding).__name__}{memory}"


def parts_along(mesh: Mesh | AbstractMesh, axis: object) -> int:
    return math.prod(mesh.shape[name] for name in mesh_axes_of(axis))


def axis_size(mesh: Mesh | AbstractMesh, axis: object, argument: str) -> int:
    names = axis if isinstance(axis, tuple) else (axis,)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{argument}: must be the name of an axis or a tuple of names, got {axis!r}"
            )
        if name not in mesh.shape:
            hint = suggest_names(str(name), map(str, mesh.axis_names))
            raise ValueError(
                f"{argument}: the mesh has no axis {name!r}{hint}; its axes are {dict(mesh.shape)}"
            )
    return parts_along(mesh, axis)


def fitting_spec(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> PartitionSpec:
    """Drop from a spec the axes that do not divide an array of this shape."""
    axes = []
    for size, axis in zip(shape, dims_of(spec), strict=False):
        axes.append(axis if size % parts_along(mesh, axis) == 0 else None)
    return PartitionSpec(*axes)


def largest_divisible(shape: tuple[int, ...], size: int) -> int | None:
    """Return the largest dimension that `size` divides, the first of equal ones, or None."""
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    return max(fitting, key=lambda dim: (shape[dim], -dim), default=None)


def mesh_axes_of(axis: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a spec: None, a name, or several names."""
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def spec_of(leaf: object) -> PartitionSpec:
    return jax.typeof(leaf).sharding.spec


def reduce_unreduced(total: object) -> Any:
    """Sum an `unreduced` array over its devices, and clear `reduced` axes."""
    mesh = explicit_mesh(total)
    if mesh is None:
        return total
    spec = spec_of(total)
    if not (spec.unreduced or spec.reduced):
        return total
    return jax.sharding.reshard(total, NamedSharding(mesh, PartitionSpec(*dims_of(spec))))


def shard_like(*trees: Any) -> Callable[[Any], Any]:
    """Return a function from a result to the specs of leaves of equal path and shape in `trees`."""

    def specs(result: object) -> Any:
        known: dict[Any, PartitionSpec] = {}
        for tree in trees:
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                sharding = sharding_on_mesh(leaf)
                if sharding is not None:
                    known[path, leaf.shape] = sharding.spec

        def spec(path: Any, leaf: object) -> PartitionSpec:
            return known.get((path, getattr(leaf, "shape", ())), PartitionSpec())

        return jax.tree_util.tree_map_with_path(spec, result)

    return specs


def call_on_auto_axes(
    fn: Callable[..., _R],
    *args: Any,
    specs_of: Callable[[Any], Any] | None = None,
    mesh: AbstractMesh | None = None,
) -> _R:
    """Call `fn(*args)` with Auto axes; `specs_of` maps the result to its specs.

    `fn` must not close over an array on a mesh.
    """
    mesh = mesh or explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    auto_mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    with using_mesh(mesh_of(args)):
        with jax.sharding.use_abstract_mesh(auto_mesh):
            result = fn(*jax.tree.map(_to_auto_axes, args))
        specs = (specs_of or shard_like())(result)
        return jax.tree.map(functools.partial(_to_own_axes, mesh), result, specs)


def leaving_auto_axes(fn: Callable[[Any], _R], params: Tree) -> Callable[[Any], _R]:
    """Let a function run on its own axis types within `call_on_auto_axes`."""
    mesh = explicit_mesh(params)
    if mesh is None:
        return fn
    specs_of = shard_like(params)

    def call(params: Tree) -> _R:
        with jax.sharding.use_abstract_mesh(mesh):
            to_own_axes = functools.partial(_to_own_axes, mesh)
            result = fn(jax.tree.map(to_own_axes, params, specs_of(params)))
        return jax.tree.map(_to_auto_axes, result)

    return call


def _to_auto_axes(leaf: object) -> Any:
    if not isinstance(leaf, jax.Array) or jax.typeof(leaf).sharding.mesh.empty:
        return leaf
    return jax.sharding.reshard(leaf, PartitionSpec(*[None] * leaf.ndim))


def _to_own_axes(mesh: AbstractMesh, leaf: Any, spec: PartitionSpec) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, _keep_explicit_axes(mesh, spec)))
    if is_traced(leaf):
        return leaf
    # JAX normalizes specs; compiled programs were compiled for the user's form.
    return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, spec))


def _keep_explicit_axes(mesh: AbstractMesh, spec: PartitionSpec) -> PartitionSpec:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(types.values()) == {AxisType.Explicit}:
        return spec

    def part(axis: object) -> Any:
        names = (name for name in mesh_axes_of(axis) if types.get(name) == AxisType.Explicit)
        return tuple(names) or None

    return PartitionSpec(*map(part, dims_of(spec)))


def supports_meshes(*like: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: support arrays on any mesh, and exempt internal transfers.

    A leaf of the result is sharded like the leaf of equal path and shape in the first of `like`
    (`"state.params"`).
    """

    def decorated(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with internal_transfers():
                if explicit_mesh((args, kwargs)) is None:
                    return fn(*args, **kwargs)
                arguments = types.SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
                # Reversed, because of leaves with one path and shape `shard_like` takes the last.
                specs_of = shard_like(*(_argument_at(arguments, name) for name in reversed(like)))
                return call_on_auto_axes(
                    lambda args, kwargs: fn(*args, **kwargs), args, kwargs, specs_of=specs_of
                )

        return call

    return decorated


def _argument_at(arguments: Any, path: str) -> Any:
    """Return an argument or its attribute, such as `state.params`.

    None if it is missing, which the function itself will report.
    """
    value = arguments
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


class AxesFallback:
    """Calls of a user's function on its axis types, or on Auto axes if JAX rejects these."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_logged = False

    def __call__(
        self, fn: Callable[..., _R], *args: Any, specs_of: Callable[[Any], Any] | None = None
    ) -> _R:
        """Call `fn(*args)`; if both attempts fail, raise the first error, with a note."""
        mesh = explicit_mesh(args)
        if mesh is None:
            return fn(*args)
        with using_mesh(mesh_of(args)), jax.sharding.use_abstract_mesh(mesh):
            try:
                return atomic(fn, *args)
            except Exception as error:
                refusal = error
            try:
                result = call_on_auto_axes(fn, *args, specs_of=specs_of)
            except Exception as error:
                if _signature(error) != _signature(refusal):
                    other = f"On Auto axes: {type(error).__name__}: {error}".splitlines()[0]
                    refusal.add_note(f"{other}\n{_WAYS_OUT}")
                raise refusal from refusal.__cause__
            finally:
                reason = f"{type(refusal).__name__}: {refusal}".splitlines()[0]
                del refusal  # its traceback holds tracers
        if not self._is_logged and jax.process_index() == 0:  # `processes` imports this file
            self._is_logged = True
            text = (
                "%s runs with Auto axes, where XLA chooses the shardings, as it has no annotations "
                "for the Explicit axes of its mesh; results are the same. JAX's reason: %s"
            )
            logger.info(text, self._name, reason)
        return result


def _signature(error: Exception) -> tuple[type, str]:
    # A bug in the user's function gives one error on all axis types; later lines depend on traces.
    first_line = (str(error).splitlines() or [""])[0]
    # In types on Explicit axes, the axes follow an @.
    return type(error), re.sub(r"@\([^()]*\)|@\w+", "", first_line)


def atomic(fn: Callable[..., _R], *args: Any) -> _R:
    """Call `fn(*args)`; if tracing raises, no operation has joined the caller's program."""
    arrays, filled = partition_arrays(args)

    def whole(arrays: list[Any]) -> Any:
        return fn(*filled(arrays))

    if any(map(is_traced, arrays)):
        result: _R = jax.jit(whole)(arrays)
        return result
    jax.eval_shape(whole, arrays)
    return fn(*args)


def replicate_call(fn: Callable[..., _R], *args: Any) -> _R:
    """Call `fn(*args)` on every device of the mesh, on whole arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return fn(*args)
    spec = PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*args)
