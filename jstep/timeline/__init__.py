"""Where the time of a run goes: a stopwatch of parts, the file it is kept in, and what it adds up to.

`timeline.jsonl` holds one JSON object a line, each with `"kind"`, `"start"` (which start of the run wrote it) and
`"prefix"` (of the run's checkpoints):

    {"kind": "start", "start": "5f0c1a2b", "prefix": "model", "version": 1, …}      the first line of each start
    {"kind": "parts", …, "time": 1.7e9, "step": [100, 137], "seconds": {"starting": 8.2, "stepping": 30.1, …}}

`time` is the wall time of the line, in seconds since 1970, `step` is where this start began and where it is, and
`seconds` are those of all its parts up to now: `time` minus their sum is when it began. A start line has these three
fields, too. Readers skip other kinds.
"""

from jstep.timeline.goodput import Goodput, goodput
from jstep.timeline.lines import NAME, VERSION, Line, read
from jstep.timeline.stopwatch import PARTS, Stopwatch
from jstep.timeline.timeline import Timeline

__all__ = ["NAME", "PARTS", "VERSION", "Goodput", "Line", "Stopwatch", "Timeline", "goodput", "read"]
