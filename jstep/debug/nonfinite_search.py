"""The search of `find_nonfinite`: evaluate a traced program by operation, and check each result."""

import contextlib
import dataclasses
import itertools
import math
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
    return dataclasses.replace(
        arrays.array_range(np.asarray(value)), dtype=str(jnp.result_type(value))
    )


@jax.jit
def _flags(value: Any) -> Any:
    """Whether a value has a NaN, and whether it has a number that is not finite."""
    value = reduce_unreduced(value)
    return jnp.stack([jnp.isnan(value).any(), ~jnp.isfinite(value).all()])


class ChainLink(NamedTuple):
    """An operation in its program; `label` says which body ran, such as "scan iteration 3"."""

    program: Subprogram
    operation: Operation
    label: str = ""


class Place(NamedTuple):
    """An operation that ran, the last in the chain of those that enclose it, outermost first."""

    chain: tuple[ChainLink, ...]
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...]


class Origin(NamedTuple):
    """Where a value that is not finite comes from, if no operation made it of arguments.

    Attributes:
        order: How many operations ran before the first one that read the constant, or that made it
            of finite ones.
        place: That operation; None before it.
        constant: The constant; None if all are finite.
        is_mask: Whether it is infinite, and was only moved so far.
    """

    order: int
    place: Place | None
    constant: Range | None
    is_mask: bool


class Value(NamedTuple):
    """A value: whether it depends on an argument, has a NaN, and has a non-finite number."""

    value: Any
    depends: bool
    has_nan: bool
    is_bad: bool
    origin: Origin | None = None


