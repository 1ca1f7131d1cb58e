"""Evaluation of a program with instruments: the control flow of a pass over calls, branches, loops and shard_maps."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.programs import Operation, Subprogram, apply, counts_of, evaluate, shard_counts, walk
from jstep.tools.nonfinite.numbers import on_current_mesh, on_mesh_of


class Value(NamedTuple):
    """A value with its mark, which is what a pass knows about it.

    Attributes:
        value: The value, traced.
        mark: A tree of traced arrays.
        depends: Whether the value depends on an argument of the outermost program.
    """

    value: Any
    mark: Any
    depends: bool


@dataclasses.dataclass(frozen=True)
class Level:
    """A part of a program that JAX traces as one: the outermost one, or that of a loop, a branch or a shard.

    Attributes:
        iterations: The number and the iteration of each enclosing loop.
        axes: The mesh axes of the enclosing shard_map.
        notes: What a pass noted about the operations of this level, in execution order.
        parts: The records of its loops, branches and shards.
    """

    iterations: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()
    notes: list[Any] = dataclasses.field(default_factory=list)
    parts: list[Any] = dataclasses.field(default_factory=list)

    def shard(self) -> Any:
        """Return the index of the shard, traced; 0 outside of a shard_map."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def varying(self, tree: Any) -> Any:
        """Return arrays whose types vary over the shards, as those of a loop's carry have to."""
        return jax.tree.map(lambda leaf: leaf + (0 * self.shard()).astype(leaf.dtype), tree) if self.axes else tree


