"""Metrics that are not means over examples: objects for `jstep.evaluator`, with `merge` and `compute`."""

from jstep.core.public import publish as _publish
from jstep.metrics.accuracy import Accuracy, accuracy
from jstep.metrics.auc import AUC, auc
from jstep.metrics.confusion_matrix import ConfusionMatrix, confusion_matrix
from jstep.metrics.f1 import F1, f1
from jstep.metrics.perplexity import Perplexity, perplexity

__all__ = [
    "AUC",
    "F1",
    "Accuracy",
    "ConfusionMatrix",
    "Perplexity",
    "accuracy",
    "auc",
    "confusion_matrix",
    "f1",
    "perplexity",
]

_publish(globals())