@dataclasses.dataclass
class Search:
    """One evaluation; `found` is the first operation to make a NaN, or infinity of an argument.

    If there is none, but a result is not finite: the operation that first read, or made, the
    constant behind it.
    """

    found: Place | None = None
    constant: Range | None = None
    reaches: bool = False
    _order: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)
    # The operations whose bodies are being evaluated, outermost first.
    _chain: tuple[ChainLink, ...] = ()

    def run(self, body: Subprogram, values: Sequence[Any], depends: Sequence[bool]) -> None:
        """Evaluate a program.

        Args:
            body: The program.
            values: Its constants and arguments.
            depends: Whether each of them is an argument, or depends on one.
        """
        args = [
            _constant(value, is_argument)
            for value, is_argument in zip(values, depends, strict=True)
        ]
        outs = self._evaluate(body, args)
        self.reaches = any(out.is_bad for out in outs)
        origins = [out.origin for out in outs if out.origin is not None and not out.origin.is_mask]
        if self.found is None and origins:
            first = min(origins, key=lambda origin: origin.order)
            self.found = first.place
            self.constant = first.constant

    def _evaluate(self, body: Subprogram, args: Sequence[Value]) -> list[Value]:
        control_flow = {
            "call": self._call,
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
        }

        def evaluate_operation(operation: Operation, ins: list[Value]) -> list[Value]:
            with _mesh_of(operation):
                if operation.kind in ("operation", "shard_map"):
                    outs = jaxprs.apply(operation, [item.value for item in ins])
                    return self._check(body, operation, ins, outs)
                return control_flow[operation.kind](body, operation, ins)

        return jaxprs.evaluate(body, args, evaluate_operation, _constant)

    def _check(
        self, body: Subprogram, operation: Operation, ins: list[Value], outs: list[Any]
    ) -> list[Value]:
        """Note whether an operation made numbers that are not finite, or where they come from."""
        order = next(self._order)
        depends = any(item.depends for item in ins)
        results = [Value(out, depends, *_bad(out)) for out in outs]
        if self.found is not None or not any(result.is_bad for result in results):
            return results
        has_nan = any(result.has_nan for result in results)
        is_new_nan = has_nan and not any(item.has_nan for item in ins)
        is_new = is_new_nan or (depends and not any(item.is_bad for item in ins))
        if is_new and operation.name not in HARMLESS:
            self.found = self._place(body, operation, ins, outs)
            return results
        origin = _first_origin(ins)
        if origin is None:
            # An infinity that was made of finite constants.
            origin = Origin(
                order=order,
                place=self._place(body, operation, ins, outs),
                constant=None,
                is_mask=False,
            )
        elif origin.place is None:
            # The first operation that reads the constant.
            origin = origin._replace(order=order, place=self._place(body, operation, ins, outs))
        origin = origin._replace(is_mask=origin.is_mask and operation.name in MOVES)
        return [result._replace(origin=origin if result.is_bad else None) for result in results]

    def _place(
        self, body: Subprogram, operation: Operation, ins: list[Value], outs: list[Any]
    ) -> Place:
        inputs = tuple(map(_range, _values(ins)))
        outputs = tuple(_range(out) for out in outs if out is not None)
        return Place((*self._chain, ChainLink(body, operation)), inputs, outputs)

    # Control flow. If anything in a loop depends on an argument, all of its carry does, as it may
    # in a later iteration.

    def _evaluate_body(self, link: ChainLink, index: int, args: list[Value]) -> list[Value]:
        """Evaluate a body of an operation."""
        outer = self._chain
        self._chain = (*outer, link)
        try:
            return self._evaluate(link.operation.bodies[index], args)
        finally:
            self._chain = outer

    def _call(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        names = {"remat2": "remat", "checkpoint": "remat", "pjit": "jit"}
        label = names.get(operation.name, operation.name).removesuffix("_call")
        if operation.called:
            label += f"({operation.called})"
        return self._evaluate_body(ChainLink(body, operation, label), 0, ins)

    def _cond(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        index = int(np.clip(np.asarray(ins[0].value).astype(int), 0, len(operation.bodies) - 1))
        return self._evaluate_body(
            ChainLink(body, operation, f"cond branch {index}"), index, ins[1:]
        )

    def _scan(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        const_count, carry_count = operation.counts
        consts = ins[:const_count]
        carry = ins[const_count : const_count + carry_count]
        stacked = ins[const_count + carry_count :]
        depends = any(item.depends for item in ins)
        is_reversed = operation.options["reverse"]
        iterations = range(operation.options["length"])
        rows: list[list[Value]] = []
        for i in reversed(iterations) if is_reversed else iterations:
            carry = [item._replace(depends=depends) for item in carry]
            xs = [
                _derived(lax.index_in_dim(item.value, i, keepdims=False), depends, [item])
                for item in stacked
            ]
            label = f"scan iteration {i}, backwards" if is_reversed else f"scan iteration {i}"
            outs = self._evaluate_body(ChainLink(body, operation, label), 0, [*consts, *carry, *xs])
            carry = outs[:carry_count]
            rows.append(outs[carry_count:])
        carry = [item._replace(depends=depends) for item in carry]
        if is_reversed:
            rows.reverse()
        results = carry
        for k, var in enumerate(operation.eqn.outvars[carry_count:]):
            results.append(_stacked([row[k] for row in rows], var.aval, depends))
        return results

    def _while(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        cond_count, body_count = operation.counts
        cond_consts = ins[:cond_count]
        body_consts = ins[cond_count : cond_count + body_count]
        carry = ins[cond_count + body_count :]
        depends = any(item.depends for item in ins)
        for i in itertools.count():
            carry = [item._replace(depends=depends) for item in carry]
            condition = ChainLink(body, operation, f"while condition iteration {i}")
            (goes_on,) = self._evaluate_body(condition, 0, [*cond_consts, *carry])
            if not np.any(goes_on.value):
                break
            carry = self._evaluate_body(
                ChainLink(body, operation, f"while iteration {i}"), 1, [*body_consts, *carry]
            )
        return carry


def _range(value: Any) -> Range:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return Range(str(value.dtype), value.shape, None, None)
    return value_range(value)


def _bad(value: Any) -> tuple[bool, bool]:
    """Return `has_nan` and `is_bad` of a value."""
    if value is None or not holds_floats(value):
        return False, False
    has_nan, is_bad = np.asarray(_flags(value)).tolist()
    return has_nan, is_bad


def _constant(value: Any, depends: bool = False) -> Value:
    has_nan, is_bad = _bad(value)
    origin = None
    if is_bad:
        origin = Origin(order=-1, place=None, constant=value_range(value), is_mask=not has_nan)
    return Value(value, depends, has_nan, is_bad, origin)


def _derived(value: Any, depends: bool, parts: Sequence[Value]) -> Value:
    """A slice or a stack of values, which has their origin."""
    has_nan, is_bad = _bad(value)
    return Value(value, depends, has_nan, is_bad, _first_origin(parts) if is_bad else None)


def _stacked(parts: list[Value], aval: Any, depends: bool) -> Value:
    # A scan without iterations returns zeros.
    stack = (
        jnp.stack([part.value for part in parts]) if parts else lax.full(aval.shape, 0, aval.dtype)
    )
    return _derived(stack, depends, parts)


def _first_origin(values: Iterable[Value]) -> Origin | None:
    """Return the origin that explains a result best.

    A NaN comes before an infinity, a mask last, and of equals the first one.
    """
    first: Origin | None = None
    first_rank: tuple[bool, bool, float] = (True, True, math.inf)
    for value in values:
        origin = value.origin
        if origin is None:
            continue
        rank = (not value.has_nan, origin.is_mask, origin.order)
        if rank < first_rank:
            first = origin
            first_rank = rank
    return first


def _values(items: Iterable[Value]) -> list[Any]:
    return [
        item.value if hasattr(item.value, "dtype") else jnp.asarray(item.value) for item in items
    ]


def _mesh_of(operation: Operation) -> contextlib.AbstractContextManager[Any]:
    """Set the mesh on which an operation was traced, which differs in a region of `auto_axes`."""
    meshes = [
        out.aval.sharding.mesh for out in operation.eqn.outvars if hasattr(out.aval, "sharding")
    ]
    if not meshes or meshes[0].empty or meshes[0] == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(meshes[0])
