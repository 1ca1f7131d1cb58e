"""Accounting of the wall time of a run: a stopwatch, the timeline file, and the goodput.

`timeline.jsonl` contains one JSON object per line, each with `"kind"`, `"start"` (the start of the run that wrote it)
and `"prefix"` (of the run's checkpoints):

    {"kind": "start", "start": "5f0c1a2b", "prefix": "model", "version": 1, …}      the first line of each start
    {"kind": "parts", …, "time": 1.7e9, "step": [100, 137], "seconds": {"starting": 8.2, "stepping": 30.1, …}}

`time` is the wall time of the line, in seconds since 1970; `step` contains the first and the current step of this
start; `seconds` are the seconds of all its parts so far. `time` minus their sum is the time of the start. A start line
also has these three fields. Readers skip lines of other kinds.
"""
