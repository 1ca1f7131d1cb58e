"""Gates: where XLA may not overlap gradients and updates. They change memory and time, never values."""

from typing import Any

import jax

GATE_NONE = 0
"""No gating: XLA may start an update before its gradient is whole."""
GATE_OP = 1
"""Each gradient is whole before its update begins."""
GATE_GRAPH = 2
"""All gradients are whole before any update begins."""

GATES = (GATE_NONE, GATE_OP, GATE_GRAPH)


def gated(grads: list[Any], gate: int) -> list[Any]:
    """The gradients (arrays, `IndexedSlices` or None) behind their gates."""
    if gate == GATE_OP:
        return [None if g is None else jax.lax.optimization_barrier(g) for g in grads]
    return jax.lax.optimization_barrier(grads) if gate == GATE_GRAPH else grads
