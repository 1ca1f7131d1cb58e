"""Detection of the parameters that a loss depends on, while its gradient is traced."""

from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jstep.core.types import Array


def track_connected(leaves: list[Array], connected: set[int]) -> list[Array]:
    """Return the leaves; tracing the gradient adds the indices of those that receive a gradient to `connected`.

    An identity function has a custom backward rule, which JAX runs once while it traces the gradient. The rule gets a
    symbolic zero for a leaf that nothing depends on. It leaves no trace in the compiled program.
    """

    @jax.custom_vjp
    def identity(leaves: list[Array]) -> list[Array]:
        return leaves

    def forward(leaves: Any) -> tuple[list[Array], None]:
        return [leaf.value for leaf in leaves], None

    def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        connected.update(i for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero))
        return ([None if isinstance(ct, SymbolicZero) else ct for ct in cotangents],)

    identity.defvjp(forward, backward, symbolic_zeros=True)
    return identity(leaves)
