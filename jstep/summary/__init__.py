"""What does TensorBoard show? Event files, without TensorFlow.

Summaries are pytrees, which a compiled step may create and return. A `SummaryWriter` writes them on
a background thread. The extra `summaries` (tensorboard's protos) is required.

- `creation`: creation of summaries.
- `encode`: encoding of summaries as events.
- `graph`: the graph of a traced program.
- `new_event_files`: creation of event files.
- `run_writer`: the writer that hooks use.
- `summaries`: summaries as pytrees, and collections.
- `writer`: `SummaryWriter`.
"""

from jstep.core.public_names import set_public_module as _set_public_module
from jstep.stores.event_files import DataLossError, summary_iterator
from jstep.summary.creation import histogram, image, scalar, text, zero_fraction
from jstep.summary.encode import to_proto
from jstep.summary.graph import write_graph
from jstep.summary.summaries import Summary, collect, merge, merge_all, summaries_in
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
    "to_proto",
    "write_graph",
    "zero_fraction",
]

_set_public_module(globals())
