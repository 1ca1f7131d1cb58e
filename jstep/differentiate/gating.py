"""Gates, which keep XLA from overlapping gradients and updates. They affect memory and time, never values."""

from typing import Any

import jax

GATE_NONE = 0
"""No gating: XLA may start an update before its gradient is complete."""
GATE_OP = 1
"""Each gradient is complete before its update begins."""
GATE_GRAPH = 2
"""All gradients are complete before any update begins."""

GATES = (GATE_NONE, GATE_OP, GATE_GRAPH)


def gated(grads: list[Any], gate: int) -> list[Any]:
    """Apply a gate, which keeps XLA from overlapping gradients and updates, to gradients.

    It affects memory and time, never values.

    Args:
        grads: Arrays, `IndexedSlices` or None.
        gate: One of `GATES`.
    """
    if gate == GATE_OP:
        return [None if g is None else jax.lax.optimization_barrier(g) for g in grads]
    return jax.lax.optimization_barrier(grads) if gate == GATE_GRAPH else grads