class Pass:
    """A pass over a program, which evaluates it once and records what its subclass looks for.

    An operation that runs has a position, a vector of int32: number and iteration of each enclosing loop, the number of
    the operation, zeros, and the index of the shard. Positions in lexicographic order are in execution order.

    Args:
        body: The program.
    """

    def __init__(self, body: Subprogram) -> None:
        self._body = body
        self._width = 2 + 2 * max((one.depth for one in walk(body)), default=0)

    def _enters(self, operation: Operation) -> bool:
        """Whether to evaluate the inner programs of an operation with instruments."""
        return operation.kind != "operation"

    def _constant(self, value: Any) -> Any:
        """Return the mark of a constant or an argument."""

    def _note(self, operation: Operation, ins: list[Value], outs: list[Any], level: Level) -> list[Any]:
        """Note an operation that is not entered; return the marks of its results."""
        return [None] * len(outs)

    def _part(self, value: Any, mark: Any) -> Any:
        """Return the mark of a slice or a shard, of a value that has a mark."""
        return mark

    def _whole(self, marks: Any) -> Any:
        """Return the mark of a value from those of its slices or shards, stacked."""
        return marks

    def _record(self, level: Level) -> Any:
        """Return the record of a level, from its notes and parts: a tree of arrays that is alike for all levels."""

    def _earlier(self, record: Any, later: Any) -> Any:
        """Return the record of an iteration and of a later one."""

    def _of_shards(self, records: Any) -> Any:
        """Return one record from those of all shards, stacked."""

    def _position(self, number: Any, level: Level) -> Any:
        """Return the position of the operation with a number."""
        zeros = [0] * (self._width - len(level.iterations) - 2)
        parts = (*level.iterations, number, *zeros, level.shard())
        return jnp.stack([on_current_mesh(jnp.asarray(part, jnp.int32)) for part in parts])

    def _evaluated(
        self, values: Sequence[Any], depends: Sequence[bool], found: Callable[[Any, list[Value]], Any]
    ) -> Any:
        """Evaluate the program.

        Args:
            values: Its arguments.
            depends: Which of them are arguments of the user's function, unlike constants.
            found: Maps the record of the program and its results to what is returned, as NumPy arrays.
        """
        marks = list(map(self._constant, values))

        def fn(values: Sequence[Any]) -> Any:
            level = Level()
            outs = self._run(self._body, list(map(Value, values, marks, depends)), level)
            return found(self._record_at(level), outs)

        # A function that moves arrays between devices is evaluated operation by operation.
        if len({frozenset(one.devices()) for one in values if isinstance(one, jax.Array) and one.committed}) > 1:
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
            with on_mesh_of(eqn.outvars[0].aval) if eqn.outvars else contextlib.nullcontext():
                if self._enters(operation):
                    ins = [one._replace(mark=_on_current_mesh(one.mark)) for one in ins]
                    outs, marks = getattr(self, f"_{operation.kind}")(operation, ins, level)
                else:
                    outs, marks = apply(operation, [one.value for one in ins]), None
            if marks is None:
                marks = self._note(operation, ins, outs, level)
            return _values(outs, _on_current_mesh(marks), _depends(ins))

        return evaluate(body, args, by, lambda value: Value(value, self._constant(value), False))

    def _call(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        return _columns(self._run(operation.bodies[0], ins, level))

    def _cond(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        def branch(body: Subprogram) -> Any:
            def run(pairs: Any) -> Any:
                args = [Value(value, mark, one.depends) for (value, mark), one in zip(pairs, ins[1:], strict=True)]
                return self._inside(body, args, Level(level.iterations, level.axes))

            return run

        index, pairs = jnp.asarray(ins[0].value).astype(jnp.int32), [(one.value, one.mark) for one in ins[1:]]
        record, outs, marks = lax.switch(index, [branch(body) for body in operation.bodies], pairs)
        level.parts.append(record)
        return outs, marks

    def _scan(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        params = operation.eqn.params
        first, second = itertools.accumulate(counts_of(params))
        split, count = ins[second:], second - first

        def step(state: Any, xs: Any) -> Any:
            i, values, marks, record = state
            parts = [self._part(x, one.mark) for x, one in zip(xs, split, strict=True)]
            given = [*values, *xs], [*marks, *parts]
            new, values, marks = self._iteration(operation, operation.bodies[0], ins, ins[:first], i, given, level)
            return (i + 1, values[:count], marks[:count], self._earlier(record, new)), (values[count:], marks[count:])

        start = (jnp.int32(0), *_columns(ins[first:second]), self._record_at(Level(axes=level.axes)))
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (_, values, marks, record), (ys, of_ys) = lax.scan(step, start, _columns(split)[0], **options)
        level.parts.append(record)
        return [*values, *ys], [*marks, *map(self._whole, of_ys)]

    def _while(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        condition, body = operation.bodies
        counts = (operation.eqn.params[name] for name in ("cond_nconsts", "body_nconsts"))
        first, second = itertools.accumulate(counts)

        def test(i: Any, values: Any, marks: Any, record: Any) -> Any:
            new, (again,), _ = self._iteration(operation, condition, ins, ins[:first], i, (values, marks), level)
            return again, (i, values, marks, self._earlier(record, new))

        def step(tested: Any) -> Any:
            _, (i, *given, record) = tested
            new, values, marks = self._iteration(operation, body, ins, ins[first:second], i, given, level)
            return test(i + 1, values, marks, self._earlier(record, new))

        start = test(jnp.int32(0), *_columns(ins[second:]), self._record_at(Level(axes=level.axes)))
        _, (_, values, marks, record) = lax.while_loop(lambda tested: tested[0], step, start)
        level.parts.append(record)
        return values, marks

    def _iteration(
        self,
        operation: Operation,
        body: Subprogram,
        ins: list[Value],
        consts: list[Value],
        i: Any,
        given: Sequence[Any],
        level: Level,
    ) -> tuple[Any, list[Any], list[Any]]:
        # The carry is passed on, so every value depends on all others.
        values, marks = (most + more for most, more in zip(_columns(consts), given, strict=True))
        at = Level((*level.iterations, operation.number, i), level.axes)
        return self._inside(body, _values(values, marks, _depends(ins)), at)

    def _shard_map(self, operation: Operation, ins: list[Value], level: Level) -> tuple[list[Any], list[Any]]:
        params, axes = operation.eqn.params, tuple(shard_counts(operation))

        def on_shard(values: list[Any], marks: list[Any], iterations: tuple[Any, ...]) -> Any:
            at = Level(iterations, axes)
            marks = [at.varying(self._part(one, mark)) for one, mark in zip(values, marks, strict=True)]
            record, outs, marks = self._inside(operation.bodies[0], _values(values, marks, _depends(ins)), at)
            return outs, jax.tree.map(lambda leaf: leaf[None], (record, at.varying(marks)))

        outs, stacked = jax.shard_map(
            on_shard,
            mesh=params["mesh"],
            in_specs=(list(params["in_specs"]), PartitionSpec(), PartitionSpec()),
            out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*_columns(ins), level.iterations)
        record, marks = jax.tree.map(_replicated, stacked)
        level.parts.append(self._of_shards(record))
        return outs, list(map(self._whole, marks))


def _depends(ins: list[Value]) -> bool:
    return any(one.depends for one in ins)


def _columns(values: Iterable[Value]) -> tuple[list[Any], list[Any]]:
    values = list(values)
    return [one.value for one in values], [one.mark for one in values]


def _values(values: Iterable[Any], marks: Iterable[Any], depends: bool) -> list[Value]:
    return [Value(value, mark, depends) for value, mark in zip(values, marks, strict=True)]


def _on_current_mesh(tree: Any) -> Any:
    return jax.tree.map(on_current_mesh, tree)


def _replicated(leaf: Any) -> Any:
    mesh = jax.typeof(leaf).sharding.mesh
    return leaf if mesh.empty else jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*[None] * leaf.ndim)))
