"""The search of `find_nonfinite`: a traced program is evaluated one operation at a time, and each result is checked."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jstep.core import jaxprs
from jstep.core.jaxprs import HARMLESS, MOVES, Operation, Subprogram
from jstep.core.meshes import reduce_unreduced
from jstep.look import ranges
from jstep.look.ranges import Range


def holds_floats(value: object) -> bool:
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def value_range(value: object) -> Range:
    return dataclasses.replace(ranges.array_range(np.asarray(value)), dtype=str(jnp.result_type(value)))


@jax.jit
def _flags(value: Any) -> Any:
    """Whether a value has a NaN, and whether it has a non-finite number."""
    value = reduce_unreduced(value)
    return jnp.stack([jnp.isnan(value).any(), ~jnp.isfinite(value).all()])


class Place(NamedTuple):
    """An operation that ran, and those that enclose it, outermost first, each with its program and "scan iteration 3".

    `order` counts the operations that have run.
    """

    order: int
    chain: tuple[tuple[Subprogram, Operation, str], ...]
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...]


class Cause(NamedTuple):
    """Where the non-finite numbers of a value come from. The lowest cause of the operands counts.

    Attributes:
        is_moved: Whether they are infinities of a constant that was only moved, such as a mask.
        order: When the operation ran that made them or read the constant first; −1 before that.
        place: That operation.
        constant: The index of the constant, or −1.
    """

    is_infinite: bool
    is_moved: bool
    order: int
    constant: int
    place: Place | None


class Value(NamedTuple):
    """A value; `depends` tells whether it depends on an argument; without an `cause` it is finite."""

    value: Any
    depends: bool
    cause: Cause | None = None

    @property
    def has_nan(self) -> bool:
        return self.cause is not None and not self.cause.is_infinite


@dataclasses.dataclass
class Search:
    """One evaluation. `found` is the first operation that makes a NaN, or an infinity from an argument."""

    found: Place | None = None
    constant: Range | None = None
    reaches: bool = False
    _constants: list[Range] = dataclasses.field(default_factory=list)
    _order: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)
    _chain: tuple[tuple[Subprogram, Operation, str], ...] = ()

    def run(self, body: Subprogram, values: Sequence[Any], depends: Sequence[bool]) -> None:
        outs = self._run_each(body, [self._constant(*pair) for pair in zip(values, depends, strict=True)])
        causes = [out.cause for out in outs if out.cause is not None]
        self.reaches = bool(causes)
        # Constants that are only infinite, such as masks, do not count.
        lowest = min((cause for cause in causes if not cause.is_moved), key=lambda cause: cause[2:4], default=None)
        if self.found is None and lowest is not None:
            self.found, self.constant = lowest.place, self._constants[lowest.constant] if lowest.constant >= 0 else None

    def _run_each(self, body: Subprogram, args: Sequence[Value]) -> list[Value]:
        inner = {"call": self._call, "cond": self._cond, "scan": self._scan, "while": self._while}

        def by(operation: Operation, ins: list[Value]) -> list[Value]:
            with _mesh_of(operation):
                if operation.kind in ("operation", "shard_map"):
                    return self._check(body, operation, ins, jaxprs.apply(operation, [item.value for item in ins]))
                return inner[operation.kind](body, operation, ins)

        return jaxprs.evaluate(body, args, by, self._constant)

    # Checks of values.

    def _constant(self, value: Any, depends: bool = False) -> Value:
        if not _bad(value)[1]:
            return Value(value, depends)
        self._constants.append(value_range(value))
        is_infinite = not self._constants[-1].nans
        return Value(value, depends, Cause(is_infinite, is_infinite, -1, len(self._constants) - 1, None))

    def _check(self, body: Subprogram, operation: Operation, ins: list[Value], outs: list[Any]) -> list[Value]:
        """Note whether an operation made non-finite numbers, or where they come from."""
        order = next(self._order)
        depends = any(item.depends for item in ins)
        lowest = _lowest(ins)
        flags = [_bad(out) for out in outs]
        if not any(is_bad for _, is_bad in flags):
            return [Value(out, depends) for out in outs]
        place = lowest.place if lowest is not None and self.found is not None else None
        place = place or self._place(order, (body, operation), ins, outs)
        if lowest is None:
            cause = Cause(False, False, order, -1, place)
        else:
            read = lowest if lowest.order >= 0 else lowest._replace(order=order, place=place)
            cause = read._replace(is_moved=lowest.is_moved and operation.name in MOVES)
        has_nan = any(is_nan for is_nan, _ in flags)
        makes = (has_nan and not any(item.has_nan for item in ins)) or (lowest is None and depends)
        if makes and self.found is None and operation.name not in HARMLESS:
            self.found = place
        return [_with_cause(out, depends, cause) for out in outs]

    def _place(self, order: int, at: tuple[Subprogram, Operation], ins: list[Value], outs: list[Any]) -> Place:
        inputs, outputs = (
            tuple(map(_range, some)) for some in (_values(ins), [out for out in outs if out is not None])
        )
        return Place(order, (*self._chain, (*at, "")), inputs, outputs)

    # Control flow.

    def _inside(self, outer: Subprogram, operation: Operation, inner: int, args: list[Value], at: str) -> list[Value]:
        before, self._chain = self._chain, (*self._chain, (outer, operation, at))
        try:
            return self._run_each(operation.bodies[inner], args)
        finally:
            self._chain = before

    def _call(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        kind = {"remat2": "remat", "checkpoint": "remat", "pjit": "jit"}.get(operation.name, operation.name)
        at = kind.removesuffix("_call") + (f"({operation.called})" if operation.called else "")
        return self._inside(body, operation, 0, ins, at)

    def _cond(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        index = np.clip(np.asarray(ins[0].value).astype(int), 0, len(operation.bodies) - 1)
        return self._inside(body, operation, int(index), ins[1:], f"cond branch {index}")

    def _scan(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        first, second = itertools.accumulate(operation.counts)
        length, backwards = operation.options["length"], operation.options["reverse"]
        depends = any(item.depends for item in ins)
        carry, rows = [item._replace(depends=depends) for item in ins[first:second]], []
        for i in range(length - 1, -1, -1) if backwards else range(length):
            xs = [
                _with_cause(lax.index_in_dim(item.value, i, keepdims=False), depends, item.cause)
                for item in ins[second:]
            ]
            at = f"scan iteration {i}{', backwards' * backwards}"
            outs = self._inside(body, operation, 0, [*ins[:first], *carry, *xs], at)
            carry = [out._replace(depends=depends) for out in outs[: second - first]]
            rows.append(outs[second - first :])
        rows = rows[::-1] if backwards else rows
        avals = [var.aval for var in operation.eqn.outvars[second - first :]]
        return [*carry, *(self._stacked([row[k] for row in rows], aval, depends) for k, aval in enumerate(avals))]

    def _stacked(self, parts: list[Value], aval: Any, depends: bool) -> Value:
        if not parts:
            return self._constant(lax.full(aval.shape, 0, aval.dtype))
        return Value(jnp.stack([part.value for part in parts]), depends, _lowest(parts))

    def _while(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        first, second = itertools.accumulate(operation.counts)
        depends = any(item.depends for item in ins)
        carry = ins[second:]
        for i in itertools.count():
            carry = [item._replace(depends=depends) for item in carry]
            again = self._inside(body, operation, 0, [*ins[:first], *carry], f"while condition iteration {i}")[0]
            if not np.any(again.value):
                break
            carry = self._inside(body, operation, 1, [*ins[first:second], *carry], f"while iteration {i}")
        return carry


def _range(value: Any) -> Range:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return Range(str(value.dtype), value.shape, None, None)
    return value_range(value)


def _bad(value: Any) -> tuple[bool, bool]:
    if value is None or not holds_floats(value):
        return False, False
    has_nan, is_bad = np.asarray(_flags(value)).tolist()
    return has_nan, is_bad


def _with_cause(value: Any, depends: bool, cause: Cause | None) -> Value:
    has_nan, is_bad = _bad(value)
    return Value(value, depends, cause._replace(is_infinite=not has_nan) if cause is not None and is_bad else None)


def _values(items: Iterable[Value]) -> list[Any]:
    return [item.value if hasattr(item.value, "dtype") else jnp.asarray(item.value) for item in items]


def _lowest(values: Iterable[Value]) -> Cause | None:
    causes = [value.cause for value in values if value.cause is not None]
    return min(causes, key=lambda cause: cause[:4], default=None)


def _mesh_of(operation: Operation) -> contextlib.AbstractContextManager[Any]:
    mesh = next((out.aval.sharding.mesh for out in operation.eqn.outvars if hasattr(out.aval, "sharding")), None)
    if mesh is None or mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)
