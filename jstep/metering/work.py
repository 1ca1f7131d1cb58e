"""The work of a traced program: operations and bytes over all loop iterations.

XLA counts each loop body once.
"""

import functools
import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.jaxprs import (
    Operation,
    Product,
    Subprogram,
    count_flops,
    factorization_flops,
    loops_in,
    matrix_product,
    shard_counts,
    uncounted_work,
)

_NO_PRODUCTS = Counter[Product]()
_NO_FACTORIZATIONS = Counter[str]()


class Work(NamedTuple):
    """Operations and memory traffic of a program, summed over all devices.

    Attributes:
        flops_once: The operations if each loop body counts once, as in XLA.
        flops: The operations if each loop body counts once per iteration.
        nbytes_once: The bytes that operations read and write, counted as `flops_once`.
        nbytes: The same, counted as `flops`.
        unknown: The number of loops, counted once, whose length depends on values.
        products: The operations of matrix products, by dtype and precision, counted as `flops`.
        factorizations: The operations of factorizations and solves on one device, by name; XLA does
            not know them.
        uncounted: The names of the operations whose work is unknown.
    """

    flops_once: float = 0.0
    flops: float = 0.0
    nbytes_once: float = 0.0
    nbytes: float = 0.0
    unknown: int = 0
    products: Counter[Product] = _NO_PRODUCTS
    factorizations: Counter[str] = _NO_FACTORIZATIONS
    uncounted: frozenset[str] = frozenset()

    def plus(self, other: "Work") -> "Work":
        return Work(
            flops_once=self.flops_once + other.flops_once,
            flops=self.flops + other.flops,
            nbytes_once=self.nbytes_once + other.nbytes_once,
            nbytes=self.nbytes + other.nbytes,
            unknown=self.unknown + other.unknown,
            products=self.products + other.products,
            factorizations=self.factorizations + other.factorizations,
            uncounted=self.uncounted | other.uncounted,
        )

    def repeat(self, times: int, copies: int) -> "Work":
        """Return the work of a body that runs so many times and has so many copies."""
        return Work(
            flops_once=copies * self.flops_once,
            flops=times * self.flops,
            nbytes_once=copies * self.nbytes_once,
            nbytes=times * self.nbytes,
            unknown=self.unknown,
            products=Counter({product: times * flops for product, flops in self.products.items()}),
            factorizations=Counter(
                {name: times * flops for name, flops in self.factorizations.items()}
            ),
            uncounted=self.uncounted,
        )


def work_of(body: Subprogram) -> Work:
    return functools.reduce(Work.plus, map(_work_of_operation, body.operations), Work())


def _work_of_operation(operation: Operation) -> Work:
    inner = [work_of(body) for body in operation.bodies]
    if operation.kind == "call":
        return inner[0]
    if operation.kind == "shard_map":
        shards = math.prod(shard_counts(operation).values())
        # Not of factorizations: each device computes those of its own shard, or else of whole
        # matrices.
        repeated = inner[0].repeat(shards, copies=shards)
        return repeated._replace(factorizations=inner[0].factorizations)
    if operation.kind == "cond":
        largest = max(inner, key=lambda work: work.flops + work.factorizations.total())
        return largest._replace(uncounted=frozenset().union(*(work.uncounted for work in inner)))
    if operation.kind == "while":
        condition, loop_body = inner
        work = condition.plus(loop_body)
        spaces = [getattr(var.aval, "memory_space", None) for var in operation.eqn.invars]
        if jax.memory.Space.Host in spaces:
            # A loop that loads arrays from the host is one of an offloaded update, counted once.
            return work
        return work._replace(unknown=work.unknown + 1)
    if operation.kind == "scan":
        length = operation.options["length"]
        unroll = min(max(1, int(operation.options["unroll"])), max(1, length))
        if length > unroll:
            # The remainder of an unrolled loop is a program of its own.
            copies = unroll + length % unroll
        else:
            copies = max(1, length)
        return inner[0].repeat(length, copies)
    flops = count_flops(operation.eqn)
    moved = sum(_bytes(var.aval) for var in (*operation.eqn.invars, *operation.eqn.outvars))
    product = matrix_product(operation.eqn)
    return Work(
        flops_once=flops,
        flops=flops,
        nbytes_once=moved,
        nbytes=moved,
        unknown=loops_in(operation.eqn),
        products=Counter({} if product is None else {product: flops}),
        factorizations=Counter(factorization_flops(operation.eqn)),
        uncounted=frozenset(uncounted_work(operation.eqn)),
    )


def _bytes(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.generic):
        return 0.0
    return float(math.prod(aval.shape) * dtype.itemsize)
