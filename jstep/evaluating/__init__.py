"""Exact evaluation and metric-driven callbacks."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.evaluating.evaluator import evaluator
from jstep.evaluating.keep_best import KeepBest
from jstep.evaluating.metric_callbacks import EarlyStopping, ReduceOnPlateau

__all__ = [
    "EarlyStopping",
    "KeepBest",
    "ReduceOnPlateau",
    "evaluator",
]

_set_public_module(globals())
