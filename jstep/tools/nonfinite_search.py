"""The search of `find_nonfinite`: a traced program is evaluated one operation at a time, and each result is checked."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import jaxprs
from jstep.core.jaxprs import HARMLESS, MOVES, Operation, Subprogram
from jstep.core.meshes import reduce_unreduced
from jstep.tools import ranges
from jstep.tools.ranges import Range


def holds_floats(value: object) -> bool:
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def value_range(value: object) -> Range:
    return dataclasses.replace(ranges.array_range(np.asarray(value)), dtype=str(jnp.result_type(value)))


@functools.partial(jax.jit, static_argnums=1)
def _flags(value: Any, axes: int) -> Any:
    """Whether a value has a NaN, and whether it has a non-finite number; for each index of its first axes."""
    value = reduce_unreduced(value)
    over = tuple(range(axes, value.ndim))
    return jnp.stack([jnp.isnan(value).any(over), ~jnp.isfinite(value).all(over)], -1)


class Place(NamedTuple):
    """An operation that ran, and those that enclose it, outermost first, each with its program and "scan iteration 3".

    `order` counts the operations that have run.
    """

    order: int
    chain: tuple[tuple[Subprogram, Operation, str], ...]
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a shard_map. A value inside of it has a first axis over them; `active` ones take the branch."""

    mesh: Any
    counts: Mapping[str, int]
    active: np.ndarray[Any, Any]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(tuple(self.counts))

    def map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = False) -> Any:
        axes = {"mesh": self.mesh, "axis_names": set(self.counts)}
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, **axes)

    def apply(self, operation: Operation, values: list[Any]) -> list[Any]:
        varies = operation.name.endswith("_invariant")  # which refuses values that do not
        kept = [k for k, var in enumerate(operation.eqn.outvars) if type(var).__name__ != "DropVar"]

        def on_shard(*values: Any) -> list[Any]:
            outs = jaxprs.apply(operation, [value[0] for value in values])
            return [outs[k][None] for k in kept]

        outs = dict(zip(kept, self.map(on_shard, self.spec, self.spec, varies)(*values), strict=True))
        return [outs.get(k) for k in range(len(operation.eqn.outvars))]

    def everywhere(self, value: Any) -> Any:
        stacked = jnp.broadcast_to(jnp.asarray(value), (len(self.active), *jnp.shape(value)))
        return jax.device_put(stacked, NamedSharding(self.mesh, self.spec))

    def text(self, shard: int) -> str:
        place = np.unravel_index(shard, tuple(self.counts.values()))
        return f"shard_map ({', '.join(f'{name} {i}' for name, i in zip(self.counts, place, strict=True))})"


