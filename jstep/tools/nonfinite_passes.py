"""The passes of `find_nonfinite` over a traced program, forward and backward."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import jaxprs
from jstep.core.annotations import Tree
from jstep.core.jaxprs import HARMLESS, MOVES, Operation, Subprogram
from jstep.core.meshes import reduce_unreduced
from jstep.tools import ranges
from jstep.tools.ranges import Range

# Tests for non-finite numbers, also of traced values.


def holds_floats(value: object) -> bool:
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _real(value: Any) -> list[Any]:
    """Return real arrays, at least float32, with all numbers of a value."""
    value = reduce_unreduced(jnp.asarray(value))
    if jnp.iscomplexobj(value):
        return [lax.real(value), lax.imag(value)]
    return [value if value.dtype.itemsize >= 4 else value.astype(jnp.float32)]


def probe(*values: object) -> Any:
    """Return a float32 scalar that is finite if and only if all numbers, of one type, are."""
    # Not part · 0: XLA simplifies (x · c) · 0 to x · (c · 0), which is finite.
    with mesh_context(values[0]):
        zeros = [part - part for value in values for part in _real(value)]
        total = jnp.sum(functools.reduce(jnp.add, zeros)).astype(jnp.float32)
    return on_current_mesh(total)


def is_any_bad(values: Iterable[Any]) -> Any:
    """Whether any number is not finite; compiles one sum for each type."""
    by_type: dict[Any, list[Any]] = {}
    for value in values:
        by_type.setdefault(jax.typeof(value), []).append(value)
    flags = [~jnp.isfinite(probe(*some)) for some in by_type.values()]
    return functools.reduce(jnp.logical_or, flags, jnp.bool_(False))


def has_nan(value: object) -> Any:
    with mesh_context(value):
        result = functools.reduce(jnp.logical_or, [jnp.isnan(jnp.sum(lax.sign(part))) for part in _real(value)])
    return on_current_mesh(result)


def measure_value(value: object) -> tuple[Any, ...]:
    """Return the lowest and highest finite number of a value, and how many are NaN and infinite."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return ()  # keys have no numbers
    with mesh_context(value):
        parts = _real(value) if holds_floats(value) else [value.astype(jnp.int32) if value.dtype == bool else value]
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, parts))
        real = parts[0] if len(parts) == 1 else jnp.where(finite, jnp.abs(value), parts[0] + parts[1])
        limits: Any = np.finfo(real.dtype) if holds_floats(real) else np.iinfo(real.dtype)
        low = jnp.min(real, where=finite, initial=limits.max)
        high = jnp.max(real, where=finite, initial=limits.min)
        nans = jnp.sum(jnp.isnan(real), dtype=jnp.int32)
        numbers = low, high, nans, jnp.sum(~finite, dtype=jnp.int32) - nans
    return tuple(map(on_current_mesh, numbers))


