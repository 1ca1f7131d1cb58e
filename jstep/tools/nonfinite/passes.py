"""The passes of `find_nonfinite`: the first operation that makes a non-finite number, its ranges, and other origins."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jstep.core.checks import Range
from jstep.core.programs import HARMLESS, MOVES, Operation, Subprogram, path_to
from jstep.tools.nonfinite.forward import Level, Pass, Value
from jstep.tools.nonfinite.numbers import as_range, has_nan, is_inexact, measured, on_current_mesh, probe, range_of

_NEVER, _UNREAD = 2**31 - 1, -1
"""In place of the numbers of a position: no operation, and an operation still to come."""
Position = np.ndarray[Any, Any]


def _inexact(values: Iterable[Any]) -> list[Any]:
    return [one for one in values if one is not None and is_inexact(one)]


class _Note(NamedTuple):
    number: int
    ins: list[Any]
    outs: list[Any]
    depends: bool


class FirstMade(Pass):
    """A pass for the position of the first operation that makes a NaN, or an infinity from an argument."""

    def run(self, values: list[Any], depends: list[bool]) -> tuple[Position | None, bool]:
        """Return the position, and whether any result of the program is non-finite."""

        def found(position: Any, outs: list[Value]) -> Any:
            flags = [~jnp.isfinite(probe(one)) for one in _inexact(out.value for out in outs)]
            return position, functools.reduce(jnp.logical_or, flags, jnp.bool_(False))

        position, reaches = self._evaluated(values, depends, found)
        return None if position[0] == _NEVER else position, bool(reaches)

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> list[Any]:
        made = _inexact(outs)
        if made and operation.eqn.primitive.name not in HARMLESS:
            depends = any(one.depends for one in ins)
            level.notes.append(_Note(operation.number, _inexact(one.value for one in ins), made, depends))
        return [None] * len(outs)

    def _record(self, level: Level) -> Any:
        number = _first_number(level.notes)
        found = [jnp.where(number == _NEVER, _NEVER, self._position(number, level)), *level.parts]
        # Within a level, the numbers at its depth are in execution order.
        numbers = jnp.stack([one[len(level.iterations)] for one in found])
        return jnp.stack(found)[jnp.argmin(numbers)]

    def _earlier(self, record: Any, later: Any) -> Any:
        return jnp.where(record[0] == _NEVER, later, record)

    def _of_shards(self, records: Any) -> Any:
        return records[_lowest(records)]


def _first_number(notes: list[_Note]) -> Any:
    """Return the number of the first operation that makes a non-finite number.

    All flags are stacked and compared at once, since most of the time of a pass goes into compiling.
    """
    if not notes:
        return jnp.int32(_NEVER)
    values = {id(one): one for note in notes for one in (*note.ins, *note.outs)}
    rows = {key: row for row, key in enumerate(values)}
    bad = jnp.stack([~jnp.isfinite(probe(one)) for one in values.values()] + [jnp.bool_(False)])
    nan = jnp.stack([has_nan(one) for one in values.values()] + [jnp.bool_(False)])

    def any_of(groups: list[list[Any]]) -> Callable[[Any], Any]:
        length = max(map(len, groups))
        indices = np.array(
            [[*(rows[id(one)] for one in group), *[-1] * (length - len(group))] for group in groups], int
        )
        return lambda flags: jnp.any(flags[indices], axis=1)

    before, after = any_of([note.ins for note in notes]), any_of([note.outs for note in notes])
    # Infinities that do not depend on an argument are constants of the user; NaNs are always recorded.
    depends = np.array([note.depends for note in notes])
    made = (after(nan) & ~before(nan)) | (after(bad) & ~before(bad) & depends)
    return jnp.min(jnp.where(made, np.array([note.number for note in notes], np.int32), jnp.int32(_NEVER)))


class Ranges(Pass):
    """A pass for the ranges of the operands and results of the operation at a position.

    The record of all other operations is zero, so that records add up.

    Args:
        body: The program.
        position: The position, as found by another pass.
    """

    def __init__(self, body: Subprogram, position: Position) -> None:
        super().__init__(body)
        self._target = position
        chain = [operation for _, operation in path_to(body, number_of(position))]
        self._path = {operation.number for operation in chain}
        used = [var for var in chain[-1].eqn.outvars if not isinstance(var, core.DropVar)]
        self._avals = [atom.aval for atom in (*chain[-1].eqn.invars, *used)]
        self._count = len(chain[-1].eqn.invars)

    def run(self, values: list[Any], depends: list[bool]) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Return the ranges of the operands and those of the results."""
        record = self._evaluated(values, depends, lambda record, _: record)
        ranges = tuple(map(as_range, self._avals, record))
        return ranges[: self._count], ranges[self._count :]

    def _enters(self, operation: Operation) -> bool:
        return super()._enters(operation) and operation.number in self._path

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> list[Any]:
        if operation.number in self._path:
            here = jnp.all(self._position(operation.number, level) == self._target)
            found = [measured(one) for one in (*(one.value for one in ins), *outs) if one is not None]
            level.parts.append(jax.tree.map(lambda one: jnp.where(here, one, jnp.zeros_like(one)), found))
        return super()._note(operation, ins, outs, level)

    def _record(self, level: Level) -> Any:
        if level.parts:
            return level.parts[0]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self._avals]
        return jax.tree.map(lambda one: jnp.zeros((), one.dtype), [jax.eval_shape(measured, one) for one in shapes])

    def _earlier(self, record: Any, later: Any) -> Any:
        return jax.tree.map(jnp.add, record, later)

    def _of_shards(self, records: Any) -> Any:
        return jax.tree.map(lambda one: jnp.sum(one, axis=0, dtype=one.dtype), records)