class Cause(NamedTuple):
    """Where the non-finite numbers of a value come from. The lowest cause of the operands counts.

    Attributes:
        is_infinite: Whether none is a NaN.
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
    _shards: Shards | None = None

    def run(self, body: Subprogram, values: Sequence[Any], depends: Sequence[bool]) -> None:
        outs = self._run(body, [self._constant(value, of) for value, of in zip(values, depends, strict=True)])
        causes = [out.cause for out in outs if out.cause is not None]
        self.reaches = bool(causes)
        # Constants that are only infinite, such as masks, do not count.
        lowest = min((cause for cause in causes if not cause.is_moved), key=lambda cause: cause[2:4], default=None)
        if self.found is None and lowest is not None:
            self.found, self.constant = lowest.place, self._constants[lowest.constant] if lowest.constant >= 0 else None

    def _run(self, body: Subprogram, args: Sequence[Value]) -> list[Value]:
        def by(operation: Operation, ins: list[Value]) -> list[Value]:
            with contextlib.nullcontext() if self._shards else _mesh_of(operation):
                if operation.kind == "operation":
                    apply = jaxprs.apply if self._shards is None else self._shards.apply
                    return self._check(body, operation, ins, apply(operation, [item.value for item in ins]))
                return getattr(self, f"_{operation.kind}")(body, operation, ins)

        return jaxprs.evaluate(body, args, by, self._constant)

    # Checks of values.

    def _bad(self, value: Any) -> np.ndarray[Any, Any]:
        """Whether each active shard has a NaN, and a non-finite number."""
        if value is None or not holds_floats(value):
            return np.zeros((1, 2), bool)
        flags = np.asarray(_flags(value, int(self._shards is not None))).reshape(-1, 2)
        return flags if self._shards is None else flags & self._shards.active[:, None]

    def _constant(self, value: Any, depends: bool = False) -> Value:
        placed = value if self._shards is None else self._shards.everywhere(value)
        if not self._bad(placed).any():
            return Value(placed, depends)
        self._constants.append(value_range(value))
        is_infinite = not self._constants[-1].nans
        return Value(placed, depends, Cause(is_infinite, is_infinite, -1, len(self._constants) - 1, None))

    def _with_cause(self, value: Any, depends: bool, cause: Cause | None) -> Value:
        flags = self._bad(value)
        nan, bad = bool(flags[:, 0].any()), bool(flags[:, 1].any())
        return Value(value, depends, cause._replace(is_infinite=not nan) if cause is not None and bad else None)

    def _check(self, body: Subprogram, operation: Operation, ins: list[Value], outs: list[Any]) -> list[Value]:
        """Note whether an operation made non-finite numbers, or where they come from."""
        order, depends, lowest = next(self._order), any(item.depends for item in ins), _lowest(ins)
        flags = functools.reduce(np.logical_or, map(self._bad, outs), np.zeros((1, 2), bool))
        if not flags.any():
            return [Value(out, depends) for out in outs]
        place = lowest.place if lowest is not None and self.found is not None else None
        place = place or self._place(order, (body, operation), int(flags[:, 1].argmax()), ins, outs)
        if lowest is None:
            cause = Cause(False, False, order, -1, place)
        else:
            read = lowest if lowest.order >= 0 else lowest._replace(order=order, place=place)
            cause = read._replace(is_moved=lowest.is_moved and operation.name in MOVES)
        makes = (flags[:, 0].any() and not any(item.has_nan for item in ins)) or (lowest is None and depends)
        if makes and self.found is None and operation.name not in HARMLESS:
            self.found = place
        return [self._with_cause(out, depends, cause) for out in outs]

    def _place(self, order: int, at: Any, shard: int, ins: list[Value], outs: list[Any]) -> Place:
        chain = self._chain
        if self._shards is not None:
            chain = tuple((body, outer, label or self._shards.text(shard)) for body, outer, label in chain)

        def measured(value: Any) -> Range:
            if jnp.issubdtype(value.dtype, jax.dtypes.extended):
                return Range(str(value.dtype), value.shape, None, None)
            return value_range(value if self._shards is None else np.asarray(value)[shard])

        inputs, outputs = ([measured(value) for value in some if value is not None] for some in (_values(ins), outs))
        return Place(order, (*chain, (*at, "")), tuple(inputs), tuple(outputs))

    # Control flow.

    def _inside(self, outer: Subprogram, operation: Operation, inner: int, args: list[Value], at: str) -> list[Value]:
        before, self._chain = self._chain, (*self._chain, (outer, operation, at))
        try:
            return self._run(operation.bodies[inner], args)
        finally:
            self._chain = before

    def _call(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        kind = {"remat2": "remat", "checkpoint": "remat", "pjit": "jit"}.get(operation.name, operation.name)
        at = kind.removesuffix("_call") + (f"({operation.called})" if operation.called else "")
        return self._inside(body, operation, 0, ins, at)

    @contextlib.contextmanager
    def _on(self, shards: Shards | None) -> Any:
        before, self._shards = self._shards, shards
        try:
            yield
        finally:
            self._shards = before

    def _shard_map(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        options, counts = operation.options, jaxprs.shard_counts(operation)
        shards = Shards(options["mesh"], counts, np.ones(int(np.prod([*counts.values()])), bool))
        depends, args = any(item.depends for item in ins), [item.value for item in ins]
        stack = shards.map(lambda *xs: [x[None] for x in xs], tuple(options["in_specs"]), shards.spec)
        with self._on(shards):
            parts = zip(stack(*args), ins, strict=True)
            outs = self._inside(body, operation, 0, [self._with_cause(x, depends, item.cause) for x, item in parts], "")
        merge = shards.map(lambda *xs: [x[0] for x in xs], shards.spec, list(options["out_specs"]))
        merged = merge(*(out.value for out in outs))
        return [self._with_cause(x, depends, out.cause) for x, out in zip(merged, outs, strict=True)]

    def _each(self, choice: Any, take: Callable[[int], list[Value]]) -> list[Value]:
        """Take the branches that shards choose, and select the results of each shard."""
        if self._shards is None:
            return take(int(choice))
        shards, chosen, results = self._shards, np.asarray(choice), None
        for index in sorted(set(chosen[shards.active].tolist())):
            takes = chosen == index
            with self._on(dataclasses.replace(shards, active=shards.active & takes)):
                outs = take(index)
            results = outs if results is None else [_select(takes, *pair) for pair in zip(outs, results, strict=True)]
        assert results is not None
        return results

    def _cond(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        index = np.clip(np.asarray(ins[0].value).astype(int), 0, len(operation.bodies) - 1)
        return self._each(index, lambda i: self._inside(body, operation, i, ins[1:], f"cond branch {i}"))

    def _scan(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        first, second = itertools.accumulate(operation.counts)
        length, backwards = operation.options["length"], operation.options["reverse"]
        depends, axis = any(item.depends for item in ins), int(self._shards is not None)
        carry, rows = [item._replace(depends=depends) for item in ins[first:second]], []
        for i in range(length - 1, -1, -1) if backwards else range(length):
            xs = [
                self._with_cause(lax.index_in_dim(item.value, i, axis, keepdims=False), depends, item.cause)
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
        value = jnp.stack([part.value for part in parts], int(self._shards is not None))
        return Value(value, depends, _lowest(parts))

    def _while(self, body: Subprogram, operation: Operation, ins: list[Value]) -> list[Value]:
        first, second = itertools.accumulate(operation.counts)
        depends = any(item.depends for item in ins)

        def take(i: int, carry: list[Value], again: int) -> list[Value]:
            args = [*ins[first:second], *carry]
            return self._inside(body, operation, 1, args, f"while iteration {i}") if again else carry

        carry = ins[second:]
        for i in itertools.count():
            carry = [item._replace(depends=depends) for item in carry]
            again = self._inside(body, operation, 0, [*ins[:first], *carry], f"while condition iteration {i}")[0]
            choice = np.asarray(again.value)
            if not np.any(choice if self._shards is None else choice & self._shards.active):
                break
            carry = self._each(choice.astype(int), functools.partial(take, i, carry))
        return carry


def _values(items: Iterable[Value]) -> list[Any]:
    return [item.value if hasattr(item.value, "dtype") else jnp.asarray(item.value) for item in items]


def _lowest(values: Iterable[Value]) -> Cause | None:
    causes = [value.cause for value in values if value.cause is not None]
    return min(causes, key=lambda cause: cause[:4], default=None)


def _select(takes: np.ndarray[Any, Any], one: Value, other: Value) -> Value:
    where = jax.device_put(takes.reshape(-1, *[1] * (one.value.ndim - 1)), one.value.sharding)
    return Value(jnp.where(where, one.value, other.value), one.depends or other.depends, _lowest([one, other]))


def _mesh_of(operation: Operation) -> contextlib.AbstractContextManager[Any]:
    mesh = next((out.aval.sharding.mesh for out in operation.eqn.outvars if hasattr(out.aval, "sharding")), None)
    if mesh is None or mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)
