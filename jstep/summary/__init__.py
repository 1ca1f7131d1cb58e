"""TensorBoard event files without TensorFlow.

Summaries are pytrees: they can be created inside a compiled step, returned from it, scanned and merged. A
`SummaryWriter` writes them on a background thread. The extra `summaries` (tensorboard's protos, google-crc32c) is
required, and imported when the first file is opened.
"""

from typing import TYPE_CHECKING

from jstep.core.checks import load_when_used as _load_when_used
from jstep.core.checks import set_public_module as _set_public_module
from jstep.summary.read import summary_iterator
from jstep.summary.records import DataLossError

if TYPE_CHECKING:
    from jstep.summary.collected import collect, merge_all
    from jstep.summary.graph.write_graph import write_graph
    from jstep.summary.histograms import histogram
    from jstep.summary.make import image, merge, scalar, summaries_in, text, zero_fraction
    from jstep.summary.values import Summary
    from jstep.summary.write.encode import to_proto
    from jstep.summary.write.writer import SummaryWriter
else:  # these import JAX
    __getattr__, __dir__ = _load_when_used(
        globals(),
        {
            "collect": "jstep.summary.collected",
            "merge_all": "jstep.summary.collected",
            "write_graph": "jstep.summary.graph.write_graph",
            "histogram": "jstep.summary.histograms",
            "image": "jstep.summary.make",
            "merge": "jstep.summary.make",
            "summaries_in": "jstep.summary.make",
            "scalar": "jstep.summary.make",
            "zero_fraction": "jstep.summary.make",
            "text": "jstep.summary.make",
            "Summary": "jstep.summary.values",
            "to_proto": "jstep.summary.write.encode",
            "SummaryWriter": "jstep.summary.write.writer",
        },
    )

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
    "to_proto",
    "write_graph",
    "zero_fraction",
]

_set_public_module(globals())
