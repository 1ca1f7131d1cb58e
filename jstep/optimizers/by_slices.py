"""Updates of large leaves in loops over slices, for TPUs: no array of float32 has the size of a leaf.

XLA's compiler for TPUs does not fuse codes of blocks with the arithmetic of an update. In the body of a loop over
slices of rows it keeps the float32 values of a slice in the fast memory of a core, if a barrier separates the new slots
from their codes. The update is traced as a whole. For each leaf the operations at its end that are elementwise run in
the loop, and everything before them, such as a global norm or a product of matrices, runs first.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jstep.core.meshes import parts_along
from jstep.core.placement import layout_of
from jstep.core.programs import Operation, Subprogram, apply, evaluate, is_elementwise_operation, on_part, variables
from jstep.core.slot_roles import Blocks
from jstep.core.trees import Array

LARGE = 2**20
"""The number of elements from which a leaf is updated in slices."""
SLICE = 2**19
"""The number of elements that a slice should have at most."""
_TILE = {1: 4096, 2: 128}
_ROWS = 32
"""Whole tiles of a TPU's memory, for every dtype: numbers by the dimensions of a leaf, and rows of its last two."""

Shape = tuple[int, ...]


def slice_shape(path: str, shape: Shape, blocks: Blocks | None) -> Shape:
    """The shape of the slices of a leaf; that of the leaf if its axes cannot be cut.

    Args:
        path: The path of the leaf.
        shape: Its shape.
        blocks: The blocks of its slots, which slices do not cut.
    """
    layout = layout_of(path)
    if layout is None and jax.default_backend() == "tpu" and jax.device_count() > 1:
        return shape  # along an axis that is split a loop would gather the leaf
    part = list(shape)
    for axis in range(len(shape)):
        if layout is not None and axis < len(layout.spec) and parts_along(layout.mesh, layout.spec[axis]) > 1:
            continue
        from_end = len(shape) - axis
        whole = {1: _TILE[min(len(shape), 2)], 2: _ROWS}.get(from_end, 1)
        multiple = math.lcm(whole, blocks.size if blocks is not None and axis == blocks.axis else 1)
        rest = math.prod(part) // part[axis]
        lengths = [n for n in _divisors(shape[axis]) if n % multiple == 0]
        if lengths:
            part[axis] = max((n for n in lengths if n * rest <= SLICE), default=min(lengths))
    return tuple(part)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class Ending(NamedTuple):
    """The elementwise operations at the end of a program from which some of its results are computed.

    Attributes:
        numbers: The indices of these results among all.
        operations: The operations, in order.
        needs: The variables that they read and do not compute.
        results: The results, as variables or literals.
    """

    numbers: list[int]
    operations: list[Operation]
    needs: list[Any]
    results: list[Any]

    def on_slice(self, known: Mapping[Any, Any], part: Shape) -> list[Any]:
        """Compute the results for a slice, from the values of what the operations need."""
        env = dict(known)
        for operation in self.operations:
            values = [read(env, atom) for atom in operation.eqn.invars]
            env.update(zip(operation.eqn.outvars, on_part(operation, values, part), strict=True))
        return [read(env, atom) for atom in self.results]


def ending_of(program: Subprogram, results: list[int], shape: Shape) -> Ending:
    """The end of a program without calls that computes some of its results, all of one shape.

    Args:
        program: The program.
        results: Their indices among all results.
        shape: Their shape.
    """
    wanted = [program.jaxpr.outvars[i] for i in results]
    needs = dict.fromkeys(variables(wanted))
    operations = []
    for operation in reversed(program.operations):
        made = [var for var in operation.eqn.outvars if var in needs]
        if made and made[0].aval.shape == shape and is_elementwise_operation(operation, shape):
            operations.append(operation)
            needs = {var: None for var in needs if var not in made}
            needs |= dict.fromkeys(variables(operation.eqn.invars))
    return Ending(results, operations[::-1], list(needs), wanted)


