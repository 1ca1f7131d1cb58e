"""Metrics for `jstep.evaluator` that are not means over examples: objects with `merge` and `compute`."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.metrics.accuracy import accuracy
from jstep.metrics.auc import auc
from jstep.metrics.confusion_matrix import confusion_matrix
from jstep.metrics.f1 import f1
from jstep.metrics.perplexity import perplexity

__all__ = [
    "accuracy",
    "auc",
    "confusion_matrix",
    "f1",
    "perplexity",
]

_set_public_module(globals())
