"""When is something due, and what are its numbers?

- `cadence`: when a hook is due.
- `history_file`: the file of a `History`.
- `in_flight`: the step that the device has finished.
- `metric_sums`: sums of metrics over intervals of steps.
- `numbers`: numbers, and their transfer from the device.
- `work`: operations and bytes of a traced program.
"""
