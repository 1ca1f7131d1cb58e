"""From a loss to gradients."""

from jstep.core.public import publish as _publish
from jstep.differentiate.gradients import GATE_GRAPH, GATE_NONE, GATE_OP, compute_gradients, gradients, stop_gradient
from jstep.differentiate.microbatches import AggregationMethod

__all__ = [
    "GATE_GRAPH",
    "GATE_NONE",
    "GATE_OP",
    "AggregationMethod",
    "compute_gradients",
    "gradients",
    "stop_gradient",
]

_publish(globals())
