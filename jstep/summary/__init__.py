"""TensorBoard event files without TensorFlow.

Summaries are pytrees: they can be created inside a compiled step, returned from it, scanned and merged. A
`SummaryWriter` writes them on a background thread. The extra `summaries` (tensorboard's protos, google-crc32c) is
required, and imported when the first file is opened.
"""

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING

from jstep.core.public_names import set_public_module as _set_public_module
from jstep.summary.read import DataLossError, summary_iterator

if TYPE_CHECKING:
    from jstep.summary.encode import histogram, to_proto
    from jstep.summary.graph import write_graph
    from jstep.summary.make import Summary, collect, image, merge, merge_all, scalar, summaries_in, text, zero_fraction
    from jstep.summary.writer import SummaryWriter
else:  # These import JAX: the command line reads event files without it.
    _made = ("Summary", "collect", "image", "merge", "merge_all", "scalar", "summaries_in", "text", "zero_fraction")
    _places = {
        **dict.fromkeys(_made, "jstep.summary.make"),
        **dict.fromkeys(("histogram", "to_proto"), "jstep.summary.encode"),
        "write_graph": "jstep.summary.graph",
        "SummaryWriter": "jstep.summary.writer",
    }

    def __getattr__(name):
        if name not in _places:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name, obj=_sys.modules[__name__]
            )
        value = globals()[name] = getattr(_importlib.import_module(_places[name]), name)
        _set_public_module(globals())
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


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
