"""Operation counts of a program with all loop iterations; XLA counts each loop body once."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.programs import MOVES, Operation, Subprogram, shard_counts

_FREE = MOVES | {"gather", "convert_element_type", "bitcast_convert_type"}
"""Operations that move data without arithmetic."""


_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_NONE: Mapping["Product", float] = MappingProxyType({})


class Product(NamedTuple):
    """The number format of a matrix product or a convolution.

    Attributes:
        dtype: The name of the wider dtype of its operands.
        precision: The name of its `jax.lax.Precision` or `jax.lax.DotAlgorithmPreset`, or `"ANY_F8"` for presets that
            accept any float8.
    """

    dtype: str
    precision: str


class Work(NamedTuple):
    """Operations and memory traffic of a program, summed over all devices.

    Attributes:
        once: Operations, with each loop body counted once, as XLA does.
        all: Operations, with each loop body counted once per iteration.
        once_bytes: Bytes read and written, counted as in `once`.
        all_bytes: Bytes read and written, counted as in `all`.
        unknown: The number of loops whose number of iterations depends on values; they are counted once.
        products: Number format → operations of matrix products and convolutions, counted as in `all`.
    """

    once: float = 0.0
    all: float = 0.0
    once_bytes: float = 0.0
    all_bytes: float = 0.0
    unknown: int = 0
    products: Mapping[Product, float] = _NONE

    def plus(self, other: "Work") -> "Work":
        """The sum."""
        return Work(
            self.once + other.once,
            self.all + other.all,
            self.once_bytes + other.once_bytes,
            self.all_bytes + other.all_bytes,
            self.unknown + other.unknown,
            _sums(self.products, other.products),
        )

    def times(self, once: int, total: int) -> "Work":
        """Return the work of a loop whose program contains this body `once` times and which runs it `total` times."""
        products = {product: total * flops for product, flops in self.products.items()}
        return Work(
            once * self.once, total * self.all, once * self.once_bytes, total * self.all_bytes, self.unknown, products
        )


def work_of(body: Subprogram) -> Work:
    """Compute the work of a program."""
    total = Work()
    for operation in body.operations:
        total = total.plus(_work_of_operation(operation))
    return total


def _work_of_operation(operation: Operation) -> Work:
    inner = [work_of(body) for body in operation.bodies]
    if operation.kind == "call":
        return inner[0]
    if operation.kind == "shard_map":
        shards = math.prod(shard_counts(operation).values())
        return inner[0].times(shards, shards)
    if operation.kind == "cond":
        return max(inner, key=lambda work: work.all)
    if operation.kind == "while":
        both = inner[0].plus(inner[1])
        return both._replace(unknown=both.unknown + (not _is_over_host(operation.eqn)))
    if operation.kind == "scan":
        length = operation.eqn.params["length"]
        unroll = min(max(1, int(operation.eqn.params["unroll"])), max(1, length))
        # The remainder of an unrolled loop is a second copy of its program.
        return inner[0].times(unroll + length % unroll if length > unroll else max(1, length), length)
    flops = _flops(operation.eqn)
    moved = sum(_bytes(var.aval) for var in (*operation.eqn.invars, *operation.eqn.outvars))
    product = _product(operation.eqn)
    return Work(flops, flops, moved, moved, products=_NONE if product is None else {product: flops})


def _sums(some: Mapping[Product, float], others: Mapping[Product, float]) -> Mapping[Product, float]:
    if not (some and others):
        return some or others
    return {product: some.get(product, 0.0) + others.get(product, 0.0) for product in {**some, **others}}


def _is_over_host(eqn: Any) -> bool:
    """Whether a loop loads arrays from the host: a loop of an offloaded update, counted once."""
    return any(getattr(var.aval, "memory_space", None) == jax.memory.Space.Host for var in eqn.invars)


def _flops(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    size = sum(math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars)
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        return 2.0 * size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        ((contracted, _), _) = numbers.dot_dimension_numbers
        # If the groups are along a contracted axis, each result uses only the rows of one group.
        is_parted = not set(numbers.lhs_ragged_dimensions).isdisjoint(contracted)
        groups = eqn.invars[2].aval.shape[-1] if is_parted else 1
        return 2.0 * size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted) / groups
    if name == "pallas_call" and params.get("cost_estimate") is not None:
        return float(params["cost_estimate"].flops)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, params["dimension_numbers"]
        return 2.0 * size * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    if name in _FREE:
        return 0.0
    if name.startswith(("reduce_", "arg", "cum")):
        return float(sum(math.prod(getattr(var.aval, "shape", ())) for var in eqn.invars[:1]))
    return float(size)


def _product(eqn: Any) -> Product | None:
    """Return the number format of a matrix product or convolution; None for any other operation."""
    if eqn.primitive.name not in _PRODUCTS:
        return None
    dtype = max((var.aval.dtype for var in eqn.invars[:2]), key=lambda one: one.itemsize)
    precision = eqn.params["precision"]
    if isinstance(precision, tuple) and all(isinstance(one, jax.lax.Precision) for one in precision):
        precision = max(precision, key=lambda one: int(one.value))
    name = "DEFAULT" if precision is None else str(getattr(precision, "name", precision))
    return Product(dtype.name, "ANY_F8" if name.startswith("ANY_F8") else name)


def _bytes(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.generic):
        return 0.0
    return float(math.prod(aval.shape) * dtype.itemsize)
