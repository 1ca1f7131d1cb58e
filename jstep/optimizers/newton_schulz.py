"""Newton–Schulz iteration: approximate the nearest orthogonal matrix with matrix products only."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int, kind, one_of, shown
from jstep.core.trees import Array
from jstep.optimizers.distribute_matrices import Layout, distribute_matrices

Triple: TypeAlias = tuple[float, float, float]

COEFFICIENTS: Triple = (3.4445, -4.775, 2.0315)
"""Jordan's, the default."""


class Preset(NamedTuple):
    """A list of coefficients.

    Attributes:
        triples: (a, b, c) of each step.
        steps: The default number of steps.
        safety: A factor on the norm in the divisor.
        repeats: Whether further steps repeat the last triple.
    """

    triples: tuple[Triple, ...]
    steps: int = 5
    safety: float = 1.0
    repeats: bool = False


PRESETS = {
    "jordan": Preset((COEFFICIENTS,), repeats=True),
    "dion": Preset(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # Ten polynomials for singular values from 0.001, each optimal after the preceding ones, with a cushion of 0.02.
    "polar_express": Preset(
        (
            (8.2373125, -23.1577474, 16.6805684),
            (4.0824420, -2.8930477, 0.5252849),
            (3.9263480, -2.8547468, 0.5318022),
            (3.2982187, -2.4245420, 0.4863201),
            (2.2970369, -1.6366256, 0.4002628),
            (1.8763805, -1.2347897, 0.3589189),
            *[(1.8564423, -1.2132450, 0.3568003)] * 3,
            (1.875, -1.25, 0.375),
        ),
        steps=8,
        safety=1.01,
        repeats=True,
    ),
}


def triples_and_safety(given: Any, steps: int | None) -> tuple[tuple[Triple, ...], float]:
    """The triple of each step, and the safety factor.

    Args:
        given: The name of a preset, a triple, or one triple for each step.
        steps: The number of steps; None for the preset's number, or 5.

    Raises:
        TypeError: `given` has another form, or `steps` is not an integer.
        ValueError: There is no such preset, or it has fewer steps; or the number of triples is not the number of steps.
    """
    count = None if steps is None else as_int(steps, "ns_steps", at_least=1)
    if not isinstance(given, str):
        return _own(given, 5 if count is None else count), 1.0
    triples, default, safety, repeats = PRESETS[one_of(given, "ns_coefficients", PRESETS)]
    count = default if count is None else count
    if count > len(triples) and not repeats:
        raise ValueError(
            f"ns_steps={count}: must be at most {len(triples)}, the steps of ns_coefficients={given!r}; "
            "ns_coefficients='polar_express' allows any number"
        )
    return (triples + triples[-1:] * (count - len(triples)))[:count], safety


def _own(given: Any, count: int) -> tuple[Triple, ...]:
    def number(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)

    wrong = TypeError(
        f"ns_coefficients={shown(given)}: must be three numbers (a, b, c), such a triple for each of the {count} "
        f"steps, or one of {', '.join(map(repr, PRESETS))}, got {kind(given)}"
    )
    if not isinstance(given, list | tuple):
        raise wrong
    triples = [given] * count if len(given) == 3 and all(map(number, given)) else given
    for triple in triples:
        if not (isinstance(triple, list | tuple) and len(triple) == 3 and all(map(number, triple))):
            raise wrong
    if len(triples) != count:
        raise ValueError(f"ns_coefficients: must have a triple for each step, got {len(triples)} for ns_steps={count}")
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


SMALL = 64 * 64
"""Up to this number of elements, batching matrices is faster on CPUs, too; larger ones run separately."""


Normalization: TypeAlias = Literal["frobenius", "schatten"]


class Iteration(NamedTuple):
    """The options of the iteration, fixed when the optimizer is created.

    Attributes:
        coefficients: (a, b, c) of each step.
        dtype: The dtype of the products; None for that of the matrices.
        safety: A factor on the norm, because steep polynomials diverge just above 1.
        schatten: Whether to use the Schatten-4 norm instead of the Frobenius norm.
    """

    coefficients: tuple[tuple[float, float, float], ...]
    dtype: Any
    safety: float = 1.0
    schatten: bool = False


def orthogonalized(
    matrices: Sequence[Array], iteration: Iteration, epsilon: Any, layouts: Sequence[Layout | None]
) -> list[Array]:
    """Orthogonalize matrices [..., rows, columns] approximately.

    Matrices of one shape are batched where that is faster: on accelerators, which a single small matrix does not
    fill, and if they are small. A CPU processes large matrices separately. Matrices on a mesh are distributed over its
    devices.

    Args:
        matrices: Floating arrays; a zero matrix stays zero.
        iteration: The options of the iteration.
        epsilon: The lower bound of the norm in the divisor.
        layouts: The layout of each matrix on a mesh; None if it should not be distributed.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (matrix, layout) in enumerate(zip(matrices, layouts, strict=True)):
        shape = matrix.shape if layout is None else matrix.shape[-2:]
        groups.setdefault((shape, matrix.dtype, layout), []).append(i)
    results: dict[int, Array] = {}
    for (shape, _, layout), indices in groups.items():
        members = [matrices[i] for i in indices]
        if layout is not None and sum(math.prod(member.shape[:-2]) for member in members) > 1:
            together = distribute_matrices(members, layout, lambda stack: newton_schulz(stack, epsilon, iteration))
        elif len(members) == 1:
            together = [newton_schulz(members[0], epsilon, iteration)]
        elif math.prod(shape) <= SMALL:
            together = _batched(iteration)(epsilon, *members)
        else:
            together = jax.lax.platform_dependent(
                epsilon, *members, cpu=_one_by_one(iteration), default=_batched(iteration)
            )
        results |= dict(zip(indices, together, strict=True))
    return [results[i] for i in range(len(matrices))]


def _batched(iteration: Iteration) -> Callable[..., list[Array]]:
    return lambda epsilon, *members: list(newton_schulz(jnp.stack(members), epsilon, iteration))


def _one_by_one(iteration: Iteration) -> Callable[..., list[Array]]:
    return lambda epsilon, *members: [newton_schulz(member, epsilon, iteration) for member in members]


def _newton_schulz(x: Array, epsilon: Any, iteration: Iteration) -> Array:
    wide = x.dtype
    turned = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -2, -1) if turned else x
    smallest = jnp.asarray(epsilon).astype(wide)
    length = _length(x)
    # The Schatten norm comes from the first product, computed at norm 1: squares of small matrices would underflow.
    by = jnp.maximum(length if iteration.schatten else iteration.safety * length, smallest)
    x = (x / by).astype(iteration.dtype or wide)
    gram = None
    if iteration.schatten:
        gram = x @ jnp.swapaxes(x, -2, -1)
        square = gram.astype(wide)
        by = jnp.maximum(iteration.safety * jnp.sqrt(_length(square)), smallest / by)
        x, gram = (x.astype(wide) / by).astype(x.dtype), (square / jnp.square(by)).astype(x.dtype)
    for a, b, c in iteration.coefficients:
        gram = x @ jnp.swapaxes(x, -2, -1) if gram is None else gram
        x = a * x + (b * gram + c * (gram @ gram)) @ x
        gram = None
    x = jnp.swapaxes(x, -2, -1) if turned else x
    return x.astype(wide)


def _length(x: Array) -> Array:
    """The Frobenius norm of each matrix."""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))


# Traced and lowered once for all matrices of one shape; XLA inlines it.
newton_schulz = jax.jit(_newton_schulz, static_argnums=2)


def as_matrix(x: Array, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Array, Callable[[Array], Array]]:
    """Reshape an array to matrices [batch..., in, out], and return the inverse function, too.

    Args:
        x: The array.
        axes: The axes that form the rows, and those that form the columns; the others index matrices.
    """
    rows, columns = axes
    batch = tuple(i for i in range(x.ndim) if i not in (*rows, *columns))
    order = (*batch, *rows, *columns)
    sizes = [math.prod(x.shape[i] for i in part) for part in axes]
    turned = x if order == tuple(range(x.ndim)) else jnp.transpose(x, order)
    matrix = turned.reshape((*(x.shape[i] for i in batch), *sizes))

    def back(matrix: Array) -> Array:
        array = matrix.reshape(turned.shape)
        return array if turned is x else jnp.transpose(array, tuple(int(i) for i in np.argsort(order)))

    return matrix, back
