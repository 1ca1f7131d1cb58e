"""Gradients of loss functions: microbatches, sparse lookups and gates."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.differentiate.compute_gradients import compute_gradients
from jstep.differentiate.engine import GATE_GRAPH, GATE_NONE, GATE_OP
from jstep.differentiate.gradients import gradients, map_gradients, stop_gradient
from jstep.differentiate.lookup import lookup
from jstep.differentiate.microbatches import AggregationMethod

__all__ = [
    "GATE_GRAPH",
    "GATE_NONE",
    "GATE_OP",
    "AggregationMethod",
    "compute_gradients",
    "gradients",
    "lookup",
    "map_gradients",
    "stop_gradient",
]

_set_public_module(globals())
