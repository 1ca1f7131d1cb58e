"""TensorBoard event files without TensorFlow.

Summaries are values: pytrees that may be made inside a compiled step, returned from it, scanned and merged. A
`SummaryWriter` writes them on a thread of its own. Needs the extra `summaries` (tensorboard's protos,
google-crc32c), which is imported when the first file is opened.
"""

from jstep.summary._collections import collect, merge_all
from jstep.summary._histogram import histogram
from jstep.summary._image import image
from jstep.summary._merge import merge, summaries_in
from jstep.summary._records import DataLossError
from jstep.summary._scalar import scalar, zero_fraction
from jstep.summary._text import text
from jstep.summary._values import Summary
from jstep.summary.graph import write_graph
from jstep.summary.reader import summary_iterator
from jstep.summary.writer import SummaryWriter

__all__ = [
    "DataLossError",
    "Summary",
    "SummaryWriter",
    "collect",
    "histogram",
    "image",
    "merge",
    "merge_all",
    "scalar",
    "summaries_in",
    "summary_iterator",
    "text",
    "write_graph",
    "zero_fraction",
]