def mesh_context(value: object) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the mesh, and its axis types, of a value or its type."""
    mesh = (value if isinstance(value, jax.core.ShapedArray) else jax.typeof(value)).sharding.mesh
    if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def on_current_mesh(value: object) -> Any:
    """Reshard a traced value to the current mesh, replicated; move others to the host."""
    if not isinstance(value, jax.core.Tracer):
        return np.asarray(value)
    mesh = jax.sharding.get_abstract_mesh()
    there = jax.typeof(value).sharding.mesh
    if there.empty or mesh.empty or there == mesh:
        return value
    return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec()))


def value_range(value: object) -> Range:
    return dataclasses.replace(ranges.array_range(np.asarray(value)), dtype=str(jnp.result_type(value)))


# Evaluation of a program with instruments: the control flow of a pass over calls, branches, loops and shard_maps.


class Value(NamedTuple):
    """A value with its mark, in which a pass keeps what it knows about the value.

    `depends` tells whether it depends on an argument of the outermost program.
    """

    value: Any
    mark: Any
    depends: bool


@dataclasses.dataclass(frozen=True)
class Level:
    """A part of a program that JAX traces as one: the outermost one, or a loop, a branch or a shard.

    `iterations` has the number and the iteration of each enclosing loop, `parts` the records of inner levels.
    """

    iterations: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()
    notes: list[Any] = dataclasses.field(default_factory=list)
    parts: list[Any] = dataclasses.field(default_factory=list)

    def shard(self) -> Any:
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def varying(self, tree: Tree) -> Any:
        """Make arrays vary over the shards, as the carry of a loop must."""
        return jax.tree.map(lambda leaf: leaf + (0 * self.shard()).astype(leaf.dtype), tree) if self.axes else tree


class Pass:
    """A pass over a program, which evaluates it once for its subclass.

    An operation that runs has a position, a vector of int32; lexicographic order is execution order.
    """

    def __init__(self, body: Subprogram) -> None:
        self._body = body
        # A position has number and iteration of each enclosing loop, the number of the operation, zeros, and the index
        # of the shard.
        self._width = 2 + 2 * max((operation.depth for operation in jaxprs.walk(body)), default=0)

    def _enters(self, operation: Operation) -> bool:
        return operation.kind != "operation"

    def _constant(self, value: object) -> Any:
        """The mark of a constant or an argument."""

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> list[Any] | None:
        """Note an operation that is not entered; return the marks of its results, if any."""

    def _part(self, value: object, mark: object) -> Any:
        """The mark of a slice or a shard."""
        return mark

    def _whole(self, marks: object) -> Any:
        """The mark of a value, from the stacked marks of its parts."""
        return marks

    def _record(self, level: Level) -> Any:
        """The record of a level: a tree of arrays, alike for all levels."""

    def _earlier(self, record: object, later: object) -> Any:
        """Combine the records of an iteration and of a later one."""

    def _of_shards(self, records: object) -> Any:
        """Combine the stacked records of all shards."""

    def _position(self, number: object, level: Level) -> Any:
        zeros = [0] * (self._width - len(level.iterations) - 2)
        parts = (*level.iterations, number, *zeros, level.shard())
        return jnp.stack([on_current_mesh(jnp.asarray(part, jnp.int32)) for part in parts])

    def _first(self, number: object, positions: list[Any], level: Level) -> Any:
        """The first position in a level."""
        here = jnp.where(number == _NEVER, _NEVER, self._position(number, level))
        stacked = jnp.stack([here, *positions])
        # The numbers at the depth of the level are in execution order.
        return stacked[jnp.argmin(stacked[:, len(level.iterations)])]

    def _evaluated(
        self, values: Sequence[Any], depends: Sequence[bool], result_of: Callable[[Any, list[Value]], Any]
    ) -> Any:
        """Evaluate the program; `depends` tells which values are arguments of the user's function."""
        marks = list(map(self._constant, values))

        def fn(values: Sequence[Any]) -> Any:
            level = Level()
            outs = self._run(self._body, list(map(Value, values, marks, depends)), level)
            return result_of(self._record_at(level), outs)

        # A function that moves arrays between devices is evaluated operation by operation.
        if (
            len({frozenset(value.devices()) for value in values if isinstance(value, jax.Array) and value.committed})
            > 1
        ):
            return jax.device_get(fn(values))
        # The program runs only once, and on a CPU, the optimizations of LLVM take half of the time to compile.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.device_get(jax.jit(fn, compiler_options=options)(values))

    def _inside(self, body: Subprogram, args: list[Value], level: Level) -> tuple[Any, list[Any], list[Any]]:
        outs = self._run(body, args, level)
        return self._record_at(level), *_columns(outs)

    def _record_at(self, level: Level) -> Any:
        return level.varying(self._record(dataclasses.replace(level, parts=_on_current_mesh(level.parts))))

    def _run(self, body: Subprogram, args: list[Value], level: Level) -> list[Value]:
        def by(operation: Operation, ins: list[Value]) -> list[Value]:
            eqn = operation.eqn
            with mesh_context(eqn.outvars[0].aval) if eqn.outvars else contextlib.nullcontext():
                if self._enters(operation):
                    ins = [item._replace(mark=_on_current_mesh(item.mark)) for item in ins]
                    outs, marks = getattr(self, f"_{operation.kind}")(operation, ins, level)
                else:
                    outs, marks = jaxprs.apply(operation, [item.value for item in ins]), None
            if marks is None:
                marks = self._note(operation, ins, outs, level) or [None] * len(outs)
            return _values(outs, _on_current_mesh(marks), _depends(ins))

        return jaxprs.evaluate(body, args, by, lambda value: Value(value, self._constant(value), False))

    def _call(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        return _columns(self._run(operation.bodies[0], ins, level))

    def _cond(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        def branch(body: Subprogram) -> Any:
            def run(pairs: Any) -> Any:
                args = [Value(value, mark, item.depends) for (value, mark), item in zip(pairs, ins[1:], strict=True)]
                return self._inside(body, args, Level(level.iterations, level.axes))

            return run

        index, pairs = jnp.asarray(ins[0].value).astype(jnp.int32), [(item.value, item.mark) for item in ins[1:]]
        record, outs, marks = lax.switch(index, [branch(body) for body in operation.bodies], pairs)
        level.parts.append(record)
        return outs, marks

    def _scan(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        first, second = itertools.accumulate(operation.counts)
        split, count = ins[second:], second - first
        iteration = self._iteration_of(operation, ins, level)

        def step(state: Tree, xs: Any) -> Any:
            i, values, marks, record = state
            parts = [self._part(x, item.mark) for x, item in zip(xs, split, strict=True)]
            inputs = [*values, *xs], [*marks, *parts]
            new, values, marks = iteration(operation.bodies[0], ins[:first], i, inputs)
            return (i + 1, values[:count], marks[:count], self._earlier(record, new)), (values[count:], marks[count:])

        start = (jnp.int32(0), *_columns(ins[first:second]), self._record_at(Level(axes=level.axes)))
        (_, values, marks, record), (ys, of_ys) = lax.scan(step, start, _columns(split)[0], **operation.options)
        level.parts.append(record)
        return [*values, *ys], [*marks, *map(self._whole, of_ys)]

    def _while(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        condition, body = operation.bodies
        iteration = self._iteration_of(operation, ins, level)
        first, second = itertools.accumulate(operation.counts)

        def test(i: object, values: object, marks: object, record: object) -> Any:
            new, (again,), _ = iteration(condition, ins[:first], i, (values, marks))
            return again, (i, values, marks, self._earlier(record, new))

        def step(tested: Any) -> Any:
            _, (i, *carry, record) = tested
            new, values, marks = iteration(body, ins[first:second], i, carry)
            return test(i + 1, values, marks, self._earlier(record, new))

        start = test(jnp.int32(0), *_columns(ins[second:]), self._record_at(Level(axes=level.axes)))
        _, (_, values, marks, record) = lax.while_loop(lambda tested: tested[0], step, start)
        level.parts.append(record)
        return values, marks

    def _iteration_of(self, operation: Operation, ins: list[Value], level: Level) -> Callable[..., Any]:
        def iteration(body: Subprogram, consts: list[Value], i: object, inputs: Sequence[Any]) -> Any:
            values, marks = (most + more for most, more in zip(_columns(consts), inputs, strict=True))
            at = Level((*level.iterations, operation.number, i), level.axes)
            # The carry is passed on, so every value depends on all others.
            return self._inside(body, _values(values, marks, _depends(ins)), at)

        return iteration

    def _shard_map(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        options, axes = operation.options, tuple(jaxprs.shard_counts(operation))

        def on_shard(values: list[Any], marks: list[Any], iterations: tuple[Any, ...]) -> Any:
            at = Level(iterations, axes)
            marks = [at.varying(self._part(value, mark)) for value, mark in zip(values, marks, strict=True)]
            record, outs, marks = self._inside(operation.bodies[0], _values(values, marks, _depends(ins)), at)
            return outs, jax.tree.map(lambda leaf: leaf[None], (record, at.varying(marks)))

        outs, stacked = jax.shard_map(
            on_shard,
            mesh=options["mesh"],
            in_specs=(list(options["in_specs"]), PartitionSpec(), PartitionSpec()),
            out_specs=(list(options["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=options["check_vma"],
        )(*_columns(ins), level.iterations)
        record, marks = jax.tree.map(_replicated, stacked)
        level.parts.append(self._of_shards(record))
        return outs, list(map(self._whole, marks))


def _depends(ins: list[Value]) -> bool:
    return any(item.depends for item in ins)


def _columns(values: Iterable[Value]) -> tuple[list[Any], list[Any]]:
    values = list(values)
    return [item.value for item in values], [item.mark for item in values]


def _values(values: Iterable[Any], marks: Iterable[Any], depends: bool) -> list[Value]:
    return [Value(value, mark, depends) for value, mark in zip(values, marks, strict=True)]


def _on_current_mesh(tree: Tree) -> Any:
    return jax.tree.map(on_current_mesh, tree)


def _replicated(leaf: Any) -> Any:
    mesh = jax.typeof(leaf).sharding.mesh
    return leaf if mesh.empty else jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*[None] * leaf.ndim)))


# The passes of `find_nonfinite`: where non-finite numbers are, the first operation that makes one, its ranges, and
# other origins.

_NEVER, _UNREAD = 2**31 - 1, -1
"""In place of the numbers of a position: no operation, and an operation still to come."""
_MAX_RESULTS, _MAX_BYTES = 64, 2**26
"""The results of a group, whose numbers are checked together and are kept until then."""
Position = np.ndarray[Any, Any]


def _inexact(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None and holds_floats(value)]


def first_made(body: Subprogram, values: list[Any], depends: list[bool]) -> tuple[Position | None, bool]:
    """Return the position of the first operation that makes a NaN, or an infinity from an argument.

    Also return whether any result is non-finite.
    """
    # Most of the time goes into compiling checks. So results are checked in groups, and one by one only in the first
    # group with a non-finite number, or in all such groups if that one only has a constant of the user.
    groups = BadGroups(body)
    first, bad, reaches = groups.run(values, depends)
    if first is None:
        return None, reaches
    number = operation_number(first)
    position = FirstMade(body, groups.members[number]).run(values, depends)
    of_loops = slice(2 * int(np.argmax(first[:-1:2])))  # the part of a position before the number of the operation
    if len(bad) > 1 and (position is None or not np.array_equal(position[of_loops], first[of_loops])):
        position = FirstMade(body, set().union(*(groups.members[group] for group in bad))).run(values, depends)
    return position, reaches


class BadGroups(Pass):
    """A pass for the groups of consecutive operations with a non-finite result, known by their first operation."""

    def __init__(self, body: Subprogram) -> None:
        super().__init__(body)
        self.members: dict[int, set[int]] = {}
        self._numbers = 1 + max((operation.number for operation in jaxprs.walk(body)), default=0)

    def run(self, values: list[Any], depends: list[bool]) -> tuple[Position | None, list[int], bool]:
        """Return the position of the first group, the numbers of all, and whether a result is bad."""

        def found(record: object, outs: list[Value]) -> Any:
            return record, is_any_bad(_inexact(out.value for out in outs))

        (position, bad), reaches = self._evaluated(values, depends, found)
        return None if position[0] == _NEVER else position, np.flatnonzero(bad).tolist(), bool(reaches)

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> None:
        results = _inexact(outs)
        if results and operation.name not in HARMLESS:
            level.notes.append((operation.number, results, len(level.parts)))

    def _record(self, level: Level) -> Any:
        groups = self._groups(level.notes)
        numbers = np.array([number for number, _ in groups], np.int32)
        flags = jnp.array([is_any_bad(results) for _, results in groups], bool)
        number = jnp.min(jnp.where(flags, numbers, _NEVER), initial=_NEVER)
        bad = jnp.zeros(self._numbers, bool).at[numbers].set(flags)
        for _, of_part in level.parts:
            bad |= of_part
        return self._first(number, [position for position, _ in level.parts], level), bad

    def _groups(self, notes: list[tuple[int, list[Any], int]]) -> list[tuple[int, list[Any]]]:
        """Return the number and results of each group, none of which extends beyond the level."""
        groups: list[tuple[int, list[Any]]] = []
        before = 0  # the parts of the level before the latest operation
        for number, outs, parts in notes:
            kept = groups[-1][1] if groups and parts == before else []
            sizes = [aval.size * aval.dtype.itemsize for aval in map(jax.typeof, [*kept, *outs])]
            if not kept or len(sizes) > _MAX_RESULTS or sum(sizes) > _MAX_BYTES:
                groups.append((number, []))
                self.members[number] = set()
            first, results = groups[-1]
            self.members[first].add(number)
            results += outs
            before = parts
        return groups

    def _earlier(self, record: Any, later: Any) -> Any:
        return _earlier(record[0], later[0]), record[1] | later[1]

    def _of_shards(self, records: Any) -> Any:
        return records[0][_lowest(records[0])], jnp.any(records[1], axis=0)


def _earlier(record: Any, later: Any) -> Any:
    """The position of an iteration or, if it has none, of a later one."""
    return jnp.where(record[0] == _NEVER, later, record)


class FirstMade(Pass):
    """A pass for the first of some operations that makes a NaN, or an infinity from an argument."""

    def __init__(self, body: Subprogram, numbers: set[int]) -> None:
        super().__init__(body)
        self._numbers = numbers

    def run(self, values: list[Any], depends: list[bool]) -> Position | None:
        position = self._evaluated(values, depends, lambda position, _: position)
        return None if position[0] == _NEVER else position

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> None:
        if operation.number in self._numbers:
            operands = _inexact(item.value for item in ins)
            level.notes.append((operation.number, operands, _inexact(outs), _depends(ins)))

    def _record(self, level: Level) -> Any:
        return self._first(_first_number(level.notes), level.parts, level)

    def _earlier(self, record: object, later: object) -> Any:
        return _earlier(record, later)

    def _of_shards(self, records: Any) -> Any:
        return records[_lowest(records)]


def _first_number(notes: list[tuple[int, list[Any], list[Any], bool]]) -> Any:
    """Return the number of the first operation that makes a non-finite number."""
    if not notes:
        return jnp.int32(_NEVER)
    # All flags are stacked and compared together, since most of the time of a pass goes into compiling.
    numbers, ins, outs, depends = zip(*notes, strict=True)
    values = {id(value): value for some in (*ins, *outs) for value in some}
    rows = {key: row for row, key in enumerate(values)}
    bad = jnp.stack([~jnp.isfinite(probe(value)) for value in values.values()] + [jnp.bool_(False)])
    nan = jnp.stack([has_nan(value) for value in values.values()] + [jnp.bool_(False)])

    def any_of(groups: Sequence[list[Any]]) -> Callable[[Any], Any]:
        indices = np.full((len(groups), max(map(len, groups))), -1)
        for row, group in zip(indices, groups, strict=True):
            row[: len(group)] = [rows[id(value)] for value in group]
        return lambda flags: jnp.any(flags[indices], axis=1)

    before, after = any_of(ins), any_of(outs)
    # Infinities that do not depend on an argument are constants of the user; NaNs are always recorded.
    makes = (after(nan) & ~before(nan)) | (after(bad) & ~before(bad) & np.array(depends))
    return jnp.min(jnp.where(makes, np.array(numbers, np.int32), jnp.int32(_NEVER)))


class Ranges(Pass):
    """A pass for the ranges of the operands and results of the operation at a position."""

    def __init__(self, body: Subprogram, position: Position) -> None:
        super().__init__(body)
        self._target = position
        chain = [operation for _, operation in jaxprs.path_to(body, operation_number(position))]
        self._path = {operation.number for operation in chain}
        used = [var for var in chain[-1].eqn.outvars if not isinstance(var, core.DropVar)]
        self._avals = [atom.aval for atom in (*chain[-1].eqn.invars, *used)]
        self._count = len(chain[-1].eqn.invars)

    def run(self, values: list[Any], depends: list[bool]) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        record = self._evaluated(values, depends, lambda record, _: record)
        ranges = []
        for aval, measures in zip(self._avals, record, strict=True):
            low, high, nans, infinities = (measure.item() for measure in measures) if measures else (1, 0, 0, 0)
            low, high = (float(low), float(high)) if low <= high else (None, None)
            ranges.append(Range(str(aval.dtype), tuple(aval.shape), low, high, nans, infinities))
        return tuple(ranges[: self._count]), tuple(ranges[self._count :])

    def _enters(self, operation: Operation) -> bool:
        return super()._enters(operation) and operation.number in self._path

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> None:
        if operation.number in self._path:
            here = jnp.all(self._position(operation.number, level) == self._target)
            measures = [measure_value(item) for item in (*(item.value for item in ins), *outs) if item is not None]
            level.parts.append(jax.tree.map(lambda item: jnp.where(here, item, jnp.zeros_like(item)), measures))

    def _record(self, level: Level) -> Any:
        if level.parts:
            return level.parts[0]
        # Zero for all other operations, so that records add up.
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self._avals]
        return jax.tree.map(
            lambda leaf: jnp.zeros((), leaf.dtype), [jax.eval_shape(measure_value, leaf) for leaf in shapes]
        )

    def _earlier(self, record: object, later: object) -> Any:
        return jax.tree.map(jnp.add, record, later)

    def _of_shards(self, records: object) -> Any:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), records)


class Origins(Pass):
    """A pass that marks each value with the origin of its non-finite numbers."""

    def __init__(self, body: Subprogram) -> None:
        super().__init__(body)
        self._constants: list[Range] = []
        # A mark is a vector of int32: 0 for a NaN, 1 for infinities only, `_NEVER` for a finite value; 1 for infinities
        # of a constant that was only moved, else 0; the position of the operation that made the numbers or read the
        # constant first; and the index of the constant, or -1. The lowest mark counts.
        self._finite = np.full(3 + self._width, _NEVER, np.int32)

    def run(self, values: list[Any], depends: list[bool]) -> tuple[Position | None, Range | None]:
        """Return the position of the first operation that a non-finite result comes from, and the constant it reads.

        If the results are constants, there is no position, and the constant is the first with a NaN. There is no
        constant if the operation made the numbers from finite ones.
        """
        marks = self._evaluated(values, depends, lambda _, outs: [out.mark for out in outs])
        # Constants that are only infinite, such as masks, do not count.
        candidates = [mark.tolist() for mark in marks if mark[0] != _NEVER and not mark[1]]
        *position, constant = min((mark[2:] for mark in candidates), default=[_UNREAD, -1])
        return (
            None if position[0] == _UNREAD else np.array(position, np.int32),
            None if constant < 0 else self._constants[constant],
        )

    def _constant(self, value: object) -> Any:
        numbers = value_range(value) if holds_floats(value) else None
        if numbers is None or numbers.is_finite:
            return self._finite
        self._constants.append(numbers)
        unread = [_UNREAD] * self._width
        return np.array([not numbers.nans, not numbers.nans, *unread, len(self._constants) - 1], np.int32)

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> list[Any]:
        marks = [on_current_mesh(item.mark) for item in ins if item.mark is not self._finite]
        lowest = functools.reduce(_lower, marks, self._finite)
        kind, moved, read, constant = jnp.split(lowest, [1, 2, 2 + self._width])
        here = self._position(operation.number, level)
        if operation.name not in MOVES:
            moved = jnp.zeros_like(moved)
        fresh = jnp.concatenate([kind, jnp.zeros_like(moved), here, jnp.full_like(constant, -1)])
        came = jnp.concatenate([kind, moved, jnp.where(read == _UNREAD, here, read), constant])
        mark = jnp.where(kind == _NEVER, fresh, came)
        return [self._finite if out is None else self._part(out, mark) for out in outs]

    def _part(self, value: object, mark: object) -> Any:
        if mark is self._finite or not holds_floats(value):
            return self._finite
        bad, nan = ~jnp.isfinite(probe(value)), has_nan(value)
        return jnp.where(bad, jnp.asarray(mark).at[0].set((~nan).astype(jnp.int32)), self._finite)

    def _whole(self, marks: Any) -> Any:
        return marks[_lowest(marks)] if len(marks) else self._finite


def _lower(mark: Any, other: Any) -> Any:
    column = jnp.argmax(mark != other)
    return jnp.where(jnp.take(mark, column) <= jnp.take(other, column), mark, other)


def _lowest(rows: Tree) -> Any:
    """The index of the first row in lexicographic order."""
    return jnp.lexsort(rows.T[::-1])[0]


def operation_number(position: Position) -> int:
    return int(position[:-1:2].max())
