"""Who looks, and changes nothing? The observers of a run.

- `batch_watch`: whether a restart reads the same batch.
- `card`: what a program is made of.
- `notebook`: the progress bar in a notebook.
- `process_recorder`: the times of a process other than the first.
- `progress`: a progress bar.
- `recorder`: the file of a start.
- `stalls`: what each process waits for, and the end of a run that stalls.
- `utilization`: FLOP/s, as a share of the devices' peak.
"""
