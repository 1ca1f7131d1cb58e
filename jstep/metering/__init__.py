"""When is something due, and what are its numbers?

- `cadence`: when a hook is due.
- `device_sums`: sums of metrics on the device.
- `history_file`: the file of a `History`.
- `in_flight`: the step that the device has finished.
- `intervals`: these sums over intervals of steps, on the host.
- `metric_sums`: sums of metrics over intervals of steps.
- `numbers`: numbers, and their transfer from the device.
- `work`: operations and bytes of a traced program.
"""
