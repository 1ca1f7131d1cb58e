"""TensorBoard event files without TensorFlow.

Summaries are values: pytrees that may be made inside a compiled step, returned from it, scanned and merged.
"""

from jstep.summary._collections import collect, merge_all
from jstep.summary._histogram import histogram
from jstep.summary._image import image
from jstep.summary._merge import merge, summaries_in
from jstep.summary._scalar import scalar, zero_fraction
from jstep.summary._text import text
from jstep.summary._values import Summary

__all__ = [
    "Summary",
    "collect",
    "histogram",
    "image",
    "merge",
    "merge_all",
    "scalar",
    "summaries_in",
    "text",
    "zero_fraction",
]
