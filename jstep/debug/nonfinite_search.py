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
from jstep.look import arrays
from jstep.look.arrays import Range


def holds_floats(value: object) -> bool:
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def value_range(value: object) -> Range:
    return dataclasses.replace(arrays.array_range(np.asarray(value)), dtype=str(jnp.result_type(value)))


@jax.jit
def _flags(value: Any) -> Any:
    """Whether a value has a NaN, and whether it has a number that is not finite."""
    value = reduce_unreduced(value)
    return jnp.stack([jnp.isnan(value).any(), ~jnp.isfinite(value).all()])


class Place(NamedTuple):
    """An operation that ran, and those that enclose it, with their programs and "scan iteration 3"."""

    chain: tuple[tuple[Subprogram, Operation, str], ...]
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...]


class Origin(NamedTuple):
    """Where a value that is not finite comes from, if no operation made it of arguments.

    Attributes:
        order: How many operations ran before the first one that read the constant, or that made it of finite ones.
        place: That operation; None before it.
        constant: The constant; None if all are finite.
        is_mask: Whether it is infinite, and was only moved so far.
    """

    order: int
    place: Place | None
    constant: Range | None
    is_mask: bool


class Value(NamedTuple):
    """A value: whether it depends on an argument, has a NaN, and has a number that is not finite."""

    value: Any
    depends: bool
    has_nan: bool
    is_bad: bool
    origin: Origin | None = None


@dataclasses.dataclass
class Search:
    """One evaluation. `found` is the first operation that makes a NaN, or an infinity from an argument.

    If there is none, but a result is not finite: the operation that first read, or made, the constant behind it.
    """

    found: Place | None = None
    constant: Range | None = None
    reaches: bool = False
    _order: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)
    _chain: tuple[tuple[Subprogram, Operation, str], ...] = ()

    def run(self, body: Subprogram, values: Sequence[Any], depends: Sequence[bool]) -> None:
        outs = self._run_each(body, [_constant(*pair) for pair in zip(values, depends, strict=True)])
        self.reaches = any(out.is_bad for out in outs)
        origins = [out.origin for out in outs if out.origin is not None and not out.origin.is_mask]
        if self.found is None and origins:
            first = min(origins, key=lambda origin: origin.order)
            self.found, self.constant = first.place, first.constant

    def _run_each(self, body: Subprogram, args: Sequence[Value]) -> list[Value]:
        inner = {"call": self._call, "cond": self._cond, "scan": self._scan, "while": self._while}

        def by(operation: Operation, ins: list[Value]) -> list[Value]:
            with _mesh_of(operation):
                if operation.kind in ("operation", "shard_map"):
                    return self._check(body, operation, ins, jaxprs.apply(operation, [item.value for item in ins]))
                return inner[operation.kind](body, operation, ins)

        return jaxprs.evaluate(body, args, by, _constant)

    def _check(self, body: Subprogram, operation: Operation, ins: list[Value], outs: list[Any]) -> list[Value]:
        """Note whether an operation made numbers that are not finite, or where they come from."""
        order = next(self._order)
        depends = any(item.depends for item in ins)
        results = [Value(out, depends, *_bad(out)) for out in outs]
        if self.found is not None or not any(result.is_bad for result in results):
            return results
        is_new_nan = any(result.has_nan for result in results) and not any(item.has_nan for item in ins)
        is_new = is_new_nan or (depends and not any(item.is_bad for item in ins))
        if is_new and operation.name not in HARMLESS:
            self.found = self._place(body, operation, ins, outs)
            return results
        origin = _first_origin(ins)
        if origin is None:
            origin = Origin(order, self._place(body, operation, ins, outs), None, False)
        elif origin.place is None:
            origin = origin._replace(order=order, place=self._place(body, operation, ins, outs))
        origin = origin._replace(is_mask=origin.is_mask and operation.name in MOVES)
        return [result._replace(origin=origin if result.is_bad else None) for result in results]

    def _place(self, body: Subprogram, operation: Operation, ins: list[Value], outs: list[Any]) -> Place:
        inputs = tuple(map(_range, _values(ins)))
        outputs = tuple(_range(out) for out in outs if out is not None)
        return Place((*self._chain, (body, operation, "")), inputs, outputs)

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
            xs = [_moved(lax.index_in_dim(item.value, i, keepdims=False), depends, [item]) for item in ins[second:]]
            at = f"scan iteration {i}{', backwards' * backwards}"
            outs = self._inside(body, operation, 0, [*ins[:first], *carry, *xs], at)
            carry = [out._replace(depends=depends) for out in outs[: second - first]]
            rows.append(outs[second - first :])
        rows = rows[::-1] if backwards else rows
        avals = [var.aval for var in operation.eqn.outvars[second - first :]]
        return [*carry, *(_stacked([row[k] for row in rows], aval, depends) for k, aval in enumerate(avals))]

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


def _constant(value: Any, depends: bool = False) -> Value:
    has_nan, is_bad = _bad(value)
    return Value(value, depends, has_nan, is_bad, Origin(-1, None, value_range(value), not has_nan) if is_bad else None)


def _moved(value: Any, depends: bool, before: Sequence[Value]) -> Value:
    has_nan, is_bad = _bad(value)
    return Value(value, depends, has_nan, is_bad, _first_origin(before) if is_bad else None)


def _stacked(parts: list[Value], aval: Any, depends: bool) -> Value:
    whole = jnp.stack([part.value for part in parts]) if parts else lax.full(aval.shape, 0, aval.dtype)
    return _moved(whole, depends, parts)


def _first_origin(values: Iterable[Value]) -> Origin | None:
    known = [(not value.has_nan, value.origin) for value in values if value.origin is not None]
    return min(known, key=lambda pair: (pair[0], pair[1].is_mask, pair[1].order), default=(True, None))[1]


def _values(items: Iterable[Value]) -> list[Any]:
    return [item.value if hasattr(item.value, "dtype") else jnp.asarray(item.value) for item in items]


def _mesh_of(operation: Operation) -> contextlib.AbstractContextManager[Any]:
    mesh = next((out.aval.sharding.mesh for out in operation.eqn.outvars if hasattr(out.aval, "sharding")), None)
    if mesh is None or mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)
