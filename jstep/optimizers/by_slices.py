"""Updates of large leaves in loops over slices, for TPUs: no float32 array has the size of a leaf.

In a loop over slices of rows, XLA keeps the float32 values of a slice in the fast memory of a core,
if a barrier separates the new slots from their codes.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jstep.core.jaxprs import (
    Operation,
    Subprogram,
    apply,
    evaluate,
    is_elementwise_operation,
    subprogram,
    variables,
)
from jstep.core.meshes import parts_along
from jstep.core.placement import layout_of
from jstep.core.trees import Array
from jstep.slots.compact_numbers import Blocks

LARGE = 2**20
"""The minimum number of elements of a leaf that is updated in slices."""
SLICE = 2**19
"""The maximum number of elements of a slice, if the axes of the leaf allow it."""
_TILE = {1: 4096, 2: 128}
_ROWS = 32
"""Whole tiles of a TPU's memory, in rows."""
Shape = tuple[int, ...]


def slice_shape(path: str, shape: Shape, blocks: Blocks | None) -> Shape:
    """Return the shape of a leaf's slices, which cut no blocks; its own if no axis can be cut."""
    layout = layout_of(path)
    if layout is None and jax.default_backend() == "tpu" and jax.device_count() > 1:
        return shape  # a loop along an axis that is split would gather the leaf
    sizes = list(shape)
    for axis in range(len(shape)):
        if (
            layout is not None
            and axis < len(layout.spec)
            and parts_along(layout.mesh, layout.spec[axis]) > 1
        ):
            continue
        whole = {1: _TILE[min(len(shape), 2)], 2: _ROWS}.get(len(shape) - axis, 1)
        multiple = math.lcm(whole, blocks.size if blocks is not None and axis == blocks.axis else 1)
        others = math.prod(sizes) // sizes[axis]
        lengths = [n for n in range(multiple, shape[axis] + 1, multiple) if shape[axis] % n == 0]
        if lengths:
            sizes[axis] = max((n for n in lengths if n * others <= SLICE), default=min(lengths))
    return tuple(sizes)


def find_ending(
    program: Subprogram,
    results: Sequence[Any],
    is_part: Callable[[Operation], bool] = lambda operation: True,
) -> Subprogram:
    """The last operations (with `is_part`) computing `results`, as a program of what they read."""
    needs = dict.fromkeys(variables(results))
    operations = []
    for operation in reversed(program.operations):
        outputs = operation.eqn.outvars
        if needs.keys().isdisjoint(outputs) or not is_part(operation):
            continue
        operations.append(operation)
        for var in outputs:
            needs.pop(var, None)
        needs |= dict.fromkeys(variables(operation.eqn.invars))
    return Subprogram(subprogram(program.jaxpr, [*needs], results, []), (), tuple(operations[::-1]))


def is_of_leaf(shape: Shape, operation: Operation) -> bool:
    is_whole = any(var.aval.shape == shape for var in operation.eqn.outvars)
    return is_whole and is_elementwise_operation(operation, shape)


def compute_values(program: Subprogram, inputs: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """Compute some variables of a program, and only what they need."""
    known = [*program.jaxpr.constvars, *program.jaxpr.invars]
    env = dict(zip(known, [*program.consts, *inputs], strict=True))
    widened: dict[Any, Any] = {}

    def apply_narrow(operation: Operation, values: list[Any]) -> list[Any]:
        if operation.kind == "cond":
            return _narrow(operation, values, widened)
        eqn = operation.eqn
        output = operation.eqn.outvars[0]
        is_conversion = operation.name == "convert_element_type"
        if is_conversion and eqn.invars[0].aval.dtype.itemsize < output.aval.dtype.itemsize:
            widened[output] = values[0]
        return apply(operation, values)

    ending = find_ending(program, wanted)
    return evaluate(ending, [env[var] for var in ending.jaxpr.invars], apply_narrow)


def _narrow(operation: Operation, values: Sequence[Any], widened: Mapping[Any, Any]) -> list[Any]:
    """Apply a conditional to its operands before they were widened, which it then does itself."""
    atoms = operation.eqn.invars[1:]
    inputs: list[Any] = []
    for atom, value in zip(atoms, values[1:], strict=True):
        inputs.append(value if isinstance(atom, Literal) else widened.get(atom, value))

    def branch(number: int, *inputs: Any) -> list[Any]:
        operands = [x.astype(atom.aval.dtype) for atom, x in zip(atoms, inputs, strict=True)]
        return evaluate(operation.bodies[number], operands)

    branches = [functools.partial(branch, number) for number in range(len(operation.bodies))]
    return list(jax.lax.switch(values[0], branches, *inputs))


Body = Callable[[tuple[Any, ...], Any, Any], Any]
"""`body(position, carried, read) -> carried`, for the slices at a position."""


def update_slices(
    body: Body, shape: Shape, slice_shape: Shape, carried: object, read: object
) -> Any:
    """Replace `carried` arrays slice by slice, in place; slice `read` arrays except for scalars."""
    if slice_shape == shape:
        return body((0,) * len(shape), carried, read)
    counts = [whole // size for whole, size in zip(shape, slice_shape, strict=True)]
    cut_axes = [axis for axis, count in enumerate(counts) if count > 1]
    slice_axes = [axis + i for i, axis in enumerate(cut_axes)]  # of a view: see `split`

    def split(x: Array) -> Array:
        """A view with axes for the slice position; XLA slices it without changing the layout."""
        sizes: list[int] = []  # a scalar has none
        for size, count in zip(x.shape, counts, strict=False):
            sizes += [count, size // count] if count > 1 else [size]
        return x.reshape(sizes)

    def update_slice(i: Array, carried: object) -> Any:
        indices = {}
        for axis in reversed(cut_axes):
            indices[axis] = i % counts[axis]
            i = i // counts[axis]
        position = tuple(indices.get(axis, 0) * size for axis, size in enumerate(slice_shape))
        starts: list[Any] = []
        for axis in range(len(shape)):
            starts += [indices[axis], 0] if axis in indices else [0]

        def cut(x: Array) -> Array:
            sizes = [1 if axis in slice_axes else size for axis, size in enumerate(x.shape)]
            sizes_of_slice = [size for axis, size in enumerate(x.shape) if axis not in slice_axes]
            return jax.lax.dynamic_slice(x, starts[: x.ndim], sizes).reshape(sizes_of_slice)

        def put(x: Array, y: Array) -> Array:
            return jax.lax.dynamic_update_slice(x, jnp.expand_dims(y, slice_axes), starts)

        # Behind the barrier each slice is read from slow memory once.
        slices = jax.lax.optimization_barrier(jax.tree.map(cut, (carried, read_views)))
        new = body(position, *slices)
        return jax.tree.map(put, carried, new)

    carried_views, read_views = jax.tree.map(split, (carried, read))
    new_views = jax.lax.fori_loop(0, math.prod(counts), update_slice, carried_views)
    return jax.tree.map(lambda x, y: x.reshape(y.shape), new_views, carried)
