"""Merging the leaves of model_state that the lanes of a batch return: a mean, a sum of changes, or one value.

Floating leaves become the mean over the lanes. An integer that depends on the rows of a lane, on their number or on its
key is a counter, which changes by the sum of the lanes' changes. Other integers, such as step numbers, and keys are the
same in every lane. The traced loss shows which case applies, and whether an integer is its old value plus a change.
"""

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core import trees
from jstep.core.jaxprs import Operation, body_of, evaluate, operation_hash
from jstep.core.trees import Array
from jstep.differentiate.lanes import Lanes, trace_lane, trace_on_lanes

NewState = Callable[[Array, list[Array], list[Array], list[Array]], list[Array]]
"""`new_state(i, old, others, rows)`: the leaves of model_state after lane i, from the old leaves and other arrays."""


class Merge(enum.Enum):
    """How a leaf of the new model_state is computed from the leaves of the lanes."""

    MEAN = "the mean of the lanes' values"
    CHANGES = "the old value plus the sum of the lanes' changes"
    FIRST = "the value of lane 0"


def choose_merges(
    lanes: Lanes, new_state: NewState, old: object, others: list[Array], batch: list[Array], size: int
) -> list[Merge]:
    """Return how each leaf of model_state is merged; each lane gets `others` as a whole and `size` rows."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(old)]
    merges = [Merge.MEAN if jnp.issubdtype(leaf.dtype, jnp.inexact) else Merge.FIRST for leaf in leaves]
    counting = [i for i, leaf in enumerate(leaves) if merges[i] is Merge.FIRST and not trees.is_key(leaf)]
    if not counting:
        return merges

    rows = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in batch]
    held = np.int32(0), leaves, others
    program, _ = trace_lane(lanes, new_state, rows, (*held, batch))
    of_lane = of_whole = _dependences(program, leaves, len(others))
    with contextlib.suppress(Exception):  # the loss may only work for the rows of a lane
        program, _ = trace_on_lanes(lanes, new_state, *held, batch)
        of_whole = _dependences(program, leaves, len(others))
    for i in counting:
        if of_lane[i].on_lane or of_lane[i].facts != of_whole[i].facts:
            if leaves[i].dtype == jnp.bool_ or of_lane[i].plus != i or i in of_lane[i].olds:
                raise TypeError(_refusal(lanes, trees.leaf_paths(old)[i], leaves[i].dtype))
            merges[i] = Merge.CHANGES
    return merges


def _refusal(lanes: Lanes, path: str, dtype: DTypeLike) -> str:
    leaf = trees.quote_path(path)
    on = f"lanes={lanes.number}: the leaf {leaf} of model_state depends on the rows or the key of a lane"
    if dtype == jnp.bool_:
        return f"{on} and must not be of bools, which the lanes cannot add; keep an integer that counts, or a float"
    return (
        f"{on} and must be its old value plus something, of which it moves by the sum over the lanes, because it is "
        f"{dtype}; return old + change or old.at[…].add(change), or keep a float, which becomes the mean of the lanes"
    )


def summand(i: Array, merge: Merge, new: Any, old: Any) -> Array:
    """Return the term of lane i in the sum for a leaf of model_state."""
    new = trees.key_data(jnp.asarray(new))
    if merge is Merge.MEAN:
        return new.astype(trees.compute_dtype(new.dtype))
    return new - jnp.asarray(old) if merge is Merge.CHANGES else jnp.where(i == 0, new, jnp.zeros_like(new))


def merge_leaf(number: int, merge: Merge, total: Array, old: Any) -> Array:
    """Return the new leaf from the sum over the lanes."""
    if trees.is_key(old):
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(old))
    if merge is Merge.CHANGES:
        return jnp.asarray(old) + total
    return (total / number if merge is Merge.MEAN else total).astype(old.dtype)


# The dependences of each value of a traced program.


class _Value(NamedTuple):
    """The dependences of a value.

    Attributes:
        plus: The index of the old leaf if the value is one plus something.
        on_lane: Whether it, or the something, depends on the rows or the number of a lane.
        olds: The old leaves that it, or the something, depends on.
        facts: The operations and constants that it is computed from, unless it depends on a lane; if it depends on the
            number of rows, they differ for the whole batch.
    """

    plus: int | None = None
    on_lane: bool = False
    olds: frozenset[int | None] = frozenset()
    facts: frozenset[str] = frozenset()


def _dependences(program: object, leaves: Sequence[Array], others: int) -> list[_Value]:
    body = body_of(program)
    rows = len(body.jaxpr.invars) - 1 - len(leaves) - others
    lane = _Value(on_lane=True)
    operands = [lane, *(_Value(i) for i in range(len(leaves))), *[_Value()] * others, *[lane] * rows]
    return evaluate(body, operands, _Rules([leaf.dtype.itemsize for leaf in leaves]), _constant_value)


_FEW = 16
"""The number of elements up to which constants are compared by value: a number of rows is a scalar."""


def _constant_value(constant: Any) -> _Value:
    is_known = not isinstance(constant, jax.Array) and np.size(constant) <= _FEW
    return _Value(facts=frozenset({f"{jax.typeof(constant)} {constant if is_known else ''}"}))


def _computed(values: Sequence[_Value], fact: Callable[[], str], plus: int | None = None) -> _Value:
    on_lane = any(value.on_lane for value in values)
    olds = frozenset[int | None]().union(
        *(value.olds for value in values), {value.plus for value in values} - {plus, None}
    )
    facts = frozenset[str]() if on_lane else frozenset({fact()}).union(*(value.facts for value in values))
    return _Value(plus, on_lane, olds, facts)


def _chosen(by: _Value, values: Sequence[_Value], fact: str = "") -> _Value:
    first = values[0]
    if all(value is first for value in values):
        return first
    plus = first.plus if all(value.plus == first.plus for value in values) else None
    return _computed([_computed([by], lambda: fact), *values], lambda: fact, plus)


_COMMUTING = frozenset(["add", "add_any"])
_TO_FIRST = frozenset(["sub", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub"])
"""Operations that add to their first operand, or subtract from it; the commuting ones to either operand."""


class _Rules:
    """An evaluator of operations on dependences."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # bytes of an element of each old leaf: a narrower one is not the old value plus something
        self._hashes: dict[int, str] = {}

    def __call__(self, operation: Operation, values: list[_Value]) -> list[_Value]:
        if operation.kind == "call":
            return evaluate(operation.bodies[0], values, self, _constant_value)
        if operation.kind == "cond":
            branches = [evaluate(body, values[1:], self, _constant_value) for body in operation.bodies]
            return [_chosen(values[0], row) for row in zip(*branches, strict=True)]
        if operation.kind == "scan":
            return self._scan(operation, values)
        if operation.kind == "while":
            return self._while(operation, values)
        if operation.name == "optimization_barrier":
            return values
        if operation.name == "select_n":
            return [_chosen(values[0], values[1:])]
        result = _computed(values, lambda: self._hash(operation), self._kept(operation, values))
        return [result] * len(operation.eqn.outvars)

    def _hash(self, operation: Operation) -> str:
        if operation.number not in self._hashes:
            self._hashes[operation.number] = operation_hash(operation)
        return self._hashes[operation.number]

    def _kept(self, operation: Operation, values: Sequence[_Value]) -> int | None:
        """The old leaf that the result equals up to a summand."""
        leaves = [value.plus for value in values if value.plus is not None]
        if len(leaves) != 1:
            return None
        (leaf,), name, result = leaves, operation.name, operation.eqn.outvars[0].aval
        if name in _COMMUTING or (name in _TO_FIRST and values[0].plus == leaf):
            return leaf
        if name == "convert_element_type":
            is_as_wide = jnp.issubdtype(result.dtype, jnp.integer) and result.dtype.itemsize >= self._sizes[leaf]
            return leaf if is_as_wide else None
        return leaf if operation.keeps_order else None

    def _scan(self, operation: Operation, values: list[_Value]) -> list[_Value]:
        consts, carried = operation.counts

        def turn(carry: list[_Value]) -> list[_Value]:
            operands = [*values[:consts], *carry, *values[consts + carried :]]
            return evaluate(operation.bodies[0], operands, self, _constant_value)

        def next_carry(carry: list[_Value]) -> list[_Value]:
            length = f"{operation.options['length']} turns"
            pairs = zip(carry, turn(carry)[:carried], strict=True)
            return [_chosen(_Value(), pair, length) for pair in pairs]

        carry = _settled(values[consts : consts + carried], next_carry)
        return [*carry, *turn(carry)[carried:]]

    def _while(self, operation: Operation, values: list[_Value]) -> list[_Value]:
        condition, body = operation.bodies
        first, second = operation.counts

        def next_carry(carry: list[_Value]) -> list[_Value]:
            (continues,) = evaluate(condition, [*values[:first], *carry], self, _constant_value)
            results = evaluate(body, [*values[first : first + second], *carry], self, _constant_value)
            return [_chosen(continues, pair) for pair in zip(carry, results, strict=True)]

        return _settled(values[first + second :], next_carry)


def _settled(carry: list[_Value], next_carry: Callable[[list[_Value]], list[_Value]]) -> list[_Value]:
    """Return the carry of a loop after any number of iterations."""
    before = None
    while carry != before:  # this terminates: each round knows less
        before, carry = carry, next_carry(carry)
    return carry
