"""When is something due, and what are its numbers?

- `cadence`: when a hook is due: steps, seconds, the last step.
- `history_file`: the file of a `History`: rows as lines of JSON.
- `in_flight`: the calls in flight: the step that the device has finished.
- `metric_sums`: sums of metrics over intervals of steps.
- `numbers`: the numbers of a log line, and their transfer from the device.
- `work`: operations and bytes of a traced program.
"""
