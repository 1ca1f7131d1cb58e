"""Who looks, and changes nothing? The observers of a run.

- `batch_watch`: whether a restart reads the batch that was read before.
- `card`: what the program of a start is made of, as JSON.
- `observer`: the interface of observers, which do nothing by default.
- `process_recorder`: the times of a process other than the first.
- `progress`: a progress bar.
- `recorder`: the file of a start, and what has changed since the last one.
- `stalls`: what each process waits for, and the end of a run that stalls.
- `utilization`: FLOP/s, as a share of the devices' peak.
"""
