"""What are the numbers of steps? They are summed on the device, and brought to the host without waiting for it.

- `device_sums`: sums of metrics on the device.
- `in_flight`: the step that the device has finished.
- `intervals`: these sums over intervals of steps, on the host.
- `metric_sums`: sums of metrics over intervals of steps.
- `numbers`: numbers, and their transfer from the device.
- `work`: operations and bytes of a traced program.
"""