def values_of(program: Subprogram, given: Sequence[Any], wanted: Iterable[Any]) -> dict[Any, Any]:
    """Compute some variables of a program, and nothing that they do not need."""
    env = dict(zip([*program.jaxpr.constvars, *program.jaxpr.invars], [*program.consts, *given], strict=True))
    missing = set(variables(wanted)) - env.keys()
    needed = []
    for operation in reversed(program.operations):
        if missing.intersection(operation.eqn.outvars):
            needed.append(operation)
            missing.update(variables(operation.eqn.invars))
    widened: dict[Any, Any] = {}
    for operation in reversed(needed):
        values = [read(env, atom) for atom in operation.eqn.invars]
        made = operation.eqn.outvars[0]
        if (
            operation.eqn.primitive.name == "convert_element_type"
            and operation.eqn.invars[0].aval.dtype.itemsize < made.aval.dtype.itemsize
        ):
            widened[made] = values[0]
        results = _narrow(operation, values, widened) if operation.kind == "cond" else apply(operation, values)
        env.update(zip(operation.eqn.outvars, results, strict=True))
    return env


def _narrow(operation: Operation, values: Sequence[Any], widened: Mapping[Any, Any]) -> list[Any]:
    """Apply a condition with its operands as they were before they were widened: XLA stores each as an array.

    Args:
        operation: The condition.
        values: Its operands, the number of the branch first.
        widened: The variables that are made by a conversion → what they are converted from.
    """
    atoms = operation.eqn.invars[1:]
    given = [x if isinstance(a, Literal) else widened.get(a, x) for a, x in zip(atoms, values[1:], strict=True)]

    def branch(number: int, *given: Any) -> list[Any]:
        operands = [x.astype(atom.aval.dtype) for atom, x in zip(atoms, given, strict=True)]
        return evaluate(operation.bodies[number], operands)

    branches = [functools.partial(branch, number) for number in range(len(operation.bodies))]
    return list(jax.lax.switch(values[0], branches, *given))


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable or a literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


Body = Callable[[tuple[Any, ...], Any, Any], Any]
"""`body(position, carried, read) -> carried`, for the slices at a position."""


def over_slices(body: Body, shape: Shape, part: Shape, carried: Any, read: Any) -> Any:
    """Replace arrays slice by slice, in place.

    Args:
        body: Computes the new slices.
        shape: The shape of the leaf.
        part: The shape of a slice.
        carried: A tree of the arrays to replace, of this shape or with fewer numbers along an axis.
        read: A tree of arrays that are only read; scalars are not sliced.
    """
    if part == shape:
        return body((0,) * len(shape), carried, read)
    counts = [whole // size for whole, size in zip(shape, part, strict=True)]
    cut_axes = [axis for axis, count in enumerate(counts) if count > 1]

    def split(x: Array) -> Array:
        """A view whose slices are elements along axes of their own, because XLA slices these without another layout."""
        sizes = [[count, size // count] if count > 1 else [size] for size, count in zip(x.shape, counts, strict=False)]
        return x.reshape([one for both in sizes for one in both])  # a scalar has no axes

    def of_slices(x: Array) -> list[int]:
        """The axes of the view along which the slices are."""
        return [axis + i for i, axis in enumerate(cut_axes)] if x.ndim else []

    def one(i: Array, carried: Any) -> Any:
        places, rest = {}, i
        for axis in reversed(cut_axes):
            places[axis], rest = rest % counts[axis], rest // counts[axis]

        def starts(x: Array) -> list[Any]:
            found: list[Any] = [0] * x.ndim
            for axis, at in zip(cut_axes, of_slices(x), strict=False):
                found[at] = places[axis]
            return found

        def cut(x: Array) -> Array:
            axes = of_slices(x)
            sizes = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
            return jax.lax.dynamic_slice(x, starts(x), sizes).reshape(
                [size for axis, size in enumerate(sizes) if axis not in axes]
            )

        def put(x: Array, y: Array) -> Array:
            return jax.lax.dynamic_update_slice(x, jnp.expand_dims(y, of_slices(x)), starts(x))

        position = tuple(places.get(axis, 0) * size for axis, size in enumerate(part))
        # Behind the barrier each slice is read from slow memory once.
        new = body(position, *jax.lax.optimization_barrier(jax.tree.map(cut, (carried, views[1]))))
        return jax.tree.map(put, carried, new)

    views = jax.tree.map(split, (carried, read))
    made = jax.lax.fori_loop(0, math.prod(counts), one, views[0])
    return jax.tree.map(lambda x, y: x.reshape(y.shape), made, carried)
