"""Who watches a run without changing it? Its observers.

- `batch_watch`: whether a restart reads the same batch.
- `ended_rates`: whether the learning rate is 0 in the last steps.
- `event_file`: the event file of a run.
- `lineage`: what the records of earlier starts know of where a run comes from.
- `log_lines`: log lines, and the counter of steps.
- `notebook`: the progress bar in a notebook.
- `observers`: the list of observers.
- `process_recorder`: the times of a process other than the first.
- `progress`: a progress bar.
- `record_numbers`: the numbers in the record of a start.
- `recorder`: the record of a start.
- `restart_report`: what has changed since a checkpoint was written.
- `rounded_updates`: whether small updates of 16-bit parameters are rounded away.
- `stall_watch`: what each process waits for, and the end of a run that stalls.
- `start_setup`: what a start was given, and what it compiled.
- `utilization`: FLOP/s, as a share of the devices' peak.
"""
