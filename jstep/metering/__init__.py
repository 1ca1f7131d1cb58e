"""What are the numbers of steps? They are summed on the device.

They are brought to the host without waiting for the device. A *ratio* is a metric that is a
`mean_of`: its total is divided by its own count, not by the number of steps.

- `device_sums`: sums of metrics on the device.
- `in_flight`: the step that the device has finished.
- `intervals`: these sums over intervals of steps, on the host.
- `metric_sums`: sums of metrics over intervals of steps.
- `numbers`: numbers, and their transfer from the device.
- `work`: operations and bytes of a traced program.
"""
