"""How good are predictions?

Metrics for `jstep.evaluator` that are not means over examples, and ratios of sums.

- `classification`: metrics of classification.
- `totals`: totals as arrays, exact for counts, and their ratios for train steps.
"""

from jstep.core.public_names import set_public_module as _set_public_module
from jstep.metrics.classification import accuracy, auc, confusion_matrix, f1, perplexity
from jstep.metrics.totals import mean_of

__all__ = ["accuracy", "auc", "confusion_matrix", "f1", "mean_of", "perplexity"]

_set_public_module(globals())