class Origins(Pass):
    """A pass that marks each value with the origin of its non-finite numbers.

    A mark is a vector of int32: 0 for a NaN, 1 for infinities only, `_NEVER` for a finite value; 1 for infinities of a
    constant that was only moved, else 0; the position of the operation that made the numbers or read the constant
    first; and the index of the constant, or -1. The lowest mark counts.
    """

    def __init__(self, body: Subprogram) -> None:
        super().__init__(body)
        self._constants: list[Range] = []
        self._finite = np.full(3 + self._width, _NEVER, np.int32)

    def run(self, values: list[Any], depends: list[bool]) -> tuple[Position | None, Range | None]:
        """Return the position of the first operation that a non-finite result comes from, and the constant it reads.

        Returns:
            No position if the results are constants: then the first with a NaN, or None if all are only infinite, such
            as masks. No constant if the operation made the numbers from finite constants.
        """
        marks = self._evaluated(values, depends, lambda _, outs: [out.mark for out in outs])
        found = [mark.tolist() for mark in marks if mark[0] != _NEVER and not mark[1]]
        *position, constant = min((mark[2:] for mark in found), default=[_UNREAD, -1])
        return (
            None if position[0] == _UNREAD else np.array(position, np.int32),
            None if constant < 0 else self._constants[constant],
        )

    def _constant(self, value: Any) -> Any:
        found = range_of(value) if is_inexact(value) else None
        if found is None or found.is_finite:
            return self._finite
        self._constants.append(found)
        unread = [_UNREAD] * self._width
        return np.array([not found.nans, not found.nans, *unread, len(self._constants) - 1], np.int32)

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> list[Any]:
        marks = [on_current_mesh(one.mark) for one in ins if one.mark is not self._finite]
        lowest = functools.reduce(_lower, marks, self._finite)
        kind, moved, read, constant = jnp.split(lowest, [1, 2, 2 + self._width])
        here = self._position(operation.number, level)
        if operation.eqn.primitive.name not in MOVES:
            moved = jnp.zeros_like(moved)
        made = jnp.concatenate([kind, jnp.zeros_like(moved), here, jnp.full_like(constant, -1)])
        came = jnp.concatenate([kind, moved, jnp.where(read == _UNREAD, here, read), constant])
        mark = jnp.where(kind == _NEVER, made, came)
        return [self._finite if out is None else self._part(out, mark) for out in outs]

    def _part(self, value: Any, mark: Any) -> Any:
        if mark is self._finite or not is_inexact(value):
            return self._finite
        bad, nan = ~jnp.isfinite(probe(value)), has_nan(value)
        return jnp.where(bad, jnp.asarray(mark).at[0].set((~nan).astype(jnp.int32)), self._finite)

    def _whole(self, marks: Any) -> Any:
        return marks[_lowest(marks)] if len(marks) else self._finite


def _lower(mark: Any, other: Any) -> Any:
    column = jnp.argmax(mark != other)
    return jnp.where(jnp.take(mark, column) <= jnp.take(other, column), mark, other)


def _lowest(rows: Any) -> Any:
    """Return the index of the first row in lexicographic order."""
    return jnp.lexsort(rows.T[::-1])[0]


def number_of(position: Position) -> int:
    """Return the number of the operation at a position."""
    return int(position[:-1:2].max())
